"""Copies between Python's memory and simulated GPUs, whose bytes can be looked at."""

import ctypes
import gc
import json
import mmap
import os
import sys
import threading
import time
import types
import unittest

os.environ["GLAKE_DEVICE"] = "sim"

import glake  # noqa: E402
from glake import _copies, _library, _memory  # noqa: E402

import child  # noqa: E402

api = _library.api()
MIB = 1 << 20


class Array:
    """Memory of the pool as ``__cuda_array_interface__`` has it."""

    def __init__(self, size, device=0, **more):
        self.size = size
        self.address = api.alloc(device, size)
        self.__cuda_array_interface__ = {
            "data": (self.address, False),
            "shape": (size // 4, 4) if size % 4 == 0 else (size,),
            "typestr": "|u1",
            "version": 3,
            **more,
        }

    def bytes(self):
        return ctypes.string_at(self.address, self.size)

    def __del__(self):
        api.free(self.address)


def pattern(size, seed=0):
    return bytes((seed + i * 7) % 251 for i in range(256)) * (size // 256) + bytes(size % 256)


class Ends(unittest.TestCase):
    def test_there_and_back(self):
        for size in (1, 4096, 300_001, 5 * MIB):
            sent, array, back = pattern(size), Array(size), bytearray(size)
            self.assertIsNone(glake.copy_(array, sent, wait=True))
            self.assertEqual(array.bytes(), sent)
            copy = glake.copy_(back, array)
            copy.wait()
            self.assertEqual(bytes(back), sent)
            self.assertTrue(copy.done())
            copy.wait()
            self.assertIn("done", repr(copy))

    def test_pinned_memory(self):
        with mmap.mmap(-1, 8 * MIB) as memory:
            pinned = _memory.range_of(memory, "memory", written=True)
            api.host_register(pinned.address, pinned.size)
            memory[:] = pattern(8 * MIB)
            array = Array(8 * MIB, device=2)
            copy = glake.copy_(array, memory, priority="critical")
            while not copy.done():
                time.sleep(0.001)
            self.assertEqual(array.bytes(), memory[:])
            memory[:] = bytes(8 * MIB)
            glake.copy_(memory, array, priority="background", wait=True, verify=True)
            self.assertEqual(memory[:], array.bytes())
            api.host_unregister(pinned.address)
            pinned.release()

    def test_every_buffer(self):
        array = Array(96)
        for source in (b"x" * 96, bytearray(96), memoryview(bytes(96)), memoryview(bytes(96)).cast("i"), (ctypes.c_int * 24)(*range(24))):
            glake.copy_(array, source, wait=True)
            self.assertEqual(array.bytes(), bytes(memoryview(source).cast("B")))
        floats = (ctypes.c_float * 24)()
        glake.copy_(floats, array, wait=True)
        self.assertEqual(bytes(floats), array.bytes())

    def test_arrays_of_numpy(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("numpy is not installed")
        sent = numpy.arange(3000, dtype=numpy.float64).reshape(30, 100)
        array, back = Array(sent.nbytes), numpy.zeros_like(sent)
        glake.copy_(array, sent, wait=True)
        glake.copy_(back, array, wait=True)
        self.assertTrue((back == sent).all())
        with self.assertRaisesRegex(ValueError, "src is a buffer whose elements do not lie side by side"):
            glake.copy_(array, sent.T)
        back.flags.writeable = False
        with self.assertRaisesRegex(ValueError, "dst may only be read"):
            glake.copy_(back, array)

    def test_nothing(self):
        array = Array(8)
        array.__cuda_array_interface__ = {"data": (0, False), "shape": (0, 5), "typestr": "<f4", "version": 3}
        glake.copy_(array, b"", wait=True)
        self.assertTrue(glake.copy_(bytearray(), array).done())


class Refusals(unittest.TestCase):
    def test_what_has_no_bytes(self):
        array = Array(16)
        for thing, error, text in [
            (5, TypeError, "src is a int: give a torch tensor"),
            ("text", TypeError, "src is a str"),
            (b"12345678", ValueError, "dst has 16 bytes and src 8"),
            (memoryview(bytes(32))[::2], ValueError, "side by side"),
            (types.SimpleNamespace(__cuda_array_interface__={"shape": (16,)}), TypeError, "without data, shape or typestr"),
        ]:
            with self.subTest(thing), self.assertRaisesRegex(error, text):
                glake.copy_(array, thing)
        with self.assertRaisesRegex(ValueError, "dst may only be read"):
            glake.copy_(bytes(16), array)
        array.__cuda_array_interface__["data"] = (array.address, True)
        with self.assertRaisesRegex(ValueError, "dst may only be read: its __cuda_array_interface__ says so"):
            glake.copy_(array, bytes(16))

    def test_what_refers_to_other_memory(self):
        class Pair(ctypes.Structure):
            _fields_ = [("number", ctypes.c_int64), ("object", ctypes.py_object)]

        kept = object()
        buffers = [
            ctypes.py_object(kept),
            (ctypes.py_object * 2)(kept, kept),
            (Pair * 1)(Pair(5, kept)),
            (ctypes.POINTER(ctypes.c_int) * 2)(),
            (ctypes.CFUNCTYPE(None) * 2)(),
            (ctypes.c_char_p * 2)(b"x", b"y"),
            (ctypes.c_wchar_p * 2)("x", "y"),
        ]
        try:
            import numpy
        except ImportError:
            pass
        else:
            fields = [("a", "i4"), ("b", [("c", "f8"), ("d", "O")])]
            buffers += [numpy.array([kept] * 2), numpy.array(kept), numpy.zeros(2, fields), numpy.zeros((), fields)]
        for buffer in buffers:
            size = memoryview(buffer).nbytes
            array, before = Array(size), bytes(memoryview(buffer).cast("B")) if memoryview(buffer).ndim else None
            with self.subTest(memoryview(buffer).format):
                for pair in ((buffer, array), (array, buffer)):
                    with self.assertRaisesRegex(TypeError, "of Python objects or of pointers"):
                        glake.copy_(*pair, wait=True)
                    with self.assertRaisesRegex(TypeError, "of Python objects or of pointers"):
                        glake.copy_list([pair], wait=True)
                if before is not None:
                    self.assertEqual(bytes(memoryview(buffer).cast("B")), before)

    def test_what_is_called_like_a_reference(self):
        class Named(ctypes.Structure):
            _fields_ = [("Object", ctypes.c_int), ("X", ctypes.c_int)]

        buffers = [(Named * 2)(), (ctypes.c_void_p * 2)(1 << 40, 2)]
        try:
            import numpy
        except ImportError:
            pass
        else:
            buffers += [numpy.zeros(2, "c16"), numpy.zeros(2, [("O", "i4"), ("z", "c8")]), numpy.zeros(3, "U5"), numpy.zeros(3, "?")]
        for buffer in buffers:
            with self.subTest(memoryview(buffer).format):
                array = Array(memoryview(buffer).nbytes)
                glake.copy_(array, buffer, wait=True)
                glake.copy_(buffer, array, wait=True)

    def test_arrays_of_objects_or_with_a_mask(self):
        array = Array(16)
        for more, error, text in [
            ({"typestr": "|O8", "shape": (2,)}, TypeError, "of Python objects"),
            ({"typestr": "|V16", "shape": (1,), "descr": [("a", "<i8"), ("b", [("c", "|O8")])]}, TypeError, "of Python objects"),
            ({"mask": Array(16)}, ValueError, "with a mask"),
        ]:
            with self.subTest(more):
                told = {**array.__cuda_array_interface__, **more}
                thing = types.SimpleNamespace(__cuda_array_interface__=told)
                for pair in ((thing, bytes(16)), (bytearray(16), thing)):
                    with self.assertRaisesRegex(error, text):
                        glake.copy_(*pair, wait=True)
        told = {**array.__cuda_array_interface__, "mask": None, "descr": [("", "|u1")]}
        glake.copy_(types.SimpleNamespace(__cuda_array_interface__=told), bytes(16), wait=True)

    def test_strides(self):
        array = Array(32)
        array.__cuda_array_interface__.update(shape=(2, 4), typestr="<f4", strides=(16, 4))
        glake.copy_(array, bytes(32), wait=True)
        array.__cuda_array_interface__.update(shape=(1, 4, 2), strides=(999, 8, 4))
        glake.copy_(array, bytes(32), wait=True)
        array.__cuda_array_interface__.update(shape=(4, 2), strides=(4, 16))
        with self.assertRaisesRegex(ValueError, "dst is an array whose elements do not lie side by side"):
            glake.copy_(array, bytes(32))

    def test_options(self):
        array = Array(16)
        with self.assertRaisesRegex(ValueError, "priority is 'urgent'"):
            glake.copy_(array, bytes(16), priority="urgent")
        with self.assertRaisesRegex(ValueError, "verify needs wait=True"):
            glake.copy_(array, bytes(16), verify=True)
        with self.assertRaisesRegex(TypeError, "stream is a str"):
            glake.copy_(array, bytes(16), stream="fast")
        with self.assertRaises(glake.DriverError):
            glake.copy_(array, bytes(16), stream=0x1234567)
        with self.assertRaisesRegex(glake.InvalidError, "no copy has the handle 99999"):
            api.copy_wait(99999)

    def test_a_refused_copy_keeps_nothing(self):
        array, source = Array(16), bytearray(16)
        for change in ({"priority": "urgent"}, {"stream": 0x1234567}):
            with self.assertRaises(Exception):
                glake.copy_(array, source, **change)
            gc.collect()
            source.extend(b"x")
            del source[-1]


class Streams(unittest.TestCase):
    def test_by_every_name(self):
        protocol = types.SimpleNamespace(__cuda_stream__=(0, 2))
        method = types.SimpleNamespace(__cuda_stream__=lambda: (0, 2))
        for stream in (None, 0, 1, 2, types.SimpleNamespace(cuda_stream=2), types.SimpleNamespace(ptr=1), protocol, method):
            array = Array(4096)
            glake.copy_(array, pattern(4096), stream=stream, wait=True)
            self.assertEqual(array.bytes(), pattern(4096))

    def test_the_stream_of_an_array_is_kept(self):
        one, two = Array(MIB, stream=2), Array(MIB, stream=1)
        glake.copy_(one, pattern(MIB))
        back = bytearray(MIB)
        glake.copy_(two, one)
        glake.copy_(back, two, wait=True)
        self.assertEqual(bytes(back), pattern(MIB))

    def test_torch_has_no_say_in_the_streams_of_others_arrays(self):
        class Tensor:
            pass

        def unusable(*_):
            raise AssertionError("torch was asked")

        torch = types.ModuleType("torch")
        torch.Tensor, torch.cuda = Tensor, types.SimpleNamespace(device=unusable, current_stream=unusable)
        sys.modules["torch"] = torch
        self.addCleanup(sys.modules.pop, "torch")
        array = Array(MIB, stream=2)
        glake.copy_(array, pattern(MIB), wait=True)
        glake.copy_(array, pattern(MIB), stream=1, wait=True)
        self.assertEqual(array.bytes(), pattern(MIB))

    def test_a_default_stream_is_that_of_the_arrays_gpu(self):
        asked, synchronized = [], []
        real = _library.api()

        class Api:
            def __getattr__(self, name):
                return getattr(real, name)

            def copy_async(self, to, from_, size, stream=0, flags=0):
                asked.append((stream, flags >> 16))
                return real.copy_async(to, from_, size, stream, flags)

            def stream_synchronize(self, device, stream):
                synchronized.append((device, stream))
                real.stream_synchronize(device, stream)

        before, _library.api = _library.api, Api
        try:
            for device in (0, 1):
                for stream in (None, 1, 2):
                    array = Array(4096, device, **({} if stream is None else {"stream": stream}))
                    glake.copy_(array, pattern(4096), wait=True)
                    self.assertEqual(array.bytes(), pattern(4096))
                    self.assertEqual(asked.pop(), (stream or 0, device + 1))
            one, two = Array(4096, 0, stream=1), Array(4096, 1, stream=1)
            real.enable_peer(1, 0)
            glake.copy_(two, one, wait=True)
            # Two streams of one handle: the copy runs behind the one, and the other was waited for.
            self.assertEqual((asked.pop(), synchronized), ((1, 2), [(0, 1)]))
        finally:
            _library.api = before

    def test_whose_memory_it_is(self):
        self.assertEqual([api.device_of(Array(4096, device).address) for device in (0, 1, 2)], [0, 1, 2])
        self.assertIsNone(api.device_of(_memory.range_of(bytearray(16), "bytes", written=True).address))


class Lives(unittest.TestCase):
    def test_a_copy_keeps_its_ends_until_it_is_done(self):
        source = bytearray(pattern(4 * MIB))
        array = Array(4 * MIB)
        copy = glake.copy_(array, source)
        with self.assertRaises(BufferError):
            source.extend(b"more")
        copy.wait()
        source.extend(b"more")

    def test_a_dropped_copy_keeps_them_too(self):
        source, array = bytearray(pattern(4 * MIB)), Array(4 * MIB)
        copy = glake.copy_(array, source)
        del copy
        gc.collect()
        with self.assertRaises(BufferError):
            source.extend(b"more")
        deadline = time.monotonic() + 20
        while _copies._dropped and time.monotonic() < deadline:
            time.sleep(0.01)
            glake.copy_stats()
        self.assertFalse(_copies._dropped)
        source.extend(b"more")
        self.assertEqual(array.bytes(), source[: 4 * MIB])

    def test_threads(self):
        failed = []

        def work(seed):
            try:
                array = Array(2 * MIB, device=seed % 4)
                for turn in range(10):
                    sent, back = pattern(2 * MIB, seed + turn), bytearray(2 * MIB)
                    glake.copy_(array, sent, stream=2)
                    glake.copy_(back, array, stream=2, wait=True)
                    if bytes(back) != sent:
                        failed.append((seed, turn))
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failed, [])

    def test_a_process_ends_with_copies_under_way(self):
        child.check(
            self,
            """
            import glake
            from glake import _library
            api = _library.api()
            class Array:
                __cuda_array_interface__ = {"data": (api.alloc(0, 64 << 20), False), "shape": (64 << 20,), "typestr": "|u1", "version": 3}
            glake.multi_path()
            kept = [glake.copy_(Array, bytes(64 << 20)) for _ in range(2)]
            glake.copy_(Array, bytes(64 << 20))
            """,
        )


class Many(unittest.TestCase):
    def test_a_list(self):
        arrays = [Array(4096, device=i % 4) for i in range(40)]
        sent = [pattern(4096, i) for i in range(40)]
        glake.copy_list(zip(arrays, sent)).wait()
        self.assertEqual([array.bytes() for array in arrays], sent)
        back = [bytearray(4096) for _ in arrays]
        self.assertIsNone(glake.copy_list(zip(back, arrays), wait=True))
        self.assertEqual([bytes(part) for part in back], sent)
        self.assertTrue(glake.copy_list([]).done())
        with self.assertRaisesRegex(ValueError, "dst of pair 1 has 4096 bytes and src of pair 1 3"):
            glake.copy_list([(arrays[0], sent[0]), (arrays[1], b"abc")])

    def test_one_to_all(self):
        arrays = [Array(3 * MIB, device=i) for i in range(4)]
        glake.copy_to_all(arrays, pattern(3 * MIB)).wait()
        for array in arrays:
            self.assertEqual(array.bytes(), pattern(3 * MIB))
        glake.copy_to_all([], b"", wait=True)
        with self.assertRaisesRegex(ValueError, "dst 0 has 3145728 bytes and src 5"):
            glake.copy_to_all(arrays, b"12345")


class Paths(unittest.TestCase):
    def test_statistics(self):
        stats = glake.copy_stats()
        for key in ("multi_path", "relays", "relay_costs", "break_even", "native_copies", "split_copies", "paths"):
            self.assertIn(key, stats)
        self.assertEqual(stats, json.loads(api.copy_stats_json()))

    def test_on_and_off(self):
        out = child.check(
            self,
            """
            import glake
            glake.multi_path()
            print(glake.copy_stats()["multi_path"])
            glake.multi_path(False)
            print(glake.copy_stats()["multi_path"], glake.copy_stats()["relays"])
            """,
        )
        self.assertEqual(out, "True\nFalse []\n")

    def test_off_where_ranks_share_the_links(self):
        out = child.check(
            self,
            """
            import glake
            print(glake.copy_stats()["multi_path"])
            try:
                glake.multi_path()
            except glake.InvalidError as error:
                print(error)
            """,
            GLAKE_MULTI_PATH="1",
            LOCAL_WORLD_SIZE="8",
        )
        self.assertTrue(out.startswith("False\ncopies cannot use other GPUs' links"), out)
        self.assertIn("8 processes of this program run on the machine", out)


if __name__ == "__main__":
    unittest.main()
