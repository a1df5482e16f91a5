"""A short program for compute-sanitizer: allocations, frees, stitches, streams, a graph and a pool with its own allocator, over small tensors.

    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/torch/sanitize.py [compiled|pluggable]

Without an argument both backends, a process each (the sanitizer follows children with --target-processes all).
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


if __name__ == "__main__":
    import os

    if len(sys.argv) > 1:
        os.environ["GLAKE_TEST_BACKEND"] = sys.argv[1]
        main()
    else:
        sys.exit(max(subprocess.run([sys.executable, __file__, backend]).returncode for backend in ("compiled", "pluggable")))
