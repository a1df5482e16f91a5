"""A part's steps, each part in a process of its own: one JSON line."""

import contextlib, json, statistics, time

from sharing.meter import Watch, meter

from .baselines import THEIRS, Blind, Skipped, recomputes
from .models import Unique, chunked_loss, gpt2, layers_of, llama

MIB = 1 << 20
# Ours: whether layers are recomputed by the program, and the preset; None is `activations` alone.
OURS = {
    "offload": (False, None), "multi-path": (False, None), "inputs": (True, None),
    "hybrid": (True, "hybrid"), "hybrid-multi-path": (True, "hybrid"),
}
BLIND = ("blind", "blind-multi-path")


class Measured:
    """Times, losses and the most memory of some steps, above what all processes used before."""

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
        steady = statistics.median(self.times[2:] or self.times)
        return {"run": a.one, "device": a.device, "tokens": a.tokens, "layers": a.layers, "first_s": self.times[0], "step_s": steady,
                "most_bytes": self.most, "losses": self.losses}


def started(a):
    """glake for a part that needs it, before torch's first use of CUDA."""
    if a.device != "cuda":
        raise Skipped("GLake's pool is a GPU's")
    import glake

    glake.enable()
    return glake


def said(a, error):
    print(json.dumps({"run": a.one, "skipped": str(error)}), flush=True)


def one(a):
    try:
        _one(a)
    except Skipped as error:
        said(a, error)


def _one(a):
    glake = started(a) if a.one in (*OURS, BLIND[1]) else None
    import torch

    measured = Measured(a)
    model, vocabulary = llama(a, torch)
    if a.one.endswith("multi-path"):
        glake.multi_path()
    handle, blind, around = None, None, contextlib.nullcontext
    if a.one in OURS:
        is_recomputed, preset = OURS[a.one]
        if is_recomputed:
            recomputes(model)
        if preset:
            handle = glake.offload(layers_of(model), budget=f"{a.budget // MIB}MiB", preset=preset)
        else:
            # One site for all steps: it learns from the first.
            site = glake.offload.activations()
            around = lambda: site
    elif a.one in BLIND:
        blind = Blind(torch, a, a.blind_bytes, glake)
    else:
        around = THEIRS[a.one](torch, model, a)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    length = min(a.tokens, a.length)
    ids = torch.randint(0, vocabulary, (a.tokens // length, length), device=a.device)
    unique = Unique(torch, model)
    for step in range(a.steps):
        with measured.step():
            with unique.hooks if a.one == "keep" and step == 0 else around():
                if blind:
                    blind.out()
                loss = chunked_loss(torch, model, ids)
                if a.one.startswith("trl"):
                    # Its trainers have the backward within the block.
                    loss.backward()
            if blind:
                blind.back()
            if not a.one.startswith("trl"):
                loss.backward()
            if blind:
                blind.end()
            optimizer.step()
            optimizer.zero_grad()
            measured.losses.append(loss.item())
    row = measured.row(a)
    if a.one == "keep":
        row.update(unique_bytes=unique.bytes, saved_bytes=unique.saved)
    if blind:
        row.update(blind_bytes=a.blind_bytes)
    if a.one in OURS:
        told = glake.offload.report()
        row.update(report=told, step_bytes=told["bytes_out"] / a.steps, budget=a.budget if OURS[a.one][1] else None)
    if handle:
        handle.remove()
    print(json.dumps(row, default=str), flush=True)


def fit(a):
    """GPT-2 small, bound by the host, where all fits: steps without, with, and without again."""
    try:
        glake = started(a)
    except Skipped as error:
        return said(a, error)
    import torch

    model = gpt2(a, torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 512, (1, 128), device=a.device)

    def steps(count):
        times = []
        for _ in range(count):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    steps(20)
    plain, ours = [], []
    budget = torch.cuda.mem_get_info()[1] // MIB * 9 // 10
    for _ in range(3):
        plain.append(steps(40))
        handle = glake.offload(model, budget=f"{budget}MiB")
        # It learns, and takes its hooks off again where all fits.
        steps(10)
        ours.append(steps(40))
        handle.remove()
    print(json.dumps({"run": a.one, "plain_s": min(plain), "ours_s": min(ours)}), flush=True)
