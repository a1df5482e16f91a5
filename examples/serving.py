"""A worker that gives its GPU memory back while nobody asks, and answers the next request with it again, at the same addresses.

    python serving.py               # needs a GPU and torch 2.0 or later; server.py is the same behind an ASGI app
"""

import sys
import time

try:
    import torch
except ImportError:
    sys.exit("serving.py needs torch 2.0 or later with CUDA: pip install torch")

import glake

GIB = 1 << 30


def used() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def main() -> None:
    try:
        glake.enable("serverless")
    except glake.Error as error:
        sys.exit(f"serving.py needs an NVIDIA GPU with its driver and a CUDA build of torch: {error}")
    torch.manual_seed(0)
    # Sealed: nobody writes to the weights, so a copy on the host stays good and they leave without copying the second time.
    with glake.region("weights", policy="sealed", host_copy="retain"), torch.device("cuda"):
        model = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192, dtype=torch.bfloat16) for _ in range(32)])
    model.requires_grad_(False)
    glake.seal("weights")

    @glake.active()  # all memory is there, and stays, while this runs; a shrink waits for it
    def answer(value: float) -> float:
        return model(torch.full((4, 8192), value, dtype=torch.bfloat16, device="cuda")).float().sum().item()

    first = answer(1.0)
    print(f"awake   {used():6.2f} GiB on the GPU")
    for _ in range(3):
        report = glake.shrink()
        print(f"asleep  {used():6.2f} GiB, after {report['seconds'] * 1000:.0f} ms; {report['copied'] / GIB:.2f} GiB copied")
        begun = time.perf_counter()
        if answer(1.0) != first:
            sys.exit("ANOTHER ANSWER")
        print(f"awake   {used():6.2f} GiB, the same answer after {(time.perf_counter() - begun) * 1000:.0f} ms")


if __name__ == "__main__":
    main()
