"""Common parts of tests of programs: small models, and a bitwise comparison with and without offload."""

import contextlib
import importlib.util
import io
import unittest
import warnings

import glake
from test_activations import OfTorch, torch

if torch:
    pass


def needs(*names):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return unittest.skipIf(missing, f"{', '.join(missing)} not installed: its programs are not run here")


def llama(**changed):
    import transformers

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**shape, "num_key_value_heads": 1, "use_cache": False, **changed}))


def sentences(count=16, length=12):
    random = torch.Generator().manual_seed(11)
    rows = torch.randint(64, (count, length), generator=random)
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


class Program(OfTorch):
    @classmethod
    def setUpClass(cls):
        # Tensors are small: other tests may have the cores.
        torch.set_num_threads(1)

    @contextlib.contextmanager
    def warns(self, text):
        """Checks for a warning; assertWarns would import every lazy module of transformers, including missing ones."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            yield
        self.assertRegex(" ".join(str(each.message) for each in told), text)

    def assertSame(self, plain, mine):
        self.assertEqual(len(plain), len(mine))
        for step, ((loss, one), (other_loss, other)) in enumerate(zip(plain, mine)):
            self.assertEqual(loss, other_loss, f"the losses of step {step}")
            for place, (a, b) in enumerate(zip(one, other)):
                self.assertTrue(a is b is None or torch.equal(a, b), f"gradient {place} of step {step}")

    def unchanged(self, program, least_bytes=1):
        """Compares a program with and without offload. It creates a model with ``make``, and returns (loss, gradients) of each
        step.
        """

        def run(offloads):
            handles = []

            def make(model):
                if offloads:
                    handles.append(self.activations(model))
                return model

            torch.manual_seed(5)
            with contextlib.redirect_stdout(io.StringIO()):
                found = program(make)
            for handle in handles:
                handle.remove()
            return found

        plain, again = run(False), run(False)
        self.assertTrue(plain)
        self.assertSame(plain, again)
        before = glake.offload.report()["bytes_out"]
        self.assertSame(plain, run(True))
        self.assertGreaterEqual(glake.offload.report()["bytes_out"] - before, least_bytes, "nothing was offloaded")
