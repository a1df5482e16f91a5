"""CUDA tensors in another process, through torch.multiprocessing."""
import unittest

import bed

ISOLATED = True


class Sharing(unittest.TestCase):
    @bed.only("compiled", "a pluggable allocator has no shareIpcHandle")
    @bed.limit(60)
    def test_tensors_arrive_and_come_back(self):
        done = bed.program("share.py", timeout=50)
        self.assertEqual(done.code, 0, done.text())

    @bed.only("pluggable", "the other backend shares")
    def test_the_plain_abi_says_so(self):
        done = bed.code("""
            import torch, bed
            from torch.multiprocessing.reductions import reduce_tensor
            bed.enable()
            tensor = bed.stamp(bed.new(1 << 20), 1)
            try:
                reduce_tensor(tensor)
                print("no error")
            except RuntimeError as error:
                print("refused:", error)
            print("alive", bed.wrong(tensor, 1))
        """)
        self.assertEqual(done.code, 0, done.text())
        self.assertIn("refused: ", done.out, done.text())
        self.assertIn("alive 0", done.out, done.text())
