"""A torch module that is followed, as it is and compiled in whatever way: its graph stays whole, what can be outside of it waits and has safe
points, and what is computed again for a backward pass has none.

Needs torch; every test is skipped without it."""

import contextlib
import copy
import gc
import importlib.util
import os
import pickle
import shutil
import tempfile
import unittest
from unittest import mock

os.environ["GLAKE_DEVICE"] = "sim"
# No processes beside this one.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import glake  # noqa: E402
from glake import _modules, _regions  # noqa: E402

from test_safepoint import shrinking  # noqa: E402

torch = None
if importlib.util.find_spec("torch"):
    import torch

if torch:

    class Net(torch.nn.Module):
        """A typical model with its own class, whose hooks run before the compiler begins."""

        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

        def forward(self, inputs):
            for part in self.parts:
                inputs = torch.relu(part(inputs))
            return inputs

    class Broken(Net):
        """A model with a graph break, so that it has two graphs."""

        def forward(self, inputs):
            inputs = self.parts[0](inputs)
            torch._dynamo.graph_break()
            return self.parts[1](inputs)


def chain():
    """A torch container class, which the compiler includes with its hooks."""
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())


def hooked(make):
    """A model with other hooks before and after."""
    module = make()
    for part in module.modules():
        part.register_forward_pre_hook(lambda _part, _inputs: None)
        part.register_forward_hook(lambda _part, _inputs, _output: None)
    return module


class OfTorch(unittest.TestCase):
    def setUp(self):
        self.compile_anew()
        torch.manual_seed(3)
        self.inputs = torch.randn(4, 8)
        # Every safe point, and whether it was waited there; what was waited for.
        self.safepoints, self.waits = [], []

    def compile_anew(self):
        # What was compiled and is gone would leave while torch looks through it.
        gc.collect()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

    @contextlib.contextmanager
    def noted(self):
        """Gives each part a region, as if the parts were in a GPU's memory."""

        def safepoint():
            self.safepoints.append(glake.safepoint())

        def tags(part, recurse):
            return tuple(type(each).__name__ for each in part.modules()) if recurse else (type(part).__name__,)

        with (
            mock.patch.object(_modules, "safepoint", safepoint),
            mock.patch.object(_modules, "_tags_of", tags),
            mock.patch.object(_regions, "wait", self.waits.append),
            mock.patch.object(_regions, "order", mock.Mock()) as self.order,
        ):
            yield

    def passes(self, call, module, count=4):
        """Runs several passes, with a shrink waiting from the second on, and compares the results with the plain module's."""
        with torch.no_grad():
            wanted = module(self.inputs)
            self.safepoints.clear()
            self.waits.clear()
            with shrinking() as begin:
                found = [call(self.inputs)]
                begin()
                found += [call(self.inputs) for _ in range(count - 1)]
        for each in found:
            torch.testing.assert_close(each, wanted)


@unittest.skipUnless(torch, "torch is not installed: no module of its is followed here")
class Eager(OfTorch):
    def test_every_part_waits_for_its_own(self):
        net = Net()
        with self.noted():
            following = glake.follow(net, safepoints=True)
            self.passes(net, net, 3)
            self.assertEqual(self.safepoints, [False, True, False])
            self.assertEqual(self.waits, 3 * ["Net", "Linear", "Linear", "Linear"])
            self.order.assert_called_once_with(["Net", "Linear"])
            following.remove()
            net(self.inputs)
            self.assertEqual(len(self.safepoints), 3)

    def test_beside_the_hooks_of_others(self):
        net, seen = Net(), []
        for name in ("one", "other"):
            net.register_forward_pre_hook(lambda _net, _inputs, name=name: seen.append(name))
        with self.noted(), mock.patch.object(_regions, "wait", seen.append):
            following = glake.follow(net)
            net(self.inputs)
            self.assertEqual(seen[:3], ["Net", "one", "other"])
            following.remove()
            seen.clear()
            net(self.inputs)
            self.assertEqual(seen, ["one", "other"])

    def test_it_is_copied_and_written(self):
        net = Net()
        glake.follow(net, safepoints=True)
        for each in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            with self.noted():
                each(self.inputs)
                self.assertEqual(self.waits[-4:], ["Net", "Linear", "Linear", "Linear"])
        self.assertEqual(self.safepoints, [False, False])

    def test_computed_again_for_a_backward_pass(self):
        from torch.utils.checkpoint import checkpoint

        net = Net()

        def gradients(between=lambda: None, **how):
            net.zero_grad()
            inputs = self.inputs.clone().requires_grad_()
            output = checkpoint(net, inputs, **how) if how else net(inputs)
            between()
            output.sum().backward()
            return [inputs.grad, *(each.grad.clone() for each in net.parameters())]

        wanted = gradients()
        for reentrant in (False, True):
            with self.subTest(use_reentrant=reentrant), self.noted(), shrinking() as begin:
                following = glake.follow(net, safepoints=True)
                self.safepoints.clear()
                swaps = []
                found = gradients(lambda: swaps.append(begin()), use_reentrant=reentrant)
                # The shrink has waited for all of the backward pass, which came to safe points.
                self.assertEqual(self.safepoints, [False, False])
                self.assertFalse(swaps[0].done())
                self.assertEqual(glake.gate()["parked"], 0)
                self.assertTrue(glake.safepoint())
                following.remove()
                for one, other in zip(found, wanted):
                    self.assertTrue(torch.equal(one, other))


@unittest.skipUnless(torch, "torch is not installed: no module of its is compiled here")
class Compiled(OfTorch):
    def graphs(self):
        counters = torch._dynamo.utils.counters
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    def test_followed_and_then_compiled(self):
        for make in (Net, lambda: hooked(Net)):
            for backend in ("eager", "aot_eager"):
                for in_place in (False, True):
                    with self.subTest(backend=backend, in_place=in_place), self.noted():
                        self.compile_anew()
                        net = make()
                        glake.follow(net, safepoints=True)
                        if in_place:
                            net.compile(fullgraph=True, backend=backend)
                            call = net
                        else:
                            call = torch.compile(net, fullgraph=True, backend=backend)
                        self.passes(call, net if not in_place else net.forward)
                        self.assertEqual(self.safepoints, [False, True, False, False])
                        # Its parts are in the graph: it waits for all that they have.
                        self.assertEqual(self.waits, 4 * ["Net", "ModuleList", "Linear", "Linear", "Linear"])
                        self.assertEqual(self.graphs(), (1, 0))

    def test_compiled_and_then_followed(self):
        for make in (Net, chain):
            with self.subTest(make=make), self.noted():
                self.compile_anew()
                net = make()
                call = torch.compile(net, fullgraph=True, backend="aot_eager")
                glake.follow(call, safepoints=True)
                self.passes(call, net)
                self.assertEqual(self.safepoints, [False, True, False, False])

    def test_within_a_graph(self):
        """The hooks are inside the graph, which stays whole: a warning says that they have no effect there."""
        for make in (Net, chain, lambda: hooked(chain), lambda: hooked(Net)):
            for backend in ("eager", "aot_eager"):
                with self.subTest(backend=backend), self.noted(), self.assertLogs("glake", "WARNING") as told:
                    self.compile_anew()
                    net = make()
                    glake.follow(net, safepoints=True)
                    # What is within a function is within its graph, whatever its class.
                    call = torch.compile(lambda inputs, net=net: net(inputs), fullgraph=True, backend=backend)
                    with torch.no_grad():
                        wanted = net(self.inputs)
                        self.safepoints.clear()
                        for _ in range(3):
                            torch.testing.assert_close(call(self.inputs), wanted)
                    self.assertEqual(self.safepoints, [])
                    self.assertEqual(self.graphs(), (1, 0))
                self.assertEqual(len(told.output), 1)
                self.assertIn("what torch.compile returned", told.output[0])

    def test_one_of_torch_s_own_classes(self):
        for make in (chain, lambda: hooked(chain)):
            with self.subTest(make=make), self.noted(), self.assertLogs("glake", "WARNING"):
                self.compile_anew()
                net = make()
                glake.follow(net, safepoints=True)
                call = torch.compile(net, fullgraph=True, backend="aot_eager")
                wanted = net(self.inputs)
                torch.testing.assert_close(call(self.inputs), wanted)

    def test_graphs_with_breaks_between(self):
        net = Broken()
        with self.noted():
            glake.follow(net, safepoints=True)
            call = torch.compile(net, backend="aot_eager")
            self.passes(call, net)
            self.assertEqual(self.safepoints, [False, True, False, False])
            self.assertEqual(self.graphs()[0], 2)

    def test_it_is_trained(self):
        net = Net()
        with self.noted():
            net(self.inputs).sum().backward()
            wanted = [each.grad.clone() for each in net.parameters()]
            glake.follow(net, safepoints=True)
            call = torch.compile(net, fullgraph=True, backend="aot_eager")
            with shrinking() as begin:
                for _ in range(3):
                    net.zero_grad()
                    loss = call(self.inputs).sum()
                    if len(self.safepoints) == 1:
                        begin()
                    loss.backward()
                    for one, other in zip(net.parameters(), wanted):
                        torch.testing.assert_close(one.grad, other)
        self.assertEqual(self.safepoints, [False, True, False])

    @unittest.skipUnless(shutil.which("g++"), "no C++ compiler: torch generates no code for a CPU")
    def test_with_little_overhead(self):
        """CUDA graphs as far as a CPU has them: the code is generated, without graphs."""
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder), self.noted():
            net = Net()
            glake.follow(net, safepoints=True)
            call = torch.compile(net, fullgraph=True, mode="reduce-overhead")
            self.passes(call, net)
            self.assertEqual(self.safepoints, [False, True, False, False])
            self.assertEqual(self.graphs(), (1, 0))


if __name__ == "__main__":
    unittest.main()
