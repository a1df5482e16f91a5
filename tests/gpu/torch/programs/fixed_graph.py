"""One rank of a graph with collectives that is replayed after a shrink and a refill.

    fixed     its pool and the tensors that its collectives use stay
    left      all of it leaves: right only with NCCL_GRAPH_REGISTER=0
    warned    the same with NCCL's default, without a replay: the shrink warns
"""
import os, sys

import glake
import torch
import torch.distributed as dist

import fixture
from fixture import MIB

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main(mode):
    fixture.enable()
    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl", device_id=torch.device("cuda", RANK))
    given, other = (fixture.new(64 * MIB).view(torch.float32) for _ in range(2))
    pool = torch.cuda.graph_pool_handle()
    if mode == "fixed":
        glake.fix(pool)
        glake.fix(given)
    dist.all_reduce(given.fill_(1.0))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        inside = given + 1
        dist.all_reduce(inside)
        gathered = torch.empty(WORLD * given.numel(), device="cuda")
        dist.all_gather_into_tensor(gathered, given)

    def replay(rounds, when):
        for number in rounds:
            given.fill_(RANK + number)
            graph.replay()
            want = sum(rank + number + 1 for rank in range(WORLD))
            if not bool((inside == want).all()):
                raise AssertionError(f"rank {RANK} {when}: all-reduce of round {number}: wrong bytes")
            for rank, piece in enumerate(gathered.chunk(WORLD)):
                if not bool((piece == rank + number).all()):
                    raise AssertionError(f"rank {RANK} {when}: all-gather of round {number} from {rank}: wrong bytes")

    replay(range(3), "before the shrink")
    other.fill_(RANK)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    report = glake.shrink()
    warned = [text for text in report["warnings"] if "NCCL_GRAPH_REGISTER" in text]
    if bool(warned) != (mode == "warned"):
        raise AssertionError(f"rank {RANK}: warnings {report['warnings']}")
    left = sum(row["freed"] for row in report["regions"] if row["tag"].startswith("graph "))
    if (left == 0) != (mode == "fixed") or report["freed"] < 64 * MIB:
        raise AssertionError(f"rank {RANK}: {left} of the graph's bytes left: {report}")
    glake.refill()
    dist.barrier()
    if mode != "warned":
        replay(range(3, 8), "after the refill")
    if not bool((other == RANK).all()):
        raise AssertionError(f"rank {RANK}: wrong bytes of a tensor that left")
    dist.barrier()
    print(f"{mode}: right", flush=True)
    dist.destroy_process_group()


main(sys.argv[1])
