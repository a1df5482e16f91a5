"""Copies over every link between the host and one GPU: beside one link, and in the order of a stream.

    python copies.py                # needs two GPUs or more, and torch 2.0 or later; glake.enable() is not needed
"""

import sys
import time

try:
    import torch
except ImportError:
    sys.exit("copies.py needs torch 2.0 or later with CUDA: pip install torch")

import glake

SIZE = 1 << 30


def rate(copy, times: int = 5) -> float:
    """GB/s of the best of some copies."""
    best = float("inf")
    for _ in range(times):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return SIZE / best / 1e9


def main() -> None:
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        sys.exit("copies.py needs two NVIDIA GPUs with their driver and a CUDA build of torch")
    there = torch.empty(SIZE, dtype=torch.uint8, device="cuda:0")
    here = torch.arange(SIZE // 8).view(torch.uint8).pin_memory()
    print(f"the driver: {rate(lambda: there.copy_(here, non_blocking=True)):.1f} GB/s")

    glake.multi_path()  # relays get ready in the background; no copy waits for them
    while not glake.copy_stats()["ready"]:
        time.sleep(0.1)
    print(f"glake over the links of GPUs {glake.copy_stats()['relays']}: {rate(lambda: glake.copy_(there, here)):.1f} GB/s")

    # In the order of the current stream: the sum sees the bytes, and nothing waits on the host but item().
    there.zero_()
    glake.copy_(there, here)
    print("the bytes are there" if torch.equal(there.cpu(), here) else sys.exit("OTHER BYTES"))


if __name__ == "__main__":
    main()
