"""Autocast's casts of parameters are not offloaded.

Needs torch; every test is skipped without it.
"""

import contextlib
import unittest

from test_activations import OfTorch, glake, torch

if torch:
    from glake.offload import _saved


class Casts(OfTorch):
    """Autocast's casts of weights are not offloaded, whether these are trained or not."""

    SIZE = 32

    def program(self, kind):
        """Returns a module, and the bytes of the activations that it saves in a forward under autocast."""
        nn, size = torch.nn, self.SIZE
        torch.manual_seed(2)
        if kind == "convolution":
            # What goes in and what comes out, of both.
            return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), torch.randn(2, 3, 8, 8)
        if kind == "channels last":
            model, x = self.program("convolution")
            return model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        if kind == "functional":

            class Tied(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.one = nn.Embedding(size, size)

                def forward(self, x):
                    return nn.functional.linear(torch.tanh(x @ self.one.weight), self.one.weight)

            return Tied(), torch.randn(3, size)
        return nn.Sequential(nn.Linear(size, 2 * size), nn.Linear(2 * size, size), nn.Linear(size, size)), torch.randn(3, size)

    def step(self, model, values, dtype):
        x = values.clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            y = model(x)
        return y, x

    def weights(self, saved, model):
        """Returns how many offloaded tensors have the size and the values of a weight."""
        casts = [p.detach().to(dtype) for p in model.parameters() for dtype in (torch.bfloat16, torch.float16)]
        flat = lambda tensor: tensor.detach().flatten().sort().values
        return sum(any(t.dtype == cast.dtype and t.numel() == cast.numel() and torch.equal(flat(t), flat(cast)) for cast in casts) for t in saved)

    def test_no_weight_is_among_what_leaves(self):
        for kind in ("linear", "convolution", "channels last", "functional"):
            for dtype in (torch.bfloat16, torch.float16):
                for trained in (True, False, "bias"):
                    with self.subTest(kind=kind, dtype=dtype, trained=trained):
                        model, values = self.program(kind)
                        for name, parameter in model.named_parameters():
                            parameter.requires_grad_(trained is True or (trained == "bias" and name.endswith("bias")))

                        def gradients(around):
                            with around:
                                y, x = self.step(model, values, dtype)
                            y.float().square().sum().backward()
                            found = [x.grad, *[None if p.grad is None else p.grad.clone() for p in model.parameters()]]
                            model.zero_grad()
                            return found

                        plain, left = gradients(contextlib.nullcontext()), []
                        handle = self.activations(model)
                        pack = handle._packer.pack

                        def packs(tensor):
                            saved = pack(tensor)
                            left.extend([tensor.detach().clone()] if type(saved) is _saved.Away else [])
                            return saved

                        handle._packer.pack = packs
                        for _ in range(5):
                            for one, other in zip(plain, gradients(contextlib.nullcontext())):
                                self.assertTrue(one is other is None or torch.equal(one, other))
                        handle.remove()
                        self.assertEqual(self.weights(left, model), 0)
                        if trained is True or kind == "functional":
                            self.assertGreater(len(left), 0, "activations leave")

    def test_frozen_weights_are_no_bytes_more_than_trained_ones(self):
        def out(trained, within):
            model = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False), torch.nn.Tanh(), torch.nn.Linear(256, 256, bias=False))
            model.requires_grad_(trained)
            handle, before = self.activations(model if within == "module" else None), glake.offload.report()["bytes_out"]
            with handle if within == "block" else contextlib.nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16):
                y = model(torch.ones(4, 256, requires_grad=True))
            self.memory.free()
            taken = glake.offload.report()["bytes_out"] - before
            y.float().sum().backward()
            handle.remove()
            return taken

        row = 4 * 256 * 2
        # What goes into the first, and what tanh gave, which goes into the second; each save that is checked goes twice.
        for within in ("module", "block"):
            self.assertEqual([out(True, within), out(False, within)], [2 * 2 * row, 2 * row], within)


if __name__ == "__main__":
    unittest.main()
