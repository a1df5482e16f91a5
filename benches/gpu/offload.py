"""Activations of a fine-tuning step that are offloaded, beside keeping, checkpointing and torch's save_on_cpu.

    python benches/gpu/offload.py [--only PART,...] [--layers N] [--tokens N] [--steps N] [--out DIR]
    python benches/gpu/offload.py --device cpu --layers 2 --hidden 64 --tokens 64 --only keep,checkpoint,save-on-cpu

Parts, each in a process of its own; a Llama of random weights in bfloat16 with peft's LoRA on all projections, one loss
in chunks, AdamW:

    keep          nothing leaves; also counts, by hooks of its own, the unique bytes that autograd saves
    checkpoint    each layer is recomputed
    save-on-cpu   torch's save_on_cpu(pin_memory=True)
    offload       glake.offload.activations over the GPU's own link
    multi-path    the same over every link (glake.multi_path)
    exact         tiny models for 20 steps with and without: losses and gradients to the bit; needs a GPU
    calls         microseconds of a pack that keeps, and of one that offloads, on the host

Memory is the GPU's, of all processes, every 50 ms, above what was used before. Writes DIR/offload.jsonl; ends with 1 if a
bar was missed.
"""

import argparse, hashlib, json, statistics, sys, time

import launch
from sharing.meter import Watch, meter

PARTS = ["keep", "checkpoint", "save-on-cpu", "offload", "multi-path", "exact", "calls"]
GIB = 1 << 30


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default=",".join(PARTS))
    p.add_argument("--layers", type=int, default=32)
    p.add_argument("--hidden", type=int, default=4096)
    p.add_argument("--tokens", type=int, default=8192, help="in sequences of 4,096")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--device", default="cuda")
    p.add_argument("--out", default="bench-results")
    p.add_argument("--time-limit", type=float, default=540)
    p.add_argument("--one", help=argparse.SUPPRESS)
    a = p.parse_args()
    a.only = launch.chosen(p, a.only, PARTS)
    return a


def llama(a, torch):
    import peft, transformers

    heads = max(a.hidden // 128, 1)
    config = transformers.LlamaConfig(
        hidden_size=a.hidden, intermediate_size=a.hidden * 7 // 2, num_hidden_layers=a.layers, num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1), vocab_size=128256 if a.hidden >= 2048 else 512,
        max_position_embeddings=8192, use_cache=False, attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(a.device):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    model.train()
    return model, config.vocab_size


def chunked_loss(torch, model, ids):
    """The same for all: logits of 1,024 tokens at a time, which are made again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    inner = model.get_base_model()
    hidden = inner.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    labels = ids[:, 1:].flatten()
    part = lambda rows, wanted: torch.nn.functional.cross_entropy(inner.lm_head(rows).float(), wanted, reduction="sum")
    parts = zip(hidden.split(1024), labels.split(1024))
    return sum(checkpoint(part, rows, wanted, use_reentrant=False) for rows, wanted in parts) / labels.numel()


class Unique:
    """Bytes that autograd saves, each once, by storage and range; without parameters and their views."""

    def __init__(self, torch, model):
        self.torch, self.seen, self.bytes, self.saved = torch, {}, 0, 0
        self.stays = {p.untyped_storage()._cdata for p in [*model.parameters(), *model.buffers()]}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def pack(self, tensor):
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        if storage._cdata in self.stays or tensor.numel() * tensor.element_size() < 256 << 10:
            return tensor
        size = (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1) * tensor.element_size()
        key = (storage._cdata, tensor.storage_offset() * tensor.element_size(), size)
        self.saved += size
        if key not in self.seen or self.seen[key].expired():
            self.seen[key] = StorageWeakRef(storage)
            self.bytes += size
        return tensor


def one(a):
    """One part's steps, as a JSON line."""
    import contextlib

    ours = a.one in ("offload", "multi-path")
    if ours:
        import glake

        glake.enable()
    import torch

    cuda = a.device == "cuda"
    meters = meter("cuda") if cuda else None
    before = meters.used() if meters else 0
    model, vocabulary = llama(a, torch)
    if a.one == "multi-path":
        glake.multi_path()
    if a.one == "checkpoint":
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    length = min(a.tokens, 4096)
    ids = torch.randint(0, vocabulary, (a.tokens // length, length), device=a.device)
    unique = Unique(torch, model)
    around = {
        "save-on-cpu": lambda: torch.autograd.graph.save_on_cpu(pin_memory=cuda),
        "offload": lambda: glake.offload.activations(),
        "multi-path": lambda: glake.offload.activations(),
    }.get(a.one, contextlib.nullcontext)
    # One site for all steps: it learns from the first.
    site = around() if ours else None
    times, losses, most = [], [], 0
    for step in range(a.steps):
        counts = a.one == "keep" and step == 0
        watch = Watch(meters, before) if meters else contextlib.nullcontext()
        with watch:
            begin = time.perf_counter()
            with unique.hooks if counts else (site or around()):
                loss = chunked_loss(torch, model, ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            times.append(time.perf_counter() - begin)
        most = max(most, getattr(watch, "most", 0))
    row = {
        "run": a.one, "tokens": a.tokens, "layers": a.layers, "first_s": times[0], "step_s": statistics.median(times[2:] or times),
        "most_bytes": most, "losses": losses,
    }
    if a.one == "keep":
        row.update(unique_bytes=unique.bytes, saved_bytes=unique.saved)
    if ours:
        told = glake.offload.report()
        row.update(report=told, step_bytes=told["bytes_out"] / a.steps)
    print(json.dumps(row), flush=True)


def exact(a):
    """Tiny models with and without, to the bit."""
    import glake

    glake.enable()
    import torch

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    nn = torch.nn
    norm = lambda: nn.Sequential(*[nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256)) for _ in range(4)])
    image = lambda: nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 256, 10))
    encoder = lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 256, batch_first=True), 3)
    cases = {"norms and dropout": (norm, (512, 256)), "convolutions": (image, (16, 3, 32, 32)), "attention": (encoder, (8, 64, 128))}

    def run(make, shape, offloads, autocast):
        torch.manual_seed(1)
        model = make().cuda()
        handle = glake.offload.activations(model, least=0) if offloads else None
        optimizer, digest = torch.optim.SGD(model.parameters(), lr=0.01), hashlib.sha256()
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = model(torch.randn(shape, device="cuda")).float().square().mean()
            loss.backward()
            for p in model.parameters():
                digest.update(p.grad.cpu().numpy().tobytes())
            optimizer.step()
        if handle:
            handle.remove()
        return digest.hexdigest()

    for name, (make, shape) in cases.items():
        for autocast in (False, True):
            plain = run(make, shape, False, autocast)
            agrees = plain == run(make, shape, False, autocast)
            row = {"run": "exact", "case": name, "autocast": autocast, "plain_agrees": agrees, "same": plain == run(make, shape, True, autocast)}
            print(json.dumps(row), flush=True)


def calls(a):
    """Microseconds of the hooks, by packs of tensors that stay and of ones that leave."""
    import glake

    glake.enable()
    import torch

    x = torch.ones(64 << 10, device="cuda", requires_grad=True)
    count, found = 2000, {}

    def cost(manager):
        best = float("inf")
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            with manager:
                for _ in range(count):
                    torch.exp(x)
            best = min(best, time.perf_counter() - begin)
        torch.cuda.synchronize()
        return best / count * 1e6

    import contextlib

    nothing = cost(contextlib.nullcontext())
    for name, least in (("keeps", 1 << 40), ("offloads", 0)):
        found[name] = cost(glake.offload.activations(least=least)) - nothing
    print(json.dumps({"run": "calls", **found}), flush=True)


def bars(rows):
    """(what, value, bar, whether the bar is the most)."""
    by = {row["run"]: row for row in rows if "step_s" in row}
    keep, saved = by.get("keep"), by.get("save-on-cpu")
    for name in ("offload", "multi-path"):
        ours = by.get(name)
        if not ours:
            continue
        if keep:
            yield f"{name}: bytes out, of the unique ones", ours["step_bytes"] / keep["unique_bytes"], 1.01, True
            yield f"{name}: step, of keeping", ours["step_s"] / keep["step_s"], None, True
            yield f"{name}: most memory, of keeping", ours["most_bytes"] / max(keep["most_bytes"], 1), None, True
            yield f"{name}: losses differ by", max(abs(x - y) for x, y in zip(ours["losses"], keep["losses"])), None, True
        if saved:
            yield f"{name}: steps, of save_on_cpu", saved["step_s"] / ours["step_s"], 2.5 if name == "multi-path" else None, False
            yield f"{name}: most memory, of save_on_cpu", ours["most_bytes"] / max(saved["most_bytes"], 1), 1.05, True
        told = ours["report"]
        for way in ("out", "in"):
            if told[f"busy_us_{way}"]:
                yield f"{name}: GB/s {way} while a queue was busy", told[f"timed_bytes_{way}"] / told[f"busy_us_{way}"] / 1e3, None, False
        yield f"{name}: first step, of a steady one", ours["first_s"] / ours["step_s"], 1.5, True
    for row in rows:
        if row["run"] == "exact" and row["plain_agrees"]:
            yield f"exact: {row['case']}{', autocast' if row['autocast'] else ''}", float(row["same"]), 1.0, False
        if row["run"] == "calls":
            yield "us a pack that keeps", row["keeps"], 4, True
            yield "us a pack that offloads", row["offloads"], 15, True


def main():
    a = arguments()
    if a.one:
        return {"exact": exact, "calls": calls}.get(a.one, one)(a)
    if a.device == "cuda":
        launch.needs_gpus("offload.py")
    clock = launch.Clock(a.time_limit)
    log = launch.Log(a.out, "offload.jsonl", clock)
    missed = 0
    for part in a.only:
        told = ["--layers", a.layers, "--hidden", a.hidden, "--tokens", a.tokens, "--steps", a.steps, "--device", a.device]
        more = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if part == "exact" else {}
        rows, error = launch.call([sys.executable, __file__, "--one", part, *map(str, told)], None, clock.left(), more)
        for row in rows:
            log.add(row, f"{part}: " + "  ".join(f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, (int, float))))
        if error:
            missed += 1
            log.add({"run": part, "error": error}, f"{part}: FAILED: {error}")
    found = [{"what": what, "value": value, "bar": bar, "most": most} for what, value, bar, most in bars([row for row in log.rows if "error" not in row])]
    missed += len(launch.told(log, "offload", found) or [])
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
