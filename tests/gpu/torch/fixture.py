"""What the cases share: the backend under test, stamped bytes, stitched tensors, programs in processes of their own."""
import json, os, pathlib, signal, socket, subprocess, sys, tempfile, textwrap, unittest

BACKEND = os.environ.get("GLAKE_TEST_BACKEND", "compiled")
HERE = pathlib.Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
REPOSITORY = HERE.parents[2]
MIB, GIB = 1 << 20, 1 << 30
STEP, PIECE = 7919, 1 << 20  # a stamp's pieces: elements each, and what tells one from the next


def enable(config=None):
    """glake with the backend under test; anything else than that backend is a failure. `native` is torch as it is."""
    if BACKEND == "native":
        return
    import glake

    glake.enable(config, backend=BACKEND)
    if glake.backend() != BACKEND:
        raise RuntimeError(f"asked for the backend {BACKEND!r}, got {glake.backend()!r}")


def only(backend, why):
    """The test is for one backend; `why` says what the other cannot do."""
    return unittest.skipIf(BACKEND != backend, why)


def limit(seconds):
    return lambda test: setattr(test, "limit", seconds) or test


def gpus(count):
    return lambda test: setattr(test, "gpus", count) or test


def ours(name, device=None):
    """One of our own counters."""
    import glake

    stats = glake.memory_stats(device) if device is not None else glake.memory_stats()
    return stats[f"glake.{name}"]


def new(size, device="cuda"):
    import torch

    return torch.empty(size, dtype=torch.uint8, device=device)


_BASE = {}


def pieces(tensor):
    import torch

    flat = tensor.view(torch.int32)
    base = _BASE.get(flat.device)
    if base is None:
        base = _BASE[flat.device] = torch.arange(PIECE, dtype=torch.int32, device=flat.device)
    for number, piece in enumerate(flat.split(PIECE)):
        yield number, piece, base[: piece.numel()]


def stamp(tensor, seed):
    """Writes bytes that depend on the seed and on the place, with kernels on the current stream."""
    import torch

    for number, piece, base in pieces(tensor):
        torch.add(base, seed + STEP * number, out=piece)
    return tensor


def wrong(tensor, seed):
    """How many elements are not as stamped."""
    return sum(int((piece != base + (seed + STEP * number)).sum()) for number, piece, base in pieces(tensor))


def failed_capture():
    """A capture that fails: it asks for a value. Its tensors are gone, and the device is idle."""
    import gc

    import torch

    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            kept = torch.ones(5 * MIB, device="cuda")
            float(kept.sum())
    except RuntimeError:
        kept = None
    else:
        raise AssertionError("the capture did not fail")
    torch.cuda.synchronize()
    gc.collect()


def stitched(size=GIB, device="cuda", block=64 * MIB):
    """(a tensor that no contiguous free memory held, the live tensors between its parts), all stamped: seeds 0, and 1, 2, ...

    Half as much again is freed as is asked for: a block need not begin where an extent does.
    """
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    index = torch.device(device).index
    kept = [new(block, device) for _ in range(2 * (size // block * 3 // 2 + 1))]
    for seed, tensor in enumerate(kept):
        stamp(tensor, seed // 2 + 1)
    del kept[::2], tensor
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_reserved(index), ours("stitches", index) + ours("alias_reuses", index)
    whole = new(size, device)
    after = torch.cuda.memory_reserved(index), ours("stitches", index) + ours("alias_reuses", index)
    if after[0] != before[0]:
        raise AssertionError(f"{size} bytes of free memory in pieces of {block}: reserved grew from {before[0]} to {after[0]}")
    if after[1] == before[1]:
        raise AssertionError("the block was handed out without a stitch")
    return stamp(whole, 0), kept


class Ended:
    """How a program ended."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    def text(self):
        return f"exit code {self.code}\n--- stdout\n{self.out[-3000:]}\n--- stderr\n{self.err[-4000:]}"

    def json(self):
        """The JSON of its last line."""
        return json.loads(self.out.strip().splitlines()[-1])


def finish(children, timeout):
    """Waits for all; after the time limit, or once one has failed, ends the rest."""
    ended = []
    for child in children:
        failed = any(one.code for one in ended)
        try:
            out, err = child.communicate(timeout=5 if failed else timeout)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # a session of its own: its children go with it
            out, err = child.communicate()
            err += f"\nended after {timeout} s"
        ended.append(Ended(child.returncode, out, err))
    return ended


def start(command, **env):
    env = {name: value for name, value in {**os.environ, **env}.items() if value is not None}
    return subprocess.Popen([str(part) for part in command], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, start_new_session=True)


def code(text, *args, timeout=50, **env):
    """Runs Python text in a process of its own. `enable()` there is fixture.enable()."""
    text = f"import sys; sys.path[:0] = [{str(HERE)!r}]\n" + textwrap.dedent(text)
    return finish([start([sys.executable, "-c", text, *args], **env)], timeout)[0]


def program(path, *args, timeout=80, **env):
    """Runs a Python file in a process of its own, with fixture.py to be imported."""
    env.setdefault("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])))
    return finish([start([sys.executable, PROGRAMS / path, *args], **env)], timeout)[0]


def ranks(path, count, *args, timeout=100, **env):
    """Runs a file of programs/ as the ranks of a process group, as torchrun would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count), OMP_NUM_THREADS="4",
                  PYTHONPATH=os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])), **env)
    common.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is another kind of memory: not what these tests are about
    command = [sys.executable, PROGRAMS / path, *args]
    return finish([start(command, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(count)], timeout)


def folder():
    return tempfile.TemporaryDirectory(prefix="glake-test-")
