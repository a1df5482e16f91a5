"""serve.py: its bars on made-up rows, and, where the library is, its runs on a simulated GPU; needs neither GPU nor
torch."""

import json, os, pathlib, queue, subprocess, sys, tempfile, time, unittest

GPU = pathlib.Path(__file__).resolve().parents[1] / "gpu"
sys.path.insert(0, str(GPU))
import launch
from sharing import agents, bars, client, models, planned
from sharing.setup import FLOOR, GIB, MIB, Setup

ASKED = {"count": 6, "weights": 8, "kv": 1, "budget": 23}
READY = bool(os.environ.get("GLAKE_LIBRARY")) and agents.command() is not None


def traced(run, seed=1, p99=1.0, e2e=5.0, gap=1.0, failed=(), most=22, **more):
    return {
        "run": run,
        "asked": ASKED,
        "seed": seed,
        "requests": 120,
        "failed": list(failed),
        "ttft": [0.1] * 116 + [p99] * 4,
        "e2e": [e2e] * 120,
        "gaps": [gap] * 120,
        "most_bytes": most * GIB,
        "budget_bytes": 23 * GIB,
        "looked": 100,
        "wrong_weights": [],
        "wrong_cache": 0,
        "parks": 3,
        **more,
    }


def missed(rows):
    return [one["what"] for one in bars.figures(rows) if not bars.meets(one)]


class Bars(unittest.TestCase):
    GOOD = [
        traced("glake"),
        traced("no-preempt", p99=3.0),
        traced("per-tensor", p99=3.5),
        traced("start-stop", p99=40.0),
    ]

    def test_all_hold(self):
        self.assertEqual(missed(self.GOOD), [])
        self.assertEqual(missed([traced("glake", seed=2), *self.GOOD]), [])

    def test_each_is_missed_by_itself(self):
        def with_ours(**more):
            return [traced("glake", **more), *self.GOOD[1:]]

        self.assertEqual(missed(with_ours(p99=1.6))[0], "glake: first token, p99, s")
        self.assertEqual(missed(with_ours(e2e=8.0)), ["ours, of no-preempt's: end to end, p99"])
        self.assertEqual(missed(with_ours(gap=2.5)), ["ours: longest gap between two tokens, p99, s"])
        self.assertEqual(missed(with_ours(most=24)), ["glake: most memory, of the budget"])
        self.assertEqual(missed(with_ours(failed=["w1: no answer"])), ["glake: requests that failed"])
        self.assertEqual(missed(with_ours(wrong_cache=1)), ["glake: workers and requests whose bytes differ"])
        self.assertEqual(
            missed([self.GOOD[0], traced("start-stop", p99=20.0)]), ["start-stop, of ours: first token, p99"]
        )
        self.assertEqual(missed([{"run": "ours", "asked": ASKED, "error": "x"}]), ["ours: runs that broke off"])

    def test_another_policy_is_compared_on_its_own_seeds(self):
        rows = [
            traced("glake", seed=1, p99=1.0),
            traced("glake", seed=2, p99=0.1),
            traced("per-tensor", seed=1, p99=2.0),
        ]
        self.assertEqual(missed(rows), ["per-tensor, of ours: first token, p99"])

    def test_plan_beside_the_runs(self):
        def plan(low=0.8, high=1.2, p50=0.1):
            return {
                "run": "plan",
                "asked": ASKED,
                "policy": "glake",
                "ttft_p50_s": p50,
                "ttft_p99_low_s": low,
                "ttft_p99_high_s": high,
                "contention": "off",
            }

        ours = traced("glake")
        self.assertEqual(missed([ours, plan()]), [])
        self.assertEqual(missed([ours, plan(p50=0.2)]), ["p50 of the first token, off plan's"])
        self.assertEqual(missed([ours, plan(low=1.1)]), ["p99 of the first token, outside of plan's interval by, s"])
        self.assertEqual(missed([ours, plan(low=0.5, high=1.1)]), ["plan's interval of p99, high of low"])

    def test_kills(self):
        kill = {"while": "shrinks", "usable_s": 0.5, "seen": "shrinking"}
        row = {"run": "kill-workers", "asked": ASKED, "seed": 0, "waiting": 0, "kills": [kill] * 3}
        self.assertEqual(missed([row]), [])
        self.assertEqual(len(missed([{**row, "waiting": 1, "kills": [kill, {**kill, "usable_s": 2.0}]}])), 3)
        agent = traced("kill-agent", kills=[{"decided_s": 0.5, "token_s": 1.0}], contexts=6)
        self.assertEqual(missed([agent]), [])
        self.assertEqual(
            len(missed([{**agent, "kills": [{"decided_s": 1.5, "token_s": 1.0}], "most_bytes": 24 * GIB}])), 2
        )

    def test_overload(self):
        row = {
            "run": "overload",
            "asked": ASKED,
            "tokens_s": 80,
            "resident_tokens_s": 100,
            "link_duty": 0.5,
            "most_link_duty": 0.6,
            "streams": 4,
        }
        self.assertEqual(missed([row]), [])
        self.assertEqual(len(missed([{**row, "tokens_s": 70, "link_duty": 0.7}])), 2)

    def test_the_table_says_what_is_missed(self):
        text = bars.table(bars.figures([traced("glake", p99=2.0)]))
        self.assertIn("MISSED  6 x (8+1) GiB in 23: glake: first token, p99, s: 2.000 (at most 1.5)", text)


class Parts(unittest.TestCase):
    def test_requests_of_a_seed_are_the_same(self):
        rows = client.lengths()
        self.assertGreater(len(rows), 1000)
        names = ["a", "b", "c"]
        one = client.draw(names, 3, 10, 100, rows, 0.5, 1.0)
        self.assertEqual(one, client.draw(names, 3, 10, 100, rows, 0.5, 1.0))
        self.assertNotEqual(one, client.draw(names, 4, 10, 100, rows, 0.5, 1.0))
        self.assertTrue(800 < len(one) < 1200)
        counts = [sum(name == each for _, name, _, _ in one) for each in names]
        self.assertTrue(counts[0] > counts[1] > counts[2], counts)

    def test_places_in_the_cache(self):
        slots = [models.Slot(10, 10), models.Slot(0, 5)]
        self.assertEqual([models.place(slots, tokens, 40) for tokens in (5, 6, 20, 21)], [5, 20, 20, None])

    def test_sizes(self):
        six = Setup(6, 8, 1, 23)
        self.assertEqual((six.share, six.room(), six.budget_bytes()), (9 * GIB, 2, 23 * GIB))
        self.assertEqual(Setup(10, 6, 1, 33).room(), 3)
        small = Setup(6, 8, 1, 23, "sim:h200x4@/x", 64)
        self.assertEqual((small.share, small.room()), (144 * MIB, 2))
        self.assertGreater(small.budget_bytes(), 6 * FLOOR)

    def test_a_calibration(self):
        row = {
            "run": "calibrate",
            "weight_bytes": 8 * GIB,
            "share_bytes": 9 * GIB,
            "refill_s": 0.164,
            "switch_s": 0.182,
            "parked_s": 0.218,
            "clean_s": 0.014,
            "pause_s": 0.22,
            "decode_ms": 12.0,
            "pair_ms": 13.0,
            "unpaced_ms": 4.0,
            "unpaced_pair_ms": 5.0,
            "prefill_tok_s": 30000.0,
        }
        text = planned.calibration([row], None, ["w01"])
        self.assertIn("refill_gbps = 52.5378", text)
        self.assertIn("clean_ms_per_gib = 1.94444", text)
        self.assertIn("park_ms = 30.0", text)
        self.assertIn("[worker.w01]", text)
        self.assertIn("step_ms = 4.0", text)
        self.assertEqual(planned.contention(row), "off")
        self.assertEqual(planned.contention({**row, "unpaced_pair_ms": 8.0}), "on")

    def test_a_front_drains_and_serves_the_oldest_first(self):
        told, ports = [], queue.Queue()

        class Port:
            def send(self, asked):
                ports.put(asked)

        front = agents.Front(
            ["a", "b", "c"],
            1,
            lambda name: told.append(f"sleep {name}"),
            lambda name: told.append(f"wake {name}"),
            lambda name: Port(),
        )
        asked = [client.Asked(name, 1, 1, 0.0) for name in "abca"]
        for each in asked:
            front.send(each)
        for _ in asked:
            each = ports.get(timeout=10)
            each.token(1.0)
            each.end()
        front.end()
        self.assertEqual(told[0], "wake a")
        self.assertEqual([word for word in told if word.startswith("wake")][:3], ["wake a", "wake b", "wake c"])
        self.assertTrue(all(each.over.is_set() and not each.failed for each in asked))


class Script(unittest.TestCase):
    def run_it(self, *arguments, **more):
        return subprocess.run(
            [sys.executable, GPU / "serve.py", *arguments], capture_output=True, text=True, timeout=300, **more
        )

    def test_wrong_arguments_are_refused(self):
        for arguments, word in (
            (["--only", "glacke"], "glacke"),
            (["--device", "sim"], "'sim'"),
            (["--seeds", "x"], "'x'"),
        ):
            done = self.run_it(*arguments)
            self.assertEqual(done.returncode, 2)
            self.assertIn(word, done.stderr)

    def test_kept_rows_are_pooled(self):
        with tempfile.TemporaryDirectory() as folder:
            files = []
            for seed in (1, 2):
                files.append(pathlib.Path(folder, f"{seed}.jsonl"))
                files[-1].write_text(
                    json.dumps(launch.header())
                    + "\n"
                    + json.dumps(traced("glake", seed, p99=2.0 if seed == 2 else 1.0))
                    + "\n"
                )
            self.assertEqual(self.run_it("--read", files[0]).returncode, 0)
            done = self.run_it("--read", *files)
            self.assertEqual(done.returncode, 1)
            self.assertIn("seeds 2  requests 240", done.stdout)


@unittest.skipUnless(READY, "no library is named by GLAKE_LIBRARY, or there is no command glake beside it")
class Simulated(unittest.TestCase):
    """The whole of it, small; then with a fault, which has to be seen."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.device = f"sim:h200x4@{self.folder}/gpus"

    def start(self, *arguments):
        command = [
            sys.executable,
            GPU / "serve.py",
            "--device",
            self.device,
            "--out",
            self.folder,
            "--scale",
            "256",
            "--rate",
            "2",
            *arguments,
        ]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def rows(self):
        [(_, rows)] = launch.runs(self.folder / "serve.jsonl")
        return {row["run"]: row for row in rows}

    def test_a_trace_is_served(self):
        done = self.start("--duration", "6", "--only", "glake,per-tensor")
        text, _ = done.communicate(timeout=240)
        rows = self.rows()
        for run in ("glake", "per-tensor"):
            self.assertEqual(
                (rows[run]["failed"], rows[run]["wrong_weights"], rows[run]["wrong_cache"]), ([], [], 0), text
            )
            self.assertEqual(len(rows[run]["e2e"]), rows[run]["requests"])
        self.assertLessEqual(rows["glake"]["most_bytes"], rows["glake"]["budget_bytes"], text)
        self.assertIn("ok      6 x (8+1) GiB in 23: glake: requests that failed: 0", text)

    def test_memory_that_nobody_was_given_and_a_worker_that_dies_are_seen(self):
        done = self.start("--duration", "8", "--only", "glake")
        lines = []
        for line in done.stdout:
            lines.append(line)
            if "given their memory back" in line:
                time.sleep(6)
                break
        # Another process takes more than the budget leaves; and one worker dies.
        hog = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from glake import _library; import sys; _library.api().alloc(0, 1 << 30); sys.stdin.read()",
            ],
            env={**os.environ, "GLAKE_DEVICE": self.device},
            stdin=subprocess.PIPE,
        )
        self.addCleanup(hog.communicate)
        found = subprocess.run(
            ["pgrep", "-f", f"worker.py glake w03 .*{self.folder}"], capture_output=True, text=True
        ).stdout.split()
        self.assertEqual(len(found), 1, lines)
        os.kill(int(found[0]), 9)
        text = "".join(lines) + done.communicate(timeout=240)[0]
        self.assertEqual(done.returncode, 1, text)
        row = self.rows()["glake"]
        self.assertGreater(row["most_bytes"], row["budget_bytes"], text)
        self.assertTrue(any("w03" in each for each in row["failed"]), text)
        self.assertRegex(text, "MISSED .*requests that failed")
        self.assertRegex(text, "MISSED .*most memory, of the budget")


if __name__ == "__main__":
    unittest.main()
