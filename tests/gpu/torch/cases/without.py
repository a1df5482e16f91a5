"""glake.mem_pool() without enable(): only some tensors come from the pool."""
import unittest

import fixture

ISOLATED = True


@fixture.only("compiled", "one run is enough: enable() is not called")
class Without(unittest.TestCase):
    def test_only_what_is_asked_for_comes_from_glake(self):
        done = fixture.code("""
            import torch, glake, fixture
            from fixture import MIB
            outside = torch.ones(10 * MIB, device="cuda")
            pool = glake.mem_pool()
            native = torch.cuda.memory_allocated()
            with torch.cuda.use_mem_pool(pool):
                kept = [fixture.stamp(fixture.new(64 * MIB), n) for n in range(8)]
            ours = glake.memory_stats()["allocated_bytes.all.current"]
            assert ours >= 8 * 64 * MIB, ours
            assert [fixture.wrong(t, n) for n, t in enumerate(kept)] == [0] * 8
            assert torch.cuda.memory_allocated() >= native + 8 * 64 * MIB
            assert float(outside.sum()) == 10 * MIB
            more = torch.ones(10 * MIB, device="cuda")
            assert glake.memory_stats()["allocated_bytes.all.current"] == ours, "a tensor outside the pool came from glake"
            del kept, pool
            torch.cuda.empty_cache()
            assert glake.memory_stats()["allocated_bytes.all.current"] < ours, "freed memory did not come back"
        """)
        self.assertEqual(done.code, 0, done.text())
