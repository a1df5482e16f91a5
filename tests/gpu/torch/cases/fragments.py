"""Free pieces are stitched for real, and every byte is where it was put."""
import random, unittest

import torch

import fixture
from fixture import GIB, MIB


class Fragments(unittest.TestCase):
    def test_every_other_block(self):
        whole, kept = fixture.stitched(2 * GIB)
        self.assertEqual(fixture.wrong(whole, 0), 0)
        for seed, tensor in enumerate(kept, 1):
            self.assertEqual(fixture.wrong(tensor, seed), 0)

    def test_a_stitched_block_is_found_again(self):
        whole, kept = fixture.stitched(GIB)
        del whole
        torch.cuda.synchronize()
        stitches, reserved = fixture.ours("stitches"), torch.cuda.memory_reserved()
        for seed in range(10):
            again = fixture.stamp(fixture.new(GIB), seed)
            self.assertEqual(fixture.wrong(again, seed), 0)
            del again
        self.assertEqual(fixture.ours("stitches"), stitches)
        # Comparing takes memory too.
        self.assertLessEqual(torch.cuda.memory_reserved() - reserved, 32 * MIB)

    def test_kernels_and_copies_on_stitched_memory(self):
        whole, _ = fixture.stitched(512 * MIB)
        matrix = whole.view(torch.float32).view(8192, 16384)
        matrix.copy_(torch.randn(8192, 16384, device="cuda"))
        plain = matrix.clone()
        self.assertTrue(torch.equal(matrix, plain))
        self.assertTrue(torch.equal(matrix @ matrix[:64].T, plain @ plain[:64].T))
        host = torch.empty(64 * MIB, dtype=torch.uint8).random_(0, 256)
        part = whole[100 * MIB : 164 * MIB]
        part.copy_(host)
        self.assertTrue(torch.equal(part.cpu(), host))
        pinned = host.pin_memory()
        part.zero_()
        part.copy_(pinned, non_blocking=True)
        self.assertTrue(torch.equal(part.cpu(), host))

    def test_programs_of_random_sizes(self):
        for seed in range(3):
            rng, live = random.Random(seed), []
            for step in range(400):
                if live and (rng.random() < 0.45 or sum(t.numel() for t, _ in live) > 2 * GIB):
                    tensor, mark = live.pop(rng.randrange(len(live)))
                    self.assertEqual(fixture.wrong(tensor, mark), 0, (seed, step))
                    del tensor
                else:
                    size = 4 * int(2 ** rng.uniform(6, 25.5))
                    live.append((fixture.stamp(fixture.new(size), step), step))
                if step % 100 == 99:
                    torch.cuda.empty_cache()
            for tensor, mark in live:
                self.assertEqual(fixture.wrong(tensor, mark), 0, seed)
            live.clear()
            tensor = None

    def test_nothing_is_left_over(self):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        whole, kept = fixture.stitched(256 * MIB)
        del whole, kept
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.assertLessEqual(torch.cuda.memory_allocated() - before, 8 * MIB)  # the stamps' base
        self.assertLessEqual(torch.cuda.memory_reserved() - torch.cuda.memory_allocated(), 128 * MIB)
