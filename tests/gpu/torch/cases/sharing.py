"""CUDA tensors in another process, through torch.multiprocessing."""
import unittest

import fixture

ISOLATED = True


class Sharing(unittest.TestCase):
    @fixture.only("compiled", "a pluggable allocator has no shareIpcHandle")
    @fixture.limit(60)
    def test_tensors_arrive_and_come_back(self):
        done = fixture.program("share.py", timeout=50)
        self.assertEqual(done.code, 0, done.text())

    @fixture.only("pluggable", "the other backend shares")
    def test_the_plain_abi_says_so(self):
        done = fixture.code("""
            import torch, fixture
            from torch.multiprocessing.reductions import reduce_tensor
            fixture.enable()
            tensor = fixture.stamp(fixture.new(1 << 20), 1)
            try:
                reduce_tensor(tensor)
                print("no error")
            except RuntimeError as error:
                print("refused:", error)
            print("alive", fixture.wrong(tensor, 1))
        """)
        self.assertEqual(done.code, 0, done.text())
        self.assertIn("refused: ", done.out, done.text())
        self.assertIn("alive 0", done.out, done.text())
