"""Pointers that are not the pool's, frees that were made before: an error or nothing, never a crash, and the pool stays well."""
import unittest

import fixture

ISOLATED = True

BEGIN = """
    import torch, fixture
    from torch.cuda import caching_allocator_alloc as alloc, caching_allocator_delete as delete
    fixture.enable()
    kept = fixture.stamp(fixture.new(8 << 20), 1)
    allocated = torch.cuda.memory_allocated()
    def told(call, *arguments):
        try:
            call(*arguments)
            print("nothing")
        except RuntimeError as error:
            print("error:", str(error).splitlines()[0])
"""
END = """
    more = fixture.stamp(fixture.new(8 << 20), 2)
    assert (fixture.wrong(kept, 1), fixture.wrong(more, 2)) == (0, 0), "bytes of another"
    del more
    torch.cuda.synchronize()
    print("alive", torch.cuda.memory_allocated() - allocated)
"""


class Misuse(unittest.TestCase):
    def check(self, middle, extra=0):
        done = fixture.code(BEGIN + middle + END)
        self.assertEqual(done.code, 0, done.text())
        self.assertIn(f"alive {extra}", done.out, done.text())
        return done

    def test_a_pointer_that_is_not_ours(self):
        done = self.check("    told(delete, 0x7f0000001000)\n    told(delete, torch.ones(100).data_ptr())\n")
        self.assertTrue("error:" in done.out or "glake" in done.err, done.text())

    def test_a_double_free(self):
        done = self.check("    p = alloc(4 << 20)\n    delete(p)\n    told(delete, p)\n")
        self.assertTrue("error:" in done.out or "glake" in done.err, done.text())

    def test_a_pointer_into_a_block(self):
        done = self.check("    told(delete, kept.data_ptr() + 4096)\n")
        self.assertTrue("error:" in done.out or "glake" in done.err, done.text())

    def test_null(self):
        self.check("    told(delete, 0)\n")

    def test_raw_allocations(self):
        self.check("    p = alloc(4 << 20)\n    assert p and torch.cuda.memory_allocated() == allocated + (4 << 20)\n    delete(p)\n")
