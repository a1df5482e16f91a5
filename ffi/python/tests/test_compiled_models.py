"""Modules with hooks that are compiled, exported or scripted, on CPU tensors laid over simulated GPUs' memory.

Needs torch; every test is skipped without it."""

import contextlib
import functools
import gc
import itertools
import os
import unittest
import warnings
import weakref

os.environ["GLAKE_DEVICE"] = "sim"

from replays import OfReplay  # noqa: E402
from test_activations import torch  # noqa: E402

if torch:
    from glake.offload._activations import Activations
    from glake.offload._budget import Offloaded
    from replays import Block, Layered
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx


class Compiled(OfReplay):
    def test_compiled_blocks(self):
        import torch._dynamo

        class Compiled(nn.Module):
            def __init__(self):
                super().__init__()
                self.block, self.after = Block(), nn.Linear(16, 16)
                self.call = torch.compile(self.block, backend="aot_eager", fullgraph=True)

            def forward(self, x):
                return torch.tanh(self.after(self.call(x))).exp()

        def make(on):
            torch._dynamo.reset()
            return Layered([Compiled() for _ in range(2)], on)

        self.same(make, steps=3)
        torch._dynamo.reset()

    def test_a_model_that_is_compiled_whole(self):
        import torch._dynamo
        from torch._dynamo.backends.debugging import aot_eager

        def outer(model):
            return torch.compile(lambda batch: model(batch) * 2, backend=backend)

        def inner(model):
            model.compile(backend=backend)
            return model

        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return aot_eager(graph, inputs)

        for compiled in (lambda model: torch.compile(model, backend=backend), inner, outer):
            found, sizes = [], []
            for replays in (False, True):
                torch._dynamo.reset()
                graphs.clear()
                torch.manual_seed(3)
                model = Layered([Block() for _ in range(2)], True)
                handle = self.replays(model) if replays else None
                call = compiled(model)
                for _ in range(4):
                    batch = self.inputs().requires_grad_()
                    loss = call(batch).square().sum()
                    found.append((loss.detach(), *torch.autograd.grad(loss, [batch, *model.parameters()])))
                if handle:
                    self.assertGreater(handle._packer.added, 0, "nothing is offloaded")
                    handle.remove()
                sizes.append(max(len(graph.graph.nodes) for graph in graphs))
                del handle, model, call, loss
            with self.subTest(compiled):
                self.assertTrue(all(torch.equal(a, b) for one, other in zip(found[:4], found[4:]) for a, b in zip(one, other)))
                self.assertGreaterEqual(sizes[1], sizes[0] - 2, "it is compiled in parts")
        torch._dynamo.reset()

    def test_exports(self):
        class Asks(nn.Linear):
            def forward(self, x):
                x = super().forward(x)
                return x * 2 if x.sum() > 0 else x

        model, asks = Layered([Block() for _ in range(2)], True), Asks(16, 16)
        handles = [self.replays(model), self.replays(asks)]
        model(self.inputs()).sum().backward()
        added = handles[0]._packer.added
        self.assertIsNotNone(torch.export.export(model, (self.inputs(),)))
        # So, torch exports no checkpoints.
        model.checkpoints = False
        self.assertIsNotNone(torch.export.export(model, (self.inputs(),), strict=True))
        model.checkpoints = True
        with self.assertRaises(Exception):
            torch.export.export(asks, (torch.randn(2, 16),))
        self.assertIsNone(torch._C._autograd._top_saved_tensors_default_hooks(False), "a trace that raised left its hooks")
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(self.inputs())
        self.assertEqual((handles[0]._packer.added, handles[0]._stack(), handles[1]._stack()), (added, [], []))
        for handle in handles:
            handle.remove()

    def test_scripts(self):
        model = Layered([Block()], True)
        handle = self.replays(model)
        model(self.inputs()).sum().backward()
        scripted = torch.jit.script(nn.Linear(4, 4))
        self.assertEqual(scripted(torch.ones(1, 4)).shape, (1, 4))
        handle.remove()

    def test_what_is_compiled_depends_on_nothing_that_hooks_look_at(self):
        import torch._dynamo

        torch._dynamo.reset()
        hooks = (
            lambda model: Activations(model, 0, self.memory),
            lambda model: Activations(model, 0, self.memory, True),
            lambda model: Offloaded(model, "1GiB", "fit", 0, self.memory),
        )

        def around():
            # A class of its own, with a forward of its own to be compiled.
            class Around(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.within = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

                def forward(self, x):
                    return self.within(x) * 2

            Around.forward.__code__ = Around.forward.__code__.replace()
            return Around

        # As many models, and classes of them, as would be compiled anew too often.
        with torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True):
            for hooked in hooks:
                for is_whole, makes in itertools.product((True, False), ([around()] * 6, [around() for _ in range(6)])):
                    torch._dynamo.reset()
                    for make in makes:
                        model = make()
                        handle = hooked(model if is_whole else model.within)
                        call = torch.compile(model, backend="aot_eager")
                        added = []
                        for _ in range(3):
                            call(self.inputs()).sum().backward()
                            added.append(handle._packer.added)
                        self.assertGreater(added[0], 0, (handle, is_whole))
                        if not isinstance(handle, Offloaded):
                            self.assertEqual(added, [added[0], 2 * added[0], 3 * added[0]], (handle, is_whole))
                        handle.remove()
        torch._dynamo.reset()

    def test_what_a_forward_compiles_by_itself(self):
        import torch._dynamo

        class Compiles(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
                self.call = torch.compile(lambda x: self.one(x), backend="aot_eager", fullgraph=True)

            def forward(self, x):
                return torch.cond(x.sum() > 0, self.other, self.one, (self.call(x),))

        for replays in (False, True):
            torch._dynamo.reset()
            torch.manual_seed(1)
            model, batch, found, said = Compiles(), self.inputs(), [], []
            for hooked in (False, True):
                handle = Activations(model, 0, self.memory, replays) if hooked else None
                torch._dynamo.reset()
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    for _ in range(3):
                        found.append(torch.autograd.grad(model(batch).square().sum(), list(model.parameters()), allow_unused=True))
                said.append({str(warning.message) for warning in told})
                if handle:
                    self.assertGreater(handle._packer.added, 0)
                    handle.remove()
            self.assertEqual(*said)
            same = lambda a, b: a is b is None or torch.equal(a, b)
            self.assertTrue(all(same(a, b) for each in found[1:] for a, b in zip(found[0], each)))
        torch._dynamo.reset()

    def test_traces(self):
        def gradients(model, x):
            return torch.autograd.grad(model(x).sum(), list(model.parameters()))

        for replays in (False, True):
            model = Layered([Block()], False)
            handle = Activations(model, 0, self.memory, replays)
            torch.jit.trace(model, (self.inputs(),), check_trace=False)(self.inputs())
            make_fx(functools.partial(gradients, model))(self.inputs())
            self.assertEqual(handle._packer.added, 0)
            handle.remove()

    def test_a_forward_that_a_signal_ended_leaves_nothing_once_its_model_is_gone(self):
        def interrupts(*_):
            raise KeyboardInterrupt

        for hooked in (
            lambda model: Activations(model, 0, self.memory),
            lambda model: Activations(model, 0, self.memory, True),
            lambda model: Offloaded(model, "1GiB", "fit", 0, self.memory),
        ):
            model = Layered([Block()], True)
            handle = hooked(model)
            model.layers[0].register_forward_hook(interrupts)
            with contextlib.suppress(KeyboardInterrupt):
                model(self.inputs())
            packer = weakref.ref(handle._packer)
            del model, handle
            gc.collect()
            self.assertIsNone(torch._C._autograd._top_saved_tensors_default_hooks(False))
            self.assertFalse(torch.nn.modules.module._global_forward_pre_hooks)
            self.assertIsNone(packer())

    def test_counting_references_frees_it_where_something_is_compiled(self):
        import torch._dynamo

        torch._dynamo.reset()
        for replays in (False, True):
            for is_compiled in (False, True):
                model = Layered([Block()], True)
                handle = Activations(model, 0, self.memory, replays)
                call = torch.compile(model, backend="aot_eager") if is_compiled else model
                call(self.inputs()).sum().backward()
                gone = [weakref.ref(each) for each in (handle, handle._packer, *([] if is_compiled else [model]))]
                torch._dynamo.reset()
                gc.collect()
                gc.disable()
                try:
                    handle.remove()
                    del handle, model, call
                    self.assertEqual([each() for each in gone], [None] * len(gone), (replays, is_compiled))
                finally:
                    gc.enable()


if __name__ == "__main__":
    unittest.main()
