"""torch on simulated memory, through the compiled allocator. Run by test_allocator.py, in a process with the stand-ins preloaded."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
import unittest
import warnings
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "glake"
MIB = 1 << 20

# By its path: the package's own way, enable(), rightly refuses simulated memory.
sys.path.insert(0, str(PACKAGE))
import compiled  # noqa: E402
import torch  # noqa: E402

compiled.load(os.environ["GLAKE_LIBRARY"], os.environ["SIMULATED_INCLUDE"])
torch.cuda.init()
cudart = ctypes.CDLL(os.environ["SIMULATED_CUDART"])
probe = ctypes.CDLL(os.environ["SIMULATED_PROBE"])
probe.probe_is_torchs.restype = ctypes.c_bool
probe.probe_last_pool.restype = ctypes.c_ulonglong
probe.probe_hold.argtypes = [ctypes.c_size_t]
probe.probe_hold.restype = ctypes.c_size_t
probe.probe_largest.restype = ctypes.c_size_t
probe.probe_block_around.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
probe.probe_block_around.restype = ctypes.c_size_t
probe.probe_copy.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_bool]

ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_MAP = 0, 1, 2, 5


def block(size, device="cuda"):
    return torch.empty(size, dtype=torch.uint8, device=device)


class Checks(unittest.TestCase):
    def setUp(self):
        gc.collect()
        self.before = torch.cuda.memory_allocated()

    def tearDown(self):
        gc.collect()
        self.assertEqual(torch.cuda.memory_allocated(), self.before, "a block was left")


class Blocks(Checks):
    def test_it_is_torchs_allocator(self):
        self.assertEqual(torch.cuda.get_allocator_backend(), "glake")
        self.assertTrue(probe.probe_is_torchs())

    def test_bytes_go_there_and_come_back(self):
        for size in (1, 1000, MIB, 40 * MIB):
            there = torch.arange(size, dtype=torch.int32)
            self.assertTrue(torch.equal(there.to("cuda").cpu(), there))

    def test_nothing_has_no_address(self):
        self.assertEqual(block(0).data_ptr(), 0)

    def test_raw_blocks(self):
        address = torch.cuda.caching_allocator_alloc(5000)
        self.assertEqual(torch.cuda.memory_allocated(), self.before + 5120)
        torch.cuda.caching_allocator_delete(address)

    def test_a_block_is_found_from_inside(self):
        held = block(100_000)
        self.assertEqual(probe.probe_block_around(held.data_ptr() + 777, held.data_ptr()), 100_352)

    def test_an_unknown_pointer_is_a_warning(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.caching_allocator_delete(64)
        self.assertEqual(len(caught), 1)

    def test_streams_are_recorded_on_what_is_ours_only(self):
        held, stream = block(3 * MIB), torch.cuda.default_stream()
        held.record_stream(stream)
        block(0).record_stream(stream)
        probe.probe_record_foreign_memory()

    def test_threads(self):
        self.assertEqual(probe.probe_threads(4, 500), 0)

    def test_the_pool_is_not_switched_off(self):
        torch.cuda.memory.caching_allocator_enable(True)
        with self.assertRaisesRegex(RuntimeError, "cannot be switched off"):
            torch.cuda.memory.caching_allocator_enable(False)

    def test_it_is_not_installed_twice(self):
        with self.assertRaisesRegex(RuntimeError, "in use already"):
            compiled.load(os.environ["GLAKE_LIBRARY"], os.environ["SIMULATED_INCLUDE"])


class Figures(Checks):
    def test_statistics(self):
        held = block(3 * MIB + 1)
        stats = torch.cuda.memory_stats()
        self.assertEqual(stats["allocated_bytes.all.current"], self.before + 3 * MIB + 512)
        self.assertEqual(stats["allocated_bytes.large_pool.current"], stats["allocated_bytes.all.current"] - stats["allocated_bytes.small_pool.current"])
        self.assertGreaterEqual(torch.cuda.memory_reserved(), torch.cuda.memory_allocated())
        self.assertGreaterEqual(torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())
        self.assertIn("Allocated memory", torch.cuda.memory_summary())
        del held
        torch.cuda.reset_peak_memory_stats()
        self.assertEqual(torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())
        torch.cuda.reset_accumulated_memory_stats()
        self.assertEqual(torch.cuda.memory_stats()["allocation.all.allocated"], 0)

    def test_empty_cache(self):
        del_me = block(100 * MIB)
        del del_me
        torch.cuda.empty_cache()
        self.assertLess(torch.cuda.memory_reserved(), 100 * MIB)

    def test_the_profiler_sees_memory(self):
        with torch.profiler.profile(profile_memory=True) as profile:
            held = block(10_000)
            del held
        moved = [event.device_memory_usage for event in profile.events() if event.device_memory_usage]
        self.assertEqual(sorted(moved), [-10_240, 10_240])


class History(Checks):
    def setUp(self):
        super().setUp()
        torch.cuda.memory._record_memory_history(max_entries=1000, clear_history=True)

    def tearDown(self):
        torch.cuda.memory._record_memory_history(None)
        super().tearDown()

    def trace(self):
        return torch.cuda.memory._snapshot()["device_traces"][0]

    def test_blocks_come_and_go(self):
        held = block(3000)
        address = held.data_ptr()
        del held
        mine = [entry for entry in self.trace() if entry["addr"] == address]
        self.assertEqual([entry["action"] for entry in mine][-3:], ["alloc", "free_requested", "free_completed"])
        self.assertEqual({entry["size"] for entry in mine[-3:]}, {3000})
        self.assertTrue(all(entry["frames"] for entry in mine[-3:]))
        self.assertAlmostEqual(mine[-1]["time_us"] / 1e6, time.time(), delta=60)

    def test_live_blocks_keep_their_stacks(self):
        held = block(2 * MIB)
        blocks = [one for segment in torch.cuda.memory._snapshot()["segments"] for one in segment["blocks"]]
        mine = [one for one in blocks if one["address"] == held.data_ptr()]
        self.assertEqual([(one["state"], one["requested_size"]) for one in mine], [("active_allocated", 2 * MIB)])
        self.assertTrue(mine[0]["frames"])

    def test_what_lived_before_is_known(self):
        torch.cuda.memory._record_memory_history(None)
        held = block(7000)
        torch.cuda.memory._record_memory_history()
        address = held.data_ptr()
        del held
        self.assertIn((address, 7000), [(entry["addr"], entry["size"]) for entry in self.trace() if entry["action"] == "free_requested"])

    def test_segments_cover_what_is_reserved(self):
        held = [block(size) for size in (100, 3 * MIB, 50 * MIB)]
        segments = torch.cuda.memory._snapshot()["segments"]
        for segment in segments:
            self.assertEqual(sum(one["size"] for one in segment["blocks"]), segment["total_size"])
        self.assertEqual(sum(segment["allocated_size"] for segment in segments), torch.cuda.memory_allocated())
        del held

    def test_the_ring_keeps_the_latest(self):
        torch.cuda.memory._record_memory_history(max_entries=3, clear_history=True)
        for _ in range(5):
            block(100)
        self.assertEqual([entry["action"] for entry in self.trace()][-1], "snapshot")
        self.assertEqual(len(self.trace()), 3)

    def test_actions_can_be_left_out(self):
        torch.cuda.memory._record_memory_history(clear_history=True, skip_actions=["free_requested", "free_completed"])
        block(100)
        self.assertEqual({entry["action"] for entry in self.trace()} & {"alloc", "free_requested"}, {"alloc"})


class Pools(Checks):
    def test_a_pool_of_its_own(self):
        pool = torch.cuda.MemPool()
        self.assertEqual(pool.use_count(), 1)
        with torch.cuda.use_mem_pool(pool):
            self.assertEqual(pool.use_count(), 2)
            inside = block(5000)
        outside = block(5000)
        segments = pool.snapshot()
        self.assertEqual(sum(segment["allocated_size"] for segment in segments), 5120)
        self.assertEqual({tuple(segment["segment_pool_id"]) for segment in segments}, {tuple(pool.id)})
        self.assertEqual(pool.use_count(), 1)
        del inside, outside, pool

    def test_no_split_is_accepted(self):
        pool = torch.cuda.MemPool(no_split=True)
        self.assertEqual(pool.use_count(), 1)

    def test_a_checkpoint_frees_what_came_later_and_brings_back_what_went(self):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            first, second = block(5000), block(3 * MIB)
            addresses = {first.data_ptr(), second.data_ptr()}
            state = torch._C._cuda_getCheckpointState(0, pool.id)
            self.assertTrue(torch._C._cuda_checkPoolLiveAllocations(0, pool.id, addresses))
            third = block(7 * MIB)
            self.assertFalse(torch._C._cuda_checkPoolLiveAllocations(0, pool.id, addresses))
            del second
            gc.collect()
        # As compile's graph trees do it: what lives now loses its deleters, what lived then comes back as new storages.
        stale = [one.untyped_storage()._cdata for one in (first, third)]
        device = torch.device("cuda", 0)
        back = [torch._C._construct_storage_from_data_pointer(address, device, 1000) for address in sorted(addresses)]
        torch._C._cuda_setCheckpointPoolState(0, state, stale, [one._cdata for one in back])
        self.assertTrue(torch._C._cuda_checkPoolLiveAllocations(0, pool.id, addresses))
        del third, first
        self.assertEqual(torch.cuda.memory_allocated(), self.before + 5120 + 3 * MIB)
        del back, pool


class OutOfMemory(Checks):
    def test_the_error_is_torchs_and_observers_are_told(self):
        told = []
        torch._C._cuda_attach_out_of_memory_observer(lambda *figures: told.append(figures))
        torch.cuda.memory._record_memory_history(clear_history=True)
        with self.assertRaises(torch.OutOfMemoryError) as raised:
            block(1 << 50)
        self.assertTrue(str(raised.exception).startswith("CUDA out of memory."), str(raised.exception))
        self.assertEqual(told, [(0, 1 << 50, 64 << 30, 1 << 30)])
        refused = [entry for entry in torch.cuda.memory._snapshot()["device_traces"][0] if entry["action"] == "oom"]
        self.assertEqual([(entry["size"], entry["device_free"]) for entry in refused], [(1 << 50, 1 << 30)])
        torch.cuda.memory._record_memory_history(None)

    def test_who_can_give_memory_up_is_asked(self):
        torch.cuda.empty_cache()
        self.assertGreater(probe.probe_largest(), 1 << 30)
        most, asked = probe.probe_largest() // 4 * 3, probe.probe_asked()
        self.assertEqual(probe.probe_hold(most), most)
        held = block(most)
        self.assertEqual(probe.probe_asked(), asked + 1)
        del held

    def test_a_pool_may_help(self):
        torch.cuda.empty_cache()
        self.assertGreater(probe.probe_largest(), 1 << 30)
        most = probe.probe_largest() // 4 * 3
        pool = torch.cuda.MemPool(use_on_oom=True)
        with torch.cuda.use_mem_pool(pool):
            block(most)
        held = block(most)
        self.assertGreaterEqual(sum(segment["allocated_size"] for segment in pool.snapshot()), most)
        self.assertEqual(pool.use_count(), 1)
        del held, pool

    def test_a_fraction(self):
        torch.cuda.set_per_process_memory_fraction(0.001)
        self.addCleanup(torch.cuda.set_per_process_memory_fraction, 1.0)
        self.assertEqual(torch.cuda.get_per_process_memory_fraction(), 0.001)
        with self.assertRaises(torch.OutOfMemoryError):
            block(1 << 30)


class Trackers(Checks):
    def test_a_tracker_sees_blocks_and_mappings(self):
        probe.probe_track()
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            held = block(3 * MIB)
        self.assertEqual(probe.probe_last_pool(), pool.id[1])
        del held
        self.assertEqual([probe.probe_seen(action) for action in (ALLOC, FREE_REQUESTED, FREE_COMPLETED)], [1, 1, 1])
        self.assertEqual(probe.probe_last_pool(), pool.id[1])
        self.assertGreaterEqual(probe.probe_seen(SEGMENT_MAP), 1)
        del pool


class Devices(Checks):
    def test_a_block_is_on_the_current_device(self):
        with torch.cuda.device(1):
            held = block(5000)
        self.assertEqual(held.device.index, 1)
        self.assertEqual(torch.cuda.memory_allocated(1), 5120)
        self.assertEqual({segment["device"] for segment in torch.cuda.memory._snapshot()["segments"]} & {1}, {1})

    def test_peer_access_goes_the_way_that_was_asked_for(self):
        self.assertEqual(probe.probe_peer(0, 1), 0)
        self.assertEqual(ctypes.c_int.in_dll(cudart, "last_peer_access").value, 1)

    def test_copies_without_peer_access_are_peer_copies(self):
        copies = ctypes.c_int.in_dll(cudart, "peer_copies")
        here, there = block(64), block(64, "cuda:1")
        probe.probe_copy(here.data_ptr(), 0, there.data_ptr(), 1, 64, False)
        self.assertEqual(copies.value, 1)
        probe.probe_copy(here.data_ptr(), 0, there.data_ptr(), 1, 64, True)
        self.assertEqual(copies.value, 1)
