"""Leaf replay under a budget: a plan says which leaves are stored, on CPU tensors laid over simulated GPUs' memory.

Needs torch; every test is skipped without it."""

import os
import types
import unittest

os.environ["GLAKE_DEVICE"] = "sim"

from replays import OfReplay  # noqa: E402
from test_activations import torch  # noqa: E402

if torch:
    from glake.offload import _report
    from glake.offload._budget import Offloaded
    from glake.offload._record import Record
    from replays import Layered
    from torch import nn
    from torch.nn import functional

    class Saving(nn.Module):
        """Attention that saves beside its output, as GPUs' kernels do, before and after a product."""

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, q, k, v):
                weights = (q @ k.transpose(-1, -2)).softmax(-1)
                ctx.save_for_backward(q, k, v, weights)
                return weights @ v

            @staticmethod
            def backward(ctx, gradient):
                q, k, v, weights = ctx.saved_tensors
                given = gradient @ v.transpose(-1, -2)
                scores = weights * (given - (given * weights).sum(-1, keepdim=True))
                return scores @ k, scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ gradient

        def __init__(self, size):
            super().__init__()
            self.into, self.out = nn.Linear(size, size), nn.Linear(size, size)

        def forward(self, x):
            q = self.into(x).unsqueeze(1)
            return x + 0.1 * self.out(functional.scaled_dot_product_attention(q, q, q).squeeze(1))


class Budget(OfReplay):
    """`hybrid`: a plan says which leaves are stored."""

    def setUp(self):
        super().setUp()
        self.original, functional.scaled_dot_product_attention = functional.scaled_dot_product_attention, lambda q, k, v: Saving.Function.apply(q, k, v)

    def tearDown(self):
        functional.scaled_dot_product_attention = self.original
        super().tearDown()

    def test_what_could_not_be_stored_is_computed_again(self):
        class Fails:
            added = 0

            def store(self, *_args):
                raise MemoryError

        leaf, sketch = types.SimpleNamespace(is_read=True), types.SimpleNamespace(reads_output=True, beside=[])
        record = Record(None, leaf, sketch, None, None)
        with self.assertRaises(MemoryError):
            record.store(torch.ones(2), [], Fails(), 0)
        self.assertEqual(record.hindrance(), "planned")

    def test_passes_are_as_their_plans_whatever_is_stored(self):
        for budget in ("1GiB", "18MiB"):
            make = lambda on: Layered([Saving(64) for _ in range(30)], on)
            inputs = lambda: torch.randn(16, 60, 64)
            handles = []

            def handle_of(model):
                handles.append(Offloaded(model, budget, "hybrid", 0, self.memory))
                handles[-1]._replay.least_inner = 0
                return handles[-1]

            plain = self.steps(make, True, None, inputs=inputs, steps=10)[0]
            before = _report.counts.recomputed
            self.equal(plain, self.steps(make, True, handle_of, inputs=inputs, steps=10)[0])
            told = handles[0].told()
            # Where all is kept nothing is asked any more.
            self.assertGreaterEqual(told["passes"], 3 if budget == "1GiB" else 10)
            # What the first pass showed is followed from the third on: which outputs are not read again is known then.
            self.assertLessEqual(told["diverged"], 1, budget)
            if budget == "1GiB":
                # Two products and attention a layer, of which the last product is not read.
                self.assertLessEqual(_report.counts.recomputed - before, 2 * 30 * 3)
        self.assertGreater(self.replayed(), 0)

    def test_forwards_whose_graphs_are_dropped_add_nothing_to_what_a_pass_needs(self):
        model = Layered([nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128), nn.ReLU()) for _ in range(6)], True)
        handle = Offloaded(model, "12MiB", "hybrid", 0, self.memory)
        # Since the process began.
        above = handle.told()["above_budget"] or 0
        batch = torch.randn(2048, 128)
        for _ in range(6):
            for _ in range(8):
                model(batch)
            model.zero_grad()
            model(batch).square().sum().backward()
        self.assertIsNone(handle.told()["unplanned"])
        self.assertEqual(handle.told()["above_budget"], above)
        self.assertLess(len(handle._packer._items), 100)
        handle.remove()


if __name__ == "__main__":
    unittest.main()
