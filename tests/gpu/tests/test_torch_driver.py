"""The driver of tests/gpu/torch on made-up cases: what it tells of tests that fail, hang, crash; needs neither GPU nor torch."""
import pathlib, sys, tempfile, textwrap, time, unittest

TORCH = pathlib.Path(__file__).resolve().parents[1] / "torch"
sys.path.insert(0, str(TORCH))
import run, schedule, worker

CASES = {
    "plain": """
        import os, time, unittest
        import fixture
        ISOLATED = True

        class Plain(unittest.TestCase):
            def test_a_passes(self):
                self.assertEqual(os.environ["CUDA_VISIBLE_DEVICES"].count(","), 0)

            def test_b_fails(self):
                with self.subTest("one"):
                    self.assertEqual(1, 2)

            @fixture.only("pluggable", "a reason")
            def test_c_is_skipped(self):
                pass

            @fixture.limit(1)
            def test_d_hangs(self):
                time.sleep(60)

            def test_e_crashes(self):
                os.abort()

            @fixture.gpus(2)
            def test_f_wants_two(self):
                self.assertEqual(os.environ["CUDA_VISIBLE_DEVICES"].count(","), 1)
    """,
    "broken": """
        import unittest
        ISOLATED = True

        class Broken(unittest.TestCase):
            @classmethod
            def setUpClass(cls):
                raise OSError("no fixture")

            def test_a(self):
                pass
    """,
    "leaving": """
        import atexit, os, unittest
        ISOLATED = True
        ALONE = True

        class Leaving(unittest.TestCase):
            def test_a(self):
                atexit.register(os._exit, 7)
    """,
}


class Driver(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        for name, text in CASES.items():
            pathlib.Path(folder.name, f"{name}.py").write_text(textwrap.dedent(text))
        sys.path.insert(0, folder.name)
        cls.addClassCleanup(sys.path.remove, folder.name)
        tests, rows = worker.listing(folder.name), []
        # Those of one module in one process, as modules with torch have it.
        together = [dict(test, isolated=False) for test in tests if test["gpus"] == 1]
        others = [test for test in tests if test["gpus"] == 2]
        todo = schedule.jobs(together + others, ["compiled"])
        schedule.Schedule(folder.name, ["0", "1"], 2, time.time() + 100, rows.append).run(todo)
        cls.tests, cls.outcomes = tests, {row["test"]: row for row in rows}

    def outcome(self, test):
        return self.outcomes[test]["outcome"], self.outcomes[test]["text"]

    def test_every_test_is_listed(self):
        self.assertEqual(len(self.tests), 8)
        limits = {test["test"]: test["limit"] for test in self.tests}
        self.assertEqual((limits["plain.Plain.test_d_hangs"], limits["plain.Plain.test_a_passes"]), (1, worker.LIMIT_ISOLATED))

    def test_every_test_has_an_outcome(self):
        self.assertEqual(sorted(test["test"] for test in self.tests if "leaving" not in test["test"] and "broken" not in test["test"]),
                         sorted(name for name in self.outcomes if name.startswith("plain")))

    def test_outcomes(self):
        self.assertEqual(self.outcome("plain.Plain.test_a_passes"), ("ok", ""))
        self.assertEqual(self.outcome("plain.Plain.test_c_is_skipped"), ("skipped", "a reason"))
        self.assertEqual(self.outcome("plain.Plain.test_f_wants_two"), ("ok", ""))
        for name, words in (("b_fails", "1 != 2"), ("d_hangs", "Timeout"), ("e_crashes", "Abort")):
            outcome, text = self.outcome(f"plain.Plain.test_{name}")
            self.assertEqual(outcome, "FAILED")
            self.assertIn(words, text)

    def test_a_class_that_cannot_be_set_up_fails(self):
        failed = [row for row in self.outcomes.values() if "broken" in row["test"].lower() and row["outcome"] == "FAILED"]
        self.assertTrue(failed)
        self.assertIn("no fixture", "".join(row["text"] for row in failed))

    def test_a_bad_exit_after_the_last_test_fails(self):
        self.assertEqual(self.outcome("leaving.Leaving.test_a")[0], "ok")
        self.assertIn("exit code 7", self.outcome("leaving.exit")[1])


class Places(unittest.TestCase):
    def test_one_alone_waits_for_the_others(self):
        gpus = schedule.Gpus(["0", "1"], 2)
        self.assertEqual(gpus.take(1, False), ["0"])
        self.assertEqual(gpus.take(1, True), ["1"])
        self.assertEqual(gpus.take(1, True), None)
        self.assertEqual(gpus.take(1, False), ["0"])
        self.assertEqual(gpus.take(1, False), None)
        gpus.give(["1"], True)
        self.assertEqual(gpus.take(2, False), None)
        gpus.give(["0"], False)
        self.assertEqual(sorted(gpus.take(2, False)), ["0", "1"])

    def test_names_are_chosen_by_pattern(self):
        self.assertTrue(run.wanted("graphs.Graphs.test_x", None))
        self.assertTrue(run.wanted("graphs.Graphs.test_x", ["threads", "Graphs"]))
        self.assertTrue(run.wanted("graphs.Graphs.test_x", ["graphs.*_x"]))
        self.assertFalse(run.wanted("graphs.Graphs.test_x", ["threads"]))


if __name__ == "__main__":
    unittest.main()
