"""Common parts of tests of regions and their gate: memory of a simulated GPU, in a region, with known bytes."""

import ctypes
import os

os.environ["GLAKE_DEVICE"] = "sim"

import glake  # noqa: E402
from glake import _library  # noqa: E402

api = _library.api()
MIB = 1 << 20
tags = (f"region {number}" for number in range(1000))


class Array:
    """Memory of the pool, allocated in the region that the thread is inside of."""

    def __init__(self, size, seed=0):
        self.size = size
        self.address = api.alloc(0, size)
        self.sent = bytes((seed + place * 7) % 251 for place in range(4096)) * (size // 4096)
        self.__cuda_array_interface__ = {"data": (self.address, False), "shape": (size,), "typestr": "|u1", "version": 3}
        glake.copy_(self, self.sent, wait=True)

    def is_right(self):
        return ctypes.string_at(self.address, self.size) == self.sent

    def __del__(self):
        api.free(self.address)


def view(tag):
    return next(region for region in glake.regions() if region["tag"] == tag)


def made(size=8 * MIB, count=2, **options):
    """Creates a region with arrays in it; returns its tag and the arrays."""
    tag = next(tags)
    with glake.region(tag, **options):
        return tag, [Array(size, seed) for seed in range(count)]
