"""The C interface from Python, through ctypes and nothing else, on the simulated device."""

import ctypes
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import unittest

os.environ["GLAKE_DEVICE"] = "sim"

import glake  # noqa: E402

LIBRARY = str(glake.library_path())
HEADER = pathlib.Path(__file__).resolve().parents[2] / "include" / "gmlake.h"
MIB = 1 << 20

OK, OUT_OF_MEMORY, INVALID, DRIVER, UNAVAILABLE, UNSUPPORTED = range(6)

SIZE, POINTER = ctypes.c_size_t, ctypes.c_void_p


class Stat(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("current", "peak", "allocated", "freed")]


class PoolStats(ctypes.Structure):
    _fields_ = [
        (name, Stat)
        for name in (
            "allocation segment active inactive_split allocated_bytes reserved_bytes active_bytes "
            "inactive_split_bytes requested_bytes"
        ).split()
    ]


class DeviceStats(ctypes.Structure):
    _fields_ = (
        [(name, PoolStats) for name in ("all", "small_pool", "large_pool")]
        + [
            (name, ctypes.c_int64)
            for name in "num_alloc_retries num_ooms num_sync_all_streams num_device_alloc num_device_free".split()
        ]
        + [
            (name, ctypes.c_uint64)
            for name in (
                "stitches alias_reuses extent_maps stream_waits edges mappings alias_bytes idle_alias_bytes waste_hard "
                "waste_soft waste_stream completion_lags completion_lag_us_p50 completion_lag_us_p95 completion_lag_us_max gpu_wait_us"
            ).split()
        ]
        + [("lease_bytes", ctypes.c_int64)]
        + [(name, ctypes.c_uint64) for name in ("made_bytes", "lease_waits", "lease_wait_us")]
    )


def opened(path):
    library = ctypes.CDLL(path)
    library.gmlake_malloc.restype = POINTER
    library.gmlake_malloc.argtypes = [SIZE, ctypes.c_int, POINTER]
    library.gmlake_free.restype = None
    library.gmlake_free.argtypes = [POINTER, SIZE, ctypes.c_int, POINTER]
    library.gmlake_base_alloc.restype = POINTER
    library.gmlake_base_alloc.argtypes = [POINTER, ctypes.POINTER(SIZE)]
    library.gmlake_last_error.restype = ctypes.c_char_p
    library.glake_version.restype = ctypes.c_char_p
    library.glake_free.argtypes = [POINTER]
    library.glake_stats.argtypes = [ctypes.c_int32, ctypes.POINTER(DeviceStats)]
    library.glake_trim.argtypes = [ctypes.c_int32, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64)]
    library.glake_string_free.restype = None
    library.glake_string_free.argtypes = [POINTER]
    for text in (library.glake_stats_json, library.glake_snapshot_json):
        text.restype = POINTER
    return library


def run(program):
    """A Python of its own with this library as `library`; what it prints."""
    prelude = f"import os, sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r}); import test_abi\n"
    prelude += "library = test_abi.opened(test_abi.LIBRARY)\n"
    done = subprocess.run([sys.executable, "-c", prelude + program], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise AssertionError(f"exit code {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


class Abi(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.library = opened(LIBRARY)

    def error(self):
        return self.library.gmlake_last_error().decode()

    def stats(self, device=0):
        stats = DeviceStats()
        self.assertEqual(self.library.glake_stats(device, ctypes.byref(stats)), OK)
        return stats

    def text(self, pointer):
        self.assertIsNotNone(pointer, self.error())
        text = ctypes.string_at(pointer).decode()
        self.library.glake_string_free(pointer)
        return json.loads(text)

    def test_every_name_of_the_header_is_there(self):
        names = set(re.findall(r"\b(gm?lake_[a-z_]+)\(", HEADER.read_text(encoding="utf-8")))
        self.assertGreater(len(names), 45)
        for name in names:
            self.assertTrue(hasattr(self.library, name), name)

    def test_bytes_are_real(self):
        blocks = {}
        for index in range(50):
            size = 3000 * index + 1 if index % 3 else index * MIB + 17
            address = self.library.gmlake_malloc(size, index % 4, None)
            blocks[address] = (index, size)
            ctypes.memset(address, index, size)
        for address, (index, size) in blocks.items():
            self.assertEqual(ctypes.string_at(address, size), bytes([index]) * size)
            requested = SIZE()
            self.assertEqual(self.library.gmlake_base_alloc(address, ctypes.byref(requested)), address)
            self.assertEqual(requested.value, size)
            self.library.gmlake_free(address, size, index % 4, None)

    def test_structures_are_as_long_as_they_are_written(self):
        # What follows the structure stays as it was.
        buffer = (ctypes.c_uint8 * (ctypes.sizeof(DeviceStats) + 64))(*([0xA5] * (ctypes.sizeof(DeviceStats) + 64)))
        place = ctypes.cast(buffer, ctypes.POINTER(DeviceStats))
        self.assertEqual(self.library.glake_stats(0, place), OK)
        self.assertEqual(bytes(buffer)[-64:], b"\xa5" * 64)
        self.assertEqual(self.text(self.library.glake_stats_json(0))["glake.gpu_wait_us"], place[0].gpu_wait_us)
        self.assertEqual(place[0].lease_bytes, -1)

    def test_threads(self):
        failures = []

        def work(number):
            for turn in range(200):
                size = (number + 1) * 1000 * (turn + 1)
                address = self.library.gmlake_malloc(size, 1, 2)
                ctypes.memset(address, number, 64)
                if ctypes.string_at(address, 64) != bytes([number]) * 64:
                    failures.append((number, turn))
                self.library.gmlake_free(address, size, 1, 2)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])
        self.assertEqual(self.stats(1).all.allocation.current, 0)

    def test_misuse(self):
        self.assertIsNone(self.library.gmlake_malloc(0, 0, None))
        self.assertIsNone(self.library.gmlake_malloc(1 << 60, 0, None))
        self.assertTrue(self.error().startswith("CUDA out of memory. Tried to allocate "), self.error())
        self.assertIsNone(self.library.gmlake_malloc(1, -1, None))
        self.assertIn("device -1 does not exist", self.error())
        self.assertEqual(self.library.glake_free(0x1234), INVALID)
        self.assertIn("0x1234", self.error())
        address = self.library.gmlake_malloc(5, 0, None)
        self.assertEqual([self.library.glake_free(address) for _ in range(2)], [OK, INVALID])

    def test_texts_are_json(self):
        address = self.library.gmlake_malloc(7 * MIB, 2, None)
        stats = self.text(self.library.glake_stats_json(2))
        self.assertEqual(stats["requested_bytes.all.current"], 7 * MIB)
        segments = [s for s in self.text(self.library.glake_snapshot_json())["segments"] if s["device"] == 2]
        self.assertIn(address, [block["address"] for segment in segments for block in segment["blocks"]])
        self.library.gmlake_free(address, 7 * MIB, 2, None)
        released = ctypes.c_uint64()
        self.assertEqual(self.library.glake_trim(2, 0, ctypes.byref(released)), OK)
        self.assertGreaterEqual(released.value, 7 * MIB)

    def test_a_forked_child_is_served_nothing(self):
        said = run(
            "address = library.gmlake_malloc(100, 0, None)\n"
            "if os.fork() == 0:\n"
            "    library.gmlake_free(address, 100, 0, None)\n"
            "    print(library.gmlake_malloc(1, 0, None), library.gmlake_last_error().decode(), flush=True)\n"
            "    os._exit(0)\n"
            "os.wait()\n"
            "print(library.glake_free(address))\n"
        )
        self.assertRegex(said, r"^None this process was forked from .*\n0\n$")

    def test_a_process_ends_with_blocks_alive(self):
        said = run(
            "import atexit, threading\n"
            "blocks = [library.gmlake_malloc(n * 100_000, n % 4, n % 3) for n in range(1, 200)]\n"
            "[library.gmlake_free(block, 0, 0, None) for block in blocks[::2]]\n"
            "def churn():\n"
            "    while True: library.gmlake_free(library.gmlake_malloc(5 << 20, 1, 2), 0, 1, 2)\n"
            "threading.Thread(target=churn, daemon=True).start()\n"
            "print('done')\n"
        )
        self.assertEqual(said, "done\n")


if __name__ == "__main__":
    unittest.main()
