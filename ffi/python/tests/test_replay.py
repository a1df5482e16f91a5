"""Leaf replay: checkpoints that replay stored outputs, on CPU tensors placed over simulated GPUs' memory.

Needs torch; those of models need transformers, and peft. Every test is skipped without what it needs.
"""

import importlib.util
import os
import unittest

os.environ["GLAKE_DEVICE"] = "sim"

from replays import OfReplay  # noqa: E402
from test_activations import torch  # noqa: E402

if torch:
    from glake.offload import _leaf, _report
    from replays import Block, Layered, Products
    from torch import nn
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop


class Exact(OfReplay):
    def test_blocks_of_a_transformer(self):
        self.same(lambda on: Layered([Block() for _ in range(3)], on), steps=20)

    def test_dropout_after_a_leaf(self):
        self.same(lambda on: Layered([Block(after=0.3) for _ in range(3)], on), steps=20)

    def test_no_product_is_computed_again(self):
        def products(on, replays):
            torch.manual_seed(0)
            model = Layered([Block() for _ in range(3)], on)
            handle = self.replays(model) if replays else None
            counts = []
            for _ in range(3):
                loss = model(self.inputs()).sum()
                with Products() as mode:
                    loss.backward()
                counts.append(mode.count)
            if handle:
                handle.remove()
            return counts

        plain, again, replayed = products(False, False), products(True, False), products(True, True)
        # Three projections and attention a block: the last product is never needed again.
        self.assertEqual(again[0], plain[0] + 3 * 4)
        # In the first pass it is computed beside, and compared.
        self.assertEqual(replayed, [again[0], plain[1], plain[2]])

    def test_attention_that_drops(self):
        make = lambda on: Layered([Block(dropout=0.3, after=0.2) for _ in range(2)], on)
        # It is computed by parts on the CPU, and saves too much.
        self.same(make, reasons=["large"])
        most, _leaf.Attention.most_beside = _leaf.Attention.most_beside, 1e9
        try:
            self.before = (_report.counts.replayed, 0)
            self.same(make)
        finally:
            _leaf.Attention.most_beside = most

    def test_attention_as_gpus_have_it(self):
        """Attention in the form of GPU kernels: it saves a generator's seed and offset too, which are unset without dropout."""
        original, unset = functional.scaled_dot_product_attention, iter(range(1 << 20))

        class Seeded(torch.autograd.Function):
            @staticmethod
            def forward(ctx, found):
                ctx.save_for_backward(torch.tensor(next(unset)), torch.tensor([next(unset)] * 2, dtype=torch.uint64))
                return found.view_as(found)

            @staticmethod
            def backward(ctx, gradient):
                assert len(ctx.saved_tensors) == 2
                return gradient

        functional.scaled_dot_product_attention = lambda *args, **named: Seeded.apply(original(*args, **named))
        try:
            self.same(lambda on: Layered([Block() for _ in range(2)], on))
        finally:
            functional.scaled_dot_product_attention = original

    def test_masks(self):
        for mask in (
            lambda length: torch.ones(length, length).tril().bool(),
            lambda length: torch.zeros(1, 1, length, length).masked_fill(~torch.ones(length, length).tril().bool(), -1e9),
        ):
            self.same(lambda on, mask=mask: Layered([Block(mask=mask) for _ in range(2)], on), steps=4)

    def test_experts_that_are_not_used(self):
        class Experts(nn.Module):
            def __init__(self):
                super().__init__()
                self.router, self.experts = nn.Linear(16, 4), nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

            def forward(self, x):
                flat = x.reshape(-1, 16)
                weights, chosen = self.router(flat).softmax(-1).max(-1)
                found = torch.zeros_like(flat)
                for place in range(3):
                    rows = (chosen == place).nonzero()[:, 0]
                    if len(rows):
                        found = found.index_add(0, rows, self.experts[place](flat[rows]) * weights[rows, None])
                return x + found.view_as(x)

        self.same(lambda on: Layered([Experts() for _ in range(3)], on), steps=20)

    def test_autocast(self):
        class Shared(nn.Module):
            def __init__(self):
                super().__init__()
                self.block, self.twice = Block(after=0.1), nn.Linear(16, 16)

            def forward(self, x):
                # Of a weight that is used twice, autocast makes one cast.
                return self.block(x) + torch.tanh(self.twice(torch.tanh(self.twice(x))))

        for around in (lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False)):
            self.same(lambda on: Layered([Shared() for _ in range(2)], on), around=around)

    def test_autocast_of_frozen_weights_and_of_inputs_that_need_gradients(self):
        def make(on):
            model = Layered([Block() for _ in range(2)], on)
            for layer in model.layers:
                layer.qkv.requires_grad_(False)
                layer.down.requires_grad_(False)
            return model

        inputs = lambda: torch.randn(2, 5, 16, requires_grad=True)
        self.same(make, around=lambda: torch.autocast("cpu", torch.bfloat16), inputs=inputs)

    def test_casts_that_autocast_keeps_have_gradients(self):
        """A backward within autocast, whose casts are cached for the next forward there."""

        def run(handle_of):
            torch.manual_seed(0)
            model = Layered([Block() for _ in range(2)], True)
            handle, seen = handle_of(model) if handle_of else None, []
            for step in range(4):
                with torch.autocast("cpu", torch.bfloat16), set_checkpoint_early_stop(step % 2 == 0):
                    # What is not stored is computed in the backward of every other step.
                    model(self.inputs()).float().square().mean().backward()
                    model(self.inputs()).float().square().mean().backward()
                seen += [p.grad.clone() for p in model.parameters()]
            if handle:
                handle.remove()
            return seen

        self.assertTrue(all(torch.equal(a, b) for a, b in zip(run(None), run(self.replays), strict=True)))

    def test_types_that_are_mixed(self):
        self.same(lambda on: Layered([Block().bfloat16() for _ in range(2)], on), inputs=lambda: torch.randn(2, 5, 16).bfloat16())
        self.same(lambda on: Layered([Block().double() for _ in range(2)], on), inputs=lambda: torch.randn(2, 5, 16).double(), steps=4)

    def test_accumulation_and_forwards_before_a_backward(self):
        def accumulated(model, batch):
            for part in (batch, batch * 2, batch[:1]):
                (model(part).square().mean() / 4).backward()
            first, second = model(batch), model(batch[:1] + 1)
            return first.sum() * 0.01 + second.square().mean()

        self.same(lambda on: Layered([Block(after=0.1) for _ in range(2)], on), loss_of=accumulated)

    def test_shapes_that_change(self):
        import random

        choose = random.Random()

        def make(on):
            choose.seed(1)
            return Layered([Block() for _ in range(2)], on)

        self.same(make, inputs=lambda: torch.randn(choose.choice((1, 2, 3)), choose.choice((4, 7)), 16))

    def test_frozen_weights_that_change_before_the_backward(self):
        def gradients(replays, is_lowered):
            torch.manual_seed(0)
            model, found = Layered([Block() for _ in range(3)], True).requires_grad_(False), []
            handle = self.replays(model) if replays else None
            weight = next(module.weight for module in model.modules() if type(module) is nn.Linear)
            for step in range(5):
                x = self.inputs().requires_grad_()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_lowered):
                    loss = model(x).float().square().mean()
                if step == 3:
                    weight.mul_(1.5)
                loss.backward()
                found.append(x.grad)
            if handle:
                handle.remove()
            return found

        for is_lowered in (False, True):
            before = _report.counts.replayed
            for plain, mine in zip(gradients(False, is_lowered), gradients(True, is_lowered)):
                self.assertTrue(torch.equal(plain, mine), is_lowered)
            self.assertGreater(_report.counts.replayed, before)

    def test_layers_that_are_used_twice(self):
        def make(on):
            block = Block(after=0.1)
            return Layered([block, Block(), block], on)

        self.same(make)

    def test_hooks_parametrizations_and_batch_norm(self):
        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.utils.parametrizations.weight_norm(nn.Linear(16, 32))
                self.second, self.norm = nn.Linear(32, 16), nn.LayerNorm(32)
                self.first.register_forward_hook(lambda _module, _inputs, output: output * 1.5)
                self.second.register_forward_pre_hook(lambda _module, inputs: (inputs[0] + 1,))
                self.second.register_full_backward_hook(lambda _module, grads, _outputs: (grads[0] * 2,))

            def forward(self, x):
                return x + self.second(self.norm(torch.relu(self.first(x))))

        self.same(lambda on: Layered([Odd() for _ in range(2)], on))

    def test_early_stop_is_off(self):
        with set_checkpoint_early_stop(False):
            self.same(lambda on: Layered([Block(after=0.1) for _ in range(2)], on), steps=4)

    def test_early_stop_that_is_turned_off_later(self):
        torch.manual_seed(0)
        model = Layered([Block() for _ in range(2)], True)
        batch = self.inputs()
        plain = torch.autograd.grad(model(batch).sum(), list(model.parameters()))
        handle = self.replays(model)
        for step in range(4):
            with set_checkpoint_early_stop(step % 2 == 0):
                # What the last product gave is needed now, and was not stored.
                found = torch.autograd.grad(model(batch).sum(), list(model.parameters()))
            self.assertTrue(all(torch.equal(a, b) for a, b in zip(plain, found)))
        handle.remove()

    def test_one_dimension_and_addmm(self):
        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight, self.bias, self.vector = (nn.Parameter(torch.randn(*sizes)) for sizes in ((16, 16), (16,), (16,)))

            def forward(self, x):
                flat = torch.tanh(torch.addmm(self.bias, x.reshape(-1, 16), self.weight)).view_as(x)
                strided = functional.linear(flat.transpose(0, 1), self.weight).transpose(0, 1)
                return x + torch.tanh(strided) * functional.linear(self.vector, self.weight)

        self.same(lambda on: Layered([Odd() for _ in range(2)], on), reasons=["large"])


@unittest.skipUnless(torch and importlib.util.find_spec("transformers"), "transformers is not installed: no model of its is replayed here")
class Models(OfReplay):
    def llama(self, adapter=None, dtype=None):
        def make(on):
            from transformers import LlamaConfig, LlamaForCausalLM

            sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
            model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64)).train()
            if on:
                model.gradient_checkpointing_enable()
            if adapter is not None:
                import peft

                model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", **adapter))
                model.enable_input_require_grads()
                if dtype is not None:
                    for name, parameter in model.named_parameters():
                        if "lora" not in name:
                            parameter.data = parameter.data.to(dtype)
            if on:
                # As the Trainer does it before its first step.
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return model

        return make

    def trains(self, make, **more):
        self.same(make, inputs=lambda: torch.randint(0, 64, (2, 6)), loss_of=lambda model, batch: model(batch, labels=batch).loss, **more)

    def test_llama(self):
        self.trains(self.llama(), steps=20)

    def test_llama_under_autocast(self):
        self.trains(self.llama(), around=lambda: torch.autocast("cpu", torch.bfloat16))

    def test_gpt2_with_its_dropouts(self):
        def make(on):
            from transformers import GPT2Config, GPT2LMHeadModel

            model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16)).train()
            if on:
                model.gradient_checkpointing_enable()
            return model

        self.trains(make, reasons=["large"], plain=False)

    def test_vit(self):
        def make(on):
            from transformers import ViTConfig, ViTForImageClassification

            sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
            model = ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8)).train()
            if on:
                model.gradient_checkpointing_enable()
            return model

        self.same(make, inputs=lambda: torch.randn(2, 3, 16, 16), loss_of=lambda model, batch: model(batch).logits.square().mean(), steps=20)


@unittest.skipUnless(torch and importlib.util.find_spec("peft"), "peft is not installed: no adapter is replayed here")
class Adapters(Models):
    def kinds(self, handle):
        return {leaf.kind.name for leaf in handle._replay._leaves.values()}

    def test_llama(self):
        self.trains(self.llama({}), steps=20)

    def test_whole_layers_are_leaves_where_nothing_drops(self):
        for dropout, expected in ((0.0, {"lora", "attention"}), (0.1, {"linear", "attention"})):
            model = self.llama({"lora_dropout": dropout})(True)
            handle = self.replays(model)
            batch = torch.randint(0, 64, (1, 4))
            model(batch, labels=batch).loss.backward()
            self.assertEqual(self.kinds(handle), expected)
            handle.remove()

    def test_with_dropout(self):
        self.trains(self.llama({"lora_dropout": 0.1}), steps=20)

    def test_adapters_of_another_type(self):
        self.trains(self.llama({}, torch.bfloat16))
        self.trains(self.llama({"lora_dropout": 0.1}, torch.bfloat16), around=lambda: torch.autocast("cpu", torch.bfloat16))

    def test_dora_and_biases(self):
        self.trains(self.llama({"use_dora": True}), steps=4)
        self.trains(self.llama({"lora_bias": True}), steps=4)

    def test_hooks_within(self):
        ran = []

        def make(on):
            model = self.llama({})(on)
            layer = next(module for name, module in model.named_modules() if name.endswith("q_proj"))
            layer.base_layer.register_forward_hook(lambda *_: ran.append(on))
            return model

        self.trains(make, steps=4)
        # Twice a step wherever it is checkpointed: also where it is replayed.
        self.assertEqual(len(ran), 4 * (1 + 3 * 2))

    test_llama_under_autocast = test_gpt2_with_its_dropouts = test_vit = None


class Checkpoints(OfReplay):
    def test_one_within_another(self):
        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.inner, self.last = Block(after=0.1), Block(after=0.1), nn.Linear(16, 16)

            def forward(self, x):
                x = self.first(x)
                return torch.tanh(self.last(torch.tanh(checkpoint(self.inner, x, use_reentrant=False))))

        self.same(lambda on: Layered([Outer() for _ in range(2)], on), reasons=["nested"])

    def test_reentrant_ones_within_and_around(self):
        class Outer(nn.Module):
            def __init__(self, outer):
                super().__init__()
                self.first, self.inner, self.outer = Block(after=0.1), Block(after=0.1), outer

            def forward(self, x):
                if self.outer:
                    return checkpoint(lambda x: checkpoint(self.inner, self.first(x), use_reentrant=False), x, use_reentrant=True)
                return torch.tanh(checkpoint(self.inner, self.first(x), use_reentrant=True))

        inputs = lambda: torch.randn(2, 5, 16, requires_grad=True)
        self.same(lambda on: Layered([Outer(False) for _ in range(2)], on), inputs=inputs, steps=4)
        self.before = (_report.counts.replayed, 0)
        self.same(lambda on: Layered([Outer(True) for _ in range(2)], False), inputs=inputs, steps=4, replays=False)

    def test_none_and_reentrant_ones_alone_are_told(self):
        for options in ({"use_reentrant": True}, None):
            make = lambda on, options=options: Layered([Block()], on and options is not None, **(options or {}))
            inputs = lambda: torch.randn(2, 5, 16, requires_grad=True)
            self.same(make, reasons=["none"], replays=False, inputs=inputs, steps=3)

    def test_ones_of_the_program_with_contexts(self):
        contexts = lambda: create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])
        self.same(lambda on: Layered([Block()], on, context_fn=contexts), reasons=["context_fn"], replays=False, steps=3)
        self.same(lambda on: Layered([Block()], on, determinism_check="none"), steps=3)

    def test_debugged(self):
        self.same(lambda on: Layered([Block()], on, debug=True), reasons=["context_fn"], replays=False, steps=2)
        with torch.utils.checkpoint.set_checkpoint_debug_enabled(True):
            self.same(lambda on: Layered([Block()], on), reasons=["context_fn"], replays=False, steps=2)

    def test_other_arguments_and_sequences(self):
        class Sequence(nn.Module):
            def __init__(self, on):
                super().__init__()
                self.on, self.layers = on, nn.Sequential(*[Block(after=0.1) for _ in range(4)])

            def forward(self, x):
                if not self.on:
                    return self.layers(x)
                x = torch.utils.checkpoint.checkpoint_sequential(self.layers[:2], 2, x, use_reentrant=False)
                return checkpoint(lambda scale, x: self.layers[2:](x * scale), x=x, scale=1.0, use_reentrant=False)

        self.same(Sequence, steps=4)

    def test_a_block_of_code(self):
        torch.manual_seed(0)
        model, batch = Layered([Block() for _ in range(2)], True), self.inputs()
        plain = torch.autograd.grad(model(batch).sum(), list(model.parameters()))
        handle = self.replays()
        for _ in range(3):
            with handle:
                loss = model(batch).sum()
            found = torch.autograd.grad(loss, list(model.parameters()))
            self.assertTrue(all(torch.equal(a, b) for a, b in zip(plain, found)))
        handle.remove()
        self.assertGreater(self.replayed(), 0)

    def test_other_hooks_within(self):
        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

            def forward(self, x):
                with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
                    x = torch.tanh(self.first(x))
                return torch.tanh(self.second(x)).exp()

        self.same(lambda on: Layered([Odd() for _ in range(2)], on))

    def test_a_module_that_replays_within_a_checkpoint_of_others(self):
        torch.manual_seed(0)
        inner, batch = Layered([Block() for _ in range(2)], True), self.inputs()
        work = lambda: torch.autograd.grad(checkpoint(inner, batch, use_reentrant=False).sum(), list(inner.parameters()))
        plain, handle = work(), self.replays(inner)
        for _ in range(3):
            self.assertTrue(all(torch.equal(a, b) for a, b in zip(plain, work())))
        handle.remove()


class Leaves(OfReplay):
    """Selection of leaves."""

    def test_layers_that_no_backward_needs_are_soon_not_stored(self):
        model = Layered([Block() for _ in range(4)], True)
        for parameter in model.layers[:2].parameters():
            parameter.requires_grad_(False)
        handle = self.replays(model)
        for _ in range(70):
            model(self.inputs()).square().sum().backward()
        self.assertLess(max(len(leaf.found) for leaf in handle._replay._leaves.values()), 32)
        before = self.replayed()
        self.assertIn("unread", self.reasons(handle))
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        for _ in range(70):
            model(self.inputs()).square().sum().backward()
        self.assertEqual([leaf.is_trusted for leaf in handle._replay._leaves.values()], [True] * len(handle._replay._leaves))
        self.assertGreater(self.replayed(), before)
        handle.remove()

    def test_products_that_are_short(self):
        model = Layered([Block()], True)
        handle = self.replays(model, least_inner=17)
        for _ in range(3):
            model(self.inputs()).sum().backward()
        self.assertEqual([leaf.kind.name for leaf in handle._replay._leaves.values()], ["attention", "linear"])
        handle.remove()

    def test_nested_and_meta_tensors(self):
        class Nested(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

            def forward(self, x):
                nested = torch.nested.as_nested_tensor([x[0], x[1, :2]])
                return torch.tanh(self.second(torch.nested.to_padded_tensor(self.first(nested), 0.0)))

        self.same(lambda on: Layered([Nested()], on, determinism_check="none"))
        model = Layered([Block()], True).to("meta")
        handle = self.replays(model)
        for _ in range(3):
            model(torch.randn(2, 5, 16, device="meta")).sum().backward()
        self.assertEqual(self.reasons(handle), {"tensors"})
        handle.remove()

    def test_subclasses_are_computed_again(self):
        class Weight(torch.Tensor):
            pass

        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight, self.after = nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 16)

            def forward(self, x):
                found = functional.linear(x, self.weight.as_subclass(Weight))
                return torch.tanh(self.after(torch.tanh(found.as_subclass(torch.Tensor))))

        self.same(lambda on: Layered([Odd() for _ in range(2)], on), reasons=["tensors"], steps=4)



class Planned(OfReplay):
    """A site that receives times of leaves, and returns verdicts about them."""

    class Site:
        def __init__(self, site, verdicts):
            self.site, self.verdicts, self.told = site, verdicts, []

        def packed(self, size, link_size, scope, leaf, stream):
            item, _, begins = self.site.packed(size)
            verdict = self.verdicts(leaf)
            self.told.append(("packed", scope, leaf))
            return item, verdict, begins

        def leaf_begins(self):
            self.told.append(("leaf",))

        def replays(self, scope, begins):
            self.told.append(("replays", scope, begins))

        def __getattr__(self, name):
            return getattr(self.site, name)

    def planned(self, model, verdicts):
        handle = self.replays(model)
        handle._packer.site = self.Site(handle._packer.site, verdicts)
        handle._packer._has_leaves = True
        return handle

    def test_all_verdicts(self):
        import random

        choose = random.Random(4)
        for verdicts in (
            lambda leaf: 0,
            lambda leaf: 1,
            lambda leaf: 2 if leaf else 1,
            lambda leaf: choose.choice((0, 1, 2)) if leaf else choose.choice((0, 1)),
        ):
            make = lambda on: Layered([Block(after=0.1) for _ in range(3)], on)
            checkpointed, _ = self.steps(make, True, None)
            found, reasons = self.steps(make, True, lambda model, verdicts=verdicts: self.planned(model, verdicts))
            self.equal(checkpointed, found)
            self.assertLessEqual(reasons, {"planned"})

    def test_what_a_site_is_told(self):
        torch.manual_seed(0)
        model = Layered([nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(2)], True)
        handle = self.planned(model, lambda leaf: 1)
        for _ in range(2):
            told = handle._packer.site.told = []
            model(self.inputs()).sum().backward()
        handle.remove()
        layer = lambda scope: [("packed", -1, False), ("leaf",), ("packed", scope, True)]
        again = lambda scope: [("replays", scope, True), ("replays", scope, False)]
        # The input of the first needs no gradients and is saved all the same.
        self.assertEqual(told, [*layer(0), *layer(1), *again(1), *again(0)])


if __name__ == "__main__":
    unittest.main()
