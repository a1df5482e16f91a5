"""Tensors that change after they were saved: with autograd's error, or by kernels without a version change.

Needs torch; every test is skipped without it.
"""

import contextlib
import gc
import unittest
import warnings

from test_activations import OfTorch, api, glake, torch
from test_exact import bits_of, let_copies_run
from test_saves import saves

class Changed(OfTorch):
    """In-place changes after a save raise autograd's own error."""

    def cases(self):
        """Cases that each compute a loss from a tensor that is changed after it was saved; the result stays alive in the
        backward.
        """

        def of(name):
            def add(case):
                found[name] = case
                return case

            return add

        found = {}

        @of("an input")
        def _(x):
            y = x * 2
            z = y * y
            y.add_(1)
            return z, y

        @of("an input, without gradients")
        def _(x):
            y = x * 2
            z = y * y
            with torch.no_grad():
                y.add_(1)
            return z, y

        @of("an input, without gradients, that nobody has")
        def _(x):
            y = x * 2
            z = y * y
            y.detach().add_(1)
            return z

        @of("an output")
        def _(x):
            y = (x * 2).exp()
            z = y * 1
            y.mul_(2)
            return z, y

        @of("an output that nobody has")
        def _(x):
            y = (x * 2).exp()
            z = y * 1
            y.mul_(2)
            return z

        @of("an output that nobody has, of an activation function in place")
        def _(x):
            return torch.relu_(torch.sigmoid(x * 2)) * 1

        @of("an input whose change depends on what read it")
        def _(x):
            y = x * 2
            z = y.sin()
            y.add_(z)
            return z, y

        @of("a second output")
        def _(x):
            q, r = torch.linalg.qr(x.view(20, 15) * 2)
            z = q.sum() * 1
            r.mul_(2)
            return z, r

        @of("an input that is an output elsewhere")
        def _(x):
            y = (x * 2).exp()
            z = y.sin()
            w = y.tanh() * w_of(y)
            y.add_(1)
            return z + w, y

        @of("an input by the operation that made it")
        def _(x):
            y = x * 2
            z = (y * y) * (y * y)
            y.add_(1)
            return z, y

        @of("a leaf")
        def _(x):
            z = x * x
            with torch.no_grad():
                x.add_(1)
            return z

        @of("a constant")
        def _(x):
            c = torch.ones_like(x)
            z = x * c
            c.add_(1)
            return z, c

        @of("a constant that has a gradient since")
        def _(x):
            c = torch.ones_like(x)
            z = x * c
            c.add_(x)
            return z, c

        @of("a view whose base is changed")
        def _(x):
            y = x * 2
            v = y.view(30, 10)
            z = v * v
            y.add_(1)
            return z, y, v

        @of("a base of which a view is changed")
        def _(x):
            y = x * 2
            z = y * y
            y[3:50].add_(1)
            return z, y

        @of("a view that was made in place")
        def _(x):
            y = x * 2
            v = y[3:]
            v.exp_()
            z = y * 1
            v.add_(1)
            return z, y, v

        @of("a double in two dimensions")
        def _(x):
            y = x.double().view(30, 10) * 2
            z = y * y
            y.add_(1)
            return z, y

        @of("a number")
        def _(x):
            y = x.sum() * 2
            z = x * y * y
            y.add_(1)
            return z, y

        def w_of(y):
            return y.detach()

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                y, z = x * 2, x * 3
                ctx.save_for_backward(x, z)
                return y, z

            @staticmethod
            def backward(ctx, one, other):
                return ctx.saved_tensors[0] * one + ctx.saved_tensors[1] * other

        @of("an input of a function of the program")
        def _(x):
            a = x * 1
            y, z = Function.apply(a)
            a.add_(1)
            return y + z, a

        @of("an output of a function of the program")
        def _(x):
            y, z = Function.apply(x * 1)
            w = y * 1 + z * 1
            z.add_(1)
            return w, z

        return found

    def said(self, case, around, anomaly):
        x = torch.linspace(1, 2, 300).requires_grad_()
        with torch.autograd.set_detect_anomaly(anomaly), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with around:
                kept = case(x)
            loss = kept[0] if isinstance(kept, tuple) else kept
            try:
                loss.sum().backward()
            except RuntimeError as error:
                return str(error)
        return None

    def test_the_text_is_torchs(self):
        for name, case in self.cases().items():
            for anomaly in (False, True):
                plain = self.said(case, contextlib.nullcontext(), anomaly)
                self.assertIn("modified by an inplace operation", plain, name)
                for least in (0, 1 << 30):
                    with self.subTest(name, anomaly=anomaly, least=least):
                        self.assertEqual(self.said(case, self.activations(least=least), anomaly), plain)

    def test_within_a_block_that_offloads(self):
        def case(x):
            y = x * 2
            z = (y * y).sum()
            y.add_(1)
            z.backward()

        def said(around):
            with self.assertRaises(RuntimeError) as caught, around:
                case(torch.ones(300, requires_grad=True))
            return str(caught.exception)

        for least in (0, 1 << 30):
            self.assertEqual(said(self.activations(least=least)), said(contextlib.nullcontext()))

    def test_an_input_that_nobody_has_is_of_the_operation_that_made_it(self):
        # Autograd names the operation that changed it: it keeps the tensor, and with that its memory.
        def tensor(x):
            y = x * 2
            z = y * y
            y.add_(1)
            return z

        def view(x):
            y = x * 2
            z = y[1:] * y[1:]
            y.add_(1)
            return z, y

        for case, changed, made in ((tensor, "AddBackward0", "MulBackward0"), (view, "AsStridedBackward0", "SliceBackward0")):
            plain = self.said(case, contextlib.nullcontext(), False)
            self.assertIn(changed, plain)
            for least in (0, 1 << 30):
                self.assertEqual(self.said(case, self.activations(least=least), False), plain.replace(changed, made))

    def test_sparse_and_nested_tensors(self):
        def case(make):
            def case(x):
                held = make()
                y = saves(held, read=[])(x)
                held.mul_(2)
                return y, held

            return case

        for name, make in {
            "coo": lambda: torch.eye(3).to_sparse(),
            "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        }.items():
            with self.subTest(name):
                plain = self.said(case(make), contextlib.nullcontext(), False)
                self.assertIn("modified by an inplace operation", plain)
                mine = self.said(case(make), self.activations(), False)
                if name == "nested":
                    # The sizes are a tensor there, which C++ writes in another way.
                    plain, mine = ((text.partition(" ")[0], text.rpartition("]")[2]) for text in (plain, mine))
                self.assertEqual(mine, plain)


class Unsaid(OfTorch):
    """Two saves of one block, and a kernel that writes between them without a version change."""

    def test_merged_saves_with_a_write_between(self):
        memory, values = self.memory, torch.randn(1000)

        def step(site, write, late=False):
            read, x = [], torch.ones(1, requires_grad=True)
            with site:
                inner = memory.laid(values)
                y = saves(inner, read=read)(x)
                let_copies_run()
                if write:
                    # As Triton does: by address.
                    inner.data.view(torch.uint8).bitwise_xor_(0x55)
                z = saves(inner, read=read)(x)
                w = saves(inner.view(10, 100)[2:], read=read)(x)
                last = torch.exp(x * 1)
            let_copies_run()
            if late:
                inner.data.view(torch.uint8).bitwise_xor_(0x33)
            expected = inner.clone()
            del inner
            gc.collect()
            (y + z + w + last).sum().backward()
            api.stream_synchronize(0, 0)
            for found in read:
                self.assertTrue(torch.equal(bits_of(found), bits_of(expected.view(10, 100)[2:] if found.dim() == 2 else expected)))

        for late in (False, True):
            site, before = self.activations(), glake.offload.report()
            step(site, True, late)
            after = glake.offload.report()
            self.assertGreaterEqual(after["changed"] - before["changed"], 1)
            self.assertGreaterEqual(after["merged"] - before["merged"], 1)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                step(site, True, late)
            self.assertIn("A kernel writes in place", " ".join(str(each.message) for each in told))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                step(site, True, late)
        # One that never changes is fine.
        site, before = self.activations(), glake.offload.report()["changed"]
        for _ in range(3):
            step(site, False)
        self.assertEqual(glake.offload.report()["changed"], before)


if __name__ == "__main__":
    unittest.main()
