"""Regions that leave and come back with a graph between, strictly sealed ones, digests, files, a decommitted slice, live ranges: to be run under compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 python tests/gpu/torch/leaving.py
"""
import tempfile

import torch

import glake

MIB = 1 << 20


def total(tensor):
    return tensor.view(torch.int32).sum(dtype=torch.int64).item()


with tempfile.TemporaryDirectory() as folder:
    glake.enable({"tiers": {"files": folder}})
    torch.manual_seed(0)
    with glake.region("sealed", policy="sealed", host_copy="retain"):
        sealed = [torch.randn(16 * MIB // 4 + 12, device="cuda") for _ in range(5)]
    with glake.region("small"):
        small = [torch.randn(count, device="cuda") for count in (1000, 70_001, 3 * MIB, 9 * MIB)]
    held = [*sealed, *small, torch.randn(MIB, device="cuda")]
    totals = [total(tensor) for tensor in held]
    still, weight = torch.randn(64, 256, device="cuda"), torch.randn(256, 256, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.tanh(still @ weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.tanh(still @ weight)
    graph.replay()
    expected = total(out)
    glake.seal("sealed", strict=True)
    for tags in (["sealed"], ["sealed", "small"], ["small"], None):
        glake.shrink(tags, verify=True)
        glake.refill(verify=True)
        out.zero_()
        graph.replay()
        if total(out) != expected or [total(tensor) for tensor in held] != totals:
            raise SystemExit(f"other bytes came back of {tags or 'everything'}")
    glake.shrink("small", tier="file", verify=True)
    glake.refill("small")
    if [total(tensor) for tensor in held] != totals:
        raise SystemExit("other bytes came back from files")
    glake.unseal("sealed")
    with glake.region("cache"):
        cache = torch.ones(1024 * MIB, dtype=torch.uint8, device="cuda")
    front, tail = cache[: 512 * MIB], cache[512 * MIB :]
    if glake.decommit(tail) != tail.numel():
        raise SystemExit("a slice did not give all of its memory")
    others = torch.full((512 * MIB,), 2, dtype=torch.uint8, device="cuda")
    glake.shrink(verify=True)
    glake.refill(verify=True)
    if glake.commit(tail) != tail.numel():
        raise SystemExit("a slice did not get its memory again")
    tail.fill_(3)
    if total(front) != total(torch.ones_like(front)) or total(tail) != 3 * total(front) or total(others) != 2 * total(front):
        raise SystemExit("other bytes are there after a slice was decommitted and committed")
    pages = torch.randn(64 * MIB // 4, device="cuda")
    used = pages[: 4 * MIB]
    expected = total(used)
    glake.live(pages, lambda: [(0, 16 * MIB)])
    gone = glake.shrink(verify=True)
    glake.refill(verify=True)
    if total(used) != expected or gone["undefined"] < 32 * MIB:
        raise SystemExit(f"other bytes came back of what counts, or too few did not count: {gone['undefined']}")
print("ok")
