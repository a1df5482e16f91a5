"""Frozen weights that stream: lifetimes of models, parameters and graphs, and writes that have no version.

Needs torch; every test is skipped without it.
"""

import copy
import gc
import io
import os
import unittest
from unittest import mock

os.environ["GLAKE_DEVICE"] = "sim"

import glake  # noqa: E402
from test_activations import torch  # noqa: E402
from test_weights import MIB, OfWeights  # noqa: E402

if torch:
    from glake.offload._budget import Offloaded
    from glake.offload._layout import layout

    nn = torch.nn
    IDS = torch.arange(16).view(2, 8)

    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, ids):
            return self.inner(ids)


class OfLives(OfWeights):
    def both(self, seed=1):
        """Returns a model that streams, its handle, and the same model without."""
        model = self.model(seed)
        return model, self.offload(model), self.model(seed)

    def trained(self, model):
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    def loss(self, model):
        torch.manual_seed(3)
        return model(IDS).square().mean()

    def same_gradients(self, parameters, others):
        for parameter, other in zip(parameters, others):
            self.assertTrue(torch.equal(parameter.grad, other.grad))

    def forward(self, model):
        torch.manual_seed(3)
        with torch.no_grad():
            return model(IDS)


class Lives(OfLives):
    def test_parts_stream_after_the_end_of_their_wrapper(self):
        model, plain = Wrapper(self.model()), self.model()
        handle = self.offload(model)
        self.equal(self.train(model, 1), self.train(plain, 1))
        model = model.inner
        gc.collect()
        self.equal(self.train(model, 2), self.train(plain, 2))
        self.assertEqual(self.told(handle)["streamed_blocks"], 5)
        handle.remove()

    def test_a_graph_lives_longer_than_the_model(self):
        for removes in (False, True):
            model, handle, plain = self.both()
            found, expected = self.trained(model), self.trained(plain)
            loss, other = self.loss(model), self.loss(plain)
            if removes:
                handle.remove()
            del model
            gc.collect()
            # Freed memory has other bytes.
            noise = [torch.full((64, 64), 7.0) for _ in range(64)]
            loss.backward(), other.backward()
            self.same_gradients(found, expected)
            del loss, noise
            gc.collect()
            self.assertEqual(glake.offload.report()["entries"], 0, "host memory is released with the graph")
            handle.remove()

    def test_a_graph_of_a_replaced_weight_reads_the_old_one(self):
        model, handle, plain = self.both()
        losses = []
        for each in (model, plain):
            losses.append(self.loss(each))
            with torch.no_grad():
                each.blocks[2].up.base.weight = nn.Parameter(torch.ones(128, 32), requires_grad=False)
            self.forward(each)
        for loss in losses:
            loss.backward()
        self.same_gradients(self.trained(model), self.trained(plain))
        handle.remove()


class Replaced(OfLives):
    def test_a_replaced_weight_keeps_its_values(self):
        model, handle, plain = self.both()
        expected = self.forward(plain)
        layer = model.blocks[1].up.base
        old, was = layer.weight, layer.weight.detach().clone()
        layer.weight = nn.Parameter(torch.ones_like(was), requires_grad=False)
        self.assertFalse(torch.equal(self.forward(model), expected))
        self.assertTrue(torch.equal(old, was))
        layer.weight = old
        self.assertTrue(torch.equal(self.forward(model), expected))
        self.assertEqual(self.told(handle)["streamed_blocks"], 5)
        handle.remove()

    def test_a_weight_with_other_strides_keeps_them(self):
        model, handle, plain = self.both()
        for each in (model, plain):
            each.blocks[1].up.base.weight = nn.Parameter(torch.ones(32, 128).t(), requires_grad=False)
        for _ in range(2):
            self.assertTrue(torch.equal(self.forward(model), self.forward(plain)))
            self.assertEqual(model.blocks[1].up.base.weight.stride(), (1, 128))
        handle.remove()

    def test_a_state_dict_keeps_its_values(self):
        for how in ("assign", "data"):
            model, handle, plain = self.both()
            expected = self.forward(plain)
            old = model.state_dict()
            new = {name: value * 1.1 for name, value in plain.state_dict().items()}
            if how == "assign":
                model.load_state_dict(new, assign=True)
            else:
                for name, parameter in model.named_parameters():
                    parameter.data = new[name]
            self.assertFalse(torch.equal(self.forward(model), expected))
            for name, value in plain.state_dict().items():
                self.assertTrue(torch.equal(old[name], value), name)
            model.load_state_dict(old, assign=True)
            self.assertTrue(torch.equal(self.forward(model), expected))
            handle.remove()

    def test_a_functional_call_leaves_the_model(self):
        model, handle, plain = self.both()
        other = self.model(2)
        weights = dict(other.named_parameters())
        for _ in range(2):
            torch.manual_seed(3)
            found = torch.func.functional_call(model, weights, (IDS,))
            self.assertTrue(torch.equal(found, self.forward(other)))
            self.assertTrue(torch.equal(self.forward(model), self.forward(plain)))
        for parameter, mine in zip(other.parameters(), self.model(2).parameters()):
            self.assertTrue(torch.equal(parameter, mine))
        handle.remove()

    def test_weights_without_room_in_host_memory_stay_on_the_gpu(self):
        model, handle, plain = self.both()
        for each in (model, plain):
            each.blocks[1].up.base.weight = nn.Parameter(torch.ones(128, 32), requires_grad=False)
        with mock.patch("glake.offload._place._library.api") as api:
            api().offload_reserve.side_effect = glake.OutOfMemoryError("none is left")
            self.assertTrue(torch.equal(self.forward(model), self.forward(plain)))
        self.equal(self.train(model, 1), self.train(plain, 1))
        handle.remove()


class Placements(OfLives):
    def test_without_memory_for_the_rest_nothing_streams(self):
        shortage = mock.patch("glake.offload._placement._Filled.rest", side_effect=torch.OutOfMemoryError("CUDA out of memory"))
        model, plain = self.model(), self.model()
        with shortage, self.assertRaises(torch.OutOfMemoryError):
            self.offload(model)
        gc.collect()
        self.assertEqual(glake.offload.report()["entries"], 0)
        self.equal(self.train(model, 1), self.train(plain, 1))
        # Those that stream already go on.
        handle = self.offload(model, 3)
        with shortage, self.assertRaises(torch.OutOfMemoryError):
            self.offload(model, 4)
        self.equal(self.train(model, 2), self.train(plain, 2))
        handle.remove()
        self.equal(self.train(model, 1), self.train(plain, 1))


    def test_weights_stream_on_without_memory_to_bring_them_back(self):
        plain, model = self.model(blocks=8), self.model(blocks=8)
        found = layout(model, 512)
        handle = Offloaded(model, found.fixed + found.nbytes + 16 * MIB, "fit", 512, self.memory)
        handle.place(model, step=16 * MIB + 3 * found.largest)
        with mock.patch.object(handle, "place", side_effect=torch.OutOfMemoryError("CUDA out of memory")) as place:
            self.equal(self.train(model, 8), self.train(plain, 8))
        place.assert_called()
        self.assertEqual(self.told(handle)["streamed_blocks"], 6)
        handle.remove()

    def test_saves_of_an_earlier_placement_are_told_to_its_site(self):
        model = self.model()
        handle = self.offload(model, preset="memory")
        loss = self.loss(model)
        before, handle._packer.site = handle._packer.site, mock.Mock(wraps=glake.offload._budget._library.api().Site())
        loss.backward()
        self.assertEqual(handle._packer.site.unpacked.call_count, 0)
        del before
        handle.remove()


class Moves(OfLives):
    def ignored(self, model):
        return set(model._ddp_params_and_buffers_to_ignore)

    def test_data_parallel_ignores_weights_only_while_they_stream(self):
        model = self.model()
        model._ddp_params_and_buffers_to_ignore = ["own"]
        handle = self.offload(model)
        name = "blocks.1.up.base.weight"
        streamed = self.ignored(model)
        self.assertIn(name, streamed)
        self.assertIn("own", streamed)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            self.assertEqual(self.ignored(other), {"own"})
        model.blocks[1].up.base.weight.requires_grad_(True)
        self.assertEqual(self.ignored(model), streamed - {name})
        model._ddp_params_and_buffers_to_ignore.append("other")
        self.assertEqual(self.ignored(model), streamed - {name} | {"other"})
        handle.remove()
        self.assertEqual(model._ddp_params_and_buffers_to_ignore, ["own", "other"])
        for module in model.modules():
            self.assertNotIn("_apply", vars(module))

    def test_assigned_weights_stream_on(self):
        model, handle, plain = self.both()
        streamed = self.ignored(model)
        for each in (model, plain):
            state = {name: value.clone() for name, value in self.model(3).state_dict().items()}
            frozen = [name for name, parameter in each.named_parameters() if not parameter.requires_grad]
            each.load_state_dict(state, assign=True)
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(name not in frozen)
        self.assertEqual(self.ignored(model), streamed)
        self.assertTrue(torch.equal(self.forward(model), self.forward(plain)))
        self.assertEqual(self.ignored(model), streamed)
        handle.remove()


class Writes(OfLives):
    def write(self, model, value):
        for block in model.blocks:
            for layer in (block.qkv, block.out, block.up, block.down):
                layer.base.weight.data.fill_(value)

    def test_uses_reads_what_was_written_on_the_host(self):
        model, handle, _ = self.both()
        self.loss(model).backward()
        self.write(model, 0.5)
        for block in model.blocks:
            with glake.offload.uses(block):
                self.assertEqual(block.up.base.weight.unique().tolist(), [0.5])
        self.loss(model).backward()
        self.write(model, 0.25)
        with glake.offload.uses(model, writes=True):
            for block in model.blocks:
                block.up.base.weight.data.mul_(2)
        for block in model.blocks:
            self.assertEqual(block.up.base.weight.unique().tolist(), [0.5])
        handle.remove()

    def test_a_write_after_an_error_is_kept(self):
        for kind in (ValueError, KeyboardInterrupt):
            for where in ("forward", "layer", "backward"):
                model, handle, plain = self.both()

                def fail(*_, kind=kind):
                    raise kind("stop")

                for each in (model, plain):
                    module = each.blocks[2].down.base if where == "layer" else each.blocks[2].down
                    hook = (module.register_full_backward_hook if where == "backward" else module.register_forward_pre_hook)(fail)
                    with self.assertRaises(kind):
                        self.train(each, 1)
                    hook.remove()
                    self.write(each, 0.01)
                with glake.offload.uses(model):
                    for block in model.blocks:
                        self.assertTrue(block.up.base.weight.eq(0.01).all(), (kind, where))
                self.write(model, 0.03), self.write(plain, 0.03)
                if where == "backward":
                    self.assertFalse(handle._packer.weights._tasks)
                self.assertTrue(torch.equal(self.forward(model), self.forward(plain)))
                self.write(model, 0.02), self.write(plain, 0.02)
                self.equal(self.train(model, 1), self.train(plain, 1))
                handle.remove()

    def test_an_unfrozen_weight_is_trained_after_inference(self):
        model, handle, plain = self.both()
        for each in (model, plain):
            each.blocks[1].up.base.weight.requires_grad_(True)
            with torch.inference_mode():
                each(IDS)
            self.assertFalse(each.blocks[1].up.base.weight.is_inference())
        self.equal(self.train(model, 2), self.train(plain, 2))
        handle.remove()

    def test_a_model_is_placed_in_inference_mode(self):
        model, plain = self.model(), self.model()
        with torch.inference_mode():
            handle = self.offload(model)
            model(IDS)
            handle.remove()
        self.assertFalse(any(parameter.is_inference() for parameter in model.parameters()))
        self.equal(self.train(model, 1), self.train(plain, 1))

    def test_uses_without_memory_pins_no_weight(self):
        model, handle, plain = self.both()
        take, left = self.memory.take, [5]

        def fails(*arguments):
            left[0] -= 1
            if left[0] < 0:
                raise glake.OutOfMemoryError("none is left")
            return take(*arguments)

        with mock.patch.object(self.memory, "take", fails), self.assertRaises(glake.OutOfMemoryError):
            with glake.offload.uses(model):
                pass
        self.assertEqual({place.pins for place in handle._packer.weights.places}, {0})
        self.equal(self.train(model, 1), self.train(plain, 1))
        handle.remove()


if __name__ == "__main__":
    unittest.main()
