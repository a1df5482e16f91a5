"""An unchanged program of torch's: tensors there and back. Run by test_preload.py; says after each copy how often the engine was asked."""

import ctypes
import os

import torch

torch.cuda.memory.change_current_allocator(
    torch.cuda.memory.CUDAPluggableAllocator(os.environ["SIMULATED_ALLOCATOR"], "host_malloc", "host_free")
)


def asked():
    try:
        library = ctypes.CDLL("libgmlake.so", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return 0
    return ctypes.c_int.in_dll(library, "gmlake").value


here = torch.arange(1 << 20, dtype=torch.int32)
small = torch.arange(1000).to("cuda").cpu()
print("small", asked())
there = here.to("cuda")
print("to", asked())
back = there.cpu()
print("cpu", asked())
there.copy_(here.flip(0), non_blocking=True)
print("copy_", asked())
torch.cuda.synchronize()
assert torch.equal(small, torch.arange(1000)) and torch.equal(back, here) and torch.equal(there.cpu(), here.flip(0))
