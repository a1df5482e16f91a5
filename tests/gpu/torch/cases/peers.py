"""Copies between GPUs under the plain ABI where peer access was not configured: right bytes or a clear error, no crash."""
import unittest

import fixture

ISOLATED = True
GPUS = 2


class Peers(unittest.TestCase):
    @fixture.only("pluggable", "the other backend is asked by torch itself")
    def test_without_peer_access(self):
        done = fixture.code("""
            import torch, fixture
            from fixture import MIB
            fixture.enable()
            tensor = fixture.stamp(fixture.new(100 * MIB, "cuda:0"), 1)
            try:
                there = tensor.to("cuda:1")
                torch.cuda.synchronize(1)
                with torch.cuda.device(1):
                    print("right" if fixture.wrong(there, 1) == 0 else "WRONG BYTES")
            except RuntimeError as error:
                print("refused:", error)
            print("alive", fixture.wrong(fixture.stamp(fixture.new(MIB), 2), 2))
        """)
        self.assertEqual(done.code, 0, done.text())
        self.assertIn("alive 0", done.out, done.text())
        self.assertTrue(done.out.startswith("right") or "peer_access" in done.out, done.text())
