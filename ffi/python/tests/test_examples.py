"""The examples say what they need where it is missing. Where there is a GPU the suite of tests/gpu runs them."""

import concurrent.futures
import importlib.util
import pathlib
import socket
import unittest

import child

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"
# Examples of fine-tuning, and what each needs beside torch and transformers.
TUNED = {"finetune_plain.py": [], "finetune_hf.py": ["peft", "accelerate"], "finetune_trl.py": ["trl", "datasets"], "finetune_lightning.py": ["lightning"]}
# Those that are one of several ranks need no more.
RANKS = ["finetune_ddp.py", "finetune_fsdp.py"]
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
        tuned = [*TUNED, *RANKS]
        for name in ("training.py", "lora.py", "serving.py", "server.py", "copies.py", "tutorial.py", "deepspeed_style.py", *tuned):
            self.assertIn("needs torch", self.told(name, "sys.modules['torch'] = None"))

    def test_without_a_gpu(self):
        for name in ("tutorial.py", "deepspeed_style.py"):
            text = self.told(name, "import torch; torch.cuda.devices[0] = 0", torch=child.FAKE_TORCH, device=None)
            self.assertIn("needs an NVIDIA GPU", text)

    def needs(self, name):
        """Skips where something that an example needs is not installed."""
        missing = [needed for needed in ["torch", "transformers", *TUNED.get(name, [])] if not importlib.util.find_spec(needed)]
        if missing:
            self.skipTest(f"{name} needs {', '.join(missing)}")

    def test_fine_tuning_without_a_gpu(self):
        for name in TUNED:
            with self.subTest(name):
                self.needs(name)
                self.assertIn("needs an NVIDIA GPU", self.told(name, "", ["--offload", "1GiB"], device=None))

    def test_fine_tuning_with_bytes_laid_into_simulated_memory(self):
        for name in TUNED:
            with self.subTest(name):
                self.needs(name)
                argv = [name, "--tokens", "32", "--steps", "2", "--offload", "1GiB"]
                done = child.run(
                    LAID.format(tests=str(child.TESTS))
                    + f"import runpy\nsys.argv = {argv!r}\nrunpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')\n"
                    + "assert Offload.given == ['1GiB'] and glake.offload.report()['bytes_out'] > 1 << 20\n"
                )
                self.assertEqual(done.returncode, 0, done.stderr[-3000:])
                self.assertIn("out of the GPU: ", done.stdout)

    def test_ranks_are_started_by_torchrun(self):
        for name in RANKS:
            with self.subTest(name):
                self.needs(name)
                self.assertIn("torchrun", self.told(name, "import os; os.environ.pop('RANK', None)"))

    def test_two_ranks_with_bytes_laid_into_simulated_memory(self):
        for name in RANKS:
            with self.subTest(name):
                self.needs(name)
                with socket.create_server(("127.0.0.1", 0)) as server:
                    port = server.getsockname()[1]
                argv = [name, "--tokens", "32", "--steps", "2", "--offload", "1GiB"]
                code = (
                    LAID.format(tests=str(child.TESTS))
                    + f"import runpy\nsys.argv = {argv!r}\nrunpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')\n"
                    + "assert Offload.given == ['1GiB'] and glake.offload.report()['bytes_out'] > 1 << 20\n"
                )

                def run(rank, code=code, port=port):
                    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                    return child.run(code, **place)

                with concurrent.futures.ThreadPoolExecutor(2) as ranks:
                    for rank, done in enumerate(ranks.map(run, range(2))):
                        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
                        self.assertIn(f"rank {rank}: offloaded now", done.stdout)
                        self.assertEqual("step 1: loss" in done.stdout, rank == 0)


if __name__ == "__main__":
    unittest.main()
