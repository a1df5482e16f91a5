"""Frozen weights that stream: autograd on the CPU, whose weights come to simulated GPUs' memory.

Needs torch; every test is skipped without it.
"""

import copy
import gc
import io
import logging
import os
import threading
import unittest
from unittest import mock

os.environ["GLAKE_DEVICE"] = "sim"

import child  # noqa: E402
import glake  # noqa: E402
from test_activations import OfTorch, api, torch  # noqa: E402

MIB = 1 << 20
if torch:
    from torch.utils.checkpoint import checkpoint

    from glake.offload import _place, _placement
    from glake.offload._budget import Offloaded, _streaming, _take_off
    from glake.offload._layout import beside, layout, spread
    from glake.offload._placement import place

    nn = torch.nn
    # Small products are slower on several threads, which share the cores with other tests.
    torch.set_num_threads(1)

    class Lora(nn.Module):
        """A frozen layer with a trained adapter, as peft's."""

        def __init__(self, wide, to, dropout=0.1, bias=False):
            super().__init__()
            self.base = nn.Linear(wide, to, bias)
            self.base.requires_grad_(False)
            self.a, self.b = nn.Linear(wide, 4, False), nn.Linear(4, to, False)
            self.dropout, self.scale, self.is_on = nn.Dropout(dropout), 2.0, True

        def forward(self, x):
            found = self.base(x)
            if self.is_on:
                found = found + self.b(self.a(self.dropout(x))) * self.scale
            return found

    class Block(nn.Module):
        def __init__(self, wide=32):
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(wide), Lora(wide, 3 * wide), Lora(wide, wide)
            self.up, self.down = Lora(wide, 4 * wide, bias=True), Lora(4 * wide, wide)
            self.norm.requires_grad_(False)

        def forward(self, x):
            rows, length, wide = x.shape
            q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, 4, wide // 4).permute(2, 0, 3, 1, 4)
            found = nn.functional.scaled_dot_product_attention(q, k, v)
            x = x + self.out(found.transpose(1, 2).reshape(rows, length, wide))
            return x + self.down(nn.functional.gelu(self.up(x)))

    class Model(nn.Module):
        """A small language model: a frozen embedding, blocks, a head."""

        def __init__(self, blocks=5, how=None, tied=False):
            super().__init__()
            self.embedding = nn.Embedding(64, 32).requires_grad_(False)
            self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
            self.head = nn.Linear(32, 64, False).requires_grad_(False)
            if tied:
                self.head.weight = self.embedding.weight
            self.how, self.skipped = how, ()

        def forward(self, ids):
            x = self.embedding(ids)
            if self.how == "reentrant":
                x = x.requires_grad_()
            for number, block in enumerate(self.blocks):
                if number in self.skipped:
                    continue
                if self.how is None or not self.training:
                    x = block(x)
                else:
                    # As transformers does: past the hooks of the layer.
                    x = checkpoint(block.forward, x, use_reentrant=self.how == "reentrant")
            return self.head(x)


class Without:
    """The library whose host memory ends behind some calls of a function."""

    def __init__(self, api, after=0, **functions):
        self.api, self.left, self.functions = api, after, functions

    def __getattr__(self, name):
        if name not in self.functions:
            return getattr(self.api, name)

        def call(*arguments):
            self.left -= 1
            if self.left < 0:
                raise glake.OutOfMemoryError(self.functions[name])
            return getattr(self.api, name)(*arguments)

        return call


class OfWeights(OfTorch):
    """Everything streams: the budget has room for what stays and three blocks."""

    @classmethod
    def setUpClass(cls):
        # What is placed is logged each time.
        logging.getLogger("glake").setLevel(logging.ERROR)

    @classmethod
    def tearDownClass(cls):
        logging.getLogger("glake").setLevel(logging.NOTSET)

    def model(self, seed=1, **how):
        torch.manual_seed(seed)
        return Model(**how)

    def offload(self, model, stream=None, least=512, preset="fit", load=None, budget=None):
        """Streams so many blocks of a model, all if not said."""
        found = layout(model, least)
        stream = len(found.blocks) if stream is None else stream
        before = _streaming(model)
        handle = Offloaded(model, 1 << 30, preset, least, self.memory)
        chosen = spread(stream, len(found.blocks))
        kept = found.nbytes - sum(found.blocks[number].nbytes for number in chosen)
        room = budget or (found.fixed + kept + beside(found, chosen)) * 4 // 3 + 16
        # A model of few blocks would stay: with the window it has all of them on the GPU.
        step = 1 << 50 if stream == len(found.blocks) and budget is None else room // 4
        weights = None if before is None else before._packer.weights
        handle._packer.weights = place(model, handle._packer.site, self.memory, 0, room, least, True, step, load, weights)
        if before is not None:
            before._packer.weights = None
        _take_off(model, handle)
        return handle

    def told(self, handle):
        return handle.told()["weights"]

    def train(self, model, steps=3, each=None, step=None):
        """Trains a model; returns losses, gradients and parameters of each step."""
        torch.manual_seed(7)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        seen = []
        for number in range(steps):
            if each is not None:
                each(model, optimizer, number)
            ids = torch.randint(0, 64, (2, 8 + number % 3))
            optimizer.zero_grad()
            loss = (step or self.step)(model, ids)
            seen.append((loss, [None if p.grad is None else p.grad.clone() for p in model.parameters()]))
            optimizer.step()
        return seen, [p.detach().clone() for p in model.parameters()]

    def step(self, model, ids):
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 64), ids[:, 1:].reshape(-1))
        loss.backward()
        return loss.item()

    def same(self, make=None, stream=None, preset="fit", **how):
        """Compares losses, gradients and parameters with those of a model that does not stream, bit by bit."""
        make = make or self.model
        plain = self.train(make(), **how)
        self.equal(self.train(make(), **how), plain, "two plain runs differ")
        model = make()
        before = [p.detach().clone() for p in model.parameters()]
        handle = self.offload(model, stream, preset=preset)
        for parameter, was in zip(model.parameters(), before):
            self.assertTrue(torch.equal(parameter, was), "what is away reads as before")
        found = self.train(model, **how)
        self.equal(found, plain)
        told = self.told(handle)
        self.assertRegex(str(handle.report()), r"weights: \d+ blocks on the GPU \(.*\), \d+ blocks stream \(.*\); in .*, out 0 B; \d+ of \d+ uses")
        handle.remove()
        for parameter, now in zip(model.parameters(), plain[1]):
            self.assertTrue(torch.equal(parameter, now), "removed")
        return told

    def equal(self, found, plain, said=None):
        for (loss, gradients), (other, others) in zip(found[0], plain[0]):
            self.assertEqual(loss, other, said)
            for gradient, another in zip(gradients, others):
                self.assertTrue(gradient is another is None or torch.equal(gradient, another), said)
        for parameter, other in zip(found[1], plain[1]):
            self.assertTrue(torch.equal(parameter, other), said)


class Exact(OfWeights):
    def test_losses_gradients_and_adapters_are_the_same(self):
        told = self.same()
        self.assertEqual((told["streamed_blocks"], told["kept_blocks"], told["bytes_out"]), (5, 0, 0))
        # Twice a step, and once where the turn is: the last blocks are still there.
        self.assertLessEqual(told["bytes_in"], told["streamed_bytes"] * 2 * 3)
        self.assertGreaterEqual(told["bytes_in"], told["streamed_bytes"] * 1.4 * 3)
        # One of each forward, and none of a backward.
        self.assertEqual(told["demanded"], 3)

    def test_checkpoints_of_both_kinds_and_some_blocks_that_stay(self):
        for how in ("reentrant", "not"):
            told = self.same(lambda how=how: self.model(how=how, blocks=7), stream=5, steps=2)
            self.assertEqual((told["streamed_blocks"], told["kept_blocks"], told["bytes_out"]), (5, 2, 0), how)
            self.assertEqual(told["demanded"], 2, how)
        self.same(lambda: self.model(how="not", blocks=3), preset="hybrid")

    def test_a_checkpoint_of_several_blocks(self):
        class Segments(Model):
            def forward(self, ids):
                x = self.embedding(ids).requires_grad_()
                for first in range(0, len(self.blocks), 2):
                    x = checkpoint(nn.Sequential(*self.blocks[first : first + 2]), x, use_reentrant=self.how == "reentrant")
                return self.head(x)

        def make(how):
            torch.manual_seed(1)
            return Segments(4, how)

        for how in ("reentrant", "not"):
            self.same(lambda how=how: make(how), steps=2)

    def test_saves_are_offloaded_beside(self):
        self.same(preset="memory")

    def test_autocast_and_accumulation(self):
        def step(model, ids):
            losses = []
            for part in ids.split(1):
                with torch.autocast("cpu", torch.bfloat16):
                    losses.append(model(part).float().square().mean())
                losses[-1].backward()
            return str([loss.item() for loss in losses])

        self.same(step=step)

    def test_a_reference_with_adapters_off(self):
        def step(model, ids):
            def adapters(on):
                for module in model.modules():
                    if isinstance(module, Lora):
                        module.is_on = on

            policy = model(ids).log_softmax(-1)
            adapters(False)
            with torch.no_grad():
                reference = model(ids).log_softmax(-1)
            adapters(True)
            loss = (policy - reference).square().sum() + policy.mean()
            loss.backward()
            return loss.item()

        self.same(step=step)

    def test_several_forwards_before_a_backward_and_retained_graphs(self):
        def step(model, ids):
            one, other = model(ids), model(ids.flip(1))
            loss = one.square().mean() + other.square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            return loss.item()

        self.same(step=step)

    def test_tied_embeddings_stay_and_blocks_are_skipped(self):
        def each(model, _optimizer, number):
            model.skipped = ((), (1, 3), (0,), (4,))[number]

        told = self.same(lambda: self.model(tied=True), each=each, steps=4)
        self.assertEqual(told["streamed_blocks"], 5)

    def test_weights_unfrozen_later_stay_on_the_gpu(self):
        def each(model, optimizer, number):
            if number == 2:
                weight = model.blocks[1].up.base.weight.requires_grad_()
                optimizer.add_param_group({"params": [weight]})

        told = self.same(each=each)
        self.assertEqual(told["streamed_blocks"], 5, "other weights of the block stream")

    def test_a_frozen_tower_before_a_trained_one(self):
        class Towers(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)]).requires_grad_(False)
                self.second = nn.ModuleList([Block() for _ in range(3)])

            def forward(self, ids):
                x = nn.functional.one_hot(ids, 64).float()[..., :32]
                for layer in self.first:
                    x = layer(x).tanh()
                for block in self.second:
                    x = block(x)
                return torch.cat([x, x], -1)

        def make():
            torch.manual_seed(2)
            return Towers()

        told = self.same(make)
        self.assertEqual(told["streamed_blocks"], 7)

    def test_torch_s_own_transformer_layers(self):
        class Encoder(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding = nn.Embedding(64, 32)
                layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
                self.encoder = nn.TransformerEncoder(layer, 3).requires_grad_(False)

            def forward(self, ids):
                x = self.encoder(self.embedding(ids))
                return torch.cat([x, x], -1)

        def make():
            torch.manual_seed(2)
            return Encoder()

        self.same(make)
        model, plain = make().eval(), make().eval()
        handle = self.offload(model)
        with torch.no_grad():
            ids = torch.randint(0, 64, (2, 8))
            # The fast path reads all weights from the layer.
            self.assertTrue(torch.equal(model(ids), plain(ids)))
        handle.remove()


class Programs(OfWeights):
    def test_what_is_away_is_a_host_tensor_that_is_saved_and_written(self):
        model, plain = self.model(), self.model()
        handle = self.offload(model)
        weight, other = model.blocks[2].up.base.weight, plain.blocks[2].up.base.weight
        self.train(model, 2), self.train(plain, 2)
        for name, value in model.state_dict().items():
            self.assertTrue(torch.equal(value, plain.state_dict()[name]), name)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        self.assertLess(len(file.getvalue()), 2 * sum(p.nbytes for p in model.parameters()))
        for write in (
            lambda w: w.data.mul_(0.5),
            lambda w: w.data.copy_(torch.full_like(w, 0.01)),
            lambda w: setattr(w, "data", w.data * 1.1),
            lambda w: nn.init.uniform_(w, -0.1, 0.1, generator=torch.Generator().manual_seed(3)),
        ):
            write(weight), write(other)
            self.equal(self.train(model, 1), self.train(plain, 1))
            self.assertTrue(torch.equal(weight, other))
        state = {name: value * 1.1 for name, value in plain.state_dict().items()}
        for how in ({}, {"assign": True}):
            model.load_state_dict(copy.deepcopy(state), **how), plain.load_state_dict(copy.deepcopy(state), **how)
            for module in (model, plain):
                module.requires_grad_(True)
                for parameter in layout_of_frozen(module):
                    parameter.requires_grad_(False)
            self.equal(self.train(model, 1), self.train(plain, 1))
        handle.remove()

    def test_a_write_on_the_gpu_is_stored(self):
        def writes(model):
            def write(module, _inputs):
                with torch.no_grad():
                    module.weight.mul_(0.9)

            # Behind ours, so that it is on the GPU.
            model.blocks[1].up.base.register_forward_pre_hook(write)
            return model

        plain = writes(self.model().eval())
        model = self.model().eval()
        handle = self.offload(model)
        writes(model)

        def forward(model):
            with torch.no_grad():
                return model(torch.arange(16).view(2, 8))

        for _ in range(3):
            self.assertTrue(torch.equal(forward(model), forward(plain)))
            self.assertTrue(torch.equal(model.blocks[1].up.base.weight, plain.blocks[1].up.base.weight))
        self.assertGreater(self.told(handle)["bytes_out"], 0)
        handle.remove()

    def test_an_error_is_as_without_for_a_weight_changed_between(self):
        for model in (self.model(), self.model()):
            handle = self.offload(model) if model.blocks is not None else None
            loss = model(torch.arange(8).view(1, 8)).sum()
            with torch.no_grad():
                model.blocks[0].down.base.weight.add_(1)
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                loss.backward()
            handle.remove()
            del loss

    def test_moves_leave_streamed_weights_and_other_types_end_it(self):
        model, plain = self.model(), self.model()
        handle = self.offload(model)
        weight = model.blocks[0].qkv.base.weight
        home = weight.data_ptr()
        for move in (lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.to(torch.float32)):
            self.assertIs(move(model), model)
            self.assertEqual(weight.data_ptr(), home)
        self.equal(self.train(model, 2), self.train(plain, 2))
        model.double(), plain.double()
        self.assertEqual(model.blocks[0].qkv.base.weight.dtype, torch.float64)
        self.equal(self.train(model, 2), self.train(plain, 2))
        self.assertEqual(self.told(handle)["streamed_blocks"], 0)
        handle.remove()

    def test_copies_and_pickles_of_a_model_do_not_stream(self):
        model = self.model()
        handle = self.offload(model)
        plain = self.train(self.model(), 2)
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (twin, torch.load(file, weights_only=False)):
            other.to(torch.float32)
            self.equal(self.train(other, 2), plain)
        self.assertEqual(self.told(handle)["uses"], 0)
        self.equal(self.train(model, 2), plain)
        handle.remove()

    def test_parts_that_are_called_by_themselves(self):
        model, plain = self.model(), self.model()
        handle = self.offload(model)
        for module, other in ((model.blocks[3], plain.blocks[3]), (model.blocks[2].up, plain.blocks[2].up), (model.blocks[1].down.base, plain.blocks[1].down.base)):
            found = []
            for each in (module, other):
                torch.manual_seed(3)
                wide = 128 if each in (model.blocks[1].down.base, plain.blocks[1].down.base) else 32
                x = torch.randn(1, 4, wide, requires_grad=True)
                y = each(x)
                # Others come between.
                model.blocks[0](torch.randn(1, 4, 32))
                y.sum().backward()
                found.append(x.grad)
            self.assertTrue(torch.equal(*found))
        handle.remove()

    def test_a_weight_that_a_function_reads(self):
        class Reads(Model):
            def forward(self, ids):
                x = super().forward(ids)[..., :32]
                up = self.blocks[0].up.base
                with glake.offload.uses(up):
                    return nn.functional.linear(x, up.weight[:64], up.bias[:64])

        def make():
            torch.manual_seed(1)
            return Reads()

        self.same(make)

        def fails(*_):
            raise RuntimeError("Expected all tensors to be on the same device, but found two, cpu and cuda:0!")

        model = self.model()
        model.head.register_forward_pre_hook(fails)
        handle = self.offload(model)
        with self.assertRaisesRegex(RuntimeError, r"(?s)^Expected all tensors.*with glake\.offload\.uses\(module\)"):
            model(torch.arange(8).view(1, 8))
        handle.remove()

    def test_a_graph_lives_longer_than_the_handle(self):
        model, plain = self.model(), self.model()
        handle = self.offload(model)
        losses = []
        for each in (model, plain):
            torch.manual_seed(2)
            losses.append(each(torch.arange(8).view(1, 8)).square().sum())
        handle.remove()
        for loss in losses:
            loss.backward()
        for mine, other in zip(model.parameters(), plain.parameters()):
            self.assertTrue(mine.grad is other.grad is None or torch.equal(mine.grad, other.grad))


def layout_of_frozen(model):
    for name, parameter in model.named_parameters():
        if ".base." in name or "norm" in name or "embedding" in name or "head" in name:
            yield parameter


class Placements(OfWeights):
    def test_blocks_are_spread_evenly(self):
        for of in range(1, 12):
            for count in range(of + 1):
                chosen = sorted(spread(count, of))
                self.assertEqual(len(chosen), count)
                gaps = [after - before for before, after in zip(chosen, chosen[1:])]
                self.assertLessEqual(max(gaps, default=1) - min(gaps, default=1), 1)

    def test_a_layout_names_what_stays(self):
        model = self.model(tied=True)
        model.blocks[1].out.base.weight = model.blocks[0].out.base.weight

        class Packed(nn.Parameter):
            pass

        model.blocks[2].out.base.weight = Packed(torch.zeros(32, 32), requires_grad=False)
        found = layout(model, 512)
        self.assertEqual(found.staying, {"tied": 2, "Packed": 1})
        self.assertEqual([block.name for block in found.blocks], [f"blocks.{n}" for n in range(5)])
        self.assertIs(found.above[0], model)
        total = sum(p.nbytes * (4 if p.requires_grad else 1) for p in model.parameters())
        self.assertEqual(found.fixed + found.nbytes, total)

    def test_a_budget_between_steps_brings_blocks_back_and_sends_others(self):
        plain, model = self.model(blocks=7), self.model(blocks=7)
        expected = self.train(plain, 6)
        torch.manual_seed(7)
        handles = []

        def each(model, _optimizer, number):
            count = (7, 5, 0, 4, 7, 6)[number]
            handles.append(self.offload(model, count))
            self.assertEqual(self.told(handles[-1])["streamed_blocks"], count)

        self.equal(self.train(model, 6, each), expected)
        handles[-1].remove()

    def test_a_model_on_meta_is_filled_by_name(self):
        source = self.model()
        state = {**dict(source.named_parameters()), **dict(source.named_buffers())}
        with torch.device("meta"):
            model = Model()
        names = []

        def load(name, out):
            names.append(name)
            out.copy_(state[name].detach())

        with self.assertRaisesRegex(glake.InvalidError, "give load="):
            self.offload(model)
        handle = self.offload(model, 4, load=load)
        self.assertEqual(self.told(handle)["kept_blocks"], 1)
        self.assertEqual(sorted(names), sorted(state))
        self.equal(self.train(model), self.train(source))
        handle.remove()

    def test_without_host_memory_nothing_moves(self):
        model = self.model()
        before = [(p.data_ptr(), p.detach().clone()) for p in model.parameters()]
        with mock.patch.object(_placement._library, "api", lambda: Without(api, offload_room="the host has 1.0 GiB available")):
            with self.assertRaisesRegex(glake.OutOfMemoryError, r"KiB of pinned host memory is needed .* the host has 1\.0 GiB .* larger budget"):
                self.offload(model)
        for parameter, (address, was) in zip(model.parameters(), before):
            self.assertEqual(parameter.data_ptr(), address)
            self.assertTrue(torch.equal(parameter, was))
        # Some of it was there when the rest was not: what had moved is an ordinary tensor of the host again.
        short = Without(api, after=7, offload_reserve="none is left")
        with mock.patch.object(_place._library, "api", lambda: short):
            with self.assertRaisesRegex(glake.OutOfMemoryError, "none is left"):
                self.offload(model)
        for parameter, (_, was) in zip(model.parameters(), before):
            self.assertTrue(torch.equal(parameter, was))
        model._forward_pre_hooks.clear()

    def test_passes_that_need_more_than_the_budget_make_weights_stream(self):
        model = self.model(blocks=6)
        found = layout(model, 512)
        handle = Offloaded(model, found.fixed + 2 * found.nbytes, "fit", 512, self.memory)
        handle.place(model)
        self.assertIsNone(handle._packer.weights, "it fits")
        told = []
        with self.assertRaisesRegex(glake.InvalidError, "passes of this shape need"):
            for _ in range(20):
                model(torch.randint(0, 64, (8, 64))).square().mean().backward()
                told.append(handle.told()["weights"])
        # Saves are not counted with weights here: they stream one after the other, and then there are no more.
        streamed = [0 if each is None else each["streamed_blocks"] for each in told]
        self.assertEqual((streamed[0], streamed, streamed[-1]), (0, sorted(streamed), 6))
        handle.remove()

    def test_memory_is_that_of_the_block_in_use_and_a_window_of_two(self):
        for how in (None, "reentrant", "not"):
            model = self.model(blocks=9, how=how)
            handle = self.offload(model)
            block = self.told(handle)["streamed_bytes"] // 9
            self.train(model, 1)
            api.reset_peaks(0)
            before = glake.memory_stats(0)["allocated_bytes.all.current"]
            self.train(model, 2)
            # Blocks of 512 bytes are rounded; what autograd holds of a place that has left is of the block in use.
            self.assertLessEqual(glake.memory_stats(0)["allocated_bytes.all.peak"] - before, 3.5 * block, how)
            self.assertLessEqual(self.told(handle)["here_bytes"], 3 * block)
            handle.remove()

    def test_weights_come_back_where_passes_leave_room(self):
        plain, model = self.model(blocks=8), self.model(blocks=8)
        found = layout(model, 512)
        handle = Offloaded(model, found.fixed + found.nbytes + 16 * MIB, "fit", 512, self.memory)
        handle.place(model, step=16 * MIB + 3 * found.largest)
        self.assertEqual(self.told(handle)["streamed_blocks"], 6)
        self.equal(self.train(model, 10), self.train(plain, 10))
        self.assertEqual(self.told(handle)["streamed_blocks"], 0)
        handle.remove()

    def test_a_budget_below_what_stays_names_one_that_is_enough(self):
        model = self.model()
        with self.assertRaisesRegex(glake.InvalidError, "before a step begins, although all blocks stream: give budget="):
            self.offload(model, budget=4096)
        model._forward_pre_hooks.clear()

    def test_what_cannot_stream_is_refused_by_name(self):
        model = self.model()
        model._hf_hook = object()
        with self.assertRaisesRegex(glake.UnsupportedError, "weights cannot stream with device_map"):
            self.offload(model)
        self.assertIs(model._hf_hook.__class__, object)


class Faults(OfWeights):
    def test_exceptions_and_signals_leave_every_weight(self):
        for kind in (ValueError, KeyboardInterrupt):
            for where in ("forward", "backward"):
                model, plain = self.model(), self.model()
                handle = self.offload(model)

                def fail(*_, kind=kind):
                    raise kind("stop")

                for each in (model, plain):
                    if where == "forward":
                        hook = each.blocks[2].down.register_forward_pre_hook(fail)
                    else:
                        hook = each.blocks[2].down.register_full_backward_hook(fail)
                    with self.assertRaises(kind):
                        self.train(each, 1)
                    hook.remove()
                for mine, other in zip(model.parameters(), plain.parameters()):
                    self.assertTrue(torch.equal(mine, other))
                self.equal(self.train(model, 2), self.train(plain, 2))
                handle.remove()
                self.assertIsNone(torch._C._autograd._top_saved_tensors_default_hooks(False), (kind, where))

    def test_threads(self):
        model, plain = self.model().eval(), self.model().eval()
        handle = self.offload(model)
        inputs = [torch.randint(0, 64, (1, 8)) for _ in range(4)]
        expected, wrong = [plain(ids) for ids in inputs], []

        def work(number):
            try:
                for turn in range(6):
                    with torch.set_grad_enabled(turn % 2 == 0):
                        found = model(inputs[number])
                    if not torch.equal(found, expected[number]):
                        wrong.append((number, turn))
                    if turn % 2 == 0:
                        found.sum().backward()
            except Exception as error:  # noqa: BLE001
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])
        handle.remove()

    def test_a_shrink_between_steps(self):
        model, plain = self.model(), self.model()
        handle = self.offload(model)
        for _ in range(2):
            self.equal(self.train(model, 1), self.train(plain, 1))
            api.shrink("{}")
            api.refill("{}")
        handle.remove()

    def test_merging_and_other_writes_without_a_version_are_stored(self):
        model, plain = self.model(), self.model()
        handle = self.offload(model)
        for each in (model, plain):
            lora = each.blocks[2].up
            with glake.offload.uses(lora, writes=True), glake.offload.uses(lora.base):
                lora.base.weight.data += 0.5 * lora.b.weight @ lora.a.weight + 0.01
        self.assertTrue(torch.equal(model.blocks[2].up.base.weight, plain.blocks[2].up.base.weight))
        self.assertGreater(self.told(handle)["bytes_out"], 0)
        self.equal(self.train(model, 2), self.train(plain, 2))
        handle.remove()

    def test_a_forked_child_and_the_end_of_the_process(self):
        out = child.check(
            self,
            """
            import os, sys
            import torch
            from test_weights import Programs, torch
            case = Programs("test_copies_and_pickles_of_a_model_do_not_stream")
            case.setUp()
            model = case.model()
            handle = case.offload(model)
            case.train(model, 1)
            if os.fork() == 0:
                # Pinned memory is the parent's: no fault, and no other bytes.
                weights = [model.blocks[0].up.base.weight, model.blocks[0].up.a.weight]
                print("child:", [weight.numel() for weight in weights], flush=True)
                os._exit(0)
            os.wait()
            case.train(model, 1)
            # Left to the interpreter's end, in the middle of a step.
            sys.kept = model(torch.arange(8).view(1, 8)).sum(), model, handle
            print("parent")
            """,
        )
        self.assertEqual(out.split("\n"), ["child: [0, 128]", "parent", ""])

    def test_it_ends_with_the_model(self):
        model = self.model()
        handle = self.offload(model)
        self.train(model, 1)
        weight = model.blocks[0].up.base.weight
        expected = weight.detach().clone()
        del model
        gc.collect()
        self.assertEqual(glake.offload.report()["entries"], 1, "a weight that the program keeps")
        self.assertTrue(torch.equal(weight, expected))
        self.assertEqual(self.told(handle)["streamed_bytes"], 0)
        del weight


if __name__ == "__main__":
    unittest.main()
