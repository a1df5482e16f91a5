"""Unusual saves and tensors behave as without hooks.

Needs torch; every test is skipped without it.
"""

import contextlib
import gc
import unittest
import warnings
from unittest import mock

from test_activations import OfTorch, glake, torch
from test_exact import bits_of

if torch:
    from glake.offload import _saved


def saves(*tensors, read=None):
    """A function that saves tensors and holds them no longer, and says what its backward reads of them."""
    given = list(tensors)

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(*given)
            given.clear()
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            found = ctx.saved_tensors
            if read is not None:
                read.extend(found)
            return gradient * 2

    return Saves.apply


class Interrupted(OfTorch):
    def test_what_is_raised_where_a_pass_begins_ends_no_planning(self):
        class Narrow(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = torch.nn.Linear(64, 64).bfloat16(), torch.nn.Linear(64, 64)

            def forward(self, x):
                return self.second(self.first(x.bfloat16()).float()).exp()

        def stack(error):
            def fails(*_):
                raise error("CUDA out of memory.")

            return mock.patch.object(torch, "stack", fails)

        model = Narrow()
        handle = self.activations(model)
        step = lambda: model(torch.randn(256, 64)).sum().backward()
        step()
        # A user's, while the GPU is waited for.
        with stack(KeyboardInterrupt), self.assertRaises(KeyboardInterrupt):
            step()
        gc.collect()
        handle._packer._proofs._proven.clear()
        step()
        # That there is no memory to ask of it is nobody's but ours.
        with stack(torch.OutOfMemoryError):
            step()
        passes = handle.told()["passes"]
        for _ in range(3):
            step()
        self.assertEqual(handle.told()["passes"], passes + 3)
        self.assertLess(len(handle._packer._items), 16)
        handle.remove()


class Layouts(OfTorch):
    """Tensors without a strided range of bytes are left alone."""

    def layouts(self):
        dense = torch.relu(torch.randn(6, 6)) + torch.eye(6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = {
                "coo": dense.to_sparse(),
                "csr": dense.to_sparse_csr(),
                "csc": dense.to_sparse_csc(),
                "bsr": dense.to_sparse_bsr((2, 2)),
                "bsc": dense.to_sparse_bsc((2, 2)),
                "nested": torch.nested.nested_tensor([dense, dense[:2]]),
                "jagged": torch.nested.nested_tensor([dense, dense[:2]], layout=torch.jagged),
            }
            if torch.backends.mkldnn.is_available():
                found["mkldnn"] = dense.to_mkldnn()
        return found

    def test_a_function_saves_one(self):
        for name, values in self.layouts().items():
            with self.subTest(name):
                read, x = [], torch.ones(300, requires_grad=True)
                with self.activations():
                    y = saves(values, read=read)(x)
                y.sum().backward()
                self.assertEqual((type(read[0]), read[0].layout, read[0].is_nested), (type(values), values.layout, values.is_nested))

    def test_products_with_one_as_it_is_and_as_a_buffer_or_parameter(self):
        class Product(torch.nn.Module):
            def __init__(self, left, how):
                super().__init__()
                if how == "buffer":
                    self.register_buffer("left", left)
                elif how == "parameter":
                    self.left = torch.nn.Parameter(left, requires_grad=False)
                else:
                    self.left = left

            def forward(self, x):
                return torch.tanh(self.left @ x)

        values = torch.randn(6, 5)

        def gradient(module):
            x = values.clone().requires_grad_()
            module(x).square().sum().backward()
            return x.grad

        for name, left in self.layouts().items():
            for how in ("buffer", "parameter", "attribute"):
                with self.subTest(layout=name, held=how):
                    try:
                        plain = gradient(Product(left, how))
                    except (RuntimeError, NotImplementedError):
                        self.assertIn(name, ("nested", "jagged", "mkldnn", "csc", "bsc", "bsr"), "torch has no such product")
                        # As it is with hooks too.
                        module = Product(left, how)
                        handle = self.activations(module)
                        with self.assertRaises((RuntimeError, NotImplementedError)):
                            gradient(module)
                        handle.remove()
                        continue
                    for replay in (False, True):
                        module = Product(left, how)
                        handle = self.activations(module, replay=replay)
                        for _ in range(3):
                            self.assertTrue(torch.equal(gradient(module), plain))
                        handle.remove()

    def test_activations_of_mkldnn(self):
        if not torch.backends.mkldnn.is_available():
            self.skipTest("torch was built without mkldnn")

        def gradient():
            x = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
            torch.relu(x.to_mkldnn()).to_dense().square().sum().backward()
            return x.grad

        plain = gradient()
        with self.activations():
            mine = gradient()
        self.assertTrue(torch.equal(mine, plain))


class Last(torch.nn.Module if torch else object):
    """Output of a recurrent layer, without its state."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Cases(OfTorch):
    """Unusual saves are read back unchanged."""

    def pairs(self, make, passes=3):
        """Returns the saves of a function, of tensors from ``make``, and the tensors read by its backward, over several passes
        of a site.
        """
        site = self.activations()
        for _ in range(passes):
            read, x = [], torch.ones(1, requires_grad=True)
            with site:
                tensors = make(x)
                y = saves(*tensors, read=read)(x)
                # What is saved last stays from the second pass on.
                last = torch.exp(x * 1)
            kept = [(t.detach().clone(), t.size(), t.stride(), t.dtype, type(t), t.data_ptr() % 512) for t in tensors]
            del tensors
            self.memory.free()
            (y + last).sum().backward()
            self.assertEqual(len(read), len(kept))
            yield from zip(read, kept)
            del y, last, read

    def same_bytes(self, make, aligned=False, passes=3):
        count, came = 0, glake.offload.report()["copies_in"]
        for read, (values, sizes, strides, dtype, kind, place) in self.pairs(make, passes):
            count += 1
            self.assertEqual((read.size(), read.stride(), read.dtype, type(read)), (sizes, strides, dtype, kind))
            self.assertTrue(torch.equal(bits_of(read), bits_of(values)))
            if aligned:
                self.assertEqual(read.data_ptr() % 512, place)
        self.assertGreater(glake.offload.report()["copies_in"], came)
        return count

    def test_broadcast_of_no_elements_and_of_one(self):
        def make(_x):
            row = torch.randn(1, 300)
            whole = torch.randn(())
            return [row.expand(40, 300), whole.expand(500), torch.randn(3, 1, 5).expand(3, 4, 5), torch.empty(0), torch.empty(3, 0, 5), whole]

        before = glake.offload.report()["bytes_out"]
        self.assertEqual(self.same_bytes(make), 18)
        # What is broadcast goes as it lies in memory.
        self.assertLess(glake.offload.report()["bytes_out"] - before, 2 * 3 * 4 * (300 + 15 + 100))

    def test_parts_that_overlap(self):
        def make(_x):
            line = torch.randn(400)
            return [line.as_strided((5, 100), (50, 1)), line.as_strided((30, 8), (3, 2), 7), line[10:200], line[100:300], line.unfold(0, 16, 4)]

        self.assertEqual(self.same_bytes(make), 15)

    def test_parts_that_count_their_changes_each_by_themselves(self):
        def split(x):
            whole = x * 2
            return whole.unsafe_chunk(2, 1)

        def data(x):
            whole = x * 2
            return whole, whole.data

        for make in (split, data):
            found = []
            for around in (contextlib.nullcontext(), self.activations()):
                x = torch.linspace(-1, 1, 128).view(4, 32).requires_grad_()
                with around:
                    one, other = make(x)
                    if make is split:
                        total = one.sigmoid_().sum() + other.sigmoid_().sum()
                    else:
                        total = (one * other.sigmoid_()).sum() + other.exp().sum()
                    del one, other
                total.backward()
                found.append(x.grad)
            self.assertTrue(torch.equal(*found), make)

    def test_an_alias_of_its_own_count_that_was_changed_between_two_saves(self):
        found = []
        for around in (contextlib.nullcontext(), self.activations()):
            x = torch.linspace(-1, 1, 128).requires_grad_()
            with around:
                t = torch.ones(128)
                # Nobody asks for this one's gradient.
                unread = x * t
                t.mul_(3)
                total = (x * t.data).sum()
                del t, unread
            total.backward()
            found.append(x.grad)
        self.assertTrue(torch.equal(*found))

    def test_what_has_its_views_saved_before_itself_is_copied_once(self):
        site = self.activations()
        for _ in range(4):
            before, x = glake.offload.report()["bytes_out"], torch.ones(1, requires_grad=True)
            with site:
                h = x.detach() * torch.arange(1024.0).view(32, 32)
                left, right = h.chunk(2, 1)
                total = (x * left).sum() + (x * right).sum() + (x * h).sum()
                del h, left, right
                last = torch.exp(x * 1)
            copied = glake.offload.report()["bytes_out"] - before
            (total + last.sum()).backward()
        self.assertLessEqual(copied, 4096 + 64)

    def test_what_was_changed_is_copied_once_for_its_views(self):
        site = self.activations()
        for _ in range(4):
            before, x = glake.offload.report()["bytes_out"], torch.ones(1, requires_grad=True)
            with site:
                y = (x * torch.arange(1024.0)).relu_()
                total = sum((x * part).sum() for part in (y, y.view(32, 32), y[:512], y, y.view(32, 32).t()))
                del y
                last = torch.exp(x * 1)
            copied = glake.offload.report()["bytes_out"] - before
            (total + last.sum()).backward()
        # And what x has.
        self.assertLessEqual(copied, 2 * 4096 + 64)

    def test_recurrent_layers(self):
        for kind in (torch.nn.GRU, torch.nn.LSTM, torch.nn.RNN):
            self.same(lambda: Last(kind(16, 16, batch_first=True)), inputs=lambda: torch.randn(4, 6, 16))

    def test_a_backward_in_inference_mode(self):
        found = []
        for around in (contextlib.nullcontext(), self.activations()):
            x = torch.linspace(-1, 1, 128).requires_grad_()
            with around:
                total = (x * 2).sigmoid().exp().sum()
            with torch.inference_mode():
                (gradient,) = torch.autograd.grad(total, x)
            found.append(gradient.clone())
        self.assertTrue(torch.equal(*found))

    def test_what_is_said_of_a_change(self):
        kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex32, torch.bool, torch.int64, torch.uint16]
        for kind in [*kinds, torch.float8_e4m3fn]:
            for is_inference in (False, True):
                errors = []
                for around in (contextlib.nullcontext(), self.activations()):
                    x, given = torch.ones(1, requires_grad=True), torch.zeros(1024).to(kind)
                    with around:
                        y = saves(given)(x)
                    given.zero_()
                    with torch.inference_mode(is_inference), self.assertRaises(RuntimeError) as raised:
                        torch.autograd.grad(y, x)
                    errors.append(str(raised.exception))
                self.assertEqual(errors[0], errors[1], (kind, is_inference))

    def test_types_of_eight_bits(self):
        kinds = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]
        self.assertTrue(kinds)
        self.same_bytes(lambda _x: [torch.arange(256, dtype=torch.uint8).view(kind) for kind in kinds])
        self.same_bytes(lambda _x: [torch.randn(300).to(kind).view(15, 20).t() for kind in kinds])
        self.assertGreater(glake.offload.report()["bytes_out"], 0)

    def test_subclasses_stay_what_they_are(self):
        from torch.testing._internal.two_tensor import TwoTensor

        class Marked(torch.Tensor):
            pass

        def gradients(make):
            x = make(torch.linspace(0, 1, 300))
            z = (x * x).exp().sin()
            kind = type(z)
            z.sum().backward()
            return kind, x.grad

        for make in (lambda x: x.as_subclass(Marked).requires_grad_(), lambda x: TwoTensor(x, x * 2).requires_grad_()):
            plain = gradients(make)
            with self.activations():
                mine = gradients(make)
            self.assertEqual(mine[0], plain[0])
            parts = lambda gradient: (gradient.a, gradient.b) if isinstance(gradient, TwoTensor) else (gradient,)
            for one, other in zip(parts(plain[1]), parts(mine[1])):
                self.assertTrue(torch.equal(one, other))

    def test_addresses_modulo_512_and_strides_are_as_before(self):
        laid = self.memory.laid

        def make(_x):
            block = laid(torch.randn(40, 64))
            image = laid(torch.randn(2, 3, 8, 8)).contiguous(memory_format=torch.channels_last)
            image = laid(image)
            line = laid(torch.randn(5000).half())
            return [
                block, block[1], block[3:7], block.t(), block[:, 3], block[5:9, 10:20], block.view(-1)[1:], block.view(-1)[129:1000],
                block[2].expand(7, 64),
                image, image[1], image[:, 1], line[1:], line[333:334], line[7:4000:3], line.view(torch.int16)[9:80],
            ]  # fmt: skip

        self.assertEqual(self.same_bytes(make, aligned=True), 3 * 16)

    def test_so_they_are_of_what_goes_in_fewer_bytes(self):
        laid = self.memory.laid

        def make(_x):
            values = torch.arange(3000, dtype=torch.bfloat16).requires_grad_()

            def cast(values):
                # As a cast's: autograd says where it comes from, and its bytes lie in a block.
                wide = (values * 1).float()
                wide.data = laid(wide.detach())
                return wide

            mask = laid(torch.rand(3000) < 0.5)
            rows = laid(torch.randn(64, 50, 8))
            wide = cast(values)
            return [wide[37:1000], wide.view(30, 100).t()[5:], mask[8:2003], mask[1000:], rows[:, 3], rows[1:, 7, ::2]]

        narrowed = glake.offload.report()["narrowed"]
        self.assertEqual(self.same_bytes(make, aligned=True, passes=6), 6 * 6)
        self.assertGreater(glake.offload.report()["narrowed"] - narrowed, 0)

    def test_a_form_in_which_a_save_was_not_tried(self):
        def step(kind, site):
            torch.manual_seed(7)
            narrow = torch.randn(530, 64).to(torch.bfloat16).requires_grad_()
            with site:
                wide = narrow.to(torch.float32)
                if kind == "written":
                    wide.data.mul_(1.00001)
                found = (wide[:, ::8] if kind == "part" else wide).square()
                del wide
                last = torch.exp(torch.randn(500, 64, requires_grad=True)).exp()
            saved = found.grad_fn._saved_self.clone()
            (found.sum() + last.sum()).backward()
            return saved

        site = self.activations()
        for kind in ["part"] * 4 + ["written"] * 3:
            self.assertTrue(torch.equal(step(kind, contextlib.nullcontext()), step(kind, site)), kind)

    def test_tied_weights(self):
        class Tied(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.words, self.body = torch.nn.Embedding(48, 32), torch.nn.Linear(32, 32)
                self.head = torch.nn.Linear(32, 48, bias=False)
                self.head.weight = self.words.weight

            def forward(self, x):
                return self.head(torch.tanh(self.body(self.words(x)))) @ self.words.weight

        class Lowered(Tied):
            def forward(self, x):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return super().forward(x).float()

        for make in (Tied, Lowered):
            self.same(make, inputs=lambda: torch.arange(40).view(4, 10) % 48)
        model, before = Tied(), glake.offload.report()["bytes_out"]
        handle = self.activations(model)
        model(torch.arange(40).view(4, 10)).sum().backward()
        handle.remove()
        # The indices (8 bytes each), what goes into each of three products and what tanh gave (which goes into the second), twice as they are
        # checked.
        self.assertLessEqual(glake.offload.report()["bytes_out"] - before, 2 * 40 * (8 + 4 * (32 + 32 + 48)))


class Passes(OfTorch):
    """Programs whose passes are not alternating forwards and backwards."""

    def model(self):
        torch.manual_seed(4)
        nn = torch.nn
        return nn.Sequential(*[nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)])

    def equal(self, program, make=None):
        """Compares the results of a program for a model with and without offload."""
        seen = []
        for offloads in (False, False, True):
            model = (make or self.model)()
            handle = self.activations(model) if offloads else None
            before = glake.offload.report()["bytes_out"]
            torch.manual_seed(9)
            seen.append(program(model))
            if handle:
                handle.remove()
        self.assertGreater(glake.offload.report()["bytes_out"], before)
        for other in seen[1:]:
            self.assertEqual(len(seen[0]), len(other))
            for place, (one, another) in enumerate(zip(seen[0], other)):
                self.assertTrue(torch.equal(one, another), f"{place} of {len(other)}")

    def test_no_gradients_within_a_module(self):
        class Teacher(torch.nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                with torch.no_grad():
                    target = torch.tanh(self.inner(x))
                y = self.inner(x)
                with torch.no_grad():
                    scale = y.abs().mean() * self.inner(y).exp().mean()
                with torch.inference_mode():
                    self.inner(x)
                return y.square().sum() + (target * y).sum() * scale

        def program(model):
            found = []
            for _ in range(4):
                model.zero_grad()
                model(torch.randn(6, 16)).backward()
                found += [p.grad.clone() for p in model.parameters()]
            return found

        self.equal(program, lambda: Teacher(self.model()))

    def test_policies_that_generate_without_gradients_and_are_trained_with_accumulation(self):
        # As GRPO: rewards of what was generated; the old policy's and a reference's likelihoods without gradients; several updates on them.
        def program(model):
            import copy

            reference, found = copy.deepcopy(model), []
            for hook in (*reference._forward_pre_hooks, *reference._forward_hooks):
                reference._forward_pre_hooks.pop(hook, None)
                reference._forward_hooks.pop(hook, None)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(3):
                batch, x = [], torch.randn(4, 16)
                model.eval()
                for _ in range(3 + step):
                    with torch.no_grad():
                        x = model(x) + 0.1 * torch.randn(4, 16)
                    batch.append(x)
                model.train()
                with torch.no_grad():
                    olds = [model(x).log_softmax(-1) for x in batch]
                    references = [reference(x).log_softmax(-1) for x in batch]
                rewards = [torch.randn(4, 1) for _ in batch]
                for _ in range(2):
                    for micro, (x, old, other, reward) in enumerate(zip(batch, olds, references, rewards)):
                        new = model(x).log_softmax(-1)
                        ratio = (new - old).exp()
                        loss = -torch.min(ratio * reward, ratio.clamp(0.8, 1.2) * reward).mean()
                        kl = (other - new).exp() - (other - new) - 1
                        ((loss + 0.04 * kl.mean()) / len(batch)).backward()
                        if micro % 2 or micro == len(batch) - 1:
                            found += [p.grad.clone() for p in model.parameters()]
                            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                            optimizer.step()
                            optimizer.zero_grad()
            return found

        self.equal(program)

    def test_a_backward_that_raises(self):
        class Stops(Exception):
            pass

        def program(model):
            found = []
            # torch keeps the graph of a backward that raised until the next one: that comes last.
            for step in range(7):
                x = torch.randn(5, 16, requires_grad=True)
                middle = model[:2](x) if step % 3 == 1 else None
                y = model(x)
                if step % 2:

                    def stop(_gradient):
                        raise Stops

                    hook = model[1][1].weight.register_hook(stop)
                    with self.assertRaises(Stops):
                        y.square().sum().backward()
                    hook.remove()
                else:
                    y.square().sum().backward()
                    found.append(x.grad)
                    found += [p.grad.clone() for p in model.parameters()]
                model.zero_grad()
                if middle is not None:
                    middle.sum().backward()
                    found.append(x.grad.clone())
                    model.zero_grad()
            return found

        self.equal(program)

    def test_copies_out_that_the_driver_refuses(self):
        """The program runs as without hooks: the tensor stays, and the report counts it."""

        class Refuses:
            def __init__(self, site, at):
                self.site, self.at, self.count = site, at, 0

            def __getattr__(self, name):
                return getattr(self.site, name)

            def refuses(self):
                self.count += 1
                if self.count in self.at:
                    raise glake.DriverError("copy refused by the driver")

            def offload_checked(self, *given):
                self.refuses()
                return self.site.offload_checked(*given)

            def check(self, save):
                # Saves of every second item are known.
                state = self.site.check(save)
                return 1 if self.count % 2 else state

        model = self.model()
        x = torch.randn(6, 16)

        def gradients():
            model.zero_grad()
            model(x).square().sum().backward()
            return [p.grad.clone() for p in model.parameters()]

        plain = gradients()
        for at in ({1}, {2}, {5}, {1, 2, 3, 4, 5}, set(range(1, 1000))):
            with self.subTest(at=len(at), first=min(at)):
                handle, stayed = self.activations(model), glake.offload.report()["stayed"]
                packer = handle._packer
                packer.site = site = Refuses(packer.site, at)
                copy_out = packer._copy_out

                def copies(*given):
                    site.refuses()
                    return copy_out(*given)

                packer._copy_out = copies
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    for _ in range(4):
                        for one, other in zip(plain, gradients()):
                            self.assertTrue(torch.equal(one, other))
                refused = len([count for count in at if count <= site.count])
                self.assertEqual(glake.offload.report()["stayed"] - stayed, refused)
                texts = [str(each.message) for each in told]
                self.assertEqual([text.count("copy refused by the driver") for text in texts], [1])
                handle.remove()

    def test_reloads_ahead_for_which_there_is_no_memory(self):
        """Such tensors are reloaded when they are read. A plugged allocator has no exception class of its own for a lack of
        memory.
        """
        model, x = self.model(), torch.randn(6, 16)

        def gradients():
            model.zero_grad()
            model(x).square().sum().backward()
            return [p.grad.clone() for p in model.parameters()]

        plain = gradients()
        for kind in (torch.OutOfMemoryError, RuntimeError, glake.OutOfMemoryError, glake.DriverError):
            with self.subTest(kind.__name__):
                handle, failed, text = self.activations(model), 0, "CUDA out of memory. Tried to allocate 1.00 GiB"
                packer, take = handle._packer, self.memory.take
                begin = packer._begin

                def fails(like, size):
                    nonlocal failed
                    failed += 1
                    raise kind(text)

                def begins(items):
                    self.memory.take = fails
                    try:
                        begin(items)
                    finally:
                        self.memory.take = take

                packer._begin = begins
                for _ in range(4):
                    for one, other in zip(plain, gradients()):
                        self.assertTrue(torch.equal(one, other))
                self.assertGreater(failed, 0)
                # What somebody else raises in the midst of it, as a signal's handler does, is the program's.
                text = "DataLoader worker is killed"
                if kind is RuntimeError:
                    with self.assertRaisesRegex(RuntimeError, "worker is killed"):
                        gradients()
                handle.remove()

    def test_storages_that_are_held_weakly_are_let_go(self):
        weak, forget = torch.UntypedStorage._weak_ref, torch.UntypedStorage._free_weak_ref
        counts = {"weak": 0, "forgotten": 0}

        class Storage:
            def __init__(self, storage):
                self.storage = storage

            def __getattr__(self, name):
                return getattr(self.storage, name)

            def _weak_ref(self):
                counts["weak"] += 1
                return weak(self.storage)

            def _free_weak_ref(self, held):
                counts["forgotten"] += 1
                forget(held)

        left = _saved.Entry.left
        with mock.patch.object(_saved.Entry, "left", lambda entry, storage, like: left(entry, Storage(storage), like)):
            model, x = self.model(), torch.randn(6, 16)
            handle = self.activations(model)
            for _ in range(4):
                model(x).square().sum().backward()
            handle.remove()
            gc.collect()
        self.assertGreater(counts["weak"], 0)
        self.assertEqual(counts["weak"], counts["forgotten"])

    def test_an_item_that_goes_while_it_is_found_names_no_storage(self):
        """Another thread may find the item between the end of its last holder and its removal from the index."""
        site, storage = mock.Mock(), torch.zeros(8).untyped_storage()
        entry = _saved.Entry(site, 0, self.memory, 0, 32)
        entry.left(storage, torch.empty(0))
        self.assertIsNotNone(entry._still_there())
        entry.__del__()
        self.assertTrue(entry.is_dropped)
        self.assertIsNone(entry._still_there())
        del entry
        # Once for each time it was said to go, and the storage is whole.
        self.assertEqual(site.dropped.call_count, 2)
        self.assertEqual(storage.nbytes(), 32)

    def test_a_backward_on_another_stream(self):
        memory = self.memory

        def program(way):
            def program(model):
                found = []
                for step in range(6):
                    memory.current = 0
                    x = torch.randn(5, 16, requires_grad=True)
                    y = model(x)
                    if way == "whole":
                        memory.current = 2
                    elif way == "alternates":
                        # What was begun on one is read on the other.
                        for hooked in [part for layer in model for part in layer]:
                            hooked.weight.register_hook(turn) if hasattr(hooked, "weight") and not step else None
                    y.square().sum().backward(retain_graph=way == "retained")
                    if way == "retained":
                        memory.current = 2
                        y.square().sum().backward()
                    found.append(x.grad)
                    found += [p.grad.clone() for p in model.parameters()]
                    model.zero_grad()
                memory.current = 0
                return found

            def turn(_gradient):
                memory.current = 2 - memory.current

            return program

        for way in ("whole", "alternates", "retained"):
            with self.subTest(way):
                self.equal(program(way))
        self.assertGreater(memory.used, 0, "nothing that was begun on one stream was read on another")

    def test_casts_that_are_read_on_two_streams(self):
        memory = self.memory

        def step(site):
            x = torch.arange(4096, dtype=torch.bfloat16).requires_grad_()
            with site:
                wide = (x * 1).float()
                y, z = wide.pow(2).sum(), wide.pow(3).sum()
                del wide
                last = torch.exp(x[:8] * 0).sum()
            memory.free()
            memory.current = 0
            y.backward(retain_graph=True)
            memory.current = 2
            (y + z + last).backward()
            memory.current = 0
            return x.grad

        site, narrowed = self.activations(), glake.offload.report()["narrowed"]
        plain = step(contextlib.nullcontext())
        for _ in range(4):
            self.assertTrue(torch.equal(step(site), plain))
        self.assertGreater(glake.offload.report()["narrowed"], narrowed)


if __name__ == "__main__":
    unittest.main()
