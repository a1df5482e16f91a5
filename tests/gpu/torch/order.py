"""The order of copies on GPUs: random programs of kernels, copies, delays, events and frees over streams and GPUs, against a model.

    python tests/gpu/torch/order.py [--steps 10000] [--seed 1] [--memory-on 1]
    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/torch/order.py --steps 300

A program orders by events what conflicts, and nothing else, so it means the same as its steps one after the other: the model.
Kernels compare what they find with what the model says. Ends with 1 if one found something else.
"""
import argparse, random, sys, time

MIB = 1 << 20
SIZES = [256 << 10, MIB + 4096, 3 * MIB, 5 * MIB + 512, 16 * MIB]
HOSTS, BLOCKS = 20, 30


class Lane:
    """A stream, and up to which step of each other one its next work comes after it."""

    def __init__(self, torch, gpu, stream, index):
        self.gpu, self.stream, self.index, self.steps, self.known = gpu, stream, index, 0, {}
        self.event = torch.cuda.Event

    def follow(self, other):
        if other is self:
            return
        event = self.event()
        event.record(other.stream)
        self.stream.wait_event(event)
        for index, step in [*other.known.items(), (other.index, other.steps)]:
            self.known[index] = max(self.known.get(index, 0), step)

    def is_after(self, use):
        lane, step = use
        return lane is self or self.known.get(lane.index, 0) >= step


class Place:
    def __init__(self, tensor, gpu):
        self.tensor, self.gpu, self.seed, self.wrote, self.read = tensor, gpu, None, None, {}

    def written(self, use, seed):
        self.wrote, self.read, self.seed = use, {}, seed


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=10_000)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--memory-on", type=int, help="so many GPUs have blocks, the others lend their links: GPUs that are copied at the same time do not; default all")
    a = p.parse_args()
    import torch
    if not torch.cuda.is_available():
        print("order: SKIPPED: no NVIDIA GPU on this machine")
        return
    import glake
    glake.enable({"transfer": {"shared_gpus": True}})
    glake.multi_path(True)
    gpus = torch.cuda.device_count()
    torch.cuda.init()
    for gpu in range(gpus):
        torch.zeros(1, device=f"cuda:{gpu}")
    time.sleep(4)  # contexts of the relays
    rng = random.Random(a.seed)
    lanes = []
    for gpu in range(gpus):
        for stream in (torch.cuda.Stream(gpu), torch.cuda.Stream(gpu), torch.cuda.default_stream(gpu)):
            lanes.append(Lane(torch, gpu, stream, len(lanes)))
    base = [torch.arange(max(SIZES) // 4, dtype=torch.int32, device=f"cuda:{gpu}") for gpu in range(gpus)]
    wrong = [torch.zeros(1, dtype=torch.int64, device=f"cuda:{gpu}") for gpu in range(gpus)]
    torch.cuda.synchronize()

    def allocate(lane, size):
        with torch.cuda.stream(lane.stream):
            place = Place(torch.empty(size // 4, dtype=torch.int32, device=f"cuda:{lane.gpu}"), lane.gpu)
        lane.steps += 1
        place.written((lane, lane.steps), None)
        return place

    hosts = [Place(torch.zeros(SIZES[i % len(SIZES)] // 4, dtype=torch.int32).pin_memory(), None) for i in range(HOSTS)]
    owners = [lane for lane in lanes if lane.gpu < (a.memory_on or gpus)]
    blocks = [allocate(rng.choice(owners), SIZES[i % len(SIZES)]) for i in range(BLOCKS)]
    seeds = copies = kernels = frees = 0

    def begin(lane, reads=(), writes=()):
        """A step that comes after all that it conflicts with."""
        for place in reads:
            if place.wrote and not lane.is_after(place.wrote):
                lane.follow(place.wrote[0])
        for place in writes:
            for use in [place.wrote, *place.read.values()]:
                if use and not lane.is_after(use):
                    lane.follow(use[0])
        lane.steps += 1
        use = (lane, lane.steps)
        for place in (*reads, *writes):
            if place.gpu is not None:
                place.tensor.record_stream(lane.stream)
        for place in reads:
            place.read[lane.index] = use
        return use

    started = time.time()
    for step in range(a.steps):
        lane, roll = rng.choice(lanes), rng.random()
        if roll < 0.40:
            host = rng.choice(hosts)
            block = rng.choice([block for block in blocks if block.tensor.numel() == host.tensor.numel()])
            to, source = (block, host) if rng.random() < 0.5 else (host, block)
            use = begin(lane, reads=[source], writes=[to])
            priority = rng.choices(("normal", "critical", "background"), (8, 1, 1))[0]
            glake.copy_(to.tensor, source.tensor, stream=lane.stream, priority=priority)
            to.written(use, source.seed)
            copies += 1
        elif roll < 0.62:
            block = rng.choice([block for block in blocks if block.gpu == lane.gpu] or [None])
            if block:
                use, seeds = begin(lane, writes=[block]), seeds + 1
                with torch.cuda.stream(lane.stream):
                    torch.add(base[lane.gpu][: block.tensor.numel()], seeds, out=block.tensor)
                block.written(use, seeds)
                kernels += 1
        elif roll < 0.84:
            block = rng.choice([block for block in blocks if block.gpu == lane.gpu and block.seed is not None] or [None])
            if block:
                begin(lane, reads=[block])
                with torch.cuda.stream(lane.stream):
                    differs = block.tensor.sub(base[lane.gpu][: block.tensor.numel()]).ne_(block.seed).any()
                    wrong[lane.gpu].index_put_((torch.zeros(1, dtype=torch.int64, device=differs.device),), differs.long().view(1), accumulate=True)
                kernels += 1
        elif roll < 0.90:
            with torch.cuda.stream(lane.stream):
                torch.cuda._sleep(rng.randrange(200_000))
        elif roll < 0.95:
            lane.follow(rng.choice(lanes))
        elif roll < 0.99:
            index = rng.randrange(BLOCKS)
            size = blocks[index].tensor.numel() * 4
            blocks[index] = None  # freed before another is asked for
            blocks[index] = allocate(lane if lane in owners else rng.choice(owners), size)
            frees += 1
        else:
            host = rng.choice(hosts)
            if host.seed is not None:
                host.wrote[0].stream.synchronize()
                expected = torch.arange(host.tensor.numel(), dtype=torch.int32) + host.seed
                if not torch.equal(host.tensor, expected):
                    print(f"order: step {step}: the host did not find pattern {host.seed}")
                    sys.exit(1)
    torch.cuda.synchronize()
    for gpu in range(gpus):
        torch.cuda.synchronize(gpu)
    found = sum(int(count) for count in wrong)
    print(f"order: {a.steps} steps on {gpus} GPUs in {time.time() - started:.1f} s: {copies} copies, {kernels} kernels, {frees} frees, {found} mismatches")
    print("order:", glake.copy_stats())
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
