"""What links carry that have nothing else to do: bare copies of pinned memory, each way, by the driver alone."""

import json, statistics, time

from .baselines import Skipped

GIB, COPIES, REPEAT = 1 << 30, 4, 7


def links(a):
    """GB/s out of GPU 0 and into it over its own link; where there are more GPUs those of all links at once, each of its own GPU's memory, and
    of GLake's copies of GPU 0's memory over all of them."""
    if a.device != "cuda":
        raise Skipped("links are a GPU's")
    import glake

    # Before torch's first use of CUDA.
    glake.enable()
    import torch

    gpus = range(torch.cuda.device_count())
    pairs = [(torch.empty(GIB, dtype=torch.uint8, pin_memory=True), torch.ones(GIB, dtype=torch.uint8, device=f"cuda:{gpu}")) for gpu in gpus]

    def rate(count, is_out, copy):
        """Of so many GPUs, in all."""
        took = []
        for _ in range(REPEAT):
            settle()
            begin = time.perf_counter()
            for gpu, (host, device) in enumerate(pairs[:count]):
                with torch.cuda.device(gpu):
                    for _ in range(COPIES):
                        copy(*((host, device) if is_out else (device, host)))
            settle()
            took.append(time.perf_counter() - begin)
        return count * COPIES * GIB / statistics.median(took) / 1e9

    def settle():
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    plain = lambda into, source: into.copy_(source, non_blocking=True)
    row = {"run": a.one, "gpus": len(gpus)}
    for way, is_out in (("out", True), ("in", False)):
        row[f"one_{way}"] = rate(1, is_out, plain)
        if len(gpus) > 1:
            row[f"all_{way}"] = rate(len(gpus), is_out, plain)
    if len(gpus) > 1:
        glake.multi_path()
        until = time.monotonic() + 20
        while len(glake.copy_stats()["relays"]) + 1 < len(gpus) and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(1)
        for way, is_out in (("out", True), ("in", False)):
            row[f"ours_{way}"] = rate(1, is_out, glake.copy_)
    print(json.dumps(row), flush=True)
