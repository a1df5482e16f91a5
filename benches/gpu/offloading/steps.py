"""A part's steps, each part in a process of its own: one JSON line."""

import contextlib, json, os, statistics, time

from sharing.meter import Watch, meter

from .baselines import THEIRS, Blind, Copied, Skipped, recomputes
from .models import Unique, chunked_loss, gpt2, layers_of, llama, whole

MIB = 1 << 20
# Ours: whether layers are recomputed by the program, and the preset; None is `activations` alone.
OURS = {
    "offload": (False, None), "multi-path": (False, None), "inputs": (True, "memory"),
    "memory": (False, "memory"), "memory-multi-path": (False, "memory"),
    "hybrid": (True, "hybrid"), "hybrid-multi-path": (True, "hybrid"), "ddp-hybrid": (True, "hybrid"),
}
BLIND = ("blind", "blind-multi-path")
# Steps that are not steady: in the first nothing is known, in the others saves and leaves are checked, and times are taken.
FIRST = 6


class Measured:
    """Times, losses and the most memory of some steps, above what all processes used before: it is made before the first use of CUDA."""

    def __init__(self, a):
        self.meter = meter("cuda") if a.device == "cuda" else None
        self.before = self.meter.used() if self.meter else 0
        self.times, self.losses, self.most = [], [], 0

    @contextlib.contextmanager
    def step(self):
        watch = Watch(self.meter, self.before) if self.meter else contextlib.nullcontext()
        with watch:
            begin = time.perf_counter()
            yield
            self.times.append(time.perf_counter() - begin)
        self.most = max(self.most, getattr(watch, "most", 0))

    def row(self, a):
        return {"run": a.one, "device": a.device, "tokens": a.tokens, "layers": a.layers, "first_s": self.times[0], "step_s": steady(self.times),
                "most_bytes": self.most, "times": self.times, "losses": self.losses}


class Moved:
    """Bytes moved and saved by each step, their rates, and host memory at its peak, the end of a forward."""

    def __init__(self, glake):
        self.glake, self.live, self.pinned = glake, 0, 0
        # Before the first step, and behind each.
        self.told = [glake.offload.report()]

    def forward_ended(self):
        told = self.glake.offload.report()
        if told["host_bytes"] > self.live:
            self.live, self.pinned = told["host_bytes"], told["host_pinned_bytes"]

    def step_ended(self):
        self.told.append(self.glake.offload.report())

    def row(self):
        each = lambda key: steady([after[key] - before[key] for before, after in zip(self.told, self.told[1:])])
        begin, end = self.told[unsteady(len(self.told) - 1)], self.told[-1]
        found = {"step_bytes": each("bytes_out"), "step_bytes_in": each("bytes_in"), "narrowed_bytes": each("narrowed")}
        for way in ("out", "in"):
            busy = end[f"busy_us_{way}"] - begin[f"busy_us_{way}"]
            found[f"gbps_{way}"] = (end[f"timed_bytes_{way}"] - begin[f"timed_bytes_{way}"]) / busy / 1e3 if busy else None
        return {**found, "live_host_bytes": self.live, "pinned_host_bytes": self.pinned}


class Step:
    """A step of training; what a part has around it comes with the call."""

    def __init__(self, torch, model, loss_of):
        self.loss_of = loss_of
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def __call__(self, ids, around=contextlib.nullcontext, is_backward_within=False, blind=None, forward_ended=lambda: None):
        with around():
            if blind:
                blind.out()
            loss = self.loss_of(ids)
            forward_ended()
            if is_backward_within:
                loss.backward()
        if blind:
            blind.back()
        if not is_backward_within:
            loss.backward()
        if blind:
            blind.end()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def unsteady(count):
    """Returns the number of warm-up steps among `count` steps; the first alone if there are few."""
    return FIRST if count > FIRST else min(1, count - 1)


def steady(values):
    return statistics.median(values[unsteady(len(values)):])


@contextlib.contextmanager
def fits(torch, what):
    """Reports an out-of-memory error of the block as a skipped part."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Skipped(f"the GPU has no memory for {what}: {str(error)[:200]}") from error


def warmed(torch, a, model, step, ids):
    """Runs an uncounted step without hooks, in which torch loads kernels and cuBLAS. Its layers are recomputed, but for `keep`'s, which
    is as cold as a program's first step is. In seconds."""
    base = model.get_base_model()
    if a.one != "keep":
        base.gradient_checkpointing_enable({"use_reentrant": False})
    begin = time.perf_counter()
    step(ids)
    took = time.perf_counter() - begin
    if a.one != "keep":
        base.gradient_checkpointing_disable()
    if a.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return took


def started(a):
    """glake for a part that needs it, before torch's first use of CUDA."""
    if a.device != "cuda":
        raise Skipped("GLake's pool is a GPU's")
    import glake

    glake.enable()
    return glake


def said(a, error):
    # Once, of several ranks.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(json.dumps({"run": a.one, "skipped": str(error)}), flush=True)


def ranked(torch, a):
    """This rank's number, of several that torchrun started: each has a GPU of its own."""
    rank = int(os.environ["LOCAL_RANK"])
    if a.device == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl" if a.device == "cuda" else "gloo")
    return rank


def one(a):
    measured = Measured(a)
    glake = started(a) if a.one in (*OURS, BLIND[1]) else None
    import torch

    is_ranked = a.one.startswith("ddp-")
    rank = ranked(torch, a) if is_ranked else 0
    model, vocabulary = llama(a, torch)
    loss_of = torch.nn.parallel.DistributedDataParallel(whole(torch, model)) if is_ranked else lambda ids: chunked_loss(torch, model, ids)
    torch.manual_seed(1 + rank)
    length = min(a.tokens, a.length)
    ids = torch.randint(0, vocabulary, (a.tokens // length, length), device=a.device)
    step = Step(torch, model, loss_of)
    cold = warmed(torch, a, model, step, ids)
    if a.one.endswith("multi-path"):
        glake.multi_path()
    handle, blind, around = None, None, contextlib.nullcontext
    if a.one in OURS:
        is_recomputed, preset = OURS[a.one]
        if is_recomputed:
            recomputes(model)
        if preset:
            pinned = None if a.host_memory is None else f"{a.host_memory}GiB"
            handle = glake.offload(layers_of(model), budget=f"{a.budget // MIB}MiB", preset=preset, host_memory=pinned)
        else:
            # One site for all steps: it learns from the first.
            site = glake.offload.activations()
            around = lambda: site
    elif a.one in BLIND:
        blind = Blind(torch, a, a.blind_bytes[0], a.blind_bytes[-1], glake)
    else:
        around = THEIRS[a.one](torch, model, a)
    unique = Unique(torch, model)
    if a.one == "keep":
        layers_of(model).register_forward_hook(unique.layers_ended)
    moved = Moved(glake) if a.one in OURS else None
    copied, sent = Copied(torch) if a.one in THEIRS else None, []
    # Its trainers have the backward within the block.
    options = {"is_backward_within": a.one.startswith("trl"), "blind": blind}
    if moved:
        options["forward_ended"] = moved.forward_ended
    for number in range(a.steps):
        counted = (lambda: unique.hooks) if a.one == "keep" and number == 0 else around
        with measured.step(), fits(torch, "all that is saved") if a.one in ("keep", *BLIND) else contextlib.nullcontext():
            measured.losses.append(step(ids, counted, **options))
        if moved:
            moved.step_ended()
        if copied:
            sent.append(copied.taken())
    row = {**measured.row(a), "cold_s": cold}
    if a.one == "keep":
        row.update(unique_bytes=unique.bytes, unique_layers_bytes=unique.of_layers, saved_bytes=unique.saved)
    if copied:
        row.update(copied_bytes=steady(sent))
    if blind:
        row.update(blind_bytes=a.blind_bytes[0], blind_back_bytes=a.blind_bytes[-1])
    if moved:
        row.update(report=glake.offload.report(), budget=a.budget if OURS[a.one][1] else None, host_memory=a.host_memory, **moved.row())
    if handle:
        handle.remove()
    if rank == 0:
        print(json.dumps(row, default=str), flush=True)
    if is_ranked:
        torch.distributed.destroy_process_group()


def fit(a):
    """GPT-2 small, bound by the host, where all fits: of two models one is under a budget, by turns each. A step of it beside one of the other,
    the median of all pairs; and of pairs in which none is under a budget, which is what such a median is worth."""
    glake = started(a)
    import torch

    ids = torch.randint(0, 512, (1, 128), device=a.device)
    budget = torch.cuda.mem_get_info()[1] // MIB * 9 // 10

    def stepped(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            return time.perf_counter() - begin

        return step

    def pairs(ours, plain, count):
        """Seconds of both; each is the first of every second pair."""
        found = []
        for pair in range(count):
            order = (ours, plain) if pair % 2 else (plain, ours)
            took = {step: step() for step in order}
            found.append((took[ours], took[plain]))
        return found

    models = [gpt2(a, torch) for _ in range(2)]
    steps = [stepped(model) for model in models]
    pairs(*steps, 20)
    beside, alike = [], []
    for one in (0, 1) * 3:
        other = 1 - one
        alike += pairs(steps[one], steps[other], 100)
        handle = glake.offload(models[one], budget=f"{budget}MiB")
        # It learns, and takes its hooks off again where all fits.
        pairs(steps[one], steps[other], 10)
        beside += pairs(steps[one], steps[other], 150)
        handle.remove()
    row = {"plain_s": statistics.median(plain for _, plain in beside), "ours_s": statistics.median(ours for ours, _ in beside)}
    for name, found in (("ratio", beside), ("alike", alike)):
        row[name] = statistics.median(ours / plain for ours, plain in found)
    print(json.dumps({"run": a.one, **row}), flush=True)
