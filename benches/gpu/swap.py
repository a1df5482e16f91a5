"""Two processes that take turns on one GPU: from wanting the memory to the logits of a whole pass, beside the per-tensor algorithm.

    python benches/gpu/swap.py [--repeat 5] [--slow-repeat 2] [--parks 60] [--capacity 40] [--only NAME,...] [--out DIR]

Each worker holds a transformers Llama of 24 GiB (bfloat16, random weights, the same kernels in all) in a sealed region whose host copies are
retained; both fit in host memory, one of them in --capacity GiB of the GPU. This process plays the agent over pipes: it tells the one worker
to shrink, and grants what that returns, as it comes, to the lease of the other, which waits for it in its refill.
idle: the victim does nothing. Bar: its bytes on one link, and 15 % of that, and 60 ms, and a pass. It is always measured, --repeat times.
The next four are rounds: in each ours swaps once, then theirs; a ratio is the median of the rounds' ratios. One has ended before the next
begins, because the GPU has no room for three pairs; host memory of 140 GiB is needed. --slow-repeat is for saver and start. All have done it
once before.
links: where there are two GPUs, idle with the other GPU's link, which joins once its context exists again: from wanting to the bytes, of
the same over one link.
tensors: torch's own allocator; each tensor is copied to a pinned buffer that is kept and then given up, and copied back from it.
saver: torch_memory_saver where it is installed, with a copy in host memory.
start: the victim's process ends, and a new one starts, with the weights from safetensors in memory (/dev/shm) to the GPU.
busy: the victim generates for 32 sequences in a use with a safe point after each token, and comes back when the other is done. What counts
are the times that it was parked inside of a use: a shrink between two uses finds an idle victim. Bar for the 95th percentile: idle's median,
a step, twice what the cache takes on the link, and 50 ms; its tokens are those of an undisturbed run. DIR/swap-wants.txt has the phases of
each want, in seconds from wanting.
beside: one decodes while the other is refilled and shrunk without pause, both in memory, in short turns with decoding alone: steps a second
inside of batches, median of median, and quartiles of the turns.
Links, steps and passes are measured in the workers. Every logit is compared. Writes DIR/swap.jsonl. Ends with 1 if a bar was missed.
"""
import argparse, contextlib, hashlib, importlib.util, json, pathlib, queue, statistics, subprocess, sys, threading, time, traceback

import launch
import shrink
from shrink import GIB, report

LIMIT = 120  # seconds for any answer of a worker
REST = 0.35  # seconds between two parks: what was parked runs for its quantum first
TURNS, TURN = 20, 1.2  # of beside, and seconds of each
FIRST_LEASE = 30 * GIB  # until a worker has left for the first time
WEIGHTS = "/dev/shm/glake-swap.safetensors"
COMMAND = [sys.executable, __file__, "--child", "worker"]


def p95(values):
    return sorted(values)[max(int(len(values) * 0.95) - 1, 0)]


def inside(steps):
    """Seconds of each step that began and ended in one batch, of when they ended; None begins a batch."""
    return [after - before for before, after in zip(steps, steps[1:]) if None not in (before, after)]


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
    """The worker's side: reads commands, a line each, until there are no more, and prints what happens as JSON. The clock is the one that all
    processes of the machine share."""

    def __init__(self, kind, lease):
        import torch
        self.torch, self.kind, self.printing, self.over = torch, kind, threading.Lock(), threading.Event()
        self.glake, self.saver, self.generating, self.steps, self.runs, self.marked = None, None, None, [], [], 0
        if kind.startswith("glake"):
            self.glake = shrink.glake_with()
            if kind == "glake-links":
                shrink.wake_relays(self.glake)
            self.glake.lease.watch(lambda event, _, size: self.say(event=event, bytes=size))
            self.glake.lease.set(0, lease)
        import transformers  # takes long, and needs nothing of the GPU's

    def load(self):
        if self.glake:
            with self.glake.region("weights", policy="sealed", host_copy="retain"):
                self.model, self.prompt = model_and_inputs()
            self.glake.seal("weights")
        elif self.kind == "saver":
            from torch_memory_saver import torch_memory_saver
            torch_memory_saver.hook_mode = "torch"
            self.saver = torch_memory_saver
            with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
                self.model, self.prompt = model_and_inputs()
        else:
            self.model, self.prompt = model_and_inputs(self.kind == "start")
            if self.kind == "start":
                self.say(bytes=True)
                self.say(logits=self.passes())
                return
            self.tensors = [*self.model.parameters(), *self.model.buffers()]
            self.buffers = [None] * len(self.tensors)
        self.passes()
        took = min(shrink.seconds(self.passes)[0] for _ in range(5))
        out, back = shrink.links(size=GIB, repeat=3)
        self.torch.cuda.empty_cache()
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
            begin = time.perf_counter()
            gone = self.glake.shrink(timeout=60)
            took = time.perf_counter() - begin
            # What is parked stays so until its memory is back.
            parked = self.glake.gate()["parked"]
            self.say(asleep=True, parked=parked, safe_point=self.steps[-1] if parked else begin, took=took,
                     **{name: gone[name] for name in ("copied", "freed", "resident")})
            return
        if self.saver:
            self.saver.pause("weights")
            self.say(asleep=True)
            return
        torch = self.torch
        for place, tensor in enumerate(self.tensors):
            if self.buffers[place] is None:
                self.buffers[place] = torch.empty_like(tensor.data, device="cpu", pin_memory=True)
            self.buffers[place].copy_(tensor.data)
            tensor.data = torch.empty(0, dtype=tensor.dtype, device="cuda")
        torch.cuda.empty_cache()
        self.say(asleep=True)

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

        # Between two batches it does not ask for its memory: it is brought back when the other is done, and does not compete for the grants.
        with glake.active(when_closed="hold"), self.torch.no_grad():
            steps.append(None)
            return self.model.generate(
                self.prompt, attention_mask=self.torch.ones_like(self.prompt), max_new_tokens=32, min_new_tokens=32, do_sample=False,
                pad_token_id=0, cache_implementation="static", disable_compile=True, stopping_criteria=[Criterion()]).cpu()

    def generate(self):
        """Tokens without end, once those of undisturbed runs are known."""
        self.tokens()
        self.alone, self.runs = self.tokens(), []
        same = self.torch.equal(self.alone, self.tokens())
        step = statistics.median(inside(self.steps)[-30:])
        def run():
            while not self.over.is_set():
                self.runs.append(self.tokens())
        self.generating = threading.Thread(target=self.told, args=[run])
        self.generating.start()
        self.say(generating=True, step=step, deterministic=same)

    def end_generate(self):
        self.over.set()
        self.generating.join()
        self.over.clear()
        self.say(runs=len(self.runs), wrong=sum(not self.torch.equal(self.alone, run) for run in self.runs))

    def cycle(self, most):
        """Refills and shrinks without pause, for so many seconds."""
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < float(most):
            self.glake.refill()
            self.glake.shrink()
            count += 1
        self.say(cycled=count)

    def mark(self):
        self.marked = len(self.steps)
        self.say(marked=True)

    def paced(self):
        self.say(paced=inside(self.steps[self.marked:]))

    def save(self):
        from safetensors.torch import save_file
        save_file({name: tensor.contiguous() for name, tensor in self.model.state_dict().items()}, WEIGHTS)
        self.say(saved=True)

    def run(self):
        for line in sys.stdin:
            name, *arguments = line.split()
            if name == "grant":
                self.glake.lease.grant(0, int(arguments[0]))
            elif name == "load":
                self.load()
            else:
                threading.Thread(target=self.told, args=[getattr(self, name), *arguments]).start()

    def told(self, what, *arguments):
        try:
            what(*arguments)
        except Exception as error:
            traceback.print_exc()
            self.say(error=f"{type(error).__name__}: {error}")


class Remote:
    """The agent's side of a worker. What a worker says gets the time at which it was heard."""

    def __init__(self, agent, kind):
        self.agent, self.lease, self.wants, self.granted, self.answers = agent, FIRST_LEASE if kind.startswith("glake") else 0, 0, 0.0, queue.Queue()
        command = [*COMMAND, "--kind", kind, "--lease", str(self.lease)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=launch.environment())
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        with self.process.stdout as lines:
            for line in lines:
                if line.startswith("{"):
                    said = {"at": time.perf_counter(), **json.loads(line)}
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
            self.answers.put(said)  # whoever asks next hears it too
            raise RuntimeError(f"{name} was waited for, and there came {said}")
        return said

    def load(self):
        """Loads the model, while no other worker of the agent's holds memory; what it says of itself."""
        self.agent.workers.append(self)
        self.tell("load")
        return self.answer("ready")


def end(*workers):
    """Ends workers, all at once."""
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.process.stdin.close()
    for worker in workers:
        try:
            worker.process.wait(20)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


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
                    each.granted = time.perf_counter()
                    each.tell(f"grant {granted}")


class Pair:
    """Two workers of a kind, one of which holds its memory. They have swapped once."""

    def __init__(self, kind, capacity):
        self.by_leases = kind.startswith("glake")
        self.agent = Agent(int(capacity * GIB))
        # Both import what they need at once; the second loads its model when the first has left.
        self.asleep, self.awake = Remote(self.agent, kind), Remote(self.agent, kind)
        try:
            one = self.asleep.load()
            self.asleep.tell("sleep")
            self.asleep.answer("asleep")
            other = self.awake.load()
            if one["ready"] != other["ready"]:
                raise RuntimeError("two workers with the same weights have other logits")
            self.said = {**one, **{name: min(one[name], other[name]) for name in ("took", "back", "out")}}
            self.swap()
        except BaseException:
            end(self.asleep, self.awake)
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        end(self.asleep, self.awake)

    def take(self):
        """The one that is asleep wants the memory: seconds from that to its bytes and logits, and to what the victim does for it."""
        begin = time.perf_counter()
        self.awake.tell("sleep")
        if not self.by_leases:
            self.awake.answer("asleep")
        self.asleep.tell("answer")
        refilled, granted = self.asleep.answer("bytes")["at"] - begin, self.asleep.granted - begin
        said = self.asleep.answer("logits")
        if said["logits"] != self.said["ready"]:
            raise RuntimeError("the logits are others than before")
        phases = {"refilled": refilled, "logits": said["at"] - begin}
        if self.by_leases:
            gone = self.awake.answer("asleep")
            phases = {"parked": gone["parked"], "safe_point": gone["safe_point"] - begin, "shrunk": gone["at"] - begin, "shrink_took": gone["took"],
                      **{f"{name}_gib": gone[name] / GIB for name in ("copied", "freed", "resident")}, "granted": granted, **phases}
        return phases

    def swap(self):
        phases = self.take()
        self.awake, self.asleep = self.asleep, self.awake
        return phases

    def take_and_return(self):
        phases = self.take()
        self.asleep.tell("sleep")
        self.awake.tell("back")
        self.asleep.answer("asleep")
        self.awake.answer("back")
        return phases


def median(found, name):
    return statistics.median(each[name] for each in found)


def idle(a, ours):
    """Tells of an idle victim; the median of the seconds to the logits."""
    said, found = ours.said, [ours.swap() for _ in range(a.repeat)]
    on_link, took = said["size"] / said["back"] / 1e9, median(found, "logits")
    bound = 1.15 * on_link + 0.06 + said["took"]
    report("idle: want to logits, of the bar's seconds", took / bound, 1, most=True, seconds=took, slowest=max(each["logits"] for each in found),
           to_bytes=median(found, "refilled"), on_link=on_link, a_pass=said["took"], gib=said["size"] / GIB, link=said["back"])
    return took


def rounds(ours, theirs, count):
    return [(ours.swap(), theirs()) for _ in range(count)]


def compare(what, found, bar, most=False, name="logits", beside="ours"):
    """Theirs of ours, round by round."""
    ratios = [their[name] / our[name] for our, their in found]
    ours, theirs = zip(*found)
    report(what, statistics.median(ratios), bar, most=most, seconds=median(theirs, name), **{beside: median(ours, name)}, least=min(ratios),
           greatest=max(ratios), rounds=len(found))


def links(a, ours, _):
    if len(launch.gpus()) < 2:
        return
    with Pair("glake-links", a.capacity) as theirs:
        found = rounds(ours, theirs.swap, a.repeat)
    compare("links: want to the bytes over two links, of one", found, 0.65, most=True, name="refilled", beside="one_link")


def tensors(a, ours, _):
    with Pair("tensors", a.capacity) as theirs:
        found = rounds(ours, theirs.swap, a.repeat)
    compare("tensors: per tensor, of ours: want to logits", found, 1.6)


def saver(a, ours, _):
    if importlib.util.find_spec("torch_memory_saver") is None:
        return
    with Pair("saver", a.capacity) as theirs:
        found = rounds(ours, theirs.swap, a.slow_repeat)
    compare("saver: torch_memory_saver, of ours: want to logits", found, 10)


def start(a, ours, _):
    agent, victims = Agent(0), []

    def again():
        """The victim is told to end, and then the other begins to start."""
        begin = time.perf_counter()
        end(*victims)
        victims.clear()
        victims.append(Remote(agent, "start"))
        victims[0].tell("load")
        refilled = victims[0].answer("bytes")["at"] - begin
        said = victims[0].answer("logits")
        if said["logits"] != ours.said["ready"]:
            raise RuntimeError("the logits are others than before")
        return {"refilled": refilled, "logits": said["at"] - begin}

    try:
        ours.awake.tell("save")
        ours.awake.answer("saved")
        again()
        found = rounds(ours, again, a.slow_repeat)
    finally:
        end(*victims)
        pathlib.Path(WEIGHTS).unlink(missing_ok=True)
    compare("start: stop and start, of ours: want to logits", found, 10)


def busy(a, ours, alone):
    victim, wants = ours.awake, []
    victim.tell("generate")
    began = victim.answer("generating")
    with open(pathlib.Path(a.out, "swap-wants.txt"), "w") as log:
        while sum(1 for want in wants if want["parked"]) < a.parks and len(wants) < 2 * a.parks:
            time.sleep(REST)
            wants.append({"number": len(wants) + 1, **ours.take_and_return()})
            print(json.dumps(wants[-1]), file=log, flush=True)
    victim.tell("end_generate")
    runs = victim.answer("runs")
    parked = [want for want in wants if want["parked"]]
    report("busy: runs whose tokens differ", runs["wrong"], 0, most=True, runs=runs["runs"], parks=len(parked), wants=len(wants),
           deterministic=began["deterministic"])
    report("busy: parks", len(parked), a.parks, wants=len(wants))
    report("busy: GiB that stayed, the most of all wants", max(want["resident_gib"] for want in wants), 0, most=True)
    cache = median(parked, "copied_gib")
    bound = alone + began["step"] + 2 * cache * GIB / ours.said["out"] / 1e9 + 0.05
    took = [want["logits"] for want in parked]
    report("busy: want to logits, p95 of the bar's seconds", p95(took) / bound, 1, most=True, bar_s=bound, p95=p95(took),
           median=statistics.median(took), most_s=max(took), p95_of_all=p95([want["logits"] for want in wants]), step=began["step"], cache_gib=cache)
    slowest = max(wants, key=lambda want: want["logits"])
    report("busy: the slowest want, s", slowest["logits"], **{name: each for name, each in slowest.items() if name != "logits"})


def beside(_, ours, __):
    ours.agent.capacity = int(100 * GIB)
    busy, sleeper = ours.awake, ours.asleep

    def cycles():
        sleeper.tell(f"cycle {TURN}")
        sleeper.answer("cycled")

    def rate(work):
        busy.tell("mark")
        busy.answer("marked")
        work()
        busy.tell("paced")
        steps = busy.answer("paced")["paced"]
        return len(steps) / sum(steps)

    busy.tell("generate")
    busy.answer("generating")
    cycles()
    alone, with_refills = zip(*[(rate(lambda: time.sleep(TURN)), rate(cycles)) for _ in range(TURNS)])
    busy.tell("end_generate")
    runs = busy.answer("runs")
    least, _, most = statistics.quantiles([there / here for here, there in zip(alone, with_refills)], n=4)
    least_alone, _, most_alone = statistics.quantiles(alone, n=4)
    report("beside: steps a second, of those alone", statistics.median(with_refills) / statistics.median(alone), 0.95, first_quartile=least,
           third_quartile=most, alone=statistics.median(alone), alone_first_quartile=least_alone, alone_third_quartile=most_alone, turns=TURNS)
    report("beside: runs whose tokens differ", runs["wrong"], 0, most=True, runs=runs["runs"])


# In this order: those whose victim has generated hold its cache too.
PARTS = {"links": links, "tensors": tensors, "saver": saver, "start": start, "busy": busy, "beside": beside}


def everything(a):
    """Runs the requested parts beside one pair of GLake's; a part that fails does not stop the others."""
    failed = []
    with Pair("glake", a.capacity) as ours:
        alone = idle(a, ours)
        for name in [name for name in PARTS if name in a.only]:
            try:
                PARTS[name](a, ours, alone)
            except Exception as error:
                traceback.print_exc()
                failed.append(f"{name}: {type(error).__name__}: {error}")
    if failed:
        sys.exit("; ".join(failed))


def main():
    p = launch.Parser(__doc__, PARTS, help="what is measured after the idle victim, of ")
    p.add_argument("--repeat", type=int, default=5, help="swaps of an idle victim, and rounds")
    p.add_argument("--slow-repeat", type=int, default=2, help="rounds with saver and start")
    p.add_argument("--parks", type=int, default=60, help="of the busy victim")
    p.add_argument("--capacity", type=float, default=40, help="GiB of the GPU that both may hold")
    p.add_argument("--time-limit", type=float, default=590)
    p.add_argument("--child", help=argparse.SUPPRESS)
    p.add_argument("--kind", help=argparse.SUPPRESS)
    p.add_argument("--lease", type=int, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.child == "worker":
        Worker(a.kind, a.lease).run()
        return
    if a.child:
        everything(a)
        return
    arguments = ["--repeat", a.repeat, "--slow-repeat", a.slow_repeat, "--parks", a.parks, "--capacity", a.capacity, "--only", ",".join(a.only), "--out", a.out]
    launch.scenarios(__file__, ["all"], arguments, a.out, a.time_limit)


if __name__ == "__main__":
    main()
