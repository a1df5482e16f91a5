"""CuPy arrays in GLake's pool: CuPy asks it for memory, beside torch or without it.

    python cupy_pool.py
"""

import sys

try:
    import cupy
except ImportError as error:
    sys.exit(f"cupy_pool.py needs CuPy and an NVIDIA GPU: pip install cupy-cuda13x ({error})")

import glake


def allocate(size: int, device: int) -> int:
    return glake.allocate(size, device=device, stream=cupy.cuda.get_current_stream())


cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(allocate, lambda address, _: glake.free(address)).malloc)

with glake.region("arrays"):
    squares = cupy.arange(1 << 24, dtype=cupy.float64) ** 2
before = float(squares.sum())
cupy.cuda.Device().synchronize()

report = glake.shrink("arrays")  # the array's memory leaves the GPU, its address stays
glake.refill("arrays")
print(f"{report['freed'] >> 20} MiB left the GPU and came back; the sum is {'the same' if float(squares.sum()) == before else 'ANOTHER'}")
print(glake.memory_summary())
