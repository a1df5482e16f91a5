"""``glake.allocate`` and ``glake.free``: the pool for programs without torch."""

import pathlib
import sys
import unittest

import child

CODE = """
import ctypes, glake
def refused(kind, word, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except kind as error:
        assert word in str(error), error
    else:
        raise AssertionError("not refused")

class Stream:
    ptr = 0

with glake.region("arrays"):
    address = glake.allocate(1 << 20, device="cuda:1", stream=Stream())
assert glake.region_of(type("Array", (), {"__cuda_array_interface__": {"data": (address, False), "shape": (4,), "typestr": "|u1", "version": 3}})()) == "arrays"
assert glake.memory_stats(1)["allocated_bytes.all.current"] == 1 << 20 and glake.memory_stats(0)["allocated_bytes.all.current"] == 0
glake.free(address)
assert glake.memory_stats(1)["allocated_bytes.all.current"] == 0
assert glake.allocate(0) == 0 and glake.free(0) is None
refused(glake.InvalidError, "no block begins at", glake.free, address)
refused(glake.InvalidError, "-1", glake.allocate, -1)
refused(TypeError, "size is '1'", glake.allocate, "1")
refused(TypeError, "stream is a str", glake.allocate, 1, stream="1")
refused(glake.InvalidError, "device 9", glake.allocate, 1, device=9)
refused(glake.OutOfMemoryError, "GPU 0", glake.allocate, 1 << 60)
"""

# Stand-ins that ask their allocators once, as CuPy and RMM do.
CUPY = """
import sys, types
cupy = types.ModuleType("cupy")
class PythonFunctionAllocator:
    def __init__(self, malloc, free):
        self.malloc = lambda size: (malloc(size, 0), free)
cupy.cuda = types.SimpleNamespace(PythonFunctionAllocator=PythonFunctionAllocator)
cupy.cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=0)
def set_allocator(malloc):
    address, free = malloc(1 << 20)
    free(address, 0)
    print("asked", address > 0)
    sys.exit()
cupy.cuda.set_allocator = set_allocator
sys.modules["cupy"] = cupy
"""
RMM = """
import sys, types
rmm = types.ModuleType("rmm")
stream = type("Stream", (), {"__cuda_stream__": lambda self: (0, 0)})()
def made(allocate, deallocate):
    address = allocate(1 << 20, stream)
    deallocate(address, 1 << 20, stream)
    print("asked", address > 0)
    sys.exit()
rmm.mr = types.SimpleNamespace(CallbackMemoryResource=made, set_current_device_resource=None)
sys.modules["rmm"] = rmm
"""
EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"


class Blocks(unittest.TestCase):
    def test_they_come_from_the_pool_and_go_back(self):
        child.check(self, CODE)

    def test_the_lines_of_the_examples(self):
        for name, stand_in in (("cupy_pool.py", CUPY), ("rmm_pool.py", RMM)):
            run = f"import runpy\nrunpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')"
            self.assertEqual(child.check(self, stand_in + run), "asked True\n", name)

    def test_the_examples_say_what_they_need(self):
        for name, module in (("cupy_pool.py", "cupy"), ("rmm_pool.py", "rmm")):
            done = child.run(f"import runpy, sys\nsys.modules[{module!r}] = None\nrunpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')")
            self.assertEqual(done.returncode, 1)
            self.assertIn("needs", done.stderr)
            self.assertNotIn("Traceback", done.stderr)


if __name__ == "__main__":
    sys.exit(unittest.main())
