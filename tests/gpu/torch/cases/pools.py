"""torch.cuda.MemPool over the stitched pool."""
import gc, unittest

import torch

import fixture
from fixture import MIB

WHY = "a pluggable allocator has no createOrIncrefPool: torch.cuda.MemPool() raises"


def inside(tensor, segments):
    return any(s["address"] <= tensor.data_ptr() < s["address"] + s["total_size"] for s in segments)


class Pools(unittest.TestCase):
    @fixture.only("compiled", WHY)
    def test_tensors_of_a_pool_lie_in_it(self):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            kept = [fixture.stamp(fixture.new(size), 1) for size in (40_000, 5 * MIB, 70 * MIB)]
        outside = fixture.new(5 * MIB)
        for tensor in kept:
            self.assertTrue(inside(tensor, pool.snapshot()))
            self.assertEqual(fixture.wrong(tensor, 1), 0)
        self.assertFalse(inside(outside, pool.snapshot()))
        self.assertGreaterEqual(pool.use_count(), 1)

    @fixture.only("compiled", WHY)
    def test_memory_of_a_pool_is_not_handed_to_others(self):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            kept = fixture.new(100 * MIB)
        address = kept.data_ptr()
        del kept
        others = [fixture.new(100 * MIB) for _ in range(4)]
        self.assertNotIn(address, [tensor.data_ptr() for tensor in others])
        with torch.cuda.use_mem_pool(pool):
            before = torch.cuda.memory_reserved()
            again = fixture.new(100 * MIB)
        self.assertEqual(torch.cuda.memory_reserved(), before)
        del again

    @fixture.only("compiled", WHY)
    def test_a_pool_that_goes_gives_its_memory_back(self):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            kept = fixture.new(512 * MIB)
        del kept
        self.assertGreaterEqual(torch.cuda.memory_reserved() - before, 512 * MIB)
        del pool
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.assertLessEqual(torch.cuda.memory_reserved() - before, 64 * MIB)

    @fixture.only("compiled", WHY)
    def test_tensors_outlive_their_pool(self):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            kept = fixture.stamp(fixture.new(30 * MIB), 2)
        del pool
        gc.collect()
        torch.cuda.empty_cache()
        self.assertEqual(fixture.wrong(kept, 2), 0)

    @fixture.only("compiled", WHY)
    def test_what_is_left_of_a_pool_leaves_and_comes_back(self):
        import glake

        def pools():
            return {region["tag"] for region in glake.regions() if region["tag"].startswith("graph")}

        outside, before = fixture.stamp(fixture.new(40 * MIB), 4), pools()
        for is_away in (False, True):
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                kept = fixture.stamp(fixture.new(64 * MIB), 2)
                gone = fixture.stamp(fixture.new(96 * MIB), 3)
            del gone
            if is_away:
                glake.shrink()
            # Before any trim: of one tensor the memory is free and its pool's still.
            del pool
            gc.collect()
            for _ in range(2):
                self.assertEqual(glake.shrink()["resident"], 0)
                glake.refill()
                self.assertEqual((fixture.wrong(kept, 2), fixture.wrong(outside, 4)), (0, 0))
            glake.shrink()
            del kept
            glake.refill()
            self.assertEqual(fixture.wrong(outside, 4), 0)
            # Forgotten once the free has surely completed.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self.assertEqual(pools() - before, set())

    @fixture.only("compiled", WHY)
    def test_fragments_of_a_pool_are_stitched(self):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            kept = [fixture.new(64 * MIB) for _ in range(8)]
            del kept[::2]
            before = torch.cuda.memory_reserved()
            whole = fixture.stamp(fixture.new(192 * MIB), 3)
        self.assertEqual(torch.cuda.memory_reserved(), before)
        self.assertEqual(fixture.wrong(whole, 3), 0)

    @fixture.only("compiled", WHY)
    def test_glakes_own_pool_when_glake_is_everything(self):
        import glake

        pool = glake.mem_pool()
        with torch.cuda.use_mem_pool(pool):
            kept = fixture.stamp(fixture.new(20 * MIB), 1)
        self.assertEqual(fixture.wrong(kept, 1), 0)
        del kept

    @fixture.only("pluggable", "the other backend has pools")
    def test_the_plain_abi_says_so(self):
        with self.assertRaises(RuntimeError) as caught:
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                fixture.new(1000)
        self.assertTrue(str(caught.exception))
        self.assertEqual(fixture.wrong(fixture.stamp(fixture.new(MIB), 1), 1), 0)
