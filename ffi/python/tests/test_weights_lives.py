"""Frozen weights that stream: lifetimes of models, parameters and graphs, and writes that have no version.

Needs torch; every test is skipped without it.
"""

import gc
import os
import unittest

os.environ["GLAKE_DEVICE"] = "sim"

import glake  # noqa: E402
from test_activations import torch  # noqa: E402
from test_weights import OfWeights  # noqa: E402

if torch:
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


class Moves(OfLives):
    def ignored(self, model):
        return set(model._ddp_params_and_buffers_to_ignore)

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


if __name__ == "__main__":
    unittest.main()
