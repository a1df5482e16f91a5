"""GMLake's tutorial on this library: the class GMlakeAllocator as it is printed there, and a small training run.

    python tutorial.py [--library path/to/libgmlake.so] [--steps 20]

The allocator is torch's plain ABI, so torch.cuda.memory_stats and its kin raise here, as they did in the tutorial;
glake.memory_summary() answers. `glake.enable()` (deepspeed_style.py) needs none of this class.
"""

import argparse
import ctypes
import pathlib
import sys

try:
    import torch
except ImportError:
    sys.exit("tutorial.py needs torch 2.0 or later with CUDA: pip install torch")

import glake


class GMlakeAllocator(torch.cuda.memory.CUDAPluggableAllocator):
    def __init__(self, path_to_so_file: str, alloc_fn_name: str, free_fn_name: str, 
                    init_fn_name: str, reset_fn_name: str, set_memory_fraction_fn_name: str,
                    base_alloc_fn_name: str, record_stream_fn_name: str):
        super().__init__(path_to_so_file, alloc_fn_name, free_fn_name)
        allocator = ctypes.CDLL(path_to_so_file)

        init_fn = ctypes.cast(getattr(allocator, init_fn_name), ctypes.c_void_p).value
        assert init_fn is not None
        self._allocator.set_init_fn(init_fn)

        reset_fn = ctypes.cast(getattr(allocator, reset_fn_name), ctypes.c_void_p).value
        assert reset_fn is not None
        self._allocator.set_reset_fn(reset_fn)

        set_memory_fraction_fn = ctypes.cast(getattr(allocator, set_memory_fraction_fn_name), ctypes.c_void_p).value
        assert set_memory_fraction_fn is not None
        self._allocator.set_memory_fraction_fn(set_memory_fraction_fn)

        base_alloc_fn = ctypes.cast(getattr(allocator, base_alloc_fn_name), ctypes.c_void_p).value
        assert base_alloc_fn is not None
        self._allocator.set_base_alloc_fn(base_alloc_fn)

        record_stream_fn = ctypes.cast(getattr(allocator, record_stream_fn_name), ctypes.c_void_p).value
        assert record_stream_fn is not None
        self._allocator.set_record_stream_fn(record_stream_fn)


def train(steps: int) -> float:
    """A few layers on random data, in batches of changing length, which is what fragments memory."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        length = 128 + 37 * (step * 7 % 11)
        tokens = torch.randn(16, length, 512, device="cuda")
        loss = (model(tokens) - tokens).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: length {length}, loss {loss.item():.4f}")
    return loss.item()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--library", type=pathlib.Path, help="libgmlake.so; default: the installed package's")
    arguments.add_argument("--steps", type=int, default=20)
    chosen = arguments.parse_args()
    sofile = chosen.library or glake.library_path()

    if not sofile.exists():
        raise FileNotFoundError(f"{sofile} not found")
    if not torch.cuda.is_available():
        sys.exit("tutorial.py needs an NVIDIA GPU with its driver and a CUDA build of torch: torch sees none here")

    # Load the GMlake allocator
    gmlake_allocator = GMlakeAllocator(
        str(sofile.absolute()),
        alloc_fn_name="gmlake_malloc",
        free_fn_name="gmlake_free",
        init_fn_name="gmlake_init",
        reset_fn_name="gmlake_reset",
        set_memory_fraction_fn_name="gmlake_memory_fraction",
        base_alloc_fn_name="gmlake_base_alloc",
        record_stream_fn_name="gmlake_record_stream"
    )

    # Swap the current allocator
    torch.cuda.memory.change_current_allocator(gmlake_allocator)

    loss = train(chosen.steps)
    torch.cuda.empty_cache()
    if chosen.library is None:
        print(glake.memory_summary())
    print(f"trained {chosen.steps} steps on {sofile}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
