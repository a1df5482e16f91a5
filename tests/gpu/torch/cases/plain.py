"""glake.plain(): memory with CUDA IPC handles and address ranges of its own, beside memory that leaves the GPU."""
import ctypes, gc, unittest

import glake
import torch

import fixture
from fixture import MIB

cuda = ctypes.CDLL("libcuda.so.1")


def plain(size):
    with glake.plain():
        return fixture.new(size)


def handle(tensor):
    """(CUDA's answer, the 64 bytes of a legacy IPC handle)."""
    out = (ctypes.c_char * 64)()
    return cuda.cuIpcGetMemHandle(out, ctypes.c_uint64(tensor.data_ptr())), bytes(out)


def extent(tensor):
    """The range that the driver says the tensor lies in."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    error = cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(tensor.data_ptr()))
    assert error == 0, error
    return base.value, size.value


class Plain(unittest.TestCase):
    def setUp(self):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def test_only_plain_memory_has_a_handle_and_one_range(self):
        mapped, tensors = fixture.new(300 * MIB), [plain(size) for size in (4096, 3 * MIB, 300 * MIB)]
        self.assertEqual(handle(mapped)[0], 1, "invalid value: mapped memory has no such handle")
        for tensor in tensors:
            self.assertEqual(handle(tensor)[0], 0)
            base, size = extent(tensor)
            self.assertLessEqual(base, tensor.data_ptr())
            self.assertGreaterEqual(base + size, tensor.data_ptr() + tensor.numel())

    def test_another_process_opens_it(self):
        tensor = fixture.stamp(plain(4 * MIB), 5)
        torch.cuda.synchronize()
        error, bytes_of = handle(tensor)
        self.assertEqual(error, 0)
        offset = tensor.data_ptr() - extent(tensor)[0]
        told = fixture.code(
            """
            import ctypes, sys
            import torch
            torch.cuda.init(); torch.cuda.synchronize()
            cuda = ctypes.CDLL("libcuda.so.1")
            class Handle(ctypes.Structure):
                _fields_ = [("reserved", ctypes.c_char * 64)]
            sent = Handle.from_buffer_copy(bytes.fromhex(sys.argv[1]))
            at = ctypes.c_uint64()
            cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
            assert cuda.cuIpcOpenMemHandle_v2(ctypes.byref(at), sent, 1) == 0
            into = (ctypes.c_int * 4)()
            assert cuda.cuMemcpyDtoH_v2(into, ctypes.c_uint64(at.value + int(sys.argv[2])), 16) == 0
            print(list(into))
            """,
            bytes_of.hex(),
            str(offset),
        )
        self.assertEqual(told.code, 0, told.text())
        self.assertEqual(told.out.strip().splitlines()[-1], str(tensor[:16].view(torch.int32).tolist()))

    def test_it_is_used_again_and_given_back(self):
        before = torch.cuda.memory_reserved()
        tensor = plain(64 * MIB)
        address = tensor.data_ptr()
        self.assertGreaterEqual(torch.cuda.memory_reserved(), before + 64 * MIB)
        del tensor
        tensor = fixture.stamp(plain(64 * MIB), 3)
        self.assertEqual(tensor.data_ptr(), address)
        self.assertEqual(fixture.wrong(tensor, 3), 0)
        del tensor
        torch.cuda.empty_cache()
        self.assertLessEqual(torch.cuda.memory_reserved(), before)

    def test_it_stays_in_a_shrink_of_everything_else(self):
        with glake.region("beside plain"):
            leaves = fixture.stamp(fixture.new(128 * MIB), 1)
        stays, default = fixture.stamp(plain(128 * MIB), 2), fixture.stamp(fixture.new(64 * MIB), 3)
        report = glake.shrink()
        self.assertGreaterEqual(report["freed"], 192 * MIB)
        self.assertEqual(fixture.wrong(stays, 2), 0, "usable while everything else is away")
        held = [used["bytes"] for used in report["gpu"] if "plain memory" in used["holder"]]
        self.assertGreaterEqual(sum(held), 128 * MIB)
        glake.refill()
        self.assertEqual([fixture.wrong(leaves, 1), fixture.wrong(stays, 2), fixture.wrong(default, 3)], [0, 0, 0])

    def test_a_graph_captures_with_it(self):
        given = fixture.new(64).zero_().view(torch.float32)
        idle = plain(32 * MIB)
        del idle
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), glake.plain():
            once = given + 1  # made in the capture, by cudaMalloc
            big = torch.full((8 * MIB,), 2.0, device="cuda")
            twice = once * big[:1]
            del once, big
            torch.cuda.empty_cache()  # frees nothing of the driver's during the capture, and does not break it
        self.assertEqual(handle(twice)[0], 0)
        for value in (1.0, 5.0):
            given.fill_(value)
            graph.replay()
            self.assertEqual(twice.tolist(), [2 * (value + 1)] * 16)
        glake.shrink()
        glake.refill()
        given.fill_(7.0)
        graph.replay()
        self.assertEqual(twice.tolist(), [16.0] * 16)
        address = twice.data_ptr()
        del twice, graph
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.assertNotEqual(address, fixture.new(64).data_ptr())
