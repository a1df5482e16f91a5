"""The examples say what they need where it is missing. Where there is a GPU the suite of tests/gpu runs them."""

import concurrent.futures
import importlib.util
import pathlib
import socket
import unittest

import child

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"
# Fine-tuning: each example with an option, and the packages that it needs beside torch and transformers.
TUNED = {
    ("finetune_plain.py",): [],
    ("finetune_hf.py",): ["accelerate"],
    ("finetune_hf.py", "--lora"): ["accelerate", "peft"],
    ("finetune_hf.py", "--trl"): ["accelerate", "trl", "datasets"],
}
TUNED_FURTHER = {("finetune_70b.py",): ["peft"]}
# Programs of several ranks need no more.
RANKS = [("finetune_plain.py", "--ddp"), ("finetune_plain.py", "--fsdp")]
# With the bytes of tensors of the CPU laid into a simulated GPU's memory, and a budget that has all of them leave.
LAID = """
import sys
sys.path.insert(0, {tests!r})
import glake, torch
from glake.offload._activations import Activations
from test_activations import Laid

torch.set_num_threads(1)

class Offload:
    given = []
    def __init__(self, package):
        self.package = package
    def __getattr__(self, name):
        return getattr(self.package, name)
    def __call__(self, model, *, budget, preset="fit"):
        assert isinstance(model, torch.nn.Module)
        self.given.append(budget)
        return Activations(model, 1024, Laid())

glake.offload, glake.enable = Offload(glake.offload), lambda: None
"""


class Examples(unittest.TestCase):
    def told(self, name, before, arguments=(), **options):
        done = child.run(
            f"import sys, runpy\n{before}\nsys.argv = {[name, *arguments]!r}\nrunpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')", **options
        )
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        return done.stderr

    def test_without_torch(self):
        for name in ("training.py", "lora.py", "serving.py", "server.py", "copies.py", "tutorial.py", "deepspeed_style.py"):
            self.assertIn("needs torch", self.told(name, "sys.modules['torch'] = None"))
        for name, *option in [*TUNED, *RANKS, ("finetune_70b.py",)]:
            self.assertIn("needs torch", self.told(name, "sys.modules['torch'] = None", option))

    def test_without_a_gpu(self):
        for name in ("tutorial.py", "deepspeed_style.py"):
            text = self.told(name, "import torch; torch.cuda.devices[0] = 0", torch=child.FAKE_TORCH, device=None)
            self.assertIn("needs an NVIDIA GPU", text)

    def test_a_model_that_streams(self):
        self.needs(("finetune_70b.py",))
        self.assertIn("needs an NVIDIA GPU", self.told("finetune_70b.py", "", ["--size", "70b"], device=None))

    def needs(self, program):
        """Skips the test where a package that an example needs is not installed."""
        missing = [needed for needed in ["torch", "transformers", *(TUNED | TUNED_FURTHER).get(program, [])] if not importlib.util.find_spec(needed)]
        if missing:
            self.skipTest(f"{' '.join(program)} needs {', '.join(missing)}")

    def laid(self, program, **environment):
        """Runs an example with a budget; all that is saved leaves."""
        argv = [*program, "--tokens", "32", "--steps", "2", "--offload", "1GiB"]
        return child.run(
            LAID.format(tests=str(child.TESTS))
            + f"import runpy\nsys.argv = {argv!r}\nrunpy.run_path({str(EXAMPLES / program[0])!r}, run_name='__main__')\n"
            + "assert Offload.given == ['1GiB'] and glake.offload.report()['bytes_out'] > 1 << 20\n",
            **environment,
        )

    def test_fine_tuning_without_a_gpu(self):
        for program in TUNED:
            with self.subTest(program):
                self.needs(program)
                self.assertIn("needs an NVIDIA GPU", self.told(program[0], "", [*program[1:], "--offload", "1GiB"], device=None))

    def test_fine_tuning_with_bytes_laid_into_simulated_memory(self):
        for program in TUNED:
            with self.subTest(program):
                self.needs(program)
                done = self.laid(program)
                self.assertEqual(done.returncode, 0, done.stderr[-3000:])
                self.assertIn("out of the GPU: ", done.stdout)

    def test_ranks_are_started_by_torchrun(self):
        for program in RANKS:
            with self.subTest(program):
                self.needs(program)
                self.assertIn("torchrun", self.told(program[0], "import os; os.environ.pop('RANK', None)", program[1:]))

    def test_two_ranks_with_bytes_laid_into_simulated_memory(self):
        for program in RANKS:
            with self.subTest(program):
                self.needs(program)
                with socket.create_server(("127.0.0.1", 0)) as server:
                    port = server.getsockname()[1]

                def run(rank, program=program, port=port):
                    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                    return self.laid(program, **place)

                with concurrent.futures.ThreadPoolExecutor(2) as ranks:
                    for rank, done in enumerate(ranks.map(run, range(2))):
                        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
                        self.assertIn(f"rank {rank}: offloaded now", done.stdout)
                        self.assertEqual("step 1: loss" in done.stdout, rank == 0)


if __name__ == "__main__":
    unittest.main()
