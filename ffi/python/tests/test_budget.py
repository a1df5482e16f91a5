"""Modules whose passes are kept within a budget: autograd on the CPU, whose saved bytes are laid into a simulated GPU's memory.

Needs torch; every test is skipped without it."""

import collections
import dataclasses
import gc
import importlib.util
import os
import re
import tempfile
import unittest

os.environ["GLAKE_DEVICE"] = "sim"

import glake  # noqa: E402
from test_activations import OfTorch  # noqa: E402

torch = None
if importlib.util.find_spec("torch"):
    import torch

    from glake.offload import _budget
    from glake.offload._budget import Offloaded, parsed


class Budgets(unittest.TestCase):
    def test_texts_and_numbers(self):
        for text, expected in (("60GiB", 60 << 30), ("1.5 GiB", 3 << 29), ("512mib", 512 << 20), ("80GB", 80 * 10**9), ("1000", 1000), (1 << 20, 1 << 20), (2e9, 2 * 10**9)):
            self.assertEqual(self.of(text), expected)
        self.assertIsNone(self.of(None))
        with self.assertRaisesRegex(ValueError, 'write "20GiB"'):
            self.of("20G")
        for wrong in ("", "GiB", "60 GiBs", "-1GiB", 0, -5, True, float("nan"), "0", [1], b"1GiB", {}, 1j, float("inf")):
            with self.assertRaises(ValueError, msg=repr(wrong)):
                self.of(wrong)

    def of(self, budget):
        if torch is None:
            self.skipTest("torch is not installed")
        return parsed(budget)


class Offloads(OfTorch):
    def model(self, layers=6):
        torch.manual_seed(1)
        nn = torch.nn
        return nn.Sequential(*[nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in range(layers)])

    def offload(self, model, budget, preset="fit", least=0):
        return Offloaded(model, budget, preset, least, self.memory)

    def step(self, model, rows):
        model.zero_grad()
        loss = model(torch.randn(rows, 64)).square().sum()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    def test_gradients_are_the_same_and_the_budget_is_kept_over_passes_of_varying_length(self):
        # The pool has what is laid there and what comes back; what stays is torch's own, and counts in plans.
        for preset, passes in (("fit", 50), ("memory", 5), ("hybrid", 5)):
            out = glake.offload.report()["bytes_out"]
            lengths = [1600 + 400 * (step * 7 % 5) for step in range(passes)]
            plain, model = self.model(10), self.model(10)
            handle = self.offload(model, "18MiB", preset)
            # Since the process began.
            above = handle.told()["above_budget"] or 0
            for step, rows in enumerate(lengths):
                torch.manual_seed(step)
                expected = self.step(plain, rows)
                torch.manual_seed(step)
                for mine, other in zip(self.step(model, rows), expected):
                    self.assertTrue(torch.equal(mine, other), preset)
                self.assertLessEqual(glake.memory_stats(0)["reserved_bytes.all.current"], 18 << 20, (preset, step))
            told = handle.told()
            self.assertEqual((told["preset"], told["above_budget"], told["unplanned"]), (preset, above, None))
            self.assertGreater(told["passes"], 3)
            if preset in ("fit", "memory"):
                self.assertGreater(handle.report()["bytes_out"], out, preset)
            handle.remove()

    def test_below_the_floor_a_forward_raises_and_names_a_budget_that_is_enough(self):
        model, budgets, said = self.model(), [1.0], "nothing yet"

        def raised(rows):
            try:
                self.step(model, rows)
            except glake.InvalidError as error:
                return str(error)
            return None

        while said and len(budgets) < 6:
            handle = self.offload(model, f"{budgets[-1]:.2f}MiB")
            said = next(filter(None, (raised(20000) for _ in range(8))), None)
            if said:
                found = re.match(r"a budget of ([0-9.]+) MiB was asked for, but passes of this shape need ([0-9]+) MiB of the GPU", said)
                self.assertIsNotNone(found, said)
                self.assertAlmostEqual(float(found[1]), budgets[-1], delta=0.01)
                # Again and again, and for this shape alone; without gradients nothing is saved.
                self.assertEqual(raised(20000)[: found.end()], said[: found.end()])
                self.assertIsNone(raised(8))
                with torch.no_grad():
                    model(torch.randn(20000, 64))
                budgets.append(float(found[2]))
            handle.remove()
        # A plan leaves more alone each time that the pool, whose blocks have gaps, was above its budget all the same.
        self.assertIsNone(said, budgets)
        self.assertGreater(len(budgets), 1)
        self.assertEqual(budgets, sorted(budgets))

    def test_where_everything_fits_there_are_no_hooks_until_shapes_change(self):
        model = self.model()
        handle = self.offload(model, "1GiB")
        for _ in range(3):
            self.step(model, 32)
        before = handle.told()["passes"]
        saved = []
        model[3].register_forward_hook(lambda *_: saved.append(torch._C._autograd._top_saved_tensors_default_hooks(False)))
        self.step(model, 32)
        self.assertEqual((saved, handle.told()["passes"]), ([None], before))
        self.assertEqual(handle.told()["plan"]["offloaded"]["items"], 0)
        self.step(model, 33)
        self.assertEqual(handle.told()["passes"], before + 1)
        handle.remove()

    def test_within_a_block_or_hooks_of_ours_a_models_own_budget_counts(self):
        def out(step):
            before = glake.offload.report()["bytes_out"]
            step()
            return glake.offload.report()["bytes_out"] - before

        def around(block, model):
            with block:
                loss = model(torch.randn(1024, 64)).square().sum()
            loss.backward()

        model, alone = self.model(), self.model()
        handle, block = self.offload(model, "1GiB"), self.activations()
        for _ in range(3):
            self.step(model, 1024)
        passes = handle.told()["passes"]
        # The loss alone leaves, all of another model does.
        self.assertLess(out(lambda: around(block, model)), 1024 * 64 * 4 + 1)
        self.assertGreater(out(lambda: around(block, alone)), 1 << 20)
        self.assertEqual(handle.told()["passes"], passes)
        # A block of its own, of which the module's forward is a part.
        self.assertLess(out(lambda: around(handle, model)), 1024 * 64 * 4 + 1)
        self.assertIsNone(torch._C._autograd._top_saved_tensors_default_hooks(False))
        # One within the module that keeps all has its own say.
        inner = self.activations(model[3])
        self.assertGreater(out(lambda: around(block, model)), 1024 * 64 * 4 + 1)
        inner.remove()
        # Of two on one module the later one counts.
        hooked = self.activations(alone)
        other = glake.offload(alone, budget="1GiB")
        other._packer.memory = self.memory
        self.assertFalse(hooked._handles)
        for each in (other, handle):
            each.remove()

    def test_a_signal_in_a_forward_within_a_block_leaves_no_hooks(self):
        class Stops(torch.nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner, self.error = inner, None

            def forward(self, x):
                x = self.inner(x)
                if self.error is not None:
                    raise self.error
                return x

        for replay in (False, True):
            for budget in ("1GiB", "2MiB"):
                model = Stops(self.model())
                handle, block = self.offload(model, budget), self.activations(replay=replay)
                for _ in range(3):
                    self.step(model, 8)
                for error in (ValueError(), KeyboardInterrupt(), SystemExit()):
                    model.error = error
                    with self.assertRaises(type(error)), block:
                        model(torch.randn(8, 64))
                    self.assertIsNone(torch._C._autograd._top_saved_tensors_default_hooks(False), (replay, budget, error))
                    model.error = None
                    self.step(model, 8)
                    self.assertEqual(handle._stack() + block._stack(), [])
                handle.remove()

    def test_blocks_that_end_in_another_order_and_hooks_of_others_between(self):
        def out(step):
            before = glake.offload.report()["bytes_out"]
            step()
            return glake.offload.report()["bytes_out"] - before

        first, second, model, theirs = self.activations(), self.activations(), self.model(), []
        losses = []
        forward = lambda: losses.append(model(torch.randn(256, 64)).square().sum())
        # As two tasks on one thread, of which the first ends first.
        for block in (first, second):
            block.__enter__()
        first.__exit__(None, None, None)
        self.assertGreater(out(forward), 1 << 20)
        second.__exit__(None, None, None)
        self.assertIsNone(torch._C._autograd._top_saved_tensors_default_hooks(False))
        users = torch.autograd.graph.saved_tensors_hooks(lambda tensor: theirs.append(0) or tensor, lambda tensor: tensor)
        for each in (first, users, second):
            each.__enter__()
        first.__exit__(None, None, None)
        self.assertEqual(out(forward), 0)
        self.assertTrue(theirs)
        for each in (second, users):
            each.__exit__(None, None, None)
        self.assertIsNone(torch._C._autograd._top_saved_tensors_default_hooks(False))
        sum(losses).backward()

    def test_leaves_of_a_model_that_keeps_all_are_not_stored_by_a_block(self):
        class Checkpointed(torch.nn.Module):
            def __init__(self, layers):
                super().__init__()
                self.layers = layers

            def forward(self, x):
                for layer in self.layers:
                    x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
                return x

        model = Checkpointed(self.model())
        handle, block = self.offload(model, "1GiB"), self.activations(replay=True)
        for _ in range(4):
            self.step(model, 1024)
        before = glake.offload.report()["bytes_out"]
        with block:
            loss = model(torch.randn(1024, 64))
        self.assertEqual(glake.offload.report()["bytes_out"], before)
        loss.sum().backward()
        handle.remove()

    def test_compiled_layers_of_a_model_that_keeps_all_are_compiled_as_without_a_block(self):
        self.addCleanup(torch._dynamo.reset)
        plain, model = self.model(), self.model()
        for layer in model:
            layer.compile(backend="eager", fullgraph=True)
        handle, block = self.offload(model, "1GiB"), self.activations()
        for step in range(5):
            torch.manual_seed(step)
            expected = self.step(plain, 64)
            torch.manual_seed(step)
            with block:
                found = self.step(model, 64)
            for mine, other in zip(found, expected):
                self.assertTrue(torch.equal(mine, other))
        self.assertEqual(torch._dynamo.utils.counters["graph_break"], {})
        handle.remove()

    def test_inputs_that_hold_each_other_are_looked_at_once(self):
        import time

        node = dataclasses.make_dataclass("Node", ["x", "near"])
        nodes = [node(torch.randn(2), []) for _ in range(200)]
        for each in nodes:
            each.near = nodes
        begun = time.monotonic()
        shape = _budget._shape(torch.nn.Linear(2, 2), (nodes,), None)
        self.assertLess(time.monotonic() - begun, 5)
        nodes[7].x = torch.randn(3)
        self.assertNotEqual(_budget._shape(torch.nn.Linear(2, 2), (nodes,), None), shape)
        # A chain, each part of which is also given by itself: what is far along one way is near along another.
        chain = None
        parts = [chain := node({"x": torch.randn(2)}, chain) for _ in range(20)]
        shapes = [_budget._shape(torch.nn.Linear(2, 2), (parts[::-1],), None)]
        for part in parts:
            part.x = {"x": torch.randn(3)}
            shapes.append(_budget._shape(torch.nn.Linear(2, 2), (parts[::-1],), None))
        self.assertEqual(len(set(shapes)), 21)

    def test_a_block_of_a_handle_has_its_floor_and_leaves_buffers(self):
        class Scaled(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("scale", torch.randn(256, 64))
                self.layer = torch.nn.Linear(64, 64)

            def forward(self, x):
                return self.layer(x) * self.scale

        scaled = Scaled()
        handle = self.activations(scaled)
        before = glake.offload.report()["bytes_out"]
        for _ in range(3):
            with handle:
                loss = scaled(torch.randn(256, 64)).sum()
            loss.backward()
        # The input of the layer alone, until a plan says that this gains nothing.
        self.assertEqual(glake.offload.report()["bytes_out"] - before, 256 * 64 * 4)
        handle.remove()
        model = self.model()
        handle = self.offload(model, "1MiB")
        with self.assertRaisesRegex(glake.InvalidError, "passes of this shape need"):
            for _ in range(8):
                with handle:
                    loss = model(torch.randn(20000, 64)).square().sum()
                loss.backward()
        del loss
        handle.remove()

    def test_a_module_that_moves_to_another_gpu_takes_its_budget_along(self):
        from unittest import mock

        model, asked = self.model(2), []
        handle = self.offload(model, "1GiB")
        self.step(model, 8)
        site = mock.Mock(wraps=handle._packer.site)
        site.ask.side_effect = lambda *what: asked.append(what)
        handle._packer.site = site
        with mock.patch.object(_budget, "_device_of", lambda *_: 1):
            for _ in range(2):
                self.step(model, 8)
        self.assertEqual(asked, [(1, 1 << 30, "fit")])
        site.ask.side_effect, handle._device = None, 0
        handle.remove()

    def test_in_a_forked_child_it_is_taken_off_and_told_nothing(self):
        model = self.model(2)
        handle = self.offload(model, "1GiB")
        self.step(model, 8)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                # A backward there is refused by torch.
                model(torch.ones(1, 64))
                handle.remove()
                model(torch.ones(1, 64))
                status = bool(model._forward_pre_hooks or model._forward_hooks)
            finally:
                os._exit(status)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        handle.remove()

    def test_graphs_that_wait_for_others_within_a_pass_stay_in_it(self):
        model = self.model()
        handle = self.offload(model, "12MiB", "memory")
        for _ in range(12):
            # As of a generator, whose backward comes after two of a discriminator.
            first = model(torch.randn(64, 64))
            for _ in range(2):
                model(first.detach()).square().sum().backward()
            first.sum().backward()
            # Many whose backwards come at the end.
            sum(model(torch.randn(8, 64)).sum() for _ in range(12)).backward()
        self.assertEqual(handle.told()["passes"], 24)
        handle.remove()

    def test_a_picture_is_of_the_site_that_offloads_most(self):
        from unittest import mock

        from glake.offload import _plot

        handles = []
        for budget, rows in (("1GiB", 8), ("18MiB", 2400), ("1GiB", 16)):
            model = self.model(10)
            handles.append(self.offload(model, budget))
            for _ in range(4):
                self.step(model, rows)
        told = [site["plan"]["offloaded"]["bytes"] for site in glake.offload.report()["sites"]]
        self.assertTrue(told[1] > 0 == told[0] == told[2], told)
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(_plot, "svg", wraps=_plot.svg) as svg:
            glake.offload.report(plot=f"{folder}/step.svg")
        self.assertEqual(svg.call_args.args[0]["plan"]["offloaded"]["bytes"], told[1])
        for handle in handles:
            handle.remove()

    def test_the_package_is_called_and_a_second_call_is_the_first_ones_successor(self):
        model = self.model(2)
        first = glake.offload(model, budget="1GiB", preset="hybrid")
        second = glake.offload(model, budget=1 << 20)
        self.assertFalse(first._handles)
        self.assertEqual(second.told()["preset"], "fit")
        second.remove()
        for wrong in ({"preset": "best"}, {"preset": ["fit"]}, {"budget": "much"}, {"least": -1}, {"least": "1MiB"}):
            with self.assertRaises(ValueError, msg=str(wrong)):
                glake.offload(model, **wrong)
        with self.assertRaises(ValueError):
            glake.offload(None, budget="1GiB")
        for wrong in ("model", 3, torch.nn.Linear, torch.optim.SGD(model.parameters(), lr=1)):
            with self.assertRaisesRegex(TypeError, "torch.nn.Module"):
                glake.offload(wrong, budget="1GiB")
        self.assertFalse(model._forward_pre_hooks or model._forward_hooks)

    def test_host_memory_that_is_asked_for_is_pinned_when_the_call_returns(self):
        model = self.model(2)
        handle = glake.offload(model, host_memory="24MiB")
        self.assertGreaterEqual(glake.offload.report()["host_pinned_bytes"], 24 << 20)
        handle.remove()
        # What there is not is said at once, and nothing is pinned or hooked for it.
        before = glake.offload.report()["host_pinned_bytes"]
        with self.assertRaisesRegex(glake.OutOfMemoryError, "pinned"):
            glake.offload(model, host_memory=1 << 52)
        self.assertEqual(glake.offload.report()["host_pinned_bytes"], before)
        with self.assertRaisesRegex(ValueError, "host_memory is"):
            glake.offload(model, host_memory="much")
        self.assertFalse(model._forward_pre_hooks or model._forward_hooks)

    def test_forwards_that_are_given_what_has_no_sizes(self):
        class Padded(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(8, 8)

            def forward(self, x, **_more):
                x = torch.nn.functional.gelu(self.layer(x))
                return torch.nested.to_padded_tensor(x, 0.0) if x.is_nested else x

        class Raises:
            @property
            def shape(self):
                raise RuntimeError("there is none")

        class Odd:
            shape = [1, [2]]

        endless = []
        endless.append(endless)
        model = Padded()
        handle = self.offload(model, "1GiB")
        nested = lambda layout: torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=layout)
        for x in (nested(torch.strided), nested(torch.jagged), torch.randn(2, 8)):
            for more in (None, Raises(), Odd(), endless, {"a": [torch.randn(2)]}, collections.UserDict(a=torch.randn(2)), torch.randn(2).to_sparse()):
                model(x, more=more).sum().backward()
        handle.remove()
        # The sizes within whatever maps count, and those of nested tensors.
        shape = lambda value: _budget._shape(model, (value,), None)
        batches = [dataclasses.make_dataclass("Batch", ["x"], slots=slots) for slots in (False, True)]
        self.assertNotEqual(shape(batches[0](torch.randn(2))), shape(batches[0](torch.randn(3))))
        shape(batches[1](torch.randn(2)))
        shape(batches[0])
        self.assertNotEqual(shape(collections.UserDict(a=torch.ones(2))), shape(collections.UserDict(a=torch.ones(3))))
        self.assertNotEqual(shape(nested(torch.strided)), shape(torch.nested.nested_tensor([torch.ones(1, 8)])))

    def test_copies_and_pickles_have_the_same_budget_and_hooks_that_are_succeeded(self):
        import copy
        import pickle

        def told():
            return [(site["preset"], site["budget"]) for site in glake.offload.report()["sites"]]

        plain, model = self.model(), self.model()
        handle = self.offload(model, "1GiB", "hybrid")
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        removed, copied = copy.deepcopy((model, handle))
        copied.remove()
        self.step(removed, 32)
        self.assertEqual([len(told) for told in (copied.report()["sites"], handle.report()["sites"])], [1, 1])
        self.assertEqual(copied.report()["sites"][0]["passes"], 0)
        del removed, copied
        gc.collect()
        for another in copies:
            another.eval()
            with torch.no_grad():
                another(torch.randn(2, 64))
            for step in range(3):
                torch.manual_seed(step)
                expected = self.step(plain, 32)
                torch.manual_seed(step)
                for mine, other in zip(self.step(another, 32), expected):
                    self.assertTrue(torch.equal(mine, other))
        self.assertEqual(told(), [("hybrid", 1 << 30)] * 3)
        for another in copies:
            second = glake.offload(another, budget="2GiB", preset="memory")
            self.assertEqual(len(another._forward_pre_hooks), len(model._forward_pre_hooks))
            second.remove()
            self.assertFalse(another._forward_pre_hooks or another._forward_hooks)
            self.assertFalse(another._forward_pre_hooks_with_kwargs or another._forward_hooks_always_called)
        self.step(model, 32)
        handle.remove()
        self.assertFalse(model._forward_pre_hooks or model._forward_hooks)

    def test_a_module_of_which_nothing_is_packed_has_no_thread_that_waits_for_a_pass(self):
        import threading

        model = self.model(1)
        handle = self.offload(model, "1GiB", "memory", least=1 << 30)
        self.step(model, 4)
        for thread in threading.enumerate():
            if thread.name == "glake-offload-pin":
                thread.join(10)
                self.assertFalse(thread.is_alive())
        handle.remove()

    def test_a_report_prints_and_draws(self):
        model = self.model()
        handle = self.offload(model, None, "memory")
        with self.assertRaisesRegex(ValueError, "no plan to draw"), tempfile.TemporaryDirectory() as folder:
            handle.report(plot=os.path.join(folder, "step.svg"))
        for _ in range(3):
            self.step(model, 32)
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "step.svg")
            report = handle.report(plot=file)
            with open(file, encoding="utf-8") as drawn:
                text = drawn.read()
        import xml.dom.minidom

        xml.dom.minidom.parseString(text)
        self.assertIn("copies out", text)
        self.assertNotIn("course", report["sites"][0]["plan"])
        self.assertIn('a site, "memory"', str(report))
        self.assertGreater(report["sites"][0]["plan"]["offloaded"]["items"], 0)
        self.assertIn(handle.told(), glake.offload.report()["sites"])
        handle.remove()

    def test_passes_on_two_threads_and_graphs_that_are_retained(self):
        import threading

        model = self.model()
        handle = self.offload(model, "24MiB", "hybrid")
        retained = model(torch.randn(16, 64)).sum()
        retained.backward(retain_graph=True)
        failed = []

        def work():
            try:
                for rows in (8, 16, 24, 8, 16):
                    x = torch.randn(rows, 64)
                    mine = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
                    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                        plain = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
                    failed.extend(not torch.equal(one, other) for one, other in zip(mine, plain) if not torch.equal(one, other))
            except BaseException as error:  # noqa: BLE001
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failed, [])
        retained.backward()
        del retained
        handle.remove()


if __name__ == "__main__":
    unittest.main()
