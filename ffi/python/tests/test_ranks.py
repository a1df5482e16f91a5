"""Two ranks, each a process with a simulated GPU, an all-reduce in each step: they are parked at the same step, or not at all."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import unittest

import child


class Ranks(unittest.TestCase):
    def run_ranks(self, scene, **environment):
        """What both print, or None of one that ended without a word."""
        names = {**os.environ, "GLAKE_DEVICE": "sim", **environment}
        sockets = socket.socketpair()
        with tempfile.NamedTemporaryFile() as store:
            ranks = []
            for own, end in enumerate(sockets):
                command = [sys.executable, child.TESTS / "rank.py", own, 2, store.name, end.fileno(), scene]
                pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
                ranks.append(subprocess.Popen([str(part) for part in command], env=names, pass_fds=[end.fileno()], **pipes))
            for end in sockets:
                end.close()
            found = []
            for rank in ranks:
                try:
                    out, err = rank.communicate(timeout=120)
                except subprocess.TimeoutExpired:
                    for other in ranks:
                        other.kill()
                    out, err = rank.communicate()
                    err += "\nended after 120 s"
                found.append((rank.returncode, out, err))
        for own, (code, out, err) in enumerate(found):
            self.assertEqual(code, 0, f"rank {own}: {out}\n{err}")
        return [json.loads(out) if out else None for _, out, _ in found]

    def parks(self, scene):
        first, second = self.run_ranks(scene)
        self.assertEqual((first["failed"], second["failed"]), (0, 0), f"{first}\n{second}")
        self.assertEqual(first["waited_at"], second["waited_at"])
        self.assertEqual((len(first["waited_at"]), first["parked"], second["parked"]), (20, 20, 20))

    def test_they_are_parked_at_the_same_steps(self):
        self.parks("threads")

    def test_tasks_are_parked_at_the_same_steps(self):
        self.parks("tasks")

    def test_nobody_waits_where_only_one_shrinks(self):
        first, second = self.run_ranks("alone")
        self.assertEqual((first["waited_at"], second["waited_at"], first["failed"]), ([], [], 10))
        self.assertLess(max(first["longest"], second["longest"]), 1.0)
        self.assertEqual(first["keys"], 1)

    def test_one_that_dies_is_waited_for_no_longer_than_was_said(self):
        first, second = self.run_ranks("dies", MEET_SECONDS="1")
        self.assertEqual((first["waited_at"], second), ([], None))
        self.assertLess(first["longest"], 2.5)

    def test_where_one_cannot_be_parked_nothing_moves(self):
        first, second = self.run_ranks("in_use", DRAIN_SECONDS="1")
        self.assertEqual((first["failed"], second["failed"]), (1, 1))
        self.assertIn("another rank", first["error"])
        self.assertLess(max(first["longest"], second["longest"]), 2.5)
        self.assertEqual((first["waited_at"], second["waited_at"]), ([], []))
        # Who asks again and again makes no store's file longer.
        self.assertLess(first["size"], 5000)

    def test_uses_that_no_shrink_waits_for_are_in_nobody_s_way(self):
        first, second = self.run_ranks("nested")
        self.assertEqual((first["failed"], second["failed"]), (0, 0), f"{first}\n{second}")
        self.assertEqual((first["waited_at"], first["parked"]), (second["waited_at"], 5))

    def test_they_are_parked_once_all_uses_that_a_shrink_waits_for_can_be(self):
        first, second = self.run_ranks("quanta", DRAIN_SECONDS="3")
        self.assertEqual((first["failed"], second["failed"]), ([], []))
        self.assertEqual((first["waited_at"], len(first["waited_at"])), (second["waited_at"], 2))
        self.assertLess(max(first["longest"], second["longest"]), 2.0)

    def test_a_group_has_nothing_of_an_earlier_one_with_its_store(self):
        first, second = self.run_ranks("groups", MEET_SECONDS="1")
        self.assertEqual((first["failed"], second["failed"]), (0, 0), f"{first}\n{second}")
        self.assertEqual((first["waited_at"], len(first["waited_at"])), (second["waited_at"], 3))

    def test_signals_at_whatever_place(self):
        first, second = self.run_ranks("signals", MEET_SECONDS="2", DRAIN_SECONDS="2", PARKS="60")
        self.assertGreater(first["raised"], 30)
        self.assertLess(max(first["longest"], second["longest"]), 6.0)
        self.assertEqual((first["parked"][-3:], second["parked"][-3:], first["keys"]), ([True] * 3, [True] * 3, 1))

    def test_a_signal_ends_the_wait_for_another(self):
        first, second = self.run_ranks("interrupted")
        self.assertLess(first["raised"], 3.0)
        self.assertFalse(first["waited"] or second["waited"])

    def test_one_that_cannot_ask_the_store_is_not_parked(self):
        for scene in ("store_is_lost", "store_does_not_answer"):
            with self.subTest(scene):
                first, second = self.run_ranks(scene, MEET_SECONDS="1", ANSWER_SECONDS="0.5")
                self.assertEqual((first["waited_at"], second["waited_at"], first["failed"], second["failed"]), ([], [], 1, 1))
                self.assertLess(max(first["longest"], second["longest"]), 2.0)


if __name__ == "__main__":
    unittest.main()
