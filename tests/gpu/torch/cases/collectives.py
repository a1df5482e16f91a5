"""NCCL over all GPUs on tensors that straddle extents and on stitched ones."""
import unittest

import torch

import fixture

ISOLATED = True
GPUS = 2
ORDER = 0


class Collectives(unittest.TestCase):
    def check(self, **env):
        ended = fixture.ranks("collectives.py", torch.cuda.device_count(), timeout=120, **env)
        for rank, done in enumerate(ended):
            self.assertEqual(done.code, 0, f"rank {rank}: {done.text()}")
        self.assertIn("after trims: right", ended[0].out)

    @fixture.limit(150)
    def test_right_bytes(self):
        self.check()

    @fixture.limit(150)
    @fixture.only("compiled", "torch registers nothing of a pluggable allocator")
    def test_right_bytes_where_registration_was_asked_for(self):
        self.check(TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK="1")

    def graph(self, mode, **env):
        ended = fixture.ranks("fixed_graph.py", torch.cuda.device_count(), mode, timeout=120, **env)
        for rank, done in enumerate(ended):
            self.assertEqual(done.code, 0, f"rank {rank}: {done.text()}")
        self.assertIn(f"{mode}: right", ended[0].out)

    @fixture.limit(150)
    def test_a_graph_in_a_fixed_pool_replays_after_a_shrink(self):
        self.graph("fixed", NCCL_GRAPH_REGISTER="1")

    @fixture.limit(150)
    def test_a_graph_that_left_replays_if_nccl_registers_nothing(self):
        self.graph("left", NCCL_GRAPH_REGISTER="0")

    @fixture.limit(150)
    def test_a_shrink_warns_of_graphs_with_collectives(self):
        self.graph("warned", NCCL_GRAPH_REGISTER="1")
