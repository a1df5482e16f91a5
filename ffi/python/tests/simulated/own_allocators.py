"""Pools of torch that bring an allocator of their own, on simulated memory. Run by test_allocator.py, as checks.py."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings

import compiled
import torch
from checks import MIB, Checks, block, cudart, probe


def figure(name):
    return ctypes.c_int.in_dll(cudart, name)


def own_allocator(kept=[]):  # noqa: B006  torch follows a pointer to it for as long as the pool has memory
    kept.append(torch.cuda.memory.CUDAPluggableAllocator(os.environ["SIMULATED_CUDART"], "own_alloc", "own_free"))
    return kept[-1].allocator()


class OwnAllocator(Checks):
    """Pools that bring an allocator of their own: what they hold is as it would be without glake."""

    def setUp(self):
        super().setUp()
        torch.cuda.empty_cache()
        self.given, self.taken = figure("own_given").value, figure("own_taken").value
        self.pool = torch.cuda.MemPool(own_allocator())

    def tearDown(self):
        self.pool = None
        torch.cuda.empty_cache()
        super().tearDown()
        self.assertEqual(figure("own_wrong").value, 0, "it was asked to free what it does not have")

    def counts(self):
        return figure("own_given").value - self.given, figure("own_taken").value - self.taken

    def write(self, held):
        there = torch.arange(held.numel(), dtype=torch.int64).to(torch.uint8)
        held.copy_(there)
        self.assertTrue(torch.equal(held.cpu(), there))
        return there

    def inside(self, size):
        with torch.cuda.use_mem_pool(self.pool):
            return block(size)

    def test_segments_are_the_allocators_and_go_back_to_it(self):
        there = torch.arange(3 * MIB, dtype=torch.int32)
        with torch.cuda.use_mem_pool(self.pool):
            self.assertEqual(self.pool.use_count(), 2)
            held = there.to("cuda")
        self.assertEqual(self.pool.use_count(), 1)
        self.assertTrue(torch.equal(held.cpu(), there))
        self.assertEqual(self.counts(), (1, 0))
        outside = block(5 * MIB)
        self.assertEqual(self.counts(), (1, 0))
        self.assertEqual(torch.cuda.memory_allocated(), self.before + 17 * MIB)
        segments = self.pool.snapshot()
        self.assertEqual([(s["address"], s["allocated_size"], tuple(s["segment_pool_id"])) for s in segments], [(held.data_ptr(), 12 * MIB, self.pool.id)])
        self.assertIn(segments[0]["address"], [s["address"] for s in torch.cuda.memory_snapshot()])
        self.assertEqual(compiled.foreign(0), {"pools": 1, "allocated_bytes": 12 * MIB, "reserved_bytes": segments[0]["total_size"]})
        del held, outside
        torch.cuda.empty_cache()
        self.assertEqual(self.counts(), (1, 0), "a pool that lives keeps its memory")
        self.assertEqual(self.pool.snapshot()[0]["allocated_size"], 0)
        self.pool = None
        self.assertEqual(self.counts(), (1, 1))
        self.assertEqual(compiled.foreign(0), {"pools": 0, "allocated_bytes": 0, "reserved_bytes": 0})

    def test_a_block_may_outlive_its_pool(self):
        held = self.inside(3 * MIB)
        self.pool = None
        self.write(held)
        self.assertEqual(self.counts(), (1, 0))
        del held
        torch.cuda.empty_cache()
        self.assertEqual(self.counts(), (1, 1))

    def test_raw_blocks_and_records(self):
        with torch.cuda.use_mem_pool(self.pool):
            address = torch.cuda.caching_allocator_alloc(5000)
            held = block(100_000)
        self.assertEqual(self.counts(), (1, 0))
        self.assertEqual(probe.probe_block_around(held.data_ptr(), self.pool.snapshot()[0]["address"]), 2 * MIB)
        held.record_stream(torch.cuda.Stream())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.caching_allocator_delete(address)
        self.assertEqual(caught, [])

    def test_what_sleeps_is_left_alone(self):
        held = self.inside(30 * MIB)
        there = self.write(held)
        cudart.own_map(ctypes.c_void_p(held.data_ptr()), 0)
        torch.cuda.empty_cache()
        self.assertEqual(sum(segment["allocated_size"] for segment in self.pool.snapshot()), 30 * MIB)
        cudart.own_map(ctypes.c_void_p(held.data_ptr()), 1)
        self.assertTrue(torch.equal(held.cpu(), there))
        self.assertEqual(self.counts(), (1, 0))

    def test_what_its_owner_unmapped_is_nobodys(self):
        for size in (100, 30 * MIB):
            with self.subTest(size=size):
                held = self.inside(size)
                gone = held.data_ptr()
                del held
                cudart.own_map(ctypes.c_void_p(gone), 0)
                again = self.inside(size)
                self.write(again)
                self.assertNotEqual(again.data_ptr(), gone)
                del again
        given = self.counts()[0]
        self.pool = None
        torch.cuda.empty_cache()
        self.assertEqual(self.counts()[1], given - 2)
        self.before = torch.cuda.memory_allocated()  # What is gone stays taken, so that nobody gets it.

    def test_a_sleeper_s_pool_may_end(self):
        held = self.inside(30 * MIB)
        cudart.own_map(ctypes.c_void_p(held.data_ptr()), 0)
        self.pool = None
        del held
        torch.cuda.empty_cache()
        self.assertEqual(self.counts(), (1, 0))

    def test_no_memory_there_is_torchs_error(self):
        told = []
        torch._C._cuda_attach_out_of_memory_observer(lambda *figures: told.append(figures))
        room = ctypes.c_size_t.in_dll(cudart, "own_room")
        before, room.value = room.value, 50 * MIB
        with self.assertRaises(torch.OutOfMemoryError):
            self.inside(100 * MIB)
        room.value = before
        self.assertEqual([figures[1] for figures in told], [100 * MIB])
        self.assertEqual(self.inside(100 * MIB).numel(), 100 * MIB)

    def test_free_memory_of_glake_goes_first(self):
        # Their allocator finds no memory while glake holds what is free: it is given back, and asked again.
        room = ctypes.c_size_t.in_dll(cudart, "own_room")
        before, room.value = room.value, 0
        block(100 * MIB)
        self.assertGreaterEqual(torch.cuda.memory_reserved(), 100 * MIB)
        with self.assertRaises(torch.OutOfMemoryError):
            self.inside(30 * MIB)
        room.value = before
        self.assertLess(torch.cuda.memory_reserved(), 100 * MIB)

    def test_the_history_has_them(self):
        torch.cuda.memory._record_memory_history(clear_history=True)
        outside = block(1000)
        held = self.inside(3 * MIB)
        address = held.data_ptr()
        del held
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(None)
        self.assertEqual([entry["action"] for entry in trace if entry["addr"] == address], ["segment_alloc", "alloc", "free_requested", "free_completed"])
        self.assertEqual([entry["time_us"] for entry in trace], sorted(entry["time_us"] for entry in trace))
        self.assertEqual([entry["action"] for entry in trace].count("snapshot"), 1)
        del outside

    def test_a_checkpoint_is_torchs_own(self):
        with torch.cuda.use_mem_pool(self.pool):
            held = block(5000)
            torch._C._cuda_getCheckpointState(0, self.pool.id)
            self.assertTrue(torch._C._cuda_checkPoolLiveAllocations(0, self.pool.id, {held.data_ptr()}))
        del held

    def test_completion_points_go_on_inside(self):
        # Only a capture holds them back, and an allocation there shows that there is none.
        block(100 * MIB)
        with torch.cuda.use_mem_pool(self.pool):
            held = block(1000)
            torch.cuda.empty_cache()
            self.assertLess(torch.cuda.memory_reserved(), 100 * MIB)
        del held

    def test_its_allocator_is_called_with_no_lock_of_ours(self):
        held, made = [], ctypes.CFUNCTYPE(None)

        def called():
            # Another thread allocates and frees meanwhile.
            other = threading.Thread(target=lambda: (held.append(block(3 * MIB)), block(40 * MIB)))
            other.start()
            other.join(20)
            self.assertFalse(other.is_alive())

        hook, door = made(called), ctypes.c_void_p.in_dll(cudart, "own_called")
        door.value = ctypes.cast(hook, ctypes.c_void_p).value
        try:
            self.inside(30 * MIB)
            self.pool = None
        finally:
            door.value = None
        self.assertEqual((len(held), self.counts()), (2, (1, 1)))
        held.clear()

    def test_it_may_help_out(self):
        self.pool = None
        pool = torch.cuda.MemPool(own_allocator(), use_on_oom=True)
        most = probe.probe_largest() // 4 * 3
        held = block(most)
        self.assertEqual(self.counts(), (0, 0))
        helped = block(most)
        self.assertEqual(self.counts(), (1, 0))
        self.assertEqual(pool.use_count(), 1)
        del held, helped, pool
        torch.cuda.empty_cache()
        self.assertEqual(self.counts(), (1, 1))

    def test_graphs_are_held_back_while_such_pools_are(self):
        # The native allocator is told of routes that are ours, and forgets them.
        ours = torch.cuda.MemPool()
        held = self.inside(1000)
        for _ in range(3):
            with torch.cuda.use_mem_pool(ours):
                held.record_stream(torch.cuda.Stream())
                block(1000)
        with torch.cuda.use_mem_pool(ours):
            del held
        self.assertEqual(ours.use_count(), 1)
        del ours
