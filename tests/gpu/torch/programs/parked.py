"""One rank of a net that is parked at safe points, with an all-reduce in each step: the results are those of a run that is left alone.

    parked.py BACKEND

With gloo the sums are made on the host, so that ranks may share a GPU; with nccl on the GPUs, each rank's its own.
"""
import json, os, sys, threading, time

import torch
import torch.distributed as dist

import fixture
from fixture import MIB

RANK, WORLD, BACKEND = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
PARKS, WIDTH = 20, 512


class Net:
    def __init__(self):
        import glake

        torch.manual_seed(RANK)
        with glake.region("parked weights"):
            self.weights = [torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH**0.5 for _ in range(16)]
            self.ballast = fixture.stamp(fixture.new(256 * MIB), RANK + 1)
        self.state = None

    def begin(self):
        self.state = torch.sin(torch.arange(64 * WIDTH, device="cuda", dtype=torch.float32).view(64, WIDTH))

    def step(self, is_over):
        """The sums over all ranks, and whether all are over."""
        for weight in self.weights:
            self.state = torch.tanh(self.state @ weight)
        sums = torch.cat([self.state.sum(0), torch.tensor([float(is_over)], device="cuda")])
        if BACKEND == "gloo":
            sums = sums.cpu()
        dist.all_reduce(sums)
        self.state = self.state + (sums[:-1] / WORLD).to("cuda") / 64
        return sums


class Shrinks(threading.Thread):
    """Takes everything and brings it back so often; this rank's turns are not the others'."""

    def __init__(self):
        super().__init__()
        self.parked, self.stayed, self.error = 0, 0, None

    def run(self):
        import glake

        try:
            for number in range(PARKS):
                time.sleep(0.01 * ((number * (RANK + 2)) % 4))
                gone = glake.shrink(timeout=60)
                self.parked += glake.gate()["parked"]
                self.stayed = max(self.stayed, gone["resident"])
                glake.refill()
        except Exception as error:
            self.error = repr(error)
            glake.refill()


def main():
    import glake

    fixture.enable({"tiers": {"extent": "8MiB"}})
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    dist.init_process_group(BACKEND)
    net, shrinks, sums, waited_at = Net(), Shrinks(), [], []
    with torch.no_grad(), glake.active():
        net.begin()
        net.step(False)
        shrinks.start()
        net.begin()
        while not sums or int(sums[-1][-1]) < WORLD:
            sums.append(net.step(not shrinks.is_alive()).clone())
            if glake.safepoint():
                waited_at.append(len(sums))
        disturbed = net.state.clone()
        net.begin()
        alone = [net.step(False).clone() for _ in sums]
        same = torch.equal(disturbed, net.state) and all(torch.equal(one[:-1], other[:-1]) for one, other in zip(sums, alone))
    shrinks.join()
    found = dict(rank=RANK, steps=len(sums), waited_at=waited_at, parked=shrinks.parked, stayed=shrinks.stayed, error=shrinks.error, same=same,
                 wrong=fixture.wrong(net.ballast, RANK + 1))
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found))


main()
