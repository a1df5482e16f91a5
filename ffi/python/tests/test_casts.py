"""Autocast's casts of parameters do not leave: they are made again when they are read.

Needs torch; every test is skipped without it."""

import contextlib
import gc
import unittest
from unittest import mock

from test_activations import OfTorch, glake, torch

if torch:
    from glake.offload import _casts, _report, _saved

    class Lowered(torch.nn.Module):
        """A product with a weight's cast that the program makes itself, and tells of."""

        def __init__(self, size=32):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(size, size))
            self.made = []

        def forward(self, x):
            cast = self.weight.to(torch.bfloat16)
            self.made.append(cast.untyped_storage()._weak_ref())
            return x.to(torch.bfloat16) @ cast.t()

        def live(self):
            """How many of them have memory."""
            found = [torch.UntypedStorage._new_with_weak_ptr(weak) for weak in self.made]
            return sum(storage is not None for storage in found)

        def forget(self):
            for weak in self.made:
                torch.UntypedStorage._free_weak_ref(weak)
            self.made.clear()


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
    def lowered(self, offloads=True, passes=3):
        """A layer, and the handle of its hooks, after the passes in which casts are looked at."""
        torch.manual_seed(5)
        layer = Lowered()
        handle = self.activations(layer) if offloads else None
        self.addCleanup(layer.forget)
        for _ in range(passes if offloads else 0):
            layer(torch.ones(4, 32, requires_grad=True)).float().sum().backward()
        layer.zero_grad()
        layer.forget()
        return layer, handle

    def alike(self, program):
        """What a program gives, of a layer whose casts are made again and of one without hooks: the same, to the bit."""
        seen = []
        for offloads in (False, True):
            layer, handle = self.lowered(offloads)
            x = torch.linspace(-1, 1, 128).view(4, 32).requires_grad_()
            found = program(layer, x)
            seen.append([*found, x.grad, layer.weight.grad])
            if handle:
                handle.remove()
        for one, other in zip(*seen):
            self.assertTrue(one is other is None or torch.equal(one, other), program)

    def test_they_take_no_memory_until_they_are_read(self):
        torch.manual_seed(5)
        layer = Lowered()
        handle = self.activations(layer)
        found, before = [], _report.counts.cast_again
        for _ in range(4):
            y = layer(torch.ones(4, 32, requires_grad=True))
            found.append(layer.live())
            y.float().sum().backward()
            layer.forget()
        self.assertEqual(found, [1, 1, 0, 0])
        self.assertEqual(_report.counts.cast_again - before, 2 * 2 * 32 * 32)
        handle.remove()

    def test_so_it_is_of_frozen_weights_of_linear_layers(self):
        made = []
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)).requires_grad_(False)
        handle, before = self.activations(model), _report.counts.cast_again
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = model(torch.ones(4, 32, requires_grad=True))
            made.append(_report.counts.cast_again - before)
            y.float().sum().backward()
        handle.remove()
        both = 2 * 64 * (32 + 64)
        self.assertEqual(made, [0, 0, both, 2 * both])

    def test_a_frozen_tensor_as_large_as_a_weight_is_none_for_that(self):
        class Masked(torch.nn.Linear):
            """What is saved has the sizes and strides of the weight, and other values."""

            def forward(self, x):
                return torch.nn.functional.linear(x, self.weight.to(torch.bfloat16) * 0.5)

        for make in (lambda: Masked(32, 32), lambda: torch.nn.Sequential(torch.nn.Linear(32, 32), Masked(32, 32))):
            torch.manual_seed(3)
            model, seen = make().requires_grad_(False), []
            for handle in (None, self.activations(model)):
                for _ in range(4):
                    x = torch.linspace(-1, 1, 128).view(4, 32).requires_grad_()
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        y = model(x)
                    y.float().square().sum().backward()
                    seen.append(x.grad)
            self.assertTrue(all(torch.equal(seen[0], each) for each in seen))
            places = handle._packer._casts._places.values()
            self.assertEqual([id(place.parameter()) for place in places], [] if isinstance(model, Masked) else [id(model[0].weight)])
            handle.remove()

    def test_an_optimizer_steps_before_they_are_read(self):
        def program(layer, x):
            optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5)
            waits = layer(x).float().square().sum()
            other = layer(x.detach().clone() * 3).float().square().sum()
            other.backward()
            optimizer.step()
            waits.backward()
            return [waits.detach(), other.detach(), layer.weight.detach().clone()]

        self.alike(program)

    def test_a_step_in_the_backward_pass_whose_parameter_is_read_once_more(self):
        def program(layer, x):
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

            def steps(_):
                optimizer.step()
                optimizer.zero_grad()

            hook = layer.weight.register_post_accumulate_grad_hook(steps)
            layer(layer(x).float()).float().square().sum().backward()
            layer(x.detach()).float().square().sum().backward()
            hook.remove()
            return [layer.weight.detach().clone()]

        self.alike(program)

    def test_graphs_that_are_retained_and_differentiated_twice(self):
        def program(layer, x):
            y = layer(x).float().square().sum()
            y.backward(retain_graph=True)
            y.backward(retain_graph=True)
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x)
            return [first.detach(), second]

        self.alike(program)

    def test_parameters_that_change_in_the_first_passes_keep_their_casts(self):
        def in_place(layer):
            with torch.no_grad():
                layer.weight.mul_(2)

        def unseen(layer):
            layer.weight.data.mul_(2)

        def other_bytes(layer):
            layer.weight.data = layer.weight.data * 2

        for change in (in_place, unseen, other_bytes):
            seen = []
            for offloads in (False, True):
                layer, handle = self.lowered(offloads, passes=0)
                found = []
                for _ in range(5):
                    x = torch.linspace(-1, 1, 128).view(4, 32).requires_grad_()
                    y = layer(x).float().square().sum()
                    change(layer)
                    y.backward()
                    found += [x.grad, layer.weight.grad.clone()]
                seen.append(found)
                if offloads:
                    self.assertTrue(all(place.differs for place in handle._packer._casts._places.values()))
                    handle.remove()
            self.assertTrue(all(torch.equal(one, other) for one, other in zip(*seen)), change)

    def test_one_that_changes_later_is_told_and_its_casts_are_kept_from_then_on(self):
        layer, handle = self.lowered()

        def step():
            x = torch.linspace(-1, 1, 128).view(4, 32).requires_grad_()
            y, cast = layer(x).float().square().sum(), layer.weight.detach().bfloat16()
            with torch.no_grad():
                layer.weight.mul_(2)
            y.backward()
            return x.grad, 2 * (x.detach().bfloat16() @ cast.t()) @ cast

        with self.assertRaisesRegex(RuntimeError, r"cast to torch.bfloat16 of a parameter \[32, 32\].*is at version 1; expected version 0"):
            step()
        one, other = step()
        self.assertTrue(torch.equal(one, other.float()))
        handle.remove()

    def test_what_is_changed_itself_raises_as_without(self):
        class Changed(Lowered):
            def forward(self, x):
                self.cast = self.weight.to(torch.bfloat16)
                self.turned = self.cast.t()
                return x.to(torch.bfloat16) @ self.turned

        layer = Changed()
        handle = self.activations(layer)
        for _ in range(4):
            layer(torch.ones(4, 32)).float().sum().backward()
        errors = []
        for handle in (handle, None):
            y = layer(torch.ones(4, 32, requires_grad=True)).float().sum()
            with torch.no_grad():
                layer.cast.mul_(2)
            with self.assertRaises(RuntimeError) as raised:
                y.backward()
            errors.append(str(raised.exception).partition(" Hint")[0])
            if handle:
                handle.remove()
        self.assertEqual(errors[0], errors[1])

    def test_optimizers_are_watched_as_long_as_casts_are_away(self):
        from torch.optim.optimizer import _global_optimizer_pre_hooks as watched

        layer, handle = self.lowered()
        self.assertEqual(len(watched), 0)
        y = layer(torch.ones(4, 32, requires_grad=True))
        self.assertEqual(len(watched), 1)
        y.float().sum().backward()
        del y
        gc.collect()
        self.assertEqual((len(watched), len(_casts._away._casts)), (0, 0))
        handle.remove()

    def test_no_memory_to_look_or_to_ask(self):
        for where in ("are_same", "read"):
            layer, handle = self.lowered(passes=0)
            fails = mock.Mock(side_effect=RuntimeError("CUDA out of memory."))
            with mock.patch(f"glake.offload._bits.{where}", fails):
                for _ in range(3):
                    layer(torch.ones(4, 32, requires_grad=True)).float().sum().backward()
            (place,) = handle._packer._casts._places.values()
            self.assertEqual((place.same, place.differs), (0, False), where)
            for _ in range(3):
                layer(torch.ones(4, 32, requires_grad=True)).float().sum().backward()
            self.assertGreater(place.same, 1, where)
            handle.remove()


if __name__ == "__main__":
    unittest.main()
