"""A safe point after each token: what transformers' ``generate`` does with it, and that it is one. Without transformers, what its lists of
criteria do; without torch, what they would be given."""

import os
import unittest
from unittest import mock

os.environ["GLAKE_DEVICE"] = "sim"

import glake  # noqa: E402

from programs import llama, needs  # noqa: E402
from test_safepoint import shrinking  # noqa: E402


class Ids:
    """Minimal fake of a tensor of token ids."""

    shape = (3, 7)

    def new_zeros(self, *shape, dtype):
        return [(shape, dtype)]


class Criterion(unittest.TestCase):
    def test_it_says_for_each_sequence_that_it_goes_on(self):
        with mock.patch.object(glake.generation, "safepoint") as safepoint:
            self.assertEqual(glake.generation.SafePoint()(Ids(), None), [((3,), bool)])
            safepoint.assert_called_once_with()

    def test_what_is_no_tensor_has_one_answer(self):
        with mock.patch.object(glake.generation, "safepoint") as safepoint:
            self.assertIs(glake.generation.SafePoint()([[1, 2]], None, more=1), False)
            safepoint.assert_called_once_with()

    @needs("torch")
    def test_a_list_of_criteria(self):
        """Lists of criteria in the form of transformers 4.39 and later."""
        import torch

        ids = torch.ones(3, 7, dtype=torch.long)
        is_done = torch.full((ids.shape[0],), False, device=ids.device, dtype=torch.bool)
        for criterion in (glake.generation.SafePoint(), lambda ids, _: ids[:, 0] > 1, glake.generation.SafePoint()):
            is_done = is_done | criterion(ids, None)
        self.assertEqual((is_done.dtype, is_done.tolist()), (torch.bool, [False] * 3))
        unfinished = torch.ones(3, dtype=torch.long) & ~is_done
        self.assertEqual(unfinished.tolist(), [1] * 3)


@needs("torch", "transformers")
class Generate(unittest.TestCase):
    """Generation with a CPU model, inside of a use of simulated memory."""

    @classmethod
    def setUpClass(cls):
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(5)
        cls.model = llama(use_cache=True).eval()
        cls.inputs = torch.randint(64, (2, 5))

    def generate(self, *criteria, **how):
        how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **how}
        return self.model.generate(self.inputs, stopping_criteria=list(criteria), **how)

    def test_it_is_accepted(self):
        import torch
        from transformers import StoppingCriteriaList

        done = StoppingCriteriaList([glake.generation.SafePoint()])(self.inputs, None)
        self.assertEqual((done.dtype, done.tolist()), (torch.bool, [False, False]))
        for how in ({}, {"num_beams": 3}, {"eos_token_id": 7}, {"return_dict_in_generate": True, "output_scores": True}):
            with self.subTest(how):
                mine, plain = (self.generate(*criteria, **how) for criteria in ((glake.generation.SafePoint(),), ()))
                if "return_dict_in_generate" in how:
                    mine, plain = mine.sequences, plain.sequences
                self.assertTrue(torch.equal(mine, plain))

    def test_others_stop_it(self):
        class Third:
            def __call__(self, ids, scores):
                return ids[:, 0].bool() | (ids.shape[1] >= 8)

        found = self.generate(glake.generation.SafePoint(), Third())
        self.assertEqual(found.shape[1], 6 if bool(self.inputs[:, 0].all()) else 8)

    def test_it_is_parked_between_tokens(self):
        import torch

        wanted = self.generate()
        with shrinking() as begin:
            for _ in range(3):
                swapped = begin()
                # Since the last time it runs for its quantum first.
                while not swapped.done():
                    self.assertTrue(torch.equal(self.generate(glake.generation.SafePoint()), wanted))
                self.assertGreater(swapped.result(), 0)


if __name__ == "__main__":
    unittest.main()
