import ctypes

import torch
from torch import _C

# Held by name, as torch's own modules hold some.
from torch._C import _cuda_memorySnapshot, _MemPool


def memory_stats_as_nested_dict(device=None):
    return torch._C._cuda_memoryStats(device or 0)


def snapshot_by_name():
    return _cuda_memorySnapshot(None)


class CUDAPluggableAllocator:
    def __init__(self, path, alloc, free):
        library = ctypes.CDLL(path)
        pointers = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in (alloc, free)]
        self._allocator = _C._cuda_customAllocator(*pointers)

    def allocator(self):
        return self._allocator


def change_current_allocator(allocator):
    torch._C._cuda_changeCurrentAllocator(allocator.allocator())


class MemPool(_MemPool):
    def __init__(self, allocator=None):
        super().__init__(allocator, True)
