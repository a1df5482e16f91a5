"""Leaf replay with in-place changes, reordered leaves, and unusual reads.

Needs torch; every test is skipped without it.
"""

import contextlib
import gc
import os
import threading
import unittest
import weakref

os.environ["GLAKE_DEVICE"] = "sim"

import glake  # noqa: E402
from replays import OfReplay  # noqa: E402
from test_activations import torch  # noqa: E402

if torch:
    from glake.offload import _interception, _leaf
    from replays import Block, Layered, Silent
    from torch import nn
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop


class Changes(OfReplay):
    """Writes to a leaf's output after the leaf."""

    def inner(self, change):
        class Changed(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

            def forward(self, x):
                return x + self.second(torch.tanh(change(self.first(x))))

        return lambda on: Layered([Changed() for _ in range(2)], on)

    def test_in_place_within_the_layer(self):
        for change in (
            lambda x: x.add_(1),
            lambda x: functional.relu(x, inplace=True),
            lambda x: (x.view(-1)[3:].mul_(2), x)[1],
            lambda x: x.transpose(0, 1).sigmoid_().transpose(0, 1),
        ):
            self.same(self.inner(change), reasons=["changed"], steps=5)

    def test_a_leaf_that_is_changed_is_not_stored_again(self):
        torch.manual_seed(0)
        model = self.inner(lambda x: x.add_(1))(True)
        handle, stored = self.replays(model), []
        store, handle._packer.store = handle._packer.store, lambda *args: (stored.append(args[1]), store(*args))[1]
        counts = []
        for _ in range(4):
            stored.clear()
            model(self.inputs()).sum().backward()
            counts.append(len(stored))
        handle.remove()
        # What the second product of a layer gave is not read, and what the first gave is changed.
        self.assertEqual(counts, [4, 0, 0, 0])

    def test_what_is_changed_and_not_read(self):
        class Within(nn.Linear):
            def forward(self, x):
                return super().forward(x).mul_(2)

        for layer in (nn.Linear(16, 16), Within(16, 16)):
            model = Layered([layer], True)
            handle, stored = self.replays(model), []
            packs = handle._packer.store
            handle._packer.store = lambda *args, stored=stored, packs=packs: (stored.append(args[1]), packs(*args))[1]
            for count in (1, 0, 0, 0):
                stored.clear()
                model(self.inputs()).mul_(2).sum().backward()
                self.assertEqual(len(stored), count)
            self.assertEqual(self.reasons(handle), set())
            handle.remove()

    def test_in_place_after_the_layer(self):
        class Outer(Layered):
            def forward(self, x):
                for layer in self.layers:
                    x = checkpoint(layer, x, **self.options) if self.checkpoints else layer(x)
                    x.mul_(0.5)
                return x

        for early in (True, False):
            with set_checkpoint_early_stop(early):
                make = lambda on: Outer([nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(2)], on)
                self.same(make, reasons=[] if early else ["changed"], steps=5)

    def test_writes_that_nothing_counts(self):
        kept = lambda model: self.keeping(self.replays(model))
        for handle_of in (self.replays, kept):
            make = self.inner(Silent.apply)
            checkpointed, _ = self.steps(make, True, None, steps=5)
            found, reasons = self.steps(make, True, handle_of, steps=5)
            self.equal(checkpointed, found)
            self.assertEqual(reasons, {"differs"})

    def keeping(self, handle):
        handle._packer.least = handle._packer.least or 1 << 40
        return handle

    def test_a_layer_that_is_not_the_same_again(self):
        class Counts(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second, self.calls = nn.Linear(16, 16), nn.Linear(16, 16), 0

            def forward(self, x):
                self.calls += 1
                return torch.tanh(self.second(torch.tanh(self.first(x * (1 + self.calls % 2)))))

        make = lambda on: Layered([Counts()], on)
        checkpointed, _ = self.steps(make, True, None, steps=5)
        found, reasons = self.steps(make, True, self.replays, steps=5)
        self.equal(checkpointed, found)
        self.assertEqual(reasons, {"differs"})

    def test_leaves_that_change_places(self):
        class Swaps(nn.Module):
            def __init__(self):
                super().__init__()
                self.parts, self.calls = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)]), 0

            def forward(self, x):
                self.calls += 1
                # From the third forward on, the other way round when it is computed again.
                order = (1, 0) if self.calls > 4 and self.calls % 2 == 0 else (0, 1)
                found = [torch.tanh(self.parts[place](x)) for place in order]
                return (found[0] * found[1]).exp()

        make = lambda on: Layered([Swaps()], on)
        checkpointed, _ = self.steps(make, True, None, steps=5)
        found, reasons = self.steps(make, True, self.replays, steps=5)
        self.equal(checkpointed, found)
        self.assertEqual(reasons, {"other"})


class Orders(OfReplay):
    """Leaves that come in another order, or are absent, from pass to pass."""

    def test_layers_that_are_left_out(self):
        class Drops(Layered):
            calls = 0

            def forward(self, x):
                self.calls += 1
                for place, layer in enumerate(self.layers):
                    if (self.calls * 7 + place * 3) % 5 < 3:
                        x = checkpoint(layer, x, **self.options) if self.checkpoints else layer(x)
                return x

        self.same(lambda on: Drops([Block(after=0.1) for _ in range(4)], on), steps=12)

    def test_trust_does_not_pass_from_one_layer_to_another(self):
        class Layer(nn.Module):
            def __init__(self, after):
                super().__init__()
                self.first, self.second, self.after = nn.Linear(16, 16), nn.Linear(16, 16), after

            def forward(self, x):
                return x + self.second(torch.tanh(self.after(self.first(x))))

        class Turns(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers, self.calls = nn.ModuleList([Layer(torch.exp), Layer(Silent.apply)]), 0

            def forward(self, x):
                self.calls += 1
                # The one that writes is there from the fourth pass on, in the place of the one that does not.
                return checkpoint(self.layers[self.calls > 3], x, use_reentrant=False)

        def kept(model):
            handle = self.replays(model)
            handle._packer.least = 1 << 30
            return handle

        for handle_of in (self.replays, kept):
            checkpointed, _ = self.steps(lambda on: Turns(), True, None, steps=8)
            found, reasons = self.steps(lambda on: Turns(), True, handle_of, steps=8)
            self.equal(checkpointed, found)
            self.assertEqual(reasons, {"differs"})

    def test_a_pass_of_another_kind_between(self):
        def loss_of(model, batch):
            model.eval() if batch[0, 0, 0] > 0 else model.train()
            return model(batch).square().mean()

        self.same(lambda on: Layered([nn.Sequential(Block(), nn.Dropout(0.2), Block()) for _ in range(2)], on), loss_of=loss_of, steps=8)


class Graphs(OfReplay):
    def model(self, **options):
        torch.manual_seed(2)
        return Layered([Block(after=0.1) for _ in range(2)], True, **options)

    def both(self, work, passes=3, **options):
        """Compares the results of a piece of work with a model, pass after pass, with and without replay."""
        found = []
        for handle_of in (None, self.replays):
            model = self.model(**options)
            handle = handle_of(model) if handle_of else None
            torch.manual_seed(9)
            found.append([[None if t is None else t.clone() for t in work(model)] for _ in range(passes)])
            if handle:
                handle.remove()
        for one, other in zip(*found):
            for a, b in zip(one, other, strict=True):
                self.assertTrue(a is b is None or torch.equal(a, b))

    def gradients(self, model):
        found = [None if p.grad is None else p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    def test_retained(self):
        def work(model):
            loss = model(self.inputs()).square().sum()
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            loss.backward()
            return self.gradients(model)

        self.both(work)

    def test_differentiated_twice(self):
        def work(model):
            x = self.inputs().requires_grad_()
            for layer in model.layers:
                layer.mask = lambda length: torch.zeros(length, length)
                layer.forward = lambda x, layer=layer: x + layer.down(torch.tanh(layer.gate(layer.norm(x))))
            (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            gradient.square().sum().backward()
            return [x.grad, *self.gradients(model)]

        self.both(work)

    def test_of_inputs_alone_and_in_part(self):
        def work(model):
            x = self.inputs().requires_grad_()
            y = model(x)
            y[0].sum().backward(inputs=[x], retain_graph=True)
            y[1].sum().backward(inputs=[model.layers[1].down.weight])
            return [x.grad, *self.gradients(model)]

        self.both(work)

    def test_a_backward_within_the_forward(self):
        class Trains(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                self.inner(x).sum().backward()
                return self.inner(x + 1).sum()

        def work(model):
            Trains(model)(self.inputs()).backward()
            return self.gradients(model)

        self.both(work)
        outer = Trains(self.model())
        handle = self.replays(outer)
        for _ in range(3):
            outer(self.inputs()).backward()
        handle.remove()

    def test_on_another_thread(self):
        def work(model):
            loss = model(self.inputs()).square().sum()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            return self.gradients(model)

        self.both(work)

    def test_two_threads(self):
        torch.manual_seed(0)
        model = Layered([Block() for _ in range(3)], True)
        batches = [self.inputs() for _ in range(2)]
        plain = [torch.autograd.grad(model(x).sum(), list(model.parameters())) for x in batches]
        handle, found = self.replays(model), {}

        def work(place):
            found[place] = [torch.autograd.grad(model(batches[place]).sum(), list(model.parameters())) for _ in range(6)]

        threads = [threading.Thread(target=work, args=[place]) for place in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        handle.remove()
        for place in range(2):
            for gradients in found[place]:
                self.assertTrue(all(torch.equal(a, b) for a, b in zip(plain[place], gradients)))

    def test_a_generator_that_is_not_set_back(self):
        most, _leaf.Attention.most_beside = _leaf.Attention.most_beside, 1e9
        self.addCleanup(setattr, _leaf.Attention, "most_beside", most)

        def work(model):
            for layer in model.layers:
                layer.dropout = 0.3
            model(self.inputs()).square().sum().backward()
            return [*self.gradients(model), torch.rand(3)]

        self.both(work, preserve_rng_state=False)
        self.both(work, preserve_rng_state=True)

        def turned(model):
            # What is replayed already is not where a checkpoint lets the generator run on.
            model.passes = getattr(model, "passes", 0) + 1
            model.options["preserve_rng_state"] = model.passes % 4 != 0
            return work(model)

        self.both(turned, passes=8)

    def test_exceptions(self):
        class Fails(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.fails = nn.Linear(16, 16), ()

            def forward(self, x):
                x = torch.tanh(self.inner(x))
                kind = self.fails[0] if self.fails else None
                self.fails = self.fails[1:]
                if kind:
                    raise kind("here")
                return self.inner(x).exp()

        torch.manual_seed(0)
        model = Layered([Block(), Fails(), Block()], True)
        batch = self.inputs()
        plain = torch.autograd.grad(model(batch).sum(), list(model.parameters()))
        handle = self.replays(model)
        for fails in ((KeyError,), (None, KeyError), (KeyboardInterrupt,), (None, KeyboardInterrupt), ()):
            model.layers[1].fails = fails
            if fails:
                with self.assertRaises(fails[-1]):
                    model(batch).sum().backward()
                model.zero_grad()
            gc.collect()
            for _ in range(2):
                model.layers[1].fails = ()
                found = torch.autograd.grad(model(batch).sum(), list(model.parameters()))
                self.assertTrue(all(torch.equal(a, b) for a, b in zip(plain, found)))
            self.assertIsNone(_interception.current.scope)
        handle.remove()

    def test_an_exception_that_the_model_catches(self):
        class Catches(Layered):
            def forward(self, x):
                def fails(x):
                    self.layers[0](x)
                    raise KeyError

                with contextlib.suppress(KeyError):
                    checkpoint(fails, x, use_reentrant=False)
                return self.layers[1](super().forward(x))

        self.same(lambda on: Catches([Block(after=0.1) for _ in range(2)], on), steps=4)

    def test_memory_goes_with_the_graph(self):
        model = self.model()
        handle = self.replays(model)
        for _ in range(2):
            loss = model(self.inputs()).sum()
            scopes = [weakref.ref(scope) for scope in handle._replay._live]
            self.assertEqual(len(scopes), 2)
            self.assertGreater(glake.offload.report()["entries"], 0)
            gc.disable()
            try:
                # No backward ever comes, and nothing waits for a collection.
                del loss
                self.assertEqual([scope() for scope in scopes], [None, None])
                self.assertEqual(glake.offload.report()["entries"], 0)
                loss = model(self.inputs()).sum()
                loss.backward()
                self.assertEqual(list(handle._replay._live), [])
                self.assertEqual(glake.offload.report()["entries"], 0)
            finally:
                gc.enable()
        handle.remove()

    def test_without_gradients_nothing_is_stored(self):
        model = self.model()
        handle, taken = self.replays(model), glake.offload.report()["bytes_out"]
        with torch.no_grad():
            model(self.inputs())
        with torch.inference_mode():
            model(self.inputs())
        self.assertEqual(glake.offload.report()["bytes_out"], taken)
        model(self.inputs()).sum().backward()
        handle.remove()


if __name__ == "__main__":
    unittest.main()
