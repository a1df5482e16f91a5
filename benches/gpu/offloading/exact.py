"""Tiny models with and without, to the bit, and what a pack costs on the host."""

import contextlib, hashlib, json, time


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

    nothing = cost(contextlib.nullcontext())
    for name, least in (("keeps", 1 << 40), ("offloads", 0)):
        found[name] = cost(glake.offload.activations(least=least)) - nothing
    print(json.dumps({"run": "calls", **found}), flush=True)
