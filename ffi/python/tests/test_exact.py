"""Bytes that must be exact, in narrow forms: kernels without version changes, casts, masks, rows.

Needs torch; every test is skipped without it.
"""

import ctypes
import gc
import unittest
import warnings

from test_activations import OfTorch, api, glake, torch

if torch:
    from glake.offload import _narrow

SMALL = 1000


def bits_of(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def every(dtype):
    """Returns all values of a 16-bit type: NaNs of all payloads, both zeros, subnormal numbers, infinities."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def let_copies_run():
    """Lets time pass on the simulated GPU until the copies out are complete."""
    size = 8 << 20
    block, host = api.alloc(0, size), ctypes.create_string_buffer(size)
    api.copy_wait(api.copy_async(block, ctypes.addressof(host), size))
    api.stream_synchronize(0, 0)
    api.free(block)


class Unsaid(OfTorch):
    """In-place writes without a version change."""

    def saves(self, values, between):
        """Returns a function that saves a tensor of a block of its own, applies a change before the free, and returns the bytes
        read by a backward.
        """
        memory, read = self.memory, []

        class Saves(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                inner = memory.laid(values)
                ctx.save_for_backward(inner)
                between.append(inner)
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                read.append(ctx.saved_tensors[0].clone())
                return gradient

        return Saves, read

    def step(self, site, values, write, keeps=False):
        between = []
        function, read = self.saves(values, between)
        x = torch.ones(1, requires_grad=True)
        with site:
            y = function.apply(x)
            # What is saved last stays from the second pass on.
            last = torch.exp(x * 1)
        let_copies_run()
        if write:
            # As Triton does: by address.
            between[0].data.view(torch.uint8)[: values.nbytes].bitwise_xor_(0x55)
        expected = between[0].clone()
        if not keeps:
            between.clear()
        gc.collect()
        (y + last).sum().backward()
        api.stream_synchronize(0, 0)
        self.assertTrue(torch.equal(bits_of(read[0]), bits_of(expected)))
        del y, last, between
        gc.collect()

    def test_what_a_kernel_wrote_in_place_is_read_and_told_and_stays_from_then_on(self):
        site, values = self.activations(), torch.randn(SMALL)
        before = glake.offload.report()
        self.step(site, values, write=True)
        api.stream_synchronize(0, 0)
        after = glake.offload.report()
        self.assertEqual((after["changed"] - before["changed"], after["copies_out"] - before["copies_out"]), (1, 3))
        # assertWarns looks into every module that is imported, and transformers then imports what is not installed.
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            self.step(site, values, write=True)
        self.assertRegex(" ".join(str(each.message) for each in told), "A kernel writes in place")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.step(site, values, write=True)
        self.assertEqual(glake.offload.report()["copies_out"], after["copies_out"], "it stays on the GPU")

    def test_what_does_not_change_is_copied_twice_in_two_passes_and_once_then(self):
        site, values, counts = self.activations(), torch.randn(SMALL), []
        for _ in range(4):
            before = glake.offload.report()["copies_out"]
            self.step(site, values, write=False)
            counts.append(glake.offload.report()["copies_out"] - before)
        # The first has that of the last save too.
        self.assertEqual(counts, [3, 2, 1, 1])

    def test_what_somebody_keeps_is_read_where_it_is(self):
        site, values = self.activations(), torch.randn(SMALL)
        before = glake.offload.report()["copies_in"]
        for write in (True, False, True, True):
            self.step(site, values, write, keeps=True)
        self.assertEqual(glake.offload.report()["copies_in"], before)

    def test_other_saves_of_the_site_are_checked_by_themselves(self):
        site = self.activations()
        x = torch.ones(SMALL, requires_grad=True)
        for _ in range(3):
            with site:
                loss = torch.exp(torch.exp(x * 0.1) * 0.1).sum()
            loss.backward()
        before = glake.offload.report()["copies_out"]
        with site:
            # One more at the end: it alone is new.
            loss = torch.tanh(torch.exp(torch.exp(x * 0.1) * 0.1)).sum()
        self.assertEqual(glake.offload.report()["copies_out"] - before, 3)
        loss.backward()


class Forms(OfTorch):
    """Narrow forms restore the same bytes."""

    def back(self, form, tensor):
        storage, start = tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size()
        narrow = form.pack(storage, start)
        self.assertEqual(narrow.nbytes, form.size)
        into = torch.full((storage.nbytes() + 512,), 0xAB, dtype=torch.uint8).untyped_storage()
        form.unpack(narrow.untyped_storage(), into, start)
        return torch.empty(0, dtype=tensor.dtype).set_(into, tensor.storage_offset(), tensor.size(), tensor.stride())

    def same(self, form, tensor):
        self.assertTrue(torch.equal(bits_of(self.back(form, tensor)), bits_of(tensor)))

    def test_all_values_of_both_narrow_types(self):
        for dtype in (torch.bfloat16, torch.float16):
            self.assertTrue(_narrow._comes_back(dtype, torch.device("cpu")), dtype)
            for values in (every(dtype), every(dtype)[1:], every(dtype).flip(0)):
                wide = values.float()
                form = _narrow.Halved(dtype, wide.numel())
                self.assertFalse(form.differs(wide.untyped_storage(), 0).item())
                self.same(form, wide)

    def test_a_device_whose_casts_lose_payloads(self):
        # Such a device makes one NaN of all; another keeps what came.
        keeps, _narrow._casts_keep_payloads = _narrow._casts_keep_payloads, lambda _: False
        part, _narrow._PART = _narrow._PART, 1000
        try:
            wide = every(torch.float16).float()
            one = torch.where(wide.isnan(), torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32), wide)
            for values in (wide, wide.flip(0)):
                form = _narrow.Halved(torch.float16, values.numel())
                self.assertFalse(form.differs(values.untyped_storage(), 0).item())
                self.same(form, values)
            # Which the cast back makes of it there, not here.
            narrow = _narrow._half_with_payload(one).view(torch.int16)
            self.assertEqual(set(narrow[one.isnan()].tolist()), {0x7FFF})
        finally:
            _narrow._casts_keep_payloads, _narrow._PART = keeps, part

    def test_what_is_no_value_of_the_narrow_type_is_seen(self):
        for dtype, wrong in ((torch.bfloat16, 1.0 + 2**-20), (torch.float16, 1.0 + 2**-12), (torch.float16, 1e9)):
            wide = every(dtype).float()
            wide[77] = wrong
            self.assertTrue(_narrow.Halved(dtype, wide.numel()).differs(wide.untyped_storage(), 0).item())
        odd = torch.zeros(64, dtype=torch.uint8)
        odd[5] = 2
        self.assertTrue(_narrow.Bits(64).differs(odd.untyped_storage(), 0).item())

    def test_masks_of_all_lengths(self):
        torch.manual_seed(1)
        for length in (8, 9, 15, 16, 64, 1001):
            for offset in (0, 8, 64):
                mask = (torch.rand(length + offset) < 0.5)[offset:]
                form = _narrow.Bits(length)
                self.assertEqual(form.size, length // 8 + length % 8)
                self.same(form, mask)
        for value in range(256):
            mask = torch.tensor([value >> bit & 1 for bit in range(8)]).bool()
            self.same(_narrow.Bits(8), mask)

    def test_rows_and_what_lies_apart(self):
        whole = torch.randn(4, 100, 6)
        for row in (whole[:, 0], whole[:, 7, ::2], whole[1:, 3].t(), whole[:, 5:7]):
            self.same(_narrow.Gathered(row), row)
            self.assertTrue(_narrow._is_disjoint(row))
        for overlapping in (torch.randn(100).as_strided((3, 4), (10, 0)), torch.randn(100).as_strided((9, 4), (2, 1))):
            self.assertFalse(_narrow._is_disjoint(overlapping))

    def form(self, tensor):
        return _narrow.form_of(tensor, tensor.storage_offset() * tensor.element_size(), tensor.nbytes)

    def test_provenance_alone_counts(self):
        x = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
        for narrow in (x, (x * 2), (x * 2).half()):
            wide = narrow.float()
            for of in (wide, wide.t(), wide[2:], wide.view(-1)[3:]):
                self.assertIsInstance(self.form(of), _narrow.Halved)
        wide = (x * 2).float()
        with torch.no_grad():
            wide.add_(1)
        changed = (x * 2).float()
        changed += 1
        refused = {
            "changed under no_grad": wide,
            "changed": changed,
            "of values that would do": (x * 2).float() * 1,
            "of no graph": x.detach().float(),
            "of a double": torch.ones(8, dtype=torch.double, requires_grad=True).float(),
            "of another type's bytes": (x * 2).float().view(torch.int32),
            "truths that begin in between": torch.zeros(64, dtype=torch.bool)[3:],
        }
        for what, tensor in refused.items():
            self.assertIsNone(self.form(tensor), what)
        _narrow.LEAST = 1 << 20
        self.assertIsNone(self.form((x * 2).float()), "small")
        _narrow.LEAST = 0


class Narrowed(OfTorch):
    """Narrow forms in a site: the bytes copied, and bit-identical gradients."""

    def gradients(self, site, step, passes=5):
        """Returns the results of each pass with and without offload, and the bytes that each copied."""
        plain, mine, moved = [], [], []
        for found, around in ((plain, None), (mine, site)):
            for _ in range(passes):
                before = glake.offload.report()["bytes_out"]
                loss, leaves = step(around or torch.enable_grad())
                # What is saved last stays from the second pass on.
                with around or torch.enable_grad():
                    loss = loss + torch.exp(torch.zeros(8, requires_grad=True) * 1).sum()
                # The last block is freed, as with its tensor.
                self.memory.free()
                loss.backward()
                del loss
                gc.collect()
                moved.append(glake.offload.report()["bytes_out"] - before)
                found.append([leaf.grad.clone() for leaf in leaves])
        for one, other in zip(plain, mine):
            self.assertTrue(all(torch.equal(bits_of(a), bits_of(b)) for a, b in zip(one, other)))
        return moved[passes + 1 :]

    def test_casts_go_narrow_after_they_were_checked(self):
        for dtype in (torch.bfloat16, torch.float16):
            values = torch.nan_to_num(every(dtype)[:4096].clone(), 1, 1, 1)
            before = glake.offload.report()["narrowed"]

            def step(around):
                x = values.clone().requires_grad_()
                with around:
                    wide = (x * 1).float()
                    y = wide.pow(2).sum() * 1e-30
                    del wide
                return y, [x]

            moved = self.gradients(self.activations(), step)
            # x * 1 saves nothing; pow saves the cast.
            self.assertEqual(moved, [2 * 4 * 4096] + [2 * 4096] * 3, dtype)
            self.assertEqual(glake.offload.report()["narrowed"] - before, 3 * 2 * 4096)

    def test_a_cast_that_a_kernel_changed_before_it_was_saved_goes_whole(self):
        def step(around):
            x = torch.ones(4096, dtype=torch.bfloat16, requires_grad=True)
            with around:
                wide = (x * 1).float()
                wide.data.add_(2**-20)
                y = wide.pow(2).sum()
                del wide
            return y, [x]

        self.assertEqual(self.gradients(self.activations(), step), [2 * 4 * 4096] + [4 * 4096] * 3)

    def test_views_of_one_cast_are_one_copy(self):
        def step(around):
            x = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
            with around:
                wide = (x * 1).float()
                y = wide.pow(2).sum() + wide.t().pow(3).sum() + wide.view(-1).exp().sum() * 0
                del wide
            return y, [x]

        moved = self.gradients(self.activations(), step)
        self.assertEqual(moved[-1], 2 * 4096 + 4 * 4096)

    def test_masks_of_dropout_go_as_bits(self):
        def step(around):
            torch.manual_seed(3)
            x = torch.ones(4099, requires_grad=True)
            with around:
                y, mask = torch.native_dropout(x * 1, 0.3, True)
                del mask
            return y.sum(), [x]

        self.assertEqual(self.gradients(self.activations(), step), [2 * 4099] + [512 + 3] * 3)

    def test_a_mask_whose_bytes_are_others_than_0_and_1_goes_whole(self):
        class Saves(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(torch.full((800,), 7, dtype=torch.uint8).view(torch.bool))
                return x * 1

            @staticmethod
            def backward(ctx, gradient):
                return gradient * ctx.saved_tensors[0].view(torch.uint8)

        def step(around):
            x = torch.ones(800, requires_grad=True)
            with around:
                y = Saves.apply(x)
            return y.sum(), [x]

        self.assertEqual(self.gradients(self.activations(), step), [2 * 800] + [800] * 3)

    def test_a_row_goes_without_what_is_between(self):
        def step(around):
            torch.manual_seed(4)
            x = torch.randn(16, 100, 32, requires_grad=True)
            with around:
                hidden = x * 2
                # Two rows of one range: each has its own bytes.
                y = hidden[:, 0].exp().sum() + hidden[:, 0].pow(2).sum() + hidden[:, 0, ::2].pow(3).sum()
                del hidden
            return y, [x]

        moved = self.gradients(self.activations(), step)
        row = 16 * 32 * 4
        # exp saves its result; both powers save their rows.
        self.assertEqual(moved[-1], row + row + row // 2)

    def test_read_again_and_in_part(self):
        def step(around):
            x = torch.ones(4096, dtype=torch.bfloat16, requires_grad=True)
            with around:
                wide = (x * 1).float()
                y, z = wide.pow(2).sum(), wide.pow(3).sum()
                del wide
            y.backward(retain_graph=True)
            return y + z, [x]

        self.gradients(self.activations(), step)

    def test_a_norm_of_llama_under_lora(self):
        try:
            import peft
            import transformers
        except ImportError:
            self.skipTest("transformers and peft are not installed")

        config = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=128
        )
        ids = torch.arange(64).view(2, 32) % 128

        def make(dropout):
            torch.manual_seed(5)
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
            lora = peft.LoraConfig(r=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
            return peft.get_peft_model(model, lora)

        for dropout in (0.0, 0.1):
            losses = []
            for offloads in (False, True):
                model = make(dropout)
                handle = self.activations(model) if offloads else None
                optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
                narrowed, seen = glake.offload.report()["narrowed"], []
                for _ in range(5):
                    optimizer.zero_grad()
                    loss = model(input_ids=ids, labels=ids).loss
                    loss.backward()
                    seen.append(loss.item())
                    seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
                    optimizer.step()
                if handle:
                    handle.remove()
                    self.assertGreater(glake.offload.report()["narrowed"], narrowed)
                losses.append(seen)
            for one, other in zip(*losses):
                self.assertTrue(torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other)


if __name__ == "__main__":
    unittest.main()
