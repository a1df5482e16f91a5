"""Two ranks that train over gloo, each with activations that are offloaded: DDP and FSDP2 compute the same to the bit.

Needs torch; every test is skipped without it."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest

import child

LIMIT_S = 240


@unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not installed: no ranks train here")
class Ranks(unittest.TestCase):
    def same(self, scene):
        paths = os.pathsep.join(filter(None, [str(child.TESTS), os.environ.get("PYTHONPATH")]))
        names = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryDirectory() as folder:
            ranks = []
            for own in range(2):
                command = [sys.executable, str(child.TESTS / "offload_rank.py"), str(own), "2", f"{folder}/store", scene]
                ranks.append(subprocess.Popen(command, env=names, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            found = []
            for rank in ranks:
                try:
                    out, err = rank.communicate(timeout=LIMIT_S)
                except subprocess.TimeoutExpired:
                    for other in ranks:
                        other.kill()
                    out, err = rank.communicate()
                    err += f"\nended after {LIMIT_S} s: they wait for each other"
                found.append((rank.returncode, out, err))
        for own, (code, out, err) in enumerate(found):
            self.assertEqual(code, 0, f"rank {own}: {out}\n{err[-4000:]}")
            told = json.loads(out.splitlines()[-1])
            self.assertEqual((told["wrong"], told["left"]), ([], [0, 0, 0]), f"rank {own}: {told}")
            self.assertGreater(min(told["taken"]), 0, "nothing was offloaded")

    def test_ddp(self):
        self.same("ddp")

    def test_ddp_with_parameters_that_are_not_used(self):
        self.same("ddp_unused")

    def test_ddp_whose_graph_is_the_same_each_time(self):
        self.same("ddp_static")

    def test_ddp_that_recomputes(self):
        for scene in ("ddp_recomputes", "ddp_recomputes_reentrant"):
            with self.subTest(scene):
                self.same(scene)

    def test_fsdp2(self):
        self.same("fsdp2")

    def test_fsdp2_in_two_precisions(self):
        self.same("fsdp2_mixed")

    def test_fsdp2_that_keeps_what_it_gathered_until_the_backward(self):
        self.same("fsdp2_whole")

    def test_fsdp2_whose_parameters_are_split_in_their_last_dimension(self):
        self.same("fsdp2_second")

    def test_fsdp2_that_recomputes(self):
        self.same("fsdp2_recomputes")

    def test_the_first_fsdp(self):
        self.same("fsdp1")


if __name__ == "__main__":
    unittest.main()
