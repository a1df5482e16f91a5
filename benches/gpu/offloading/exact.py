"""Tiny models with and without, to the bit, and what a pack costs on the host."""

import contextlib, dataclasses, gc, hashlib, json, time, types

from .models import chunked_loss, layers_of, llama
from .small import Images, Tokens, image_batches, residual, token_batches
from .steps import ranked, started

STEPS = 50


@dataclasses.dataclass
class Case:
    """A model, and how it is trained."""

    name: str
    # (model, the module that is hooked, what gives the loss of the model, or of what it is wrapped in, for a new batch)
    make: object
    autocast: str | None = None
    is_scaled: bool = False
    accumulates: int = 1
    clips: bool = False
    # Which kind of checkpoints it has: reentrant, the other one, or none.
    reentrant: bool | None = None
    replays: bool = False
    preset: str | None = None
    compiles: bool = False


def cases(torch, a):
    """Returns the cases in the order in which they run; compiled models come last because they take longest."""
    lora = lambda dropout=0.0, reentrant=None, **more: lambda: adapted(torch, a, dropout, reentrant, **more)
    full = lambda **more: lambda: token_batches(torch, a.device, Tokens(torch, 4, **more))
    vit = lambda **more: lambda: image_batches(torch, a.device, Images(torch, 3, **more))
    moe = lambda **more: lambda: token_batches(torch, a.device, Tokens(torch, 3, experts=8, **more), rows=3)
    resnet = lambda: image_batches(torch, a.device, residual(torch))
    no, yes = {"reentrant": False}, {"reentrant": True}
    return [
        Case("LoRA", lora()),
        Case("LoRA with dropout", lora(0.1), clips=True),
        Case("LoRA, checkpoints", lora(reentrant=False), **no),
        Case("LoRA with dropout, checkpoints, leaf replay", lora(0.1, False), **no, replays=True),
        Case("LoRA, checkpoints, leaf replay", lora(reentrant=False), **no, replays=True),
        Case("LoRA with dropout, reentrant checkpoints", lora(0.1, True), **yes),
        Case("LoRA with dropout, preset memory", lora(0.1), preset="memory"),
        Case("LoRA with dropout, fp32 weights, bf16 autocast", lora(0.1, kind=torch.float32), autocast="bfloat16"),
        Case("full", full()),
        Case("full, bf16 autocast, accumulation, clipping", full(), autocast="bfloat16", accumulates=4, clips=True),
        Case("full, fp16 autocast, GradScaler, clipping", full(), autocast="float16", is_scaled=True, clips=True),
        Case("full, checkpoints, bf16 autocast", full(reentrant=False), autocast="bfloat16", **no),
        Case("full, checkpoints, leaf replay, bf16 autocast", full(reentrant=False), autocast="bfloat16", **no, replays=True),
        Case("full, reentrant checkpoints", full(reentrant=True), accumulates=2, **yes),
        Case("ViT", vit()),
        Case("ViT, bf16 autocast, checkpoints, leaf replay", vit(reentrant=False), autocast="bfloat16", **no, replays=True),
        Case("ResNet, in place, BatchNorm", resnet),
        Case("ResNet, fp16 autocast, GradScaler, accumulation", resnet, autocast="float16", is_scaled=True, accumulates=2),
        Case("MoE, experts that are not used", moe()),
        Case("MoE, bf16 autocast, checkpoints", moe(reentrant=False), autocast="bfloat16", **no),
        Case("MoE, reentrant checkpoints, clipping", moe(reentrant=True), clips=True, **yes),
        Case("full, compiled blocks", full(), compiles=True),
        Case("full, compiled blocks, bf16 autocast", full(), autocast="bfloat16", compiles=True),
    ]


def adapted(torch, a, dropout, reentrant, kind=None):
    """A Llama with adapters in bfloat16, or another type, with norms and casts of more than 1 MiB: those go narrow."""
    model, vocabulary = llama(types.SimpleNamespace(device=a.device, hidden=256, layers=2, length=1024), torch, dropout)
    model = model if kind is None else model.to(kind)
    if reentrant is not None:
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    batch = lambda: torch.randint(0, vocabulary, (2, 1024 if a.device == "cuda" else 32), device=a.device)
    return model, layers_of(model), lambda _: chunked_loss(torch, model, batch())


def offloads(glake, case, module):
    """Offloads the module and returns the handle whose ``remove()`` ends it."""
    if case.preset:
        return glake.offload(module, preset=case.preset, least=0)
    return glake.offload.activations(module, least=0, replay=case.replays)


class Digest:
    """A digest of losses and gradients, in their order."""

    def __init__(self, torch):
        self.torch, self.sha = torch, hashlib.sha256()

    def add(self, tensors):
        parts = []
        for place, tensor in enumerate(tensors):
            if tensor is None:
                self.sha.update(f"{place} has none".encode())
            else:
                tensor = tensor.detach()
                tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                parts.append(tensor.contiguous().reshape(-1).view(self.torch.uint8))
        self.sha.update(self.torch.cat(parts).cpu().numpy().tobytes())


def trained(torch, glake, a, case, offloaded, wrap=lambda model: model):
    """A digest of all losses and gradients of 50 steps."""
    if case.compiles:
        torch._dynamo.reset()
    torch.manual_seed(1)
    model, hooked, loss_of = case.make()
    wrapped = wrap(model)
    hooked = wrapped if wrapped is not model else hooked
    if case.compiles:
        for block in model.layers:
            block.compile(backend="inductor" if a.device == "cuda" else "aot_eager")
    handle = offloads(glake, case, hooked) if offloaded else None
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer, digest = torch.optim.SGD(parameters, lr=0.01), Digest(torch)
    # It overflows at first: steps are skipped.
    scaler = torch.amp.GradScaler(a.device, init_scale=2.0**24, enabled=case.is_scaled)
    kind = getattr(torch, case.autocast or "bfloat16")
    for _ in range(STEPS):
        optimizer.zero_grad()
        for place in range(case.accumulates):
            is_last = place == case.accumulates - 1
            if hasattr(wrapped, "set_requires_gradient_sync"):
                wrapped.set_requires_gradient_sync(is_last)
            with contextlib.nullcontext() if is_last or not hasattr(wrapped, "no_sync") else wrapped.no_sync():
                with torch.autocast(a.device, kind, enabled=case.autocast is not None):
                    loss = loss_of(wrapped)
                scaler.scale(loss / case.accumulates).backward()
        scaler.unscale_(optimizer)
        if case.clips:
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        digest.add([loss, *(p.grad for p in parameters)])
        scaler.step(optimizer)
        scaler.update()
    if handle:
        handle.remove()
    return digest.sha.hexdigest()


def compared(torch, glake, a, case, wrap=lambda model: model):
    """A row: whether two plain runs agree, and whether one with us is the same."""
    row = {"run": a.one, "case": case.name, "plain_agrees": False, "same": False, "why": "two plain runs differ"}
    try:
        plain = trained(torch, glake, a, case, False, wrap)
        row["plain_agrees"] = plain == trained(torch, glake, a, case, False, wrap)
    except RuntimeError as error:
        # What has no deterministic kernel on a GPU, say.
        return {**row, "why": str(error)[:200]}
    if not row["plain_agrees"]:
        return row
    before = glake.offload.report()
    try:
        same = plain == trained(torch, glake, a, case, True, wrap)
    except RuntimeError as error:
        return {**row, "why": str(error)[:200]}
    gc.collect()
    after = glake.offload.report()
    moved = {key: after[key] - before[key] for key in ("bytes_out", "narrowed", "replayed", "stayed", "changed")}
    # One that moved nothing, or replayed nothing, shows nothing.
    shows = moved["bytes_out"] > 0 and (moved["replayed"] > 0 or not case.replays)
    why = "differs" if not same else "nothing was offloaded or replayed" if not shows else "ranges are left" if after["entries"] else ""
    return {**row, **moved, "same": not why, "why": why}


def prepared(a):
    glake = started(a)
    import torch

    torch.use_deterministic_algorithms(True)
    # What nobody wrote to would be the same each time.
    torch.utils.deterministic.fill_uninitialized_memory = False
    return torch, glake


def exact(a):
    """Tiny models with and without, to the bit."""
    begin = time.perf_counter()
    torch, glake = prepared(a)
    for case in cases(torch, a):
        if a.case not in case.name:
            continue
        if time.perf_counter() - begin > 0.8 * a.time_limit:
            print(json.dumps({"run": a.one, "skipped": f"{case.name}: no time is left"}), flush=True)
            continue
        print(json.dumps(compared(torch, glake, a, case)), flush=True)


def ranks(a):
    """The same on two ranks: DDP, and FSDP2 in two precisions. A row says of both ranks."""
    torch, glake = prepared(a)
    rank = ranked(torch, a)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def sharded(model):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for part in model.layers:
            fully_shard(part, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    def make(**more):
        def made():
            model, hooked, loss_of = token_batches(torch, a.device, Tokens(torch, 4, **more))
            # Batches are each rank's own; what both share was made before.
            torch.manual_seed(100 + rank)
            return model, hooked, loss_of

        return made

    ddp, no = torch.nn.parallel.DistributedDataParallel, {"reentrant": False}
    for name, wrap, more, case in (
        ("DDP", ddp, {}, {"accumulates": 2, "clips": True}),
        ("DDP, bf16 autocast, checkpoints, leaf replay", ddp, no, {"autocast": "bfloat16", "replays": True}),
        ("FSDP2", sharded, {}, {"accumulates": 2}),
        ("FSDP2, checkpoints", sharded, no, {}),
        ("FSDP2, checkpoints, leaf replay", sharded, no, {"replays": True}),
    ):
        row = compared(torch, glake, a, Case(name, make(**more), **case), wrap)
        rows = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(rows, row)
        if rank == 0:
            both = {key: all(each[key] for each in rows) for key in ("plain_agrees", "same")}
            print(json.dumps({**row, **both, "why": "; ".join(each["why"] for each in rows if each["why"])}), flush=True)
    torch.distributed.destroy_process_group()


def calls(a):
    """Microseconds of the hooks, by packs of tensors that stay and of ones that leave: in passes of as many as a model's has."""
    glake = started(a)
    import torch

    x = torch.ones(64 << 10, device=a.device, requires_grad=True)
    count, passes, found = 200, 10, {}

    def cost(manager):
        best = float("inf")
        for _ in range(5):
            took = 0.0
            for _ in range(passes):
                synchronize(torch, a)
                begin = time.perf_counter()
                with manager:
                    # The graph of each, which ends the pass with the last of them.
                    graphs = [torch.exp(x).grad_fn for _ in range(count)]
                took += time.perf_counter() - begin
                del graphs
            best = min(best, took)
        synchronize(torch, a)
        return best / count / passes * 1e6

    nothing = cost(contextlib.nullcontext())
    for name, least in (("keeps", 1 << 40), ("offloads", 0)):
        found[name] = cost(glake.offload.activations(least=least)) - nothing
    print(json.dumps({"run": "calls", **found}), flush=True)


def synchronize(torch, a):
    if a.device == "cuda":
        torch.cuda.synchronize()
