"""Autocast's casts of parameters do not leave; those of frozen weights are made again when they are read.

Needs torch; every test is skipped without it."""

import contextlib
import gc
import unittest
import weakref
from unittest import mock

from test_activations import OfTorch, glake, torch

if torch:
    from glake.offload import _report, _saved


class Leaves(OfTorch):
    """Whether these are trained or not."""

    SIZE = 32

    def program(self, kind):
        """A module, and bytes of the activations that it saves in a forward of autocast."""
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
        """How many of the tensors that were offloaded are as large as a weight, and of its values."""
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


class Again(OfTorch):
    def layer(self, offloads=True, passes=3, make=None):
        """A frozen layer, and the handle of its hooks, after the passes in which casts are looked at."""
        torch.manual_seed(5)
        layer = (make or (lambda: torch.nn.Linear(32, 32)))().requires_grad_(False)
        handle = self.activations(layer) if offloads else None
        for _ in range(passes if offloads else 0):
            self.forward(layer, torch.ones(4, 32, requires_grad=True)).sum().backward()
        return layer, handle

    def forward(self, layer, x, kind=None):
        # What tanh gives is offloaded.
        with torch.autocast("cpu", dtype=kind or torch.bfloat16):
            return torch.tanh(layer(x)).float().square()

    def alike(self, program, make=None, passes=3):
        """What a program gives, of a layer whose casts are made again and of one without hooks: the same, to the bit. Answers how many bytes
        were."""
        seen, before = [], 0
        for offloads in (False, True):
            layer, handle = self.layer(offloads, passes, make)
            x = torch.linspace(-1, 1, 128).view(4, 32).requires_grad_()
            before = _report.counts.cast_again
            found = program(layer, x)
            seen.append([*found, x.grad])
            if handle:
                handle.remove()
        for one, other in zip(*seen):
            self.assertTrue(one is other is None or torch.equal(one, other), program)
        return _report.counts.cast_again - before

    def test_they_take_no_memory_until_they_are_read(self):
        made, again = [], []
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)).requires_grad_(False)
        handle, owns = self.activations(model), self.memory.owns

        def asked(tensor):
            if tensor.stride(0) == 1:
                made.append(tensor.untyped_storage()._weak_ref())
            return owns(tensor)

        self.memory.owns = asked
        for _ in range(5):
            before = _report.counts.cast_again
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = model(torch.ones(4, 32, requires_grad=True))
            live = sum(torch.UntypedStorage._new_with_weak_ptr(weak) is not None for weak in made)
            again.append((_report.counts.cast_again - before, live))
            y.float().sum().backward()
            for weak in made:
                torch.UntypedStorage._free_weak_ref(weak)
            made.clear()
        handle.remove()
        both = 2 * 64 * (32 + 64)
        self.assertEqual(again, [(0, 2), (0, 2), (both, 0), (both, 0), (both, 0)])

    def test_gradients_are_the_same(self):
        def program(layer, x):
            for kind in (torch.bfloat16, torch.float16, torch.bfloat16):
                self.forward(layer, x, kind).sum().backward()
            return []

        self.assertEqual(self.alike(program), 3 * 2 * 32 * 32)

    def test_graphs_that_are_retained_and_differentiated_twice(self):
        def program(layer, x):
            y = self.forward(layer, x).sum()
            y.backward(retain_graph=True)
            y.backward(retain_graph=True)
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x)
            return [first.detach(), second]

        self.assertGreater(self.alike(program), 0)

    def test_a_backward_in_inference_mode(self):
        def program(layer, x):
            y = self.forward(layer, x).sum()
            with torch.inference_mode():
                (found,) = torch.autograd.grad(y, x)
            return [found.clone()]

        self.assertGreater(self.alike(program), 0)

    def test_a_layer_that_computes_with_something_else_has_casts_that_stay(self):
        class Masked(torch.nn.Linear):
            """What is saved has the sizes and strides of the weight, and other values."""

            def forward(self, x):
                return torch.nn.functional.linear(x, self.weight.to(torch.bfloat16) * 0.5)

        class Late(torch.nn.Linear):
            def __getattr__(self, name):
                found = super().__getattr__(name)
                return found * 0.5 if name == "weight" and "is_on" in self.__dict__ else found

        class Shadowed(torch.nn.Linear):
            pass

        class Mode(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                if function is torch.nn.functional.linear:
                    args = (args[0], args[1] * 0.5, *args[2:])
                return function(*args, **kwargs or {})

        def turned_on(layer, x):
            layer.is_on = True
            if type(layer) is Shadowed:
                layer.__dict__["weight"] = layer.weight * 0.5
            with Mode() if type(layer) is torch.nn.Linear else contextlib.nullcontext():
                self.forward(layer, x).sum().backward()
            return []

        def parametrized():
            return torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(32, 32))

        for make in (Masked, Late, Shadowed, torch.nn.Linear):
            self.assertEqual(self.alike(turned_on, lambda: make(32, 32)), 0, make)
        self.assertEqual(self.alike(turned_on, parametrized), 0)

    def test_trained_weights_have_casts_that_stay(self):
        def program(layer, x):
            layer.requires_grad_()
            optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5)
            waits = self.forward(layer, x).sum()
            self.forward(layer, x.detach() * 3).sum().backward()
            optimizer.step()
            waits.backward()
            return [layer.weight.detach().clone()]

        self.assertEqual(self.alike(program), 0)

    def test_weights_that_change_in_the_first_passes_keep_their_casts(self):
        def in_place(layer):
            layer.weight.mul_(2)

        def unseen(layer):
            layer.weight.data.mul_(2)

        def other_bytes(layer):
            layer.weight.data = layer.weight.data * 2

        def another(layer):
            layer.weight = torch.nn.Parameter(layer.weight * 2, requires_grad=False)

        def gone(layer):
            layer.weight.untyped_storage().resize_(0)

        for change in (in_place, unseen, other_bytes, another, gone):

            def program(layer, x):
                begins, found = layer.weight.clone(), []
                for _ in range(5):
                    y = self.forward(layer, x).sum()
                    change(layer)
                    y.backward()
                    found.append(x.grad.clone())
                    layer.weight.untyped_storage().resize_(begins.nbytes)
                    layer.weight.copy_(begins)
                return found

            self.assertEqual(self.alike(program, passes=0), 0, change)

    def test_bytes_that_are_no_longer_the_weight_s_are_cast_as_they_were(self):
        def program(layer, x):
            y = self.forward(layer, x).sum()
            layer.weight.data = layer.weight.data * 2
            y.backward()
            y = self.forward(layer, x).sum()
            layer.weight = torch.nn.Parameter(layer.weight * 2, requires_grad=False)
            y.backward()
            return []

        self.assertGreater(self.alike(program), 0)

    def test_one_that_changes_later_is_told_and_its_casts_are_kept_from_then_on(self):
        layer, handle = self.layer()

        def step():
            x = torch.linspace(-1, 1, 128).view(4, 32).requires_grad_()
            y = self.forward(layer, x).sum()
            layer.weight.mul_(2)
            y.backward()
            return x.grad

        before = layer.weight.clone()
        with self.assertRaisesRegex(RuntimeError, r"cast to torch.bfloat16 .* weight \[32, 32\] .* is at version 2; expected version 1"):
            step()
        layer.weight.copy_(before)
        mine = step()
        handle.remove()
        layer.weight.copy_(before)
        self.assertTrue(torch.equal(mine, step()))

    def test_weights_can_be_swapped_and_what_is_read_is_let_go(self):
        layer, handle = self.layer()
        torch.utils.swap_tensors(layer.weight, torch.nn.Parameter(torch.ones(32, 32), requires_grad=False))
        layer.weight.last = self.forward(layer, torch.ones(4, 32, requires_grad=True)).sum()
        there = weakref.ref(layer.weight)
        handle.remove()
        del layer
        gc.collect()
        self.assertIsNone(there())

    def test_no_memory_to_look_or_to_ask(self):
        for where in ("_bits.are_same", "_casts.Casts._send"):
            layer, handle = self.layer(passes=0)
            fails = mock.Mock(side_effect=RuntimeError("CUDA out of memory."))
            for patched in (mock.patch(f"glake.offload.{where}", fails), contextlib.nullcontext()):
                with patched:
                    for _ in range(3):
                        self.forward(layer, torch.ones(4, 32, requires_grad=True)).sum().backward()
                (place,) = handle._packer._casts._places.values()
                self.assertEqual((place.same > 1, place.differs), (isinstance(patched, contextlib.nullcontext), False), where)
            handle.remove()


if __name__ == "__main__":
    unittest.main()
