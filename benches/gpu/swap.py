"""Two processes that take turns on one GPU: from wanting the memory to the logits of a whole pass, beside the per-tensor algorithm.

    python benches/gpu/swap.py [--repeat 10] [--parks 60] [--capacity 40] [--out DIR]

Each worker holds a transformers Llama of 24 GiB (bfloat16, random weights, the same kernels in all) in a sealed region whose host copies are
retained; both fit in host memory, one of them in --capacity GiB of the GPU. This process plays the agent over pipes: it tells the one worker
to shrink, and grants what that returns, as it comes, to the lease of the other, which waits for it in its refill.
idle: the victim does nothing. Bar: its bytes on one link, and 15 % of that, and 60 ms, and a pass.
busy: the victim generates for 32 sequences in a use with a safe point after each token, and comes back when the other is done. Bar for the
95th percentile: idle's median, a step, twice what the cache takes on the link, and 50 ms; and its tokens are those of an undisturbed run.
beside: one decodes while the other is refilled and shrunk without pause, both in memory: steps a second, of those alone.
links: where there are two GPUs, idle once more with the other GPU's link, whose context stays (tiers.suspend_relays = false): from wanting to
the bytes, of the same over one link.
tensors: torch's own allocator; each tensor is copied to a pinned buffer that is kept and then given up, and copied back from it.
saver: torch_memory_saver where it is installed, with a copy in host memory; 3 swaps after one that warms it.
start: the victim's process ends, and a new one starts, with the weights from safetensors in memory (/dev/shm) to the GPU.
Links, steps and passes are measured in the workers. Every logit is compared. Writes DIR/swap.jsonl. Ends with 1 if a bar was missed.
"""
import argparse, hashlib, importlib.util, json, pathlib, queue, statistics, subprocess, sys, threading, time

import launch
import shrink
from shrink import GIB, report

LIMIT = 120  # seconds for any answer of a worker


WEIGHTS = "/dev/shm/glake-swap.safetensors"


def model_and_inputs(saved=False):
    import torch, transformers
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40, num_key_value_heads=40,
        max_position_embeddings=2048, attn_implementation="eager")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta" if saved else "cuda"):
        model = transformers.LlamaForCausalLM(config).eval()
    if saved:
        from safetensors.torch import load_file
        model.load_state_dict(load_file(WEIGHTS, device="cuda"), assign=True)
        # What is no weight, and cheap: frequencies of rotations.
        model.model.rotary_emb = type(model.model.rotary_emb)(config, device="cuda")
    torch.manual_seed(1)
    return model, torch.randint(0, 32000, (32, 48), device="cuda")


class Worker:
    """The worker's side: reads commands, a line each, and prints what happens as JSON."""

    def __init__(self, kind, lease):
        import torch
        self.torch, self.kind, self.printing, self.over = torch, kind, threading.Lock(), threading.Event()
        self.glake, self.saver, self.generating, self.steps, self.runs = None, None, None, [], []
        if kind.startswith("glake"):
            self.glake = shrink.glake_with(tiers={"suspend_relays": kind == "glake"})
            if kind == "glake-links":
                shrink.wake_relays(self.glake)
            self.glake.lease.watch(lambda event, _, size: self.say(event=event, bytes=size))
            self.glake.lease.set(0, lease)
            with self.glake.region("weights", policy="sealed", host_copy="retain"):
                self.model, self.prompt = model_and_inputs()
            self.glake.seal("weights")
        elif kind == "saver":
            from torch_memory_saver import torch_memory_saver
            torch_memory_saver.hook_mode = "torch"
            self.saver = torch_memory_saver
            with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
                self.model, self.prompt = model_and_inputs()
        else:
            self.model, self.prompt = model_and_inputs(kind == "start")
            if kind == "start":
                self.say(bytes=True)
                self.say(logits=self.passes())
                return
            self.tensors = [*self.model.parameters(), *self.model.buffers()]
            self.buffers = [None] * len(self.tensors)
        self.passes()
        took = min(shrink.seconds(self.passes)[0] for _ in range(5))
        out, back = shrink.links(size=GIB, repeat=3)
        torch.cuda.empty_cache()
        size = sum(each.numel() * each.element_size() for each in self.model.parameters())
        self.say(ready=self.passes(), took=took, out=out, back=back, size=size)

    def say(self, **what):
        with self.printing:
            print(json.dumps(what), flush=True)

    def passes(self):
        with self.torch.no_grad():
            logits = self.model(self.prompt[:1]).logits
        return hashlib.sha256(logits.view(self.torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]

    def sleep(self):
        if self.glake:
            gone = self.glake.shrink(timeout=60)
            self.say(asleep=True, copied=gone["copied"], resident=gone["resident"])
            return
        if self.saver:
            self.saver.pause("weights")
            self.say(asleep=True, copied=0, resident=0)
            return
        torch = self.torch
        for place, tensor in enumerate(self.tensors):
            if self.buffers[place] is None:
                self.buffers[place] = torch.empty_like(tensor.data, device="cpu", pin_memory=True)
            self.buffers[place].copy_(tensor.data)
            tensor.data = torch.empty(0, dtype=tensor.dtype, device="cuda")
        torch.cuda.empty_cache()
        self.say(asleep=True, copied=0, resident=0)

    def wake(self):
        if self.glake:
            self.glake.refill()
            return
        if self.saver:
            self.saver.resume("weights")
            return
        for place, tensor in enumerate(self.tensors):
            tensor.data = self.torch.empty_like(self.buffers[place], device="cuda")
            tensor.data.copy_(self.buffers[place])

    def answer(self):
        self.wake()
        self.say(bytes=True)
        self.say(logits=self.passes())

    def back(self):
        self.wake()
        self.say(back=True)

    def tokens(self):
        glake, steps = self.glake, self.steps

        class Criterion(glake.generation.SafePoint):
            def __call__(self, input_ids, scores, **more):
                steps.append(time.perf_counter())
                return super().__call__(input_ids, scores, **more)

        with glake.active(), self.torch.no_grad():
            return self.model.generate(
                self.prompt, attention_mask=self.torch.ones_like(self.prompt), max_new_tokens=32, min_new_tokens=32, do_sample=False,
                pad_token_id=0, cache_implementation="static", disable_compile=True, stopping_criteria=[Criterion()]).cpu()

    def generate(self):
        """Tokens without end, once those of undisturbed runs are known."""
        self.tokens()
        self.alone = self.tokens()
        same = self.torch.equal(self.alone, self.tokens())
        step = statistics.median(after - before for before, after in zip(self.steps[-30:], self.steps[-29:]))
        def run():
            while not self.over.is_set():
                self.runs.append(self.tokens())
        self.generating = threading.Thread(target=run)
        self.generating.start()
        self.say(generating=True, step=step, deterministic=same)

    def end_generate(self):
        self.over.set()
        self.generating.join()
        self.over.clear()
        self.say(runs=len(self.runs), wrong=sum(not self.torch.equal(self.alone, run) for run in self.runs))

    def cycle(self):
        """Refills and shrinks without pause."""
        begin = time.perf_counter()
        for _ in range(10):
            self.glake.refill()
            self.glake.shrink()
        self.say(cycled=time.perf_counter() - begin)

    def count(self):
        self.say(steps=len(self.steps))

    def save(self):
        from safetensors.torch import save_file
        save_file({name: tensor.contiguous() for name, tensor in self.model.state_dict().items()}, WEIGHTS)
        self.say(saved=True)

    def run(self):
        for line in sys.stdin:
            name, *arguments = line.split()
            if name == "grant":
                self.glake.lease.grant(0, int(arguments[0]))
            elif name == "quit":
                return
            else:
                threading.Thread(target=self.told, args=[getattr(self, name)]).start()

    def told(self, what):
        try:
            what()
        except Exception as error:
            self.say(error=f"{type(error).__name__}: {error}")


class Remote:
    """The agent's side of a worker."""

    def __init__(self, agent, kind, lease):
        command = [sys.executable, __file__, "--child", "worker", "--kind", kind, "--lease", str(lease)]
        self.agent, self.lease, self.wants, self.answers = agent, lease, 0, queue.Queue()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=launch.environment())
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                said = json.loads(line)
                if "event" in said:
                    self.agent.event(self, said["event"], said["bytes"])
                else:
                    self.answers.put(said)
        self.answers.put({"error": "the worker ended"})

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self, name):
        said = self.answers.get(timeout=LIMIT)
        if name not in said:
            raise RuntimeError(f"{name} was waited for, and there came {said}")
        return said

    def end(self):
        try:
            self.tell("quit")
            self.process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()


class Agent:
    """Leases whose sum is never above the capacity; what is returned goes to who waits."""

    def __init__(self, capacity):
        self.capacity, self.workers, self.lock = capacity, [], threading.Lock()

    def event(self, worker, event, size):
        with self.lock:
            if event == "returned":
                worker.lease -= size
            else:
                worker.wants = max(worker.wants, size) if event == "want" else worker.wants + size
            for each in self.workers:
                granted = min(each.wants, self.capacity - sum(one.lease for one in self.workers))
                if granted > 0:
                    each.wants -= granted
                    each.lease += granted
                    each.tell(f"grant {granted}")

    def start(self, kind):
        """A worker that is ready, while no other holds memory, and what it said of itself."""
        worker = Remote(self, kind, int(30 * GIB) if kind.startswith("glake") else 0)
        self.workers.append(worker)
        return worker, worker.answer("ready")

    def swap(self, victim, other, ready):
        """Seconds from wanting to the other's bytes, and to its logits."""
        begin = time.perf_counter()
        victim.tell("sleep")
        if not victim.by_leases:
            victim.answer("asleep")
        other.tell("answer")
        other.answer("bytes")
        there = time.perf_counter() - begin
        said = other.answer("logits")
        took = time.perf_counter() - begin
        if victim.by_leases:
            victim.answer("asleep")
        if said["logits"] != ready["ready"]:
            raise RuntimeError("the logits are others than before")
        return there, took


def pair(kind, capacity):
    agent = Agent(capacity)
    one, said = agent.start(kind)
    one.tell("sleep")
    one.answer("asleep")
    other, more = agent.start(kind)
    for worker in (one, other):
        worker.by_leases = kind.startswith("glake")
    if said["ready"] != more["ready"]:
        raise RuntimeError("two workers with the same weights have other logits")
    return agent, one, other, {**said, **{name: min(said[name], more[name]) for name in ("took", "back", "out")}}


def turns(kind, a, repeat):
    """Swaps of two workers of a kind, after one that warms what it uses."""
    agent, one, other, said = pair(kind, int(a.capacity * GIB))
    took = []
    try:
        for _ in range(repeat + 1):
            took.append(agent.swap(other, one, said))
            one, other = other, one
        took = took[1:]
    except BaseException:
        one.end(), other.end()
        raise
    return agent, one, other, said, took


def ours(a):
    """Medians of the seconds from wanting to the bytes, and to the logits, of an idle victim."""
    agent, one, other, said, took = turns("glake", a, a.repeat)
    on_link = said["size"] / said["back"] / 1e9
    there, idle = (statistics.median(each) for each in zip(*took))
    bound = 1.15 * on_link + 0.06 + said["took"]
    report("idle: want to logits, of the bar's seconds", idle / bound, 1, most=True, seconds=idle, slowest=max(each for _, each in took), to_bytes=there, on_link=on_link, a_pass=said["took"],
           gib=said["size"] / GIB, link=said["back"])
    try:
        if "busy" in a.only:
            # `other` is awake.
            other.tell("generate")
            busy = other.answer("generating")
            wants, copied = [], []
            for _ in range(a.parks):
                time.sleep(0.35)
                begin = time.perf_counter()
                other.tell("sleep")
                one.tell("answer")
                one.answer("bytes")
                if one.answer("logits")["logits"] != said["ready"]:
                    raise RuntimeError("the logits are others than before")
                wants.append(time.perf_counter() - begin)
                copied.append(other.answer("asleep")["copied"])
                one.tell("sleep")
                other.tell("back")
                one.answer("asleep")
                other.answer("back")
            other.tell("end_generate")
            runs = other.answer("runs")
            report("busy: runs whose tokens differ", runs["wrong"], 0, most=True, runs=runs["runs"], parks=len(wants), deterministic=busy["deterministic"])
            wants.sort()
            cache = statistics.median(copied)
            bound = idle + busy["step"] + 2 * cache / said["out"] / 1e9 + 0.05
            report("busy: want to logits, p95 of the bar's seconds", wants[max(int(len(wants) * 0.95) - 1, 0)] / bound, 1, most=True, bar_s=bound,
                   p95=wants[max(int(len(wants) * 0.95) - 1, 0)], median=statistics.median(wants), most_s=wants[-1], step=busy["step"], cache_gib=cache / GIB)
            beside(agent, one, other)
    finally:
        one.end(), other.end()
    return there, idle


def beside(agent, sleeper, busy):
    """In turns, alone and beside the other's refills: what comes between two batches is in both."""
    agent.capacity = int(100 * GIB)
    busy.tell("generate")
    busy.answer("generating")

    def rate(wait):
        busy.tell("count")
        before, begin = busy.answer("steps")["steps"], time.perf_counter()
        wait()
        busy.tell("count")
        return (busy.answer("steps")["steps"] - before) / (time.perf_counter() - begin)

    def cycle():
        sleeper.tell("cycle")
        sleeper.answer("cycled")

    rates = [(rate(lambda: time.sleep(5)), rate(cycle)) for _ in range(4)]
    busy.tell("end_generate")
    busy.answer("runs")
    ratios = [with_refills / alone for alone, with_refills in rates]
    report("beside: steps a second, of those alone", statistics.median(ratios), 0.95, least=min(ratios), most_of_4=max(ratios),
           alone=statistics.median(alone for alone, _ in rates))


def links(a, there, _):
    if len(launch.gpus()) < 2:
        return
    _, one, other, said, took = turns("glake-links", a, a.repeat)
    one.end(), other.end()
    to_bytes = statistics.median(each for each, _ in took)
    report("links: want to the bytes over two links, of one", to_bytes / there, 0.65, most=True, seconds=to_bytes, one_link=there)


def start(a, _, idle):
    """The victim is told to end when the other begins to start."""
    agent = Agent(0)
    first, said = agent.start("tensors")
    took = []
    try:
        first.tell("save")
        first.answer("saved")
        victim = first
        for _ in range(3):
            begin = time.perf_counter()
            victim.end()
            victim = Remote(agent, "start", 0)
            victim.answer("bytes")
            if victim.answer("logits")["logits"] != said["ready"]:
                raise RuntimeError("the logits are others than before")
            took.append(time.perf_counter() - begin)
        victim.end()
    finally:
        pathlib.Path(WEIGHTS).unlink(missing_ok=True)
    report("start: stop and start, of ours: want to logits", statistics.median(took[1:]) / idle, 10, seconds=statistics.median(took[1:]))


def others(kind, a, repeat):
    """The median of the seconds from wanting to the logits without GLake."""
    _, one, other, _, took = turns(kind, a, repeat)
    one.end(), other.end()
    return statistics.median(each for _, each in took)


def tensors(a, _, idle):
    theirs = others("tensors", a, a.repeat)
    report("tensors: per tensor, of ours: want to logits", theirs / idle, 1.6, seconds=theirs)


def saver(a, _, idle):
    if importlib.util.find_spec("torch_memory_saver"):
        theirs = others("saver", a, 3)
        report("saver: torch_memory_saver, of ours: want to logits", theirs / idle, 10, seconds=theirs)


BESIDE = {"links": links, "tensors": tensors, "saver": saver, "start": start}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--repeat", type=int, default=10)
    p.add_argument("--parks", type=int, default=60, help="of the busy victim")
    p.add_argument("--only", default=",".join(["busy", *BESIDE]), help="what is measured after the idle victim, of busy, " + ", ".join(BESIDE))
    p.add_argument("--capacity", type=float, default=40, help="GiB of the GPU that both may hold")
    p.add_argument("--out", default="bench-results")
    p.add_argument("--time-limit", type=float, default=560)
    p.add_argument("--child", help=argparse.SUPPRESS)
    p.add_argument("--kind", help=argparse.SUPPRESS)
    p.add_argument("--lease", type=int, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.child == "worker":
        Worker(a.kind, a.lease).run()
        return
    if a.child:
        there, idle = ours(a)
        for name in a.only.split(","):
            if name in BESIDE:
                BESIDE[name](a, there, idle)
        return
    launch.chosen(p, a.only, ["busy", *BESIDE])
    arguments = ["--repeat", a.repeat, "--parks", a.parks, "--capacity", a.capacity, "--only", a.only]
    launch.scenarios(__file__, ["all"], arguments, a.out, a.time_limit)


if __name__ == "__main__":
    main()
