"""Ranks of one process group are parked at the same step: an all-reduce in each step, twenty parks, the same results as without any."""
import unittest

import torch

import fixture

ISOLATED = True
ALONE = True  # its shrinks take everything of the GPU that they can


class Ranks(unittest.TestCase):
    def check(self, backend, count):
        ended = fixture.ranks("parked.py", count, backend, timeout=150)
        for rank, done in enumerate(ended):
            self.assertEqual(done.code, 0, f"rank {rank}: {done.text()}")
        found = [done.json() for done in ended]
        for rank in found:
            self.assertIsNone(rank["error"], found)
            self.assertTrue(rank["same"] and rank["wrong"] == 0, found)
            self.assertEqual((rank["parked"], len(rank["waited_at"])), (20, 20), found)
            self.assertEqual(rank["waited_at"], found[0]["waited_at"])
            self.assertLess(rank["stayed"], 128 * fixture.MIB, found)

    @fixture.limit(180)
    def test_two_that_may_share_a_gpu(self):
        self.check("gloo", 2)

    @fixture.limit(180)
    @fixture.gpus(2)
    def test_each_with_a_gpu_of_its_own(self):
        self.check("nccl", torch.cuda.device_count())
