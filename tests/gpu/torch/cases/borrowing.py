"""borrow = wait: other streams' memory is taken with a wait on the GPU, and every byte is still right."""
import unittest

import torch

import fixture, races
from fixture import MIB

CONFIG = {"pool": {"borrow": "wait"}}


class Borrowing(unittest.TestCase):
    def setUp(self):
        self.one, self.other = torch.cuda.Stream(), torch.cuda.Stream()

    def test_blocks_change_streams(self):
        for size in (4096, 3 * MIB, 48 * MIB):
            with self.subTest(size):
                self.assertEqual(races.freed_while_writing(size, 40, self.one, self.other), 0)
                self.assertEqual(races.recorded_elsewhere(size, 40, self.one, self.other), 0)
                self.assertEqual(races.read_while_reused(size, 40, self.one, self.other), 0)

    def test_stitched_from_another_stream(self):
        self.assertEqual(races.stitched_while_writing(20, self.one, self.other), 0)

    def test_waits_are_made_and_counted(self):
        before = fixture.ours("stream_waits"), fixture.ours("gpu_wait_us")
        torch.cuda.empty_cache()
        with torch.cuda.stream(self.one):
            block = fixture.new(256 * MIB)
            races.late(50_000_000)
            block.fill_(1)
            del block
        reserved = torch.cuda.memory_reserved()
        taken = races.filled(256 * MIB, 7, self.other)
        self.assertEqual(torch.cuda.memory_reserved(), reserved)
        torch.cuda.synchronize()
        self.assertEqual(int((taken != 7).sum()), 0)
        self.assertGreater(fixture.ours("stream_waits"), before[0])
        self.assertGreaterEqual(fixture.ours("gpu_wait_us"), before[1])
