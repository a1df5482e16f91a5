"""What house.py makes of made-up figures and builds; needs neither GPU nor glake."""
import json, os, pathlib, subprocess, sys, tempfile, unittest

GPU = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(GPU))
import house

# A stand-in for the command: answers what the part asks for, times that of the build.
GLAKE = """#!{python}
import json, sys
slow = {slow}
if "alloc" in sys.argv:
    rows = [dict(streams=n, pair_ns=100 * slow, pool_pair_ns=90.0) for n in (1, 3)]
elif "replay" in sys.argv:
    rows = [dict(trace="t", gpu_lag_ms=lag, reserved_peak=1 << 30, extent_maps=3, driver_calls=9) for lag in (0, 100)]
elif "copy" in sys.argv:
    rows = [dict(direction="h2d", bytes=4 << 20, engine_gbps=50 / slow, verified={verified})]
else:
    rows = [dict(tier="host", phase=phase, warm=True, gbps=50.0, leaked_bytes=0) for phase in ("shrink", "refill")]
print("\\n".join(map(json.dumps, rows)))
"""


def samples(news, olds, less=True):
    return {("hot", "x"): {"less": less, **{place: {"new": new, "old": old} for place, (new, old) in enumerate(zip(news, olds))}}}


class Judged(unittest.TestCase):
    def outcome(self, *given, **more):
        [row] = house.judged(samples(*given, **more))
        return row["outcome"]

    def test_within_noise(self):
        self.assertEqual(self.outcome([101, 99, 100], [100, 100, 100]), "as before")
        self.assertEqual(self.outcome([108, 99, 115], [100, 100, 100]), "as before")

    def test_beyond_noise(self):
        self.assertEqual(self.outcome([110, 111, 112], [100, 100, 100]), "WORSE")
        self.assertEqual(self.outcome([90, 91, 90], [100, 100, 100]), "better")

    def test_more_is_better_where_less_is_not(self):
        self.assertEqual(self.outcome([110, 111, 110], [100, 100, 100], less=False), "better")
        self.assertEqual(self.outcome([90, 91, 90], [100, 100, 100], less=False), "WORSE")

    def test_a_drift_of_the_machine_is_in_both(self):
        self.assertEqual(self.outcome([100, 200, 300], [100, 200, 300]), "as before")

    def test_a_round_without_its_other_half_is_left_out(self):
        found = samples([100] * 3, [100] * 3)
        found["hot", "x"][5] = {"new": 900}
        self.assertEqual(house.judged(found)[0]["rounds"], 3)
        self.assertEqual(house.judged({("hot", "y"): {"less": True, 0: {"old": 1}}}), [])

    def test_two_rounds_show_no_noise(self):
        self.assertEqual(self.outcome([200, 200], [100, 100]), "too few rounds")

    def test_memory_has_no_noise(self):
        [row] = house.judged({("memory", "x"): {"less": True, 0: {"old": 1000, "new": 1001}}})
        self.assertEqual(row["outcome"], "WORSE")


class Command(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.build("old", 1)

    def build(self, name, slow, verified=True):
        (self.folder / name).mkdir()
        (self.folder / name / "libgmlake.so").write_text("")
        glake = self.folder / name / "glake"
        glake.write_text(GLAKE.format(python=sys.executable, slow=slow, verified=verified))
        glake.chmod(0o755)

    def house(self, *more, out="out"):
        command = [str(GPU / "house.sh"), str(self.folder / "new"), str(self.folder / "old"), str(self.folder / out), "--device", "sim", *more]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable})

    def test_equal_builds(self):
        self.build("new", 1)
        done = self.house("--rounds", "3")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("6 more figures, all as before", done.stdout)

    def test_a_slower_build_is_told(self):
        self.build("new", 1.3)
        done = self.house("--rounds", "3")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stdout.count("WORSE"), 4, done.stdout)

    def test_wrong_bytes_fail(self):
        self.build("new", 1, verified=False)
        done = self.house("--rounds", "3", "--only", "copies")
        self.assertEqual(done.returncode, 1)
        self.assertIn("copies, new: bytes differ", done.stdout)

    def test_a_second_call_goes_on_where_the_first_stopped(self):
        self.build("new", 1)
        self.assertEqual(self.house("--rounds", "3", "--time-limit", "0").returncode, 3)
        self.assertEqual(self.house("--rounds", "3").returncode, 0)
        rows = (self.folder / "out" / "house.jsonl").read_text().splitlines()
        done = self.house("--rounds", "4", "--only", "hot,memory")
        self.assertEqual(done.returncode, 0)
        added = [json.loads(row) for row in (self.folder / "out" / "house.jsonl").read_text().splitlines()[len(rows):]]
        self.assertEqual({row["round"] for row in added if "round" in row}, {3})

    def test_a_folder_without_a_build_is_refused(self):
        done = self.house()
        self.assertEqual(done.returncode, 2)
        self.assertIn("there is no glake in", done.stderr)


if __name__ == "__main__":
    unittest.main()
