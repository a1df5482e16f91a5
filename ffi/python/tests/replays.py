"""Common parts of tests of leaf replay: layers with checkpoints, and a bitwise comparison with and without replay."""

import contextlib
import os

os.environ["GLAKE_DEVICE"] = "sim"

from test_activations import OfTorch, torch  # noqa: E402

if torch:
    from glake.offload import _interception, _report
    from glake.offload._activations import Activations
    from glake.offload._replay import REASONS
    from torch import nn
    from torch.nn import functional
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import checkpoint

    class Products(TorchDispatchMode):
        """Counts the computed products and attentions."""

        def __init__(self):
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            self.count += name in ("mm", "addmm", "bmm", "baddbmm") or name.startswith("_scaled_dot_product") and "backward" not in name
            return function(*args, **(kwargs or {}))

    class Silent(torch.autograd.Function):
        """A function that writes to its argument without a version change."""

        @staticmethod
        def forward(ctx, x):
            x.data.mul_(2)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    class Layered(nn.Module):
        """Layers, checkpointed or plain."""

        def __init__(self, layers, checkpoints, **options):
            super().__init__()
            self.layers = nn.ModuleList(layers)
            self.checkpoints, self.options = checkpoints, {"use_reentrant": False, **options}

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, **self.options) if self.checkpoints else layer(x)
            return x

    class Block(nn.Module):
        """A block of a transformer."""

        def __init__(self, size=16, heads=2, dropout=0.0, after=0.0, mask=None):
            super().__init__()
            self.heads, self.dropout, self.after, self.mask = heads, dropout, after, mask
            self.norm, self.qkv, self.out = nn.LayerNorm(size), nn.Linear(size, 3 * size), nn.Linear(size, size)
            self.gate, self.down = nn.Linear(size, 2 * size, bias=False), nn.Linear(2 * size, size, bias=False)

        def forward(self, x):
            rows, length, size = x.shape
            q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, size // self.heads).permute(2, 0, 3, 1, 4)
            mask = None if self.mask is None else self.mask(length)
            found = functional.scaled_dot_product_attention(q, k, v, mask, self.dropout, mask is None)
            x = x + functional.dropout(self.out(found.transpose(1, 2).reshape(rows, length, size)), self.after)
            return x + self.down(functional.silu(self.gate(self.norm(x))))


class OfReplay(OfTorch):
    def setUp(self):
        super().setUp()
        self.before = (_report.counts.replayed, _report.counts.recomputed)

    def tearDown(self):
        self.assertEqual(_interception._installed, 0)
        self.assertIsNone(_interception.current.scope)
        self.assertIsNone(_interception.current.replay)
        super().tearDown()

    def replays(self, model=None, least_inner=0):
        handle = Activations(model, 0, self.memory, True)
        handle._replay.least_inner = least_inner
        return handle

    def replayed(self):
        return _report.counts.replayed - self.before[0]

    def reasons(self, handle):
        return {key for key, text in REASONS.items() if any(text in line for line in handle._replay.report())}

    def inputs(self):
        return torch.randn(2, 5, 16)

    def steps(self, make, checkpoints, handle_of, steps=6, inputs=None, around=contextlib.nullcontext, loss_of=None):
        """Returns losses and gradients of the given number of steps."""
        torch.manual_seed(5)
        model = make(checkpoints)
        handle = handle_of(model) if handle_of else None
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.05)
        seen = []
        for _ in range(steps):
            optimizer.zero_grad()
            batch = (inputs or self.inputs)()
            with around():
                loss = loss_of(model, batch) if loss_of else model(batch).float().square().mean()
            loss.backward()
            seen.append((loss.item(), [None if p.grad is None else p.grad.clone() for p in trained]))
            optimizer.step()
            del loss
        reasons = set()
        if handle:
            reasons = self.reasons(handle)
            handle.remove()
        return seen, reasons

    def equal(self, one, other):
        for step, ((loss, gradients), (another, others)) in enumerate(zip(one, other, strict=True)):
            self.assertEqual(loss, another, f"step {step}")
            for gradient, counterpart in zip(gradients, others, strict=True):
                self.assertTrue(gradient is counterpart is None or torch.equal(gradient, counterpart), f"step {step}")

    def same(self, make, reasons=(), replays=True, plain=True, **more):
        """Compares three runs bit by bit: not checkpointed, checkpointed, and replayed."""
        checkpointed, _ = self.steps(make, True, None, **more)
        self.equal(checkpointed, self.steps(make, True, None, **more)[0])
        if plain:
            self.equal(checkpointed, self.steps(make, False, None, **more)[0])
        found, why = self.steps(make, True, self.replays, **more)
        self.equal(checkpointed, found)
        self.assertEqual(why, set(reasons))
        self.assertEqual(self.replayed() > 0, replays)
