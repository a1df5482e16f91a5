"""Rates of idle links: plain copies of pinned memory in each direction, by the driver alone."""

import json, statistics, time

from .baselines import Skipped

GIB, COPIES, REPEAT = 1 << 30, 4, 7


def is_made(glake, gpus):
    """Whether copies go over the links of all other GPUs."""
    told = glake.copy_stats()
    return len(told["relays"]) + 1 >= gpus and told["split_copies"] > 0


def links(a):
    """GB/s out of GPU 0 and into it over its own link; where there are more GPUs those of all links at once, each of its own GPU's memory, and
    of GLake's copies of GPU 0's memory over all of them."""
    if a.device != "cuda":
        raise Skipped("links are a GPU's")
    import glake

    # Before torch's first use of CUDA.
    glake.enable()
    import torch

    gpus, pairs = torch.cuda.device_count(), []

    def rate(count, is_out, copy):
        """Returns the total rate of the first `count` GPUs."""
        for gpu in range(len(pairs), count):
            pairs.append((torch.empty(GIB, dtype=torch.uint8, pin_memory=True), torch.ones(GIB, dtype=torch.uint8, device=f"cuda:{gpu}")))
        took = []
        for _ in range(REPEAT):
            settle(count)
            begin = time.perf_counter()
            for gpu, (host, device) in enumerate(pairs[:count]):
                with torch.cuda.device(gpu):
                    for _ in range(COPIES):
                        copy(*((host, device) if is_out else (device, host)))
            settle(count)
            took.append(time.perf_counter() - begin)
        return count * COPIES * GIB / statistics.median(took) / 1e9

    def settle(count):
        for gpu in range(count):
            torch.cuda.synchronize(gpu)

    def rates(name, count, copy):
        return {f"{name}_{way}": rate(count, is_out, copy) for way, is_out in (("out", True), ("in", False))}

    plain = lambda into, source: into.copy_(source, non_blocking=True)
    row = {"run": a.one, "gpus": gpus, **rates("one", 1, plain)}
    if gpus > 1:
        # Before this process uses the other GPUs itself: then it has no relays.
        glake.multi_path()
        until = time.monotonic() + 20
        # What copies take on the others is made beside the first of them.
        while not is_made(glake, gpus) and time.monotonic() < until:
            glake.copy_(*pairs[0])
            torch.cuda.synchronize()
            time.sleep(0.1)
        row.update(rates("ours", 1, glake.copy_))
        row.update(rates("all", gpus, plain))
    print(json.dumps(row), flush=True)
