"""Unusual programs: results and errors are the same with and without offload.

Needs torch; those of adapters need peft. Every test is skipped without what it needs.
"""

import contextlib
import copy
import gc
import importlib.util
import os
import pickle
import sys
import threading
import unittest
import weakref

os.environ["GLAKE_DEVICE"] = "sim"

from replays import OfReplay  # noqa: E402
from test_activations import OfTorch, torch  # noqa: E402

if torch:
    from glake.offload import _interception
    from glake.offload._activations import Activations
    from glake.offload._budget import Offloaded
    from glake.offload._drop_in import OffloadActivations
    from replays import Block, Layered
    from torch import nn
    from torch.autograd import forward_ad
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop


class Odd(OfReplay):
    def layers(self, forward, **more):
        """Returns two checkpointed layers of two products."""

        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.step = nn.Linear(16, 16), nn.Linear(16, 16), 0

        Layer.forward = forward
        return lambda: Layered([Layer() for _ in range(2)], True, **more)

    def train(self, model, step):
        for layer in getattr(model, "layers", ()):
            layer.step = step
        model(self.inputs().requires_grad_()).float().square().mean().backward()
        return [p.grad for p in model.parameters()]

    def both(self, make, work=None, passes=6, handle_of=None, reasons=None, zero=True):
        """Compares the results or exceptions of each pass with and without replay."""
        found = []
        for on in (False, True):
            torch.manual_seed(2)
            model = make()
            handle = (handle_of or self.replays)(model) if on else None
            torch.manual_seed(9)
            seen = []
            for step in range(passes):
                if zero:
                    model.zero_grad()
                try:
                    seen.append([None if t is None else t.detach().clone() for t in (work or self.train)(model, step)])
                except Exception as error:
                    seen.append((type(error), str(error)))
            found.append(seen)
            if handle is not None:
                if reasons is not None:
                    self.assertEqual(self.reasons(handle), set(reasons))
                handle.remove()
        for step, (one, other) in enumerate(zip(*found)):
            if isinstance(one, tuple) or isinstance(other, tuple):
                self.assertEqual(one, other, f"pass {step}")
                continue
            for a, b in zip(one, other, strict=True):
                self.assertTrue(a is b is None or torch.equal(a, b), f"pass {step}")


class Replayed(Odd):
    def test_weights_that_change_between_both_passes(self):
        def work(model, step):
            loss = model(self.inputs()).square().mean()
            if step > 2:
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(1.1)
            loss.backward()
            return [p.grad for p in model.parameters()]

        self.both(lambda: Layered([Block() for _ in range(2)], True), work)

    def test_inference_mode_within(self):
        def forward(layer, x):
            with torch.inference_mode():
                scale = layer.a(x)
            return torch.tanh(layer.b(x)) * scale.clone()

        self.both(self.layers(forward), reasons=["tensors"])

    def test_what_is_no_tensor(self):
        class Wraps:
            def __init__(self, tensor):
                self.tensor = tensor

            @classmethod
            def __torch_function__(cls, function, _types, args=(), kwargs=None):
                return function(*[each.tensor if isinstance(each, Wraps) else each for each in args], **(kwargs or {}))

        self.both(self.layers(lambda layer, x: torch.tanh(functional.linear(Wraps(x), layer.a.weight))), reasons=["tensors"])
        self.both(self.layers(lambda layer, x: layer.a((x, 1))))

    def test_subclasses_that_are_asked_nothing(self):
        class Refuses(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                if "linear" not in getattr(function, "__name__", ""):
                    raise TypeError(function)
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **(kwargs or {}))

        make = self.layers(lambda layer, x: torch.tanh(functional.linear(x, torch.Tensor.as_subclass(layer.a.weight, Refuses))))
        self.both(make, reasons=["tensors"])

    def test_functions_of_others_that_refuse_what_they_do_not_know(self):
        original = functional.scaled_dot_product_attention

        def theirs(q, k, v, *args, **kwargs):
            if q.size(-1) != 8 or q.size(1) != 2:
                raise ValueError("heads")
            return original(q, k, v, *args, **kwargs)

        def work(model, step):
            with torch.autocast("cpu", torch.bfloat16):
                return self.train(model, step)

        functional.scaled_dot_product_attention = theirs
        try:
            self.both(lambda: Layered([Block() for _ in range(2)], True), work)
        finally:
            functional.scaled_dot_product_attention = original

    def test_functions_of_others_that_draw(self):
        original = functional.linear
        functional.linear = lambda x, weight, bias=None: original(x, weight, bias) + 0.1 * torch.randn(*x.shape[:-1], len(weight))
        forward = lambda layer, x: torch.tanh(layer.b(functional.dropout(torch.tanh(layer.a(x)), 0.3))).exp()
        try:
            self.both(self.layers(forward), reasons=[])
            self.assertGreater(self.replayed(), 0)
            self.both(self.layers(forward, preserve_rng_state=False))
        finally:
            functional.linear = original

    def test_functions_are_found_where_they_were(self):
        before, model = functional.linear, Layered([Block()], True)
        handle = self.replays(model)
        self.train(model, 0)
        ours = functional.linear
        self.assertIsNot(ours, before)
        self.assertTrue(ours == before and before == ours and ours in {before: 1} and before in {ours: 1} and before in [ours])
        for function in (ours, functional.scaled_dot_product_attention, torch.addmm):
            self.assertEqual(pickle.loads(pickle.dumps(function)), function)
            self.assertIs(copy.deepcopy(function), function)

        class Has:
            function = functional.linear

        # No method of it: torch's is none.
        self.assertEqual(Has().function(torch.ones(2, 3), torch.ones(4, 3)).shape, (2, 4))
        handle.remove()

    def test_what_stood_in_a_functions_place_is_forgotten(self):
        table, before = torch.jit._builtins._get_builtin_table(), None
        for step in range(20):
            handle = self.replays(Layered([Block()], True))
            handle._replay.begin()
            handle._replay.end()
            handle.remove()
            del handle
            gc.collect()
            before = len(table) if before is None else before
            self.assertEqual(len(table), before, f"time {step}")

    def test_a_subclass_that_has_its_own_product(self):
        class Doubles(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                if function not in (functional.linear,):
                    return super().__torch_function__(function, types, args, kwargs or {})
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **(kwargs or {})) * 2

        make = self.layers(lambda layer, x: torch.tanh(functional.linear(x, layer.a.weight.as_subclass(Doubles)).as_subclass(torch.Tensor)))
        self.both(make, reasons=["tensors"])

    def test_one_graph_on_two_threads(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

            def forward(self, x):
                return checkpoint(self.inner, x, use_reentrant=False)

            def inner(self, x):
                z = torch.tanh(self.c(x))
                return torch.tanh(self.a(z)).exp(), torch.tanh(self.b(z)).exp()

        model, wrong = Two(), set()
        handle = self.replays(model)
        for _ in range(3):
            outputs = [each.sum() for each in model(self.inputs())]
            weights = [[each.weight, model.c.weight] for each in (model.a, model.b)]
            expected = [torch.autograd.grad(outputs[place], weights[place], retain_graph=True) for place in (0, 1)]

        def work(place):
            for _ in range(60):
                found = torch.autograd.grad(outputs[place], weights[place], retain_graph=True)
                if not all(torch.equal(a, b) for a, b in zip(found, expected[place])) or _interception.current.scope is not None:
                    wrong.add(place)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            threads = [threading.Thread(target=work, args=[place]) for place in (0, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        del outputs
        handle.remove()
        self.assertEqual(wrong, set())

    def test_a_backward_within_a_checkpoint(self):
        for more in ({"create_graph": True}, {"retain_graph": True}):

            def forward(layer, x, more=more):
                y = torch.tanh(layer.a(x))
                # From the fourth pass on, as from the first.
                g = torch.autograd.grad(y.sum(), x, **more)[0] if layer.step not in (1, 2) else y
                return torch.tanh(layer.b(g)) + x * y

            self.both(self.layers(forward), reasons=["backward"])

            def late(layer, x, more=more):
                y = torch.tanh(layer.a(x))
                return torch.tanh(layer.b(torch.autograd.grad(y.sum(), x, **more)[0] if layer.step > 2 else y)) + x * y

            self.both(self.layers(late), reasons=["backward"])

    def test_transforms_and_tangents_within(self):
        self.both(self.layers(lambda layer, x: torch.tanh(torch.vmap(lambda row: functional.linear(row, layer.a.weight))(x))))

        def jvp(layer, x):
            y, tangent = torch.func.jvp(layer.a, (x,), (torch.ones_like(x),))
            return torch.tanh(layer.b(tangent * torch.tanh(y)))

        self.both(self.layers(jvp))

        def dual(layer, x):
            with forward_ad.dual_level():
                y, tangent = forward_ad.unpack_dual(torch.tanh(layer.a(forward_ad.make_dual(x, torch.ones_like(x)))))
                tangent = torch.tanh(tangent)
            return torch.tanh(layer.b(tangent * y))

        self.both(self.layers(dual))

    def test_tangents_of_another_thread(self):
        """Forward-mode levels are global to the process: a level that is open in only one of the passes does not shift the order
        of leaves.
        """

        def forward(self, x):
            q = self.a(x).unsqueeze(1)
            for turn in range(3):
                is_again = torch._C._current_graph_task_id() != -1
                is_open = turn == 0 and self.step == (5 if is_again else 4)
                with forward_ad.dual_level() if is_open else contextlib.nullcontext():
                    q = q + functional.scaled_dot_product_attention(q, q, q)
            return self.b(q.squeeze(1))

        self.both(self.layers(forward))

    def test_replaced_functions_of_other_devices(self):
        """The state of the generator that they might draw from is not readable."""

        def forward(self, x):
            nothing = torch.empty(3, 16, device="meta")
            assert functional.linear(nothing, nothing).shape == (3, 3)
            return self.b(self.a(x))

        original = functional.linear
        functional.linear = lambda *args: original(*args)
        try:
            self.both(self.layers(forward))
        finally:
            functional.linear = original

    def test_in_place_on_what_a_frozen_layer_gave(self):
        """Without a backward pass nothing is stored."""

        def forward(self, x):
            y = self.a(x)
            y += self.b(x)
            return y

        model = self.layers(forward)()
        for layer in model.layers:
            layer.a.requires_grad_(False)
        # Too small to leave.
        handle, inputs = Activations(model, 1 << 30, self.memory, True), []
        handle._replay.least_inner = 0
        for _ in range(4):
            x = self.inputs()
            inputs.append(weakref.ref(x))
            model(x).sum()
            del x
        gc.collect()
        self.assertEqual([x() for x in inputs], [None] * 4)
        handle.remove()

    def test_in_place_on_what_was_not_read_before(self):
        self.both(self.layers(lambda layer, x: layer.a(x).add_(1).exp() if layer.step > 2 else layer.a(x)))

        def work(model, step):
            with set_checkpoint_early_stop(step < 3):
                return self.train(model, step)

        self.both(self.layers(lambda layer, x: layer.a(x).mul_(2)), work)

    def test_inputs_that_are_one_and_then_are_not(self):
        def attends(layer, x):
            q = torch.tanh(layer.a(x)).unsqueeze(1)
            k = q if layer.step < 3 else torch.sin(q)
            return x + torch.tanh(functional.scaled_dot_product_attention(q, k, k)).squeeze(1)

        def multiplies(layer, x):
            q = torch.tanh(layer.a(x))[0]
            return x + torch.tanh(functional.linear(q, q if layer.step < 3 else torch.sin(q))).sum()

        for forward in (attends, multiplies):
            self.both(self.layers(forward))

    @unittest.skipUnless(importlib.util.find_spec("peft"), "peft is not installed: no adapter is replayed here")
    def test_adapters_whose_weights_are_no_parameters_of_theirs(self):
        """Flat parameters, as FSDP has them."""
        import peft

        def lay(model):
            for part in model.modules():
                if type(part) is nn.Linear:
                    part.__dict__["weight"] = part.flat.view_as(part.flat)

        def make():
            inner = self.layers(lambda layer, x: torch.tanh(layer.b(torch.tanh(layer.a(x)))))()
            model = peft.get_peft_model(inner, peft.LoraConfig(r=2, target_modules=["a", "b"], init_lora_weights=False))
            for part in model.modules():
                if type(part) is nn.Linear:
                    part.flat = part._parameters.pop("weight")
            return model

        self.both(make, lambda model, step: (lay(model), self.train(model, step))[1])
        self.assertGreater(self.replayed(), 0)


class Saved(Odd):
    def offloads(self, make, work):
        self.both(make, work, handle_of=self.activations)

    def reasons(self, handle):
        return set()

    def scales(self, forward, **attributes):
        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(torch.randn(16), requires_grad=not attributes)
                self.w.__dict__.update(attributes)

        Layer.forward = forward
        return Layer

    def test_a_parameter_that_is_given_other_bytes(self):
        """New bytes for a parameter, as ZeRO's third stage and offloaded optimisers assign them."""

        def work(model, step):
            x = self.inputs().requires_grad_()
            loss = model(x).sum()
            model.w.data = model.w.data * 2
            loss.backward()
            return [x.grad, model.w.grad]

        self.offloads(self.scales(lambda layer, x: (x * layer.w).tanh()), work)

    def test_a_storage_that_is_emptied_and_filled_again(self):
        """A storage that is emptied and refilled, as by code that gathers parameters: the backward reads its current bytes."""

        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(16, 16)

            def forward(self, x, w):
                return (self.a(x) * w).sum()

        def work(model, step):
            x, w = self.inputs(), torch.randn(16)
            loss = model(x, w)
            storage, values, size = w.untyped_storage(), w.clone(), w.nbytes
            storage.resize_(0)
            # So that it lies elsewhere.
            between = [torch.ones(16) for _ in range(8)]
            storage.resize_(size)
            del between
            with torch.autograd._unsafe_preserve_version_counter(w):
                w.copy_(values * 2)
            loss.backward()
            return [p.grad for p in model.parameters()]

        self.offloads(Layer, work)

    def test_attributes_of_frozen_weights(self):
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w):
                ctx.save_for_backward(w)
                return x * w

            @staticmethod
            def backward(ctx, gradient):
                (w,) = ctx.saved_tensors
                return gradient * w * w.scale, None

        def work(model, step):
            x = self.inputs().requires_grad_()
            model(x).sum().backward()
            return [x.grad]

        self.offloads(self.scales(lambda layer, x: Function.apply(x, layer.w), scale=3.0), work)

    def test_a_backward_that_writes_to_what_was_saved(self):
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * 1

            @staticmethod
            def backward(ctx, gradient):
                (x,) = ctx.saved_tensors
                return gradient * x.mul_(2)

        def others(layer, x):
            y = x * layer.w * 1
            return y.exp() * 0 + y.square() * 0 + Function.apply(y)

        def work(model, step):
            loss = model(self.inputs()).sum()
            loss.backward(retain_graph=True)
            if step % 2:
                loss.backward()
            return [model.w.grad]

        self.offloads(self.scales(others), work)
        self.offloads(self.scales(lambda layer, x: Function.apply(x * layer.w * 1)), work)

        # What raised last is held by torch, with what its hook had.
        def ends(x):
            raise KeyError

        x = torch.ones(1, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, ends), self.assertRaises(KeyError):
            x.exp().sum().backward()

    def test_tangents_without_bytes(self):
        class Layer(nn.Sequential):
            def __init__(self):
                super().__init__(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())

        def work(model, step):
            x = self.inputs().requires_grad_()
            with forward_ad.dual_level():
                y, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
                (y.sum() + tangent.square().sum()).backward()
            return [x.grad, *[p.grad for p in model.parameters()]]

        self.offloads(Layer, work)

    def test_maps_are_asked_for_nothing(self):
        from collections.abc import Mapping

        class Remote(Mapping):
            def __init__(self, tensor):
                self.tensor = tensor

            def __iter__(self):
                return iter("xy")

            def __len__(self):
                return 2

            def __getitem__(self, name):
                if name == "y":
                    raise OSError("it is elsewhere")
                return self.tensor

        class Layer(nn.Linear):
            def __init__(self):
                super().__init__(16, 16)

            def forward(self, batch):
                return super().forward(batch["x"])

        def work(model, step):
            model(Remote(self.inputs())).sum().backward()
            return [p.grad for p in model.parameters()]

        self.both(Layer, work, handle_of=lambda model: Offloaded(model, "1GiB", "fit", 0, self.memory))

    def test_modules_and_tensors_are_asked_for_nothing_that_a_program_may_have_made_anew(self):
        def refuses(*_args, **_more):
            raise RuntimeError("nobody asks that here")

        class Bare(nn.Module):
            """Attributes that programs may redefine: parameters that are groups, attributes that are keys of a
            configuration.
            """

            def __init__(self):
                super().__init__()
                self.a, self.b, self.keys = nn.Linear(16, 16), nn.Linear(16, 16), {}

            def __getattr__(self, name):
                found = vars(self)["_modules"].get(name)
                return vars(self)["keys"][name] if found is None else found

            def forward(self, x):
                return self.b(checkpoint(self.a, x, use_reentrant=False).tanh())

            parameters = named_parameters = buffers = named_buffers = modules = named_modules = children = named_children = refuses

        class Strict(torch.Tensor):
            """A tensor subclass that only accepts known functions, as libraries of units have."""

            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                if getattr(function, "__name__", "") not in ("mul", "sum"):
                    raise RuntimeError(f"{function} is asked")
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **(kwargs or {}))

        class Scale(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(torch.randn(16))
                self._parameters["unit"] = torch.ones(16).as_subclass(type("Unit", (Strict, nn.Parameter), {}))

            def forward(self, x, unit):
                return (x * self.w * unit).sum()

        def bare(model, step):
            model(self.inputs()).square().mean().backward()
            return [model.a.weight.grad, model.b.bias.grad]

        def scale(model, step):
            model.w.grad = None
            model(self.inputs(), torch.ones(16).as_subclass(Strict)).as_subclass(torch.Tensor).backward()
            return [model.w.grad]

        handles = [self.replays, self.activations]
        handles += [lambda model, preset=preset: Offloaded(model, "1GiB", preset, 0, self.memory) for preset in ("fit", "memory", "hybrid")]
        for handle_of in handles:
            torch.manual_seed(4)
            for make, work in ((Bare, bare), (Scale, scale)):
                self.both(make, work, handle_of=handle_of, zero=False)

    def test_a_copy_of_a_drop_in_is_one(self):
        site = OffloadActivations(min_offload_size=4096)
        for other in (copy.deepcopy(site), pickle.loads(pickle.dumps(site))):
            self.assertIsInstance(other, OffloadActivations)
            other.update_model_params(nn.Linear(2, 2))
            self.assertEqual(other._packer.least, 4096)


if __name__ == "__main__":
    unittest.main()
