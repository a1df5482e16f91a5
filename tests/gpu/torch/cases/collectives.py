"""NCCL over all GPUs on tensors that straddle extents and on stitched ones."""
import unittest

import torch

import bed

ISOLATED = True
GPUS = 2
ORDER = 0


class Collectives(unittest.TestCase):
    def check(self, **env):
        ended = bed.ranks("collectives.py", torch.cuda.device_count(), timeout=120, **env)
        for rank, done in enumerate(ended):
            self.assertEqual(done.code, 0, f"rank {rank}: {done.text()}")
        self.assertIn("after trims: right", ended[0].out)

    @bed.limit(150)
    def test_right_bytes(self):
        self.check()

    @bed.limit(150)
    @bed.only("compiled", "torch registers nothing of a pluggable allocator")
    def test_right_bytes_where_registration_was_asked_for(self):
        self.check(TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK="1")
