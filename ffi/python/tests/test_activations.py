"""Offload of activations: autograd on the CPU, whose saved bytes are placed into simulated GPUs' memory.

Needs torch; every test is skipped without it.
"""

import contextlib
import ctypes
import gc
import importlib.util
import os
import random
import unittest
import warnings

os.environ["GLAKE_DEVICE"] = "sim"

import glake  # noqa: E402
from glake import _library  # noqa: E402

api = _library.api()
torch = None
if importlib.util.find_spec("torch"):
    import torch

    from glake.offload import _narrow, _report
    from glake.offload._activations import Activations


class Laid:
    """Tensors of the CPU whose bytes are copied to a block of a simulated GPU to be offloaded from there, and come back to one. Tensors that
    lie in such a block (`laid`) are offloaded from it."""

    def __init__(self):
        self.staged = None
        # The stream that a program of the GPU would be on: 0, or 2.
        self.current = 0
        # What was used on another stream than it was taken on.
        self.used = 0

    def owns(self, tensor):
        return tensor.device.type == "cpu"

    def device(self, index):
        return torch.device("cpu")

    def stream(self, tensor):
        return self.current

    def address(self, storage):
        self.free()
        try:
            api.generation(storage.data_ptr())
            return storage.data_ptr()
        except glake.UnsupportedError:
            pass
        self.staged = api.alloc(0, storage.nbytes(), self.current)
        ctypes.memmove(self.staged, storage.data_ptr(), storage.nbytes())
        return self.staged

    def free(self):
        """Frees the block as soon as its copy has begun, as torch frees it with the last tensor."""
        if self.staged is not None:
            api.free(self.staged)
        self.staged = None

    def take(self, like, size):
        address = api.alloc(0, size, self.current)

        class Block(ctypes.c_char * size):
            def __del__(self):
                api.free(address)

        storage = torch.frombuffer(Block.from_address(address), dtype=torch.uint8).untyped_storage()
        return storage, address

    def laid(self, values):
        """Returns a tensor of such values in a block of its own, which is freed with it."""
        storage, _ = self.take(values, values.nbytes)
        return torch.empty(0, dtype=values.dtype).set_(storage, 0, values.size(), values.stride()).copy_(values)

    def wait(self, packed, stream):
        packed.wait(stream)
        # The CPU reads, which is no stream.
        api.stream_synchronize(0, stream)

    def use(self, like, storage):
        api.record_stream(storage.data_ptr(), self.current)
        self.used += 1


@unittest.skipUnless(torch, "torch is not installed: activations are not offloaded here")
class OfTorch(unittest.TestCase):
    def setUp(self):
        self.least, _narrow.LEAST = _narrow.LEAST, 0
        self.memory = Laid()
        self.merged = _report.counts.merged

    def tearDown(self):
        _narrow.LEAST = self.least
        self.memory.free()
        gc.collect()
        left = glake.offload.report()
        self.assertEqual((left["entries"], left["host_bytes"], left["held_bytes"]), (0, 0, 0), left)
        self.assertIsNone(torch._C._autograd._top_saved_tensors_default_hooks(False), "hooks are on")
        for stream in (0, 2):
            api.stream_synchronize(0, stream)
        # What other streams used is looked at again with the next request.
        api.free(api.alloc(0, 1))
        stats = glake.memory_stats(0)
        gauges = ("allocated_bytes.all.current", "active_bytes.all.current", "active.all.current", "glake.waste_stream", "glake.alias_bytes")
        self.assertEqual({name: stats[name] for name in gauges if stats.get(name)}, {})

    def activations(self, module=None, least=0, replay=False):
        return Activations(module, least, self.memory, replay)

    def same(self, make, steps=4, inputs=lambda: torch.randn(8, 32)):
        """Compares losses and gradients of a few steps with and without offload, bit by bit."""

        def run(offloads):
            torch.manual_seed(7)
            model = make()
            handle = self.activations(model) if offloads else None
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            seen = []
            for _ in range(steps):
                optimizer.zero_grad()
                loss = model(inputs()).square().mean()
                loss.backward()
                seen.append((loss.item(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]))
                optimizer.step()
            if handle:
                handle.remove()
            return seen

        plain = run(False)
        self.assertEqual(str(plain), str(run(False)), "two plain runs differ")
        for (loss, gradients), (other, others) in zip(plain, run(True)):
            self.assertEqual(loss, other)
            for gradient, another in zip(gradients, others):
                self.assertTrue(gradient is another is None or torch.equal(gradient, another))


class Exact(OfTorch):
    def test_linear_layers_dropout_and_norms(self):
        def make():
            nn = torch.nn
            block = lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 32))
            return nn.Sequential(*[block() for _ in range(4)])

        self.same(make)

    def test_convolutions_in_place_and_batch_norms(self):
        def make():
            nn = torch.nn
            layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()]
            return nn.Sequential(*layers, nn.Linear(8 * 16, 4))

        self.same(make, inputs=lambda: torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last))

    def test_attention_whose_parts_are_views(self):
        class Attention(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

            def forward(self, x):
                q, k, v = self.qkv(x).view(2, 4, 3, 4, 8).permute(2, 0, 3, 1, 4)
                found = torch.nn.functional.scaled_dot_product_attention(q, k, v)
                return x + self.out(found.transpose(1, 2).reshape(8, 32))

        self.same(lambda: torch.nn.Sequential(*[Attention() for _ in range(3)]))

    def test_experts_that_are_not_used_and_checkpoints(self):
        from torch.utils.checkpoint import checkpoint

        class Experts(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.experts = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(4)])

            def forward(self, x):
                for place in (0, 2):
                    x = x + checkpoint(lambda x: torch.tanh(self.experts[place](x)), x, use_reentrant=place == 0)
                return x

        self.same(Experts, inputs=lambda: torch.randn(8, 32, requires_grad=True))

    def test_shapes_that_change_and_several_forwards_before_a_backward(self):
        def run(offloads):
            torch.manual_seed(3)
            model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
            handle = self.activations(model) if offloads else None
            for rows in (4, 9, 4, 9, 5):
                loss = model(torch.randn(rows, 16)).sum() + model(torch.randn(rows, 16)).square().sum()
                loss.backward()
            if handle:
                handle.remove()
            return [p.grad.clone() for p in model.parameters()]

        for mine, plain in zip(run(True), run(False)):
            self.assertTrue(torch.equal(mine, plain))


class Saves(OfTorch):
    def test_bytes_that_two_operations_save_are_copied_once(self):
        x = torch.ones(1000, requires_grad=True)
        before = glake.offload.report()
        with self.activations():
            y = x * 3
            z = (y * y).sum() + y.exp().sum()
        during = glake.offload.report()
        self.assertGreaterEqual(during["merged"] - before["merged"], 1)
        z.backward()
        self.assertTrue(torch.equal(x.grad, 18 * torch.ones(1000) + 3 * torch.exp(3 * torch.ones(1000))))

    def test_memory_of_a_private_pool_stays(self):
        torch.manual_seed(5)
        pool, library = (0, 9, 0), ctypes.CDLL(_library.path())
        library.glake_pool_begin.argtypes = [ctypes.c_int32, *[ctypes.c_uint64] * 2, *[ctypes.c_void_p] * 3]
        library.glake_pool_end.argtypes = [ctypes.c_int32, *[ctypes.c_uint64] * 2]
        values = torch.randn(4, 300)
        self.assertEqual(library.glake_pool_begin(*pool, None, None, None), 0)
        inside = self.memory.laid(values)
        self.assertEqual(library.glake_pool_end(*pool), 0)
        outside = self.memory.laid(values)
        weights = [torch.randn(4, 300, requires_grad=True) for _ in range(2)]
        before = glake.offload.report()
        with self.activations():
            # As views are saved too.
            found = [(tensor.view(-1) * weight.view(-1)).sum() for tensor, weight in zip((inside, outside), weights)]
        after = glake.offload.report()
        self.assertEqual(after["bytes_out"] - before["bytes_out"], values.nbytes, "one of the two leaves")
        address, storage = inside.data_ptr(), inside.untyped_storage()
        del inside, outside
        self.assertGreater(torch._C._storage_Use_Count(storage._cdata), 1, "it is held by a tensor")
        del storage
        sum(found).backward()
        for weight in weights:
            self.assertTrue(torch.equal(weight.grad, values))
        del found
        gc.collect()
        api.pool_release(0, pool[1:])
        self.assertIsNone(api.find(address), "it is freed with its last save")

    def test_what_stays_is_held_by_tensors(self):
        # Graph trees free a storage that nobody but its object of Python holds.
        site, kept = self.activations(), 0
        for _ in range(4):
            y, storages = torch.randn(300, requires_grad=True), []
            with site:
                for _ in range(6):
                    y = torch.exp(-y)
                    storages.append(y.untyped_storage())
                loss = y.sum()
            del y
            held = sum(torch._C._storage_Use_Count(storage._cdata) > 1 for storage in storages)
            self.assertEqual(held + glake.offload.report()["entries"], len(storages))
            kept += held
            storages.clear()
            loss.backward()
        self.assertGreater(kept, 0, "a plan that keeps nothing shows nothing")

    def test_parameters_their_views_and_buffers_stay(self):
        model = torch.nn.Linear(64, 64, bias=False)
        model.register_buffer("scale", torch.ones(64, 64))
        taken = glake.offload.report()["bytes_out"]
        handle = self.activations(model)
        x = torch.randn(2, 64, requires_grad=True)
        loss = (model(x) @ model.weight.t()).sum()
        loss.backward()
        handle.remove()
        # x alone, for the first product.
        self.assertEqual(glake.offload.report()["bytes_out"] - taken, 2 * 64 * 4)

    def test_graphs_that_are_retained_and_differentiated_twice(self):
        x = torch.full((500,), 0.5, requires_grad=True)
        with self.activations():
            z = torch.exp(x * 1.0).sum()
        z.backward(retain_graph=True)
        first = x.grad.clone()
        z.backward(retain_graph=True)
        self.assertTrue(torch.equal(x.grad, 2 * first))
        with self.activations():
            (g,) = torch.autograd.grad(torch.exp(x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(g.sum(), x)
        self.assertTrue(torch.equal(second, torch.exp(x.detach())))
        del z, g, second

    def test_passes_that_end_early_leave_nothing(self):
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())
        handle = self.activations(model)

        class Raises(torch.nn.Module):
            def forward(self, x):
                raise KeyError("not today")

        model.append(Raises())
        with self.assertRaises(KeyError):
            model(torch.randn(4, 16))
        del model[2]
        # The hooks are off again, and a pass without a backward goes with its graph.
        model(torch.randn(4, 16))
        with torch.no_grad():
            model(torch.randn(4, 16))
        model(torch.randn(4, 16)).sum().backward()
        handle.remove()
        handle.remove()

    def test_where_there_is_no_host_memory_tensors_stay(self):
        stayed, api_of = glake.offload.report()["stayed"], _library.api

        class Site:
            def __init__(self):
                self.site = api_of().Site()

            def __getattr__(self, name):
                return (lambda *_: None) if name == "offload_checked" else getattr(self.site, name)

        class Refuses:
            def __getattr__(self, name):
                refused = {"offload_begin": lambda *_: None, "Site": Site}
                return refused.get(name) or getattr(api_of(), name)

        _library.api = lambda: Refuses()
        try:
            self.test_graphs_that_are_retained_and_differentiated_twice()
        finally:
            _library.api = api_of
        self.assertGreater(glake.offload.report()["stayed"], stayed)

    def test_memory_that_is_not_ours_stays_and_is_told_once(self):
        class Foreign(Laid):
            def address(self, storage):
                return storage.data_ptr()

        self.memory, stayed = Foreign(), glake.offload.report()["stayed"]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                x = torch.full((500,), 0.5, requires_grad=True)
                with self.activations():
                    z = torch.exp(x * 1.0).sum()
                z.backward()
                del z
        self.assertGreater(glake.offload.report()["stayed"], stayed)
        self.assertEqual([text.count("glake.enable()") for text in (str(each.message) for each in told)], [1])

    def test_torchtunes_names(self):
        from glake.offload import NoOpManager, OffloadActivations

        manager = OffloadActivations(use_streams=True, min_offload_size=0)
        manager._packer.memory = self.memory
        x = torch.ones(100, requires_grad=True)
        out = glake.offload.report()["bytes_out"]
        with manager:
            with NoOpManager():
                y = torch.exp(x)
            middle = glake.offload.report()["bytes_out"]
            z = torch.exp(y).sum()
        self.assertEqual(middle, out)
        self.assertGreater(glake.offload.report()["bytes_out"], out)
        z.backward()
        for wrong in ({"min_offload_size": -1}, {"max_fwd_stash_size": 0}, {"min_offload_size": None}, {"max_fwd_stash_size": "1"}):
            with self.assertRaises(ValueError):
                OffloadActivations(**wrong)
        with self.assertRaises(TypeError):
            OffloadActivations(max_fwd_stash_sizes=3)


class Unusual(OfTorch):
    """Regression tests of earlier bugs."""

    def out(self):
        return glake.offload.report()["bytes_out"]

    def test_lazy_conjugates_quantised_and_nested_tensors(self):
        values = torch.randn(300, dtype=torch.complex64)

        class Quantised(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8))
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                return gradient * ctx.saved_tensors[0].dequantize()

        def gradients():
            x = values.clone().requires_grad_()
            torch.view_as_real(x * 2 * (x * 3).conj()).sum().backward()
            y = values.real.clone().requires_grad_()
            Quantised.apply(y).sum().backward()
            z = torch.ones(3, 4, requires_grad=True)
            nested = torch.nn.functional.gelu(torch.nested.as_nested_tensor([z, z[:2]]))
            torch.nested.to_padded_tensor(nested, 0.0).sum().backward()
            return x.grad, y.grad, z.grad

        plain = gradients()
        with self.activations():
            mine = gradients()
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(plain, mine)))

    def test_a_module_inside_of_a_checkpoint_that_saves_more(self):
        from torch.utils.checkpoint import checkpoint

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
        values = torch.randn(8, 8)

        def gradients():
            model.zero_grad()
            x = values.clone().requires_grad_()
            checkpoint(lambda x: torch.exp(model(x).sin()), x, use_reentrant=False).sum().backward()
            return [x.grad, *[p.grad.clone() for p in model.parameters()]]

        plain = gradients()
        handle = self.activations(model)
        mine = gradients()
        handle.remove()
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(plain, mine)))

    def test_hooks_go_also_where_a_signal_ended_the_forward(self):
        class Interrupted(torch.nn.Module):
            def forward(self, x):
                raise KeyboardInterrupt

        model = torch.nn.Sequential(torch.nn.Linear(8, 8), Interrupted())
        handle = self.activations(model)
        with self.assertRaises(KeyboardInterrupt):
            model(torch.randn(2, 8))
        handle.remove()
        before = self.out()
        torch.randn(1000, requires_grad=True).exp()
        self.assertEqual(self.out(), before)

    def test_hooks_that_a_signal_left_go_with_the_next_forward(self):
        class Interrupted(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.is_interrupted, self.again = True, 0

            def forward(self, x):
                if self.is_interrupted:
                    raise KeyboardInterrupt
                if self.again:
                    self.again -= 1
                    return outer(x)
                return x.exp()

        inner = Interrupted()
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), inner)
        outer = torch.nn.Sequential(model, torch.nn.Linear(8, 8))
        for whom in (model, outer):
            handle = self.activations(whom)
            for _ in range(3):
                inner.is_interrupted = True
                with self.assertRaises(KeyboardInterrupt):
                    outer(torch.randn(2, 8))
            # Also where it is within itself.
            inner.is_interrupted, inner.again = False, 2
            outer(torch.randn(2, 8)).sum().backward()
            self.assertEqual(handle._stack(), [])
            self.assertIsNone(torch._C._autograd._top_saved_tensors_default_hooks(False))
            handle.remove()

    def test_hooks_that_a_signal_left_below_others_stay_there(self):
        class Interrupted(torch.nn.Module):
            def forward(self, x):
                if self.training:
                    raise KeyboardInterrupt
                return x.exp()

        model = torch.nn.Sequential(torch.nn.Linear(8, 8), Interrupted())
        handle = self.activations(model)
        with self.assertRaises(KeyboardInterrupt):
            model(torch.randn(2, 8))
        model.eval()
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda saved: saved):
            model(torch.randn(2, 8)).sum().backward()
        self.assertGreater(len(packed), 0)
        model(torch.randn(2, 8)).sum().backward()
        self.assertIsNone(torch._C._autograd._top_saved_tensors_default_hooks(False))
        handle.remove()

    def test_copies_and_pickles_of_a_module_and_its_end(self):
        import copy
        import pickle
        import weakref

        model = torch.nn.Linear(8, 8)
        handle = self.activations(model)
        another, copied = copy.deepcopy((model, handle))
        report = glake.offload.report
        before = report()["bytes_out"]
        another(torch.randn(4, 8)).sum().backward()
        # Hooks of a copy are not taken off: they are idle.
        self.assertGreater(report()["bytes_out"], before)
        copied.remove()
        before = report()["bytes_out"]
        another(torch.randn(4, 8)).sum().backward()
        self.assertEqual(report()["bytes_out"], before)
        model(torch.randn(4, 8)).sum().backward()
        self.assertGreater(report()["bytes_out"], before)
        pickle.loads(pickle.dumps(model))
        gc.collect()
        gc.disable()
        weight = weakref.ref(model.weight)
        del model, handle
        try:
            self.assertIsNone(weight(), "a cycle holds the parameters")
        finally:
            gc.enable()

    def test_lazy_modules(self):
        model = torch.nn.Sequential(torch.nn.LazyLinear(4))
        handle = self.activations(model)
        model(torch.randn(2, 3)).sum().backward()
        handle.remove()

    def test_weights_that_autocast_casts_stay(self):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        handle = self.activations(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(torch.randn(1, 64, requires_grad=True))
        # What went into each of both, which is far less than 512 bytes.
        kept = glake.offload.report()
        self.assertEqual((kept["entries"], kept["host_bytes"]), (2, 1024))
        y.float().sum().backward()
        handle.remove()

    def test_parts_of_one_projection_are_copied_once(self):
        projection = torch.nn.Linear(32, 96, bias=False)
        x = torch.randn(2, 16, 32)
        with self.activations():
            q, k, v = (part.view(2, 16, 4, 8).transpose(1, 2) for part in projection(x).split(32, 2))
            z = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        # x, q, k and v together, and the weights of attention.
        self.assertLessEqual(glake.offload.report()["host_bytes"], (2 * 16 * 32 + 2 * 16 * 96 + 2 * 2 * 4 * 16 * 16) * 4)
        z.sum().backward()

    def test_bytes_that_changed_between_two_forwards_are_copied_again(self):
        weight = torch.randn(8, 8, requires_grad=True)
        values = torch.empty(8, 8)

        class Product(torch.nn.Module):
            def forward(self, x):
                return (x @ weight).sum()

        model = Product()
        handle = self.activations(model)
        values.data.copy_(torch.ones(8, 8))
        skipped = model(values)
        values.data.copy_(2 * torch.ones(8, 8))
        model(values).backward()
        handle.remove()
        self.assertEqual(weight.grad[0, 0].item(), 16)
        del skipped

    def test_a_reload_that_fails_early_does_not_hold_the_pass(self):
        x = torch.ones(500, requires_grad=True)
        activations = self.activations()

        def step():
            with activations:
                loss = torch.exp(torch.exp(x * 0.1) * 0.1).sum()
            loss.backward()

        step()
        take, self.memory.take = self.memory.take, lambda *_: (_ for _ in ()).throw(glake.DriverError("no memory now"))
        with self.assertRaises(glake.DriverError):
            step()
        self.memory.take = take
        gc.collect()
        step()
        self.assertEqual(activations._packer.site.packed(64)[0], 0)
        activations._packer.site.dropped(0)

    def test_two_threads_share_a_site(self):
        import threading

        torch.manual_seed(1)
        model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(4)])
        inputs = [torch.randn(4, 16) for _ in range(2)]
        plain = [torch.autograd.grad(model(x).sum(), list(model.parameters())) for x in inputs]
        handle, found = self.activations(model), {}

        def work(place):
            for _ in range(8):
                found[place] = torch.autograd.grad(model(inputs[place]).sum(), list(model.parameters()))

        threads = [threading.Thread(target=work, args=[place]) for place in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        handle.remove()
        for place in range(2):
            self.assertTrue(all(torch.equal(a, b) for a, b in zip(plain[place], found[place])))


class Programs(OfTorch):
    """Random programs in one site, pass after pass: bit by bit what they compute without it."""

    COUNT = 2000 if os.environ.get("GLAKE_SOAK") else 60

    def values(self, choose, weights):
        """A forward with views, in-place changes and products."""
        found = [weights[0] * 0.1]
        for _ in range(8):
            v, u = choose.choice(found), choose.choice(found)
            operation = choose.choice(
                [
                    lambda v, u: v.tanh(),
                    lambda v, u: v * u * 0.5,
                    lambda v, u: v @ weights[1] * 0.1,
                    lambda v, u: v.t().exp() * 0.1,
                    lambda v, u: v[1:, :].mul(u[:-1, :]).sum() * 0.01 + u,
                    lambda v, u: v.clone().mul_(2).sin_(),
                    lambda v, u: v.reshape(2, 3, 6).transpose(0, 1).sigmoid().reshape(6, 6),
                    lambda v, u: v.reshape(36)[::2].square().sum() * 0.01 + weights[2] * u,
                ]
            )
            found.append(operation(v, u))
        return found[-3:]

    def program(self, seed, around):
        """Returns the gradients after each of a few passes: whole, twice, differentiated twice, in part, late, or for one input
        alone.
        """
        choose, seen, late = random.Random(seed), [], []
        torch.manual_seed(seed)
        weights = [torch.randn(6, 6, dtype=torch.double, requires_grad=True) for _ in range(3)]
        for step in range(6):
            with around:
                losses = [value.square().sum() for value in self.values(random.Random(seed + step % 2 * 1000), weights)]
            way = choose.choice(["whole", "twice", "second", "part", "late", "one"])
            if way == "twice":
                losses[2].backward(retain_graph=True)
            if way in ("whole", "twice"):
                sum(losses).backward()
            elif way == "second":
                (gradient,) = torch.autograd.grad(sum(losses), weights[0], create_graph=True)
                gradient.square().sum().backward()
            elif way == "part":
                for loss in losses[:2]:
                    loss.backward(retain_graph=True)
            elif way == "late":
                late.append(sum(losses))
            else:
                sum(losses).backward(inputs=[weights[0]])
            if late and choose.random() < 0.5:
                late.pop(0).backward()
            seen += [None if weight.grad is None else weight.grad.clone() for weight in weights]
        return seen

    def test_random_programs(self):
        site = self.activations()
        for seed in range(self.COUNT):
            plain, mine = self.program(seed, contextlib.nullcontext()), self.program(seed, site)
            for one, other in zip(plain, mine):
                self.assertTrue(one is other is None or torch.equal(one, other), f"seed {seed}")


if __name__ == "__main__":
    unittest.main()
