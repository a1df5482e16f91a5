"""The examples say what they need where it is missing. Where there is a GPU the suite of tests/gpu runs them."""

import pathlib
import unittest

import child

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"


class Examples(unittest.TestCase):
    def told(self, name, before, **options):
        done = child.run(
            f"import sys, runpy\n{before}\nsys.argv = [{name!r}]\nrunpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')", **options
        )
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        return done.stderr

    def test_without_torch(self):
        for name in ("training.py", "lora.py", "serving.py", "server.py", "copies.py", "tutorial.py", "deepspeed_style.py"):
            self.assertIn("needs torch", self.told(name, "sys.modules['torch'] = None"))

    def test_without_a_gpu(self):
        for name in ("tutorial.py", "deepspeed_style.py"):
            text = self.told(name, "import torch; torch.cuda.devices[0] = 0", torch=child.FAKE_TORCH, device=None)
            self.assertIn("needs an NVIDIA GPU", text)


if __name__ == "__main__":
    unittest.main()
