"""Training with its memory from GLake: two lines before the first use of CUDA, and nothing else.

    python training.py              # needs a GPU and torch 2.0 or later
    GLAKE=0 python training.py      # the same with PyTorch's own allocator, to compare
"""

import os
import sys

try:
    import torch
except ImportError:
    sys.exit("training.py needs torch 2.0 or later with CUDA: pip install torch")

if os.environ.get("GLAKE", "1") != "0":
    import glake

    try:
        glake.enable()
    except glake.Error as error:
        sys.exit(f"training.py needs an NVIDIA GPU with its driver and a CUDA build of torch: {error}")
elif not torch.cuda.is_available():
    sys.exit("training.py needs an NVIDIA GPU with its driver and a CUDA build of torch")

GIB = 1 << 30


def main(steps: int = 50) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        # Batches of changing length are what fragments memory.
        tokens = torch.randn(16, 128 + 61 * (step * 7 % 13), 1024, device="cuda")
        loss = (model(tokens) - tokens).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    live, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"loss {loss.item():.4f}; {live / GIB:.2f} GiB live at the peak, {reserved / GIB:.2f} GiB reserved for it")


if __name__ == "__main__":
    main()
