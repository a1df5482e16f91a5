"""Leaf replay without free GPU memory, on CPU tensors placed over simulated GPUs' memory.

Needs torch; every test is skipped without it.
"""

import contextlib
import os
import unittest

os.environ["GLAKE_DEVICE"] = "sim"

from replays import OfReplay  # noqa: E402
from test_activations import torch  # noqa: E402

if torch:
    from glake.offload._budget import Offloaded
    from replays import Layered
    from torch import nn
    from torch.utils._python_dispatch import TorchDispatchMode

    class Full(TorchDispatchMode):
        """A GPU without memory for the output of an operation."""

        def __init__(self, name):
            super().__init__()
            self.name, self.asked = name, 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket.__name__ == self.name:
                self.asked += 1
                raise torch.OutOfMemoryError("CUDA out of memory. (as if)")
            return function(*args, **(kwargs or {}))


class Short(OfReplay):
    """A program does not notice that the GPU has no memory for comparisons."""

    def make(self):
        torch.manual_seed(1)
        return Layered([nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(2)], True)

    def gradients(self, model, around):
        found = []
        for step in range(3):
            torch.manual_seed(step)
            model.zero_grad()
            with around:
                model(self.inputs()).square().mean().backward()
            found.append([p.grad.clone() for p in model.parameters()])
        return found

    def test_comparisons_that_find_no_memory_are_made_another_time(self):
        asked = set()
        for name in ("clone", "ones", "eq", "all", "__iand__", "bitwise_and_", "stack"):
            expected = self.gradients(self.make(), Full(name))
            for handle_of in (self.replays, lambda model: Offloaded(model, "1MiB", "hybrid", 0, self.memory)):
                model, full = self.make(), Full(name)
                handle = handle_of(model)
                handle._replay.least_inner = 0
                # There is none, and then there is some again.
                for around in (full, contextlib.nullcontext()):
                    before = self.replayed()
                    for one, other in zip(expected, self.gradients(model, around), strict=True):
                        self.assertTrue(all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), name)
                if isinstance(handle, Offloaded):
                    # All fits: nothing is stored from then on.
                    self.assertEqual(handle.report()["sites"][0]["plan"]["offloaded"]["items"], 0)
                else:
                    self.assertGreater(self.replayed(), before, name)
                self.assertNotIn("differs", self.reasons(handle), name)
                handle.remove()
                asked |= {name} if full.asked else set()
        self.assertGreaterEqual(asked, {"clone", "ones", "eq", "all", "stack"})


if __name__ == "__main__":
    unittest.main()
