"""A short program for compute-sanitizer: allocations, frees, stitches, streams, a graph and a pool with its own allocator, over small tensors;
or a model that trains with its activations offloaded.

    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/torch/sanitize.py [compiled|pluggable|offload]

Without an argument both backends and the model, a process each (the sanitizer follows children with --target-processes all).
"""
import subprocess, sys


def main():
    import torch

    import fixture
    from fixture import MIB

    fixture.enable()
    live = []
    for step in range(60):
        size = (512, 40_000, 3 * MIB, 20 * MIB)[step % 4]
        live.append((fixture.stamp(fixture.new(size // 4 * 4), step), step))
        if len(live) > 10:
            tensor, seed = live.pop(step % 10)
            assert fixture.wrong(tensor, seed) == 0
            del tensor
    live.clear()
    whole, kept = fixture.stitched(128 * MIB, block=32 * MIB)
    assert fixture.wrong(whole, 0) == 0 and all(fixture.wrong(t, seed) == 0 for seed, t in enumerate(kept, 1))
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    for number in range(6):
        with torch.cuda.stream(one):
            block = torch.full((MIB,), number, dtype=torch.int32, device="cuda")
        other.wait_stream(one)
        with torch.cuda.stream(other):
            block.add_(1)
            block.record_stream(other)
        del block
        with torch.cuda.stream(one):
            torch.full((MIB,), -1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    still, graph = torch.ones(MIB, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = still * 2 + 1
    for value in range(5):
        still.fill_(value)
        graph.replay()
        assert float(result[0]) == 2 * value + 1
        torch.cuda.empty_cache()
    if fixture.BACKEND == "compiled":
        own_allocator()
    print(f"sanitize: {fixture.BACKEND}: right bytes, {fixture.ours('stitches')} stitches")


def own_allocator():
    """A pool that brings an allocator of its own: its memory sleeps and wakes, and a graph is captured in it."""
    import torch

    import fixture
    from fixture import MIB

    sys.path.insert(0, str(fixture.HERE / "cases"))
    from own_allocators import Brought

    own = Brought()
    pool, still = own.pool(), torch.ones(MIB, device="cuda")
    with torch.cuda.use_mem_pool(pool):
        kept = fixture.stamp(fixture.new(20 * MIB), 1)
        del still
        still = torch.ones(MIB, device="cuda")
    saved = kept.cpu()
    torch.cuda.synchronize()
    own.map(kept, False)
    torch.cuda.empty_cache()
    own.map(kept, True)
    kept.copy_(saved)
    assert fixture.wrong(kept, 1) == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        result = still * 3
    graph.replay()
    torch.cuda.empty_cache()
    assert float(result[0]) == 3.0
    del kept, still, graph, result, pool
    torch.cuda.synchronize()
    assert own.count("own_wrong") == 0


def offload():
    """Six steps with activations offloaded and leaves replayed beside the same steps without."""
    import glake, torch
    from torch.utils.checkpoint import checkpoint

    glake.enable()
    wide = 512

    class Blocks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            nn = torch.nn
            block = lambda: nn.Sequential(nn.LayerNorm(wide), nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide))
            self.layers = nn.ModuleList(block() for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = x + checkpoint(layer, x, use_reentrant=False)
            return x

    def losses(offloaded):
        torch.manual_seed(0)
        model = Blocks().cuda()
        handle = glake.offload.activations(model, least=0, replay=True) if offloaded else None
        optimizer, told = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(6):
            loss = model(torch.randn(1024, wide, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())
        if handle:
            handle.remove()
        return told

    plain = losses(False)
    assert losses(True) == plain
    report = glake.offload.report()
    assert report["bytes_out"] > 0 and report["replayed"] > 0, report
    print(f"sanitize: offload: same losses, {report['bytes_out'] >> 20} MiB offloaded, {report['replayed']} leaves replayed")


if __name__ == "__main__":
    import os

    if sys.argv[1:] == ["offload"]:
        offload()
    elif len(sys.argv) > 1:
        os.environ["GLAKE_TEST_BACKEND"] = sys.argv[1]
        main()
    else:
        sys.exit(max(subprocess.run([sys.executable, __file__, backend]).returncode for backend in ("compiled", "pluggable", "offload")))
