"""Sealed weights leave a GPU, another process uses the memory, and they come back; beside copies of each tensor to pinned buffers.

    python benches/gpu/weights.py [--gib 50] [--repeat 5] [--only glake,tensors] [--out DIR]

A process holds --gib GiB of bfloat16 matrices and a captured CUDA graph of a pass over all of them. All of it leaves, once to pin what that
needs, then --repeat times, timed. The first of these times a second process, which has a context already, takes nearly all of the GPU's
memory, writes it, reads it back and ends; then the weights come back. After each return the logits of the pass are compared, at the end every
byte of the weights.
glake: the matrices are a sealed region whose host copies are retained, so that nothing of them is copied when they leave again.
tensors: what serving engines do: each tensor is copied to a pinned buffer of its own that is kept, freed, and made anew when it is back.
Its pass is not captured, because its addresses change.
The link is measured in both by native copies of 1 GiB of pinned memory. A run of one part compares with the other part in the same DIR.
Writes DIR/weights.jsonl. Ends with 1 if a bar was missed.
"""
import argparse, hashlib, json, statistics, subprocess, sys, time

import launch
import shrink
from shrink import GIB, MIB, report

SIDE = 8192
MATRIX = SIDE * SIDE * 2
SPARE = GIB  # what the second process leaves free


class Pass:
    """Matrices, and the logits of a pass over all of them."""

    def __init__(self, size):
        import torch
        self.torch = torch
        torch.manual_seed(0)
        self.matrices = [torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device="cuda").mul_(SIDE ** -0.5) for _ in range(size // MATRIX)]
        self.graph = None

    def eager(self, given):
        for matrix in self.matrices:
            given = self.torch.tanh(given @ matrix)
        return given

    def inputs(self):
        return self.torch.linspace(-1, 1, 16 * SIDE, device="cuda").view(16, SIDE).bfloat16()

    def capture(self):
        torch, self.given = self.torch, self.inputs()
        beside = torch.cuda.Stream()
        with torch.cuda.stream(beside):
            self.eager(self.given)
        beside.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.answer = self.eager(self.given)

    def logits(self):
        if self.graph:
            self.answer.zero_()  # what came back must not pass for what is computed
            self.graph.replay()
            answer = self.answer
        else:
            answer = self.eager(self.inputs())
        return hashlib.sha256(answer.view(self.torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]

    def digests(self):
        """A number for each matrix, of all of its bytes and their places."""
        torch, found = self.torch, []
        place = torch.arange(MATRIX // 8, device="cuda").mul_(2654435761)
        for matrix in self.matrices:
            found.append(int((matrix.view(torch.int64).view(-1) ^ place).mul_(0x5851F42D4C957F2D).sum()))
        del place
        torch.cuda.empty_cache()
        return found


class Other:
    """A second process, which uses the GPU's memory when it is told."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, __file__, "--child", "other"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=launch.environment())
        self.answer()

    def answer(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError("the second process ended early")

    def use(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        said = self.answer()
        self.process.wait(60)
        return said


def other(*_):
    import torch
    torch.ones(1, device="cuda")
    print("{}", flush=True)
    if not sys.stdin.readline():
        return  # who started it has ended
    begin = time.perf_counter()
    free, total = torch.cuda.mem_get_info()
    size = (free - SPARE) // (512 * MIB) * (512 * MIB)
    pieces = torch.empty(size // 8, dtype=torch.int64, device="cuda").split(64 * MIB)
    for number, piece in enumerate(pieces):
        piece.fill_(0x5A5A5A5A + number)
    right = all(int(piece.min()) == int(piece.max()) == 0x5A5A5A5A + number for number, piece in enumerate(pieces))
    torch.cuda.synchronize()
    print(json.dumps({"wrote": size, "total": total, "right": right, "seconds": time.perf_counter() - begin}), flush=True)


def wait_for(size):
    """Until the memory of a process that ended is free."""
    import torch
    deadline = time.perf_counter() + 20
    while torch.cuda.mem_get_info()[0] < size:
        if time.perf_counter() > deadline:
            raise RuntimeError("the memory of the second process was not given back within 20 s")
        time.sleep(0.01)


def cycles(held, size, repeat, leave, come):
    """Leaves and comes `repeat` times, the first time with a second process in between: medians of both, and what leaving answered."""
    import torch
    logits, bytes_before, wrong, outs, backs, said = held.logits(), held.digests(), 0, [], [], None
    link = shrink.links()
    torch.cuda.empty_cache()
    first, _ = shrink.seconds(leave)
    first_back, _ = shrink.seconds(come)
    wrong += held.logits() != logits
    neighbour = Other()
    for turn in range(repeat):
        out, answer = shrink.seconds(leave)
        outs.append(out)
        if turn == 0:
            said = neighbour.use()
            wait_for(size + SPARE)
        back, _ = shrink.seconds(come)
        backs.append(back)
        wrong += held.logits() != logits
    different = sum(before != after for before, after in zip(bytes_before, held.digests()))
    out, back = statistics.median(outs), statistics.median(backs)
    report("first time out, s", first, back=first_back)
    report("out again, ms", out * 1e3, 2 * size / GIB if held.graph else None, most=True, gib=size / GIB, slowest_ms=max(outs) * 1e3)
    report("another process wrote meanwhile, of the GPU's memory", said["wrote"] / said["total"], 0.95, gib=said["wrote"] / GIB, seconds=said["seconds"],
           right=said["right"])
    if not said["right"]:
        raise RuntimeError("the second process read other bytes than it wrote")
    report("back, of the link", size / back / 1e9 / link[1], 0.9 if held.graph else None, gbps=size / back / 1e9, link=link[1], seconds=back, slowest=max(backs))
    report("passes whose logits differ", wrong, 0, most=True, passes=repeat + 1)
    report("matrices whose bytes differ", different, 0, most=True, matrices=len(held.matrices))
    return answer


def ours(size, repeat):
    glake = shrink.glake_with()
    with glake.region("weights", policy="sealed", host_copy="retain"):
        held = Pass(size)
    held.capture()
    glake.seal("weights")
    gone = cycles(held, size, repeat, glake.shrink, glake.refill)
    if gone["freed"] < size:
        raise RuntimeError(f"{size} bytes are held, {gone['freed']} left")
    report("copied the last time it left, MiB", gone["copied"] / MIB, resident_mib=gone["resident"] / MIB)


def tensors(size, repeat):
    import torch
    held = Pass(size)
    buffers = [None] * len(held.matrices)

    def leave():
        for place, matrix in enumerate(held.matrices):
            if buffers[place] is None:
                buffers[place] = torch.empty_like(matrix, device="cpu", pin_memory=True)
            buffers[place].copy_(matrix)
            held.matrices[place] = None
            del matrix
        torch.cuda.empty_cache()

    def come():
        for place, buffer in enumerate(buffers):
            held.matrices[place] = torch.empty_like(buffer, device="cuda")
            held.matrices[place].copy_(buffer)

    cycles(held, size, repeat, leave, come)


CHILDREN = {"glake": ours, "tensors": tensors, "other": other}
PARTS = ["glake", "tensors"]


def beside(rows):
    """The per-tensor algorithm's times, of ours: of the last rows of each part."""
    last = {(row["scenario"], row["what"]): row for row in rows if "scenario" in row}
    ours, theirs = ({name: last.get((part, name)) for name in ("out again, ms", "back, of the link")} for part in PARTS)
    if all(ours.values()) and all(theirs.values()) and ours["out again, ms"]["gib"] == theirs["out again, ms"]["gib"]:
        yield {"what": "per tensor, out: of ours", "value": theirs["out again, ms"]["value"] / ours["out again, ms"]["value"], "bar": 10, "most": False}
        yield {"what": "per tensor, back: of ours", "value": theirs["back, of the link"]["seconds"] / ours["back, of the link"]["seconds"], "bar": None, "most": False}


def main():
    p = launch.Parser(__doc__, PARTS)
    p.add_argument("--gib", type=int, default=50, help="GiB of weights")
    p.add_argument("--repeat", type=int, default=5)
    p.add_argument("--time-limit", type=float, default=230, help="seconds a part")
    p.add_argument("--child", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.child:
        CHILDREN[a.child](a.gib * GIB, a.repeat)
        return
    launch.needs_gpus("weights.py")
    log, missed = launch.Log(a.out, "weights.jsonl", launch.Clock(float("inf"))), []
    for name in a.only:
        missed += launch.scenario(log, __file__, name, ["--gib", a.gib, "--repeat", a.repeat], a.time_limit)
    missed += launch.told(log, "beside", list(beside([row for _, rows in launch.runs(log.path) for row in rows])))
    print(f"weights: {len(log.rows)} figures in {log.clock.spent():.0f} s, {len(missed)} bars missed", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
