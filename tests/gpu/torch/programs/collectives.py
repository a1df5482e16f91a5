"""One rank of collectives on tensors that straddle extents and on stitched ones: eager, captured in a graph, and after a trim."""
import os

import torch
import torch.distributed as dist

import fixture
from fixture import MIB

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def fill(tensor, rank, number):
    """Whole numbers, so that sums are exact: what rank `rank` contributes in round `number`."""
    ramp = torch.arange(1024, device=tensor.device, dtype=torch.float32)
    tensor.view(-1, 1024).copy_(ramp * (rank + 1) + number)


def expected_sum(tensor, number):
    want = torch.empty_like(tensor)
    ramp = torch.arange(1024, device=tensor.device, dtype=torch.float32)
    want.view(-1, 1024).copy_(ramp * (WORLD * (WORLD + 1) // 2) + WORLD * number)
    return want


def check(name, good):
    if not good:
        raise AssertionError(f"rank {RANK}: {name}: wrong bytes")


def eager(name, tensor, gathered):
    for number in range(3):
        fill(tensor, RANK, number)
        dist.all_reduce(tensor)
        check(f"{name}: all-reduce", torch.equal(tensor, expected_sum(tensor, number)))
        part = tensor[: gathered.numel() // WORLD]
        fill(part, RANK, number)
        dist.all_gather_into_tensor(gathered, part)
        want = torch.empty_like(part)
        for rank, piece in enumerate(gathered.chunk(WORLD)):
            fill(want, rank, number)
            check(f"{name}: all-gather from {rank}", torch.equal(piece, want))


def captured(name, tensor, gathered):
    """Returns a function that replays and checks, with allocations in between."""
    part = tensor[: gathered.numel() // WORLD]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        dist.all_gather_into_tensor(gathered, part)
        dist.all_reduce(tensor)

    def replay(rounds):
        for number in range(rounds):
            fill(tensor, RANK, number)
            graph.replay()
            check(f"{name}: captured all-reduce", torch.equal(tensor, expected_sum(tensor, number)))
            want = torch.empty_like(part)
            for rank, piece in enumerate(gathered.chunk(WORLD)):
                fill(want, rank, number)
                check(f"{name}: captured all-gather from {rank}", torch.equal(piece, want))
            fixture.new((3 + number) * 10 * MIB).fill_(255)

    return replay


def main():
    fixture.enable()
    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl", device_id=torch.device("cuda", RANK))
    shift = fixture.new(5 * MIB + 512)  # so that what follows begins inside an extent
    plain = fixture.new(200 * MIB)[3 * MIB : 171 * MIB].view(torch.float32)
    whole, kept = fixture.stitched(256 * MIB, f"cuda:{RANK}")
    tensors = {"straddling": plain, "stitched": whole.view(torch.float32)}
    gathered = {name: torch.empty(WORLD * 8 * MIB, device="cuda") for name in tensors}
    for name, tensor in tensors.items():
        eager(name, tensor, gathered[name])
    if RANK == 0:
        print("eager: right", flush=True)
    replays = [captured(name, tensor, gathered[name]) for name, tensor in tensors.items()]
    for replay in replays:
        replay(20)
    if RANK == 0:
        print("captured: right", flush=True)
    import glake

    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        glake.trim()
        for name, tensor in tensors.items():
            eager(name, tensor, gathered[name])
        for replay in replays:
            replay(5)
    # Memory that NCCL has seen before goes back, and other memory comes to its addresses.
    del tensors, gathered, replays, replay, tensor, plain, whole, kept, shift
    torch.cuda.synchronize()
    glake.trim()
    whole, kept = fixture.stitched(256 * MIB, f"cuda:{RANK}")
    eager("stitched anew", whole.view(torch.float32), torch.empty(WORLD * 4 * MIB, device="cuda"))
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    if RANK == 0:
        print("after trims: right", flush=True)


if __name__ == "__main__":
    main()
