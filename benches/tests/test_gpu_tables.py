"""The benches' tables, bars and searches on made-up figures; needs neither GPU nor torch."""
import contextlib, importlib.util, io, math, pathlib, random, statistics, subprocess, sys, tempfile, unittest

GPU = pathlib.Path(__file__).resolve().parents[1] / "gpu"
sys.path.insert(0, str(GPU))
import batch, graphs, launch, replay, serving, sleep, streams, table, weights


def run(alloc, workload="opt13_LR", utilization=0.97, taken=10 << 30, steady=10.0, losses=(1.0, 2.0), **more):
    return dict(workload=workload, alloc=alloc, utilization=utilization, taken_peak=taken, requested_peak=int(taken * utilization),
                reserved_peak=taken, steady_s=steady, losses=list(losses), oom=None, **more)


def missed(workload, rows):
    return [one["bar"] for one in table.bars(workload, rows) if not one["ok"]]


class Serving(unittest.TestCase):
    def rows(self, speed=1000, digest="a"):
        row = dict(start_s=1, sleeps=[], digests=["a", "a", "a"], speeds=[500, 1000, 1000])
        return [dict(row, alloc="native"), dict(row, alloc="glake", speeds=[100, speed, speed], digests=["a", "a", digest])]

    def test_the_bars(self):
        self.assertEqual(serving.summary(self.rows())[1], 0)
        self.assertEqual(serving.summary(self.rows(speed=980))[1], 1)
        self.assertEqual(serving.summary(self.rows(digest="b"))[1], 1)
        self.assertEqual(serving.summary([*self.rows(), dict(alloc="glake", error="exit code 1")])[1], 1)


class Sleep(unittest.TestCase):
    def rows(self, digests=("a", "a"), freed=70.0):
        times = [dict(sleep_s=9.0, wake_s=2.0, freed_gib=freed), dict(sleep_s=1.25, wake_s=1.25, freed_gib=freed)]
        ours = dict(engine="glake", digests=[digests[0]] * 4, link_out=55, link_in=55, sleeps=[dict(one, copied_gib=64, resident_gib=0) for one in times])
        return [ours, dict(engine="vllm", digests=[digests[1]] * 4, sleeps=[dict(one, freed_gib=70.0) for one in times])]

    def missed(self, rows):
        return [row["what"] for row in sleep.bars(rows) if row["bar"] is not None and (row["value"] > row["bar"] if row["most"] else row["value"] < row["bar"])]

    def test_the_bars(self):
        self.assertEqual(self.missed(self.rows()), [])
        self.assertEqual(self.missed(self.rows(digests=("a", "b"))), ["both: different answers"])
        self.assertEqual(self.missed(self.rows(freed=60.0)), ["freed by glake.shrink(), of what vLLM's sleep frees"])

    def test_one_engine_alone_is_not_compared(self):
        self.assertEqual(len([row for row in sleep.bars(self.rows()[:1]) if row["what"].startswith(("both", "freed"))]), 0)
        self.assertEqual(list(sleep.bars([{"engine": "vllm", "error": "x"}])), [])


class Weights(unittest.TestCase):
    def test_both_parts_are_compared_once_both_are_there(self):
        def rows(part, out, back, gib=50):
            return [dict(scenario=part, what="out again, ms", value=out, gib=gib), dict(scenario=part, what="back, of the link", value=0.9, seconds=back)]
        both = rows("glake", 30.0, 1.0) + rows("tensors", 900.0, 1.1)
        self.assertEqual([round(row["value"], 6) for row in weights.beside(both)], [30.0, 1.1])
        self.assertEqual(list(weights.beside(both[:2])), [])
        self.assertEqual(list(weights.beside(rows("glake", 30.0, 1.0, gib=8) + both[2:])), [])


class Replays(unittest.TestCase):
    def test_the_bars(self):
        row = dict(trace="t", part="every policy", gpu_lag_ms=20, stream_waits=1, policy="glake", reserved_peak=103)
        found = list(replay.bars([row, dict(row, policy="expandable", gpu_lag_ms=None, reserved_peak=100)]))
        self.assertEqual([value > most for _, value, most in found], [True, True])


class Bars(unittest.TestCase):
    def test_all_hold(self):
        rows = [run("native", utilization=0.6), run("expandable", utilization=0.98), run("glake", steady=10.05)]
        self.assertEqual(missed("opt13_LR", rows), [])
        self.assertEqual(len(table.bars("opt13_LR", rows)), 4)

    def test_utilization_is_held_to_both_bars(self):
        rows = [run("native"), run("expandable", utilization=0.975), run("glake", utilization=0.95)]
        self.assertEqual(missed("convmix", rows), ["glake: utilization >= 0.96", "glake: utilization >= expandable's - 0.01"])

    def test_time_is_of_the_better_of_the_others(self):
        rows = [run("native", steady=12), run("expandable", steady=10), run("glake", steady=10.3)]
        self.assertEqual(len(missed("gpt2_full", rows)), 1)

    def test_time_within_its_own_spread(self):
        rows = [run("native"), run("expandable")] + [run("glake", steady=s) for s in (9.8, 10.3, 10.4)]
        self.assertEqual(missed("gpt2_full", rows), [])

    def test_losses_are_held_to_what_two_native_runs_differ(self):
        native = [run("native", losses=(1.0, 2.0)), run("native", losses=(1.0, 2.1))]
        self.assertEqual(missed("convmix", native + [run("glake", losses=(1.0, 2.2))]), [])
        self.assertEqual(len(missed("convmix", native + [run("glake", losses=(1.0, 2.3))])), 1)
        self.assertEqual(len(missed("convmix", native + [run("glake", losses=(1.0,))])), 1)

    def test_memory_of_several_gpus_and_of_two_streams(self):
        def rows(workload, taken, alloc="glake"):
            return [run("expandable", workload, taken=100), run(alloc, workload, taken=taken)]
        self.assertEqual(missed("fsdp_llama_full", rows("fsdp_llama_full", 94)), [])
        self.assertEqual(len(missed("fsdp_llama_full", rows("fsdp_llama_full", 95))), 1)
        self.assertEqual(missed("wavelet_bert", rows("wavelet_bert", 101)), [])
        self.assertEqual(len(missed("wavelet_bert", rows("wavelet_bert", 86, "glake-wait"))), 1)

    def test_a_failed_run_is_a_missed_bar(self):
        rows = [run("native"), run("glake"), {"workload": "opt13_LR", "alloc": "glake", "error": "exit code 1: no"}]
        self.assertEqual(missed("opt13_LR", rows), ["glake: every run completes"])
        rows = [run("native"), {**run("glake"), "oom": "CUDA out of memory."}]
        self.assertEqual(missed("opt13_LR", rows), ["glake: every run completes"])


class Tables(unittest.TestCase):
    def test_medians_and_spread(self):
        rows = [run("native", steady=s) for s in (1.0, 3.0, 2.0)] + [run("glake", completion_lag_ms_p50=1.0, completion_lag_ms_p95=2.0, completion_lag_ms_max=3.0)]
        lines = table.table(rows, ["native", "expandable", "glake"]).splitlines()
        self.assertEqual(len(lines), 4)
        self.assertIn("2.000 (1.000-3.000)", lines[2])
        self.assertIn("1.0 / 2.0 / 3.0", lines[3])
        self.assertEqual({line.count("|") for line in lines}, {len(table.COLUMNS) + 1})

    def test_failed_runs_alone(self):
        lines = table.table([{"workload": "w", "alloc": "glake", "error": "x"}], ["glake"]).splitlines()
        self.assertIn("0 of 1", lines[2])

    def test_two_jobs_beside_one(self):
        one = run("glake", streams.ONE, window_s=10.0, window_steps=10)
        two = run("glake", streams.TWO, window_s=17.0, window_steps=20)
        self.assertEqual(streams.summary([one, two], ["glake"])[1], 0)
        lines, count = streams.summary([one, {**two, "window_s": 19.0}], ["glake", "native"])
        self.assertEqual(count, 2)
        self.assertIn("MISSED", lines[1])


class Graphs(unittest.TestCase):
    def sizes(self, scale=1.0):
        return graphs.sizes(scale, random.Random(0))

    def test_sizes_are_many_and_their_tail_is_heavy(self):
        found = self.sizes()
        edges = [edges for _, edges in found]
        self.assertEqual((found, len(set(found))), (self.sizes(), graphs.STEPS))
        self.assertGreater(max(edges), 20 * statistics.median(edges))
        self.assertLessEqual(max(nodes for nodes, _ in found), graphs.MOST_NODES)

    def test_sizes_grow_with_the_scale(self):
        half = self.sizes(0.5)
        for (nodes, edges), (fewer, less) in zip(self.sizes(), half):
            self.assertTrue(abs(nodes / 2 - fewer) < 1 and abs(edges / 2 - less) < 1)
        self.assertTrue(all(nodes >= 2 and edges >= 2 for nodes, edges in self.sizes(1e-9)))

    def row(self, alloc, losses=(1.0, 2.0, 3.0), **more):
        return {**run(alloc, graphs.WORKLOAD, steady=0.05, losses=losses), "active_peak": 4 << 30, "retries": 0, **more}

    def test_the_table(self):
        lines, count = graphs.summary([self.row("native"), self.row("glake")], ["native", "glake"])
        self.assertEqual(count, 0)
        for cell in ("10.00", "4.00", "2.50", "50.00"):
            self.assertIn(cell, lines[2])

    def test_other_losses_and_failed_runs_are_missed_bars(self):
        self.assertEqual(graphs.summary([self.row("native"), self.row("glake", (1.0, 2.0, 3.1))], ["native", "glake"])[1], 1)
        failed = {"alloc": "glake", "workload": graphs.WORKLOAD, "error": "exit code 1"}
        lines, count = graphs.summary([self.row("native"), self.row("glake"), failed], ["native", "glake"])
        self.assertEqual((count, lines[2].split()[1]), (1, "1/2"))

    @unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not installed: no step is made")
    def test_steps_on_the_host(self):
        import torch
        import workloads

        runs = []
        for _ in range(2):
            random.seed(0)
            torch.manual_seed(0)
            workloads.SCALE, workloads.STEPS = 0.002, 5
            seconds, losses = workloads.graphs(device="cpu")
            self.assertEqual((len(seconds), len(losses)), (5, 5))
            self.assertTrue(all(2 < loss < 6 for loss in losses), losses)
            runs.append(losses)
        self.assertTrue(all(math.isclose(*pair, abs_tol=1e-3) for pair in zip(*runs)), runs)


class Search(unittest.TestCase):
    def largest(self, edge, guess, width):
        """What is found, and the tries, those that go side by side as one list."""
        waves = []
        found = batch.largest(lambda numbers: waves.append(numbers) or [n <= edge for n in numbers], guess, width)
        return found, waves

    def test_finds_the_edge_from_any_guess(self):
        for width in (1, 2, 4):
            for edge in range(0, 40):
                for guess in range(1, 40, 3):
                    found, waves = self.largest(edge, guess, width)
                    tries = sum(waves, [])
                    self.assertEqual(found, edge)
                    self.assertEqual(len(tries), len(set(tries)))
                    for numbers in waves:
                        self.assertTrue(0 < len(numbers) <= width and numbers[0] > 0, numbers)
                        self.assertEqual(numbers, sorted(numbers))

    def test_few_tries_where_the_guess_is_near(self):
        for edge in range(22, 29):
            self.assertLessEqual(len(self.largest(edge, 25, 1)[1]), 5)
            self.assertLessEqual(len(self.largest(edge, 25, 4)[1]), 3)

    def test_what_fits_above_one_that_does_not_counts_for_nothing(self):
        self.assertEqual(batch.largest(lambda numbers: [n not in (9, 10) for n in numbers], 10, 4), 8)


class Scripts(unittest.TestCase):
    def test_arguments_are_read_without_a_gpu(self):
        for script in sorted(GPU.glob("*.py")):
            if "argparse" in script.read_text():
                done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, done.stderr)

    def test_an_unknown_allocator_is_refused(self):
        done = subprocess.run([sys.executable, GPU / "compare.py", "w", "--allocs", "native,glacke"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("glacke", done.stderr)

    def test_a_guess_for_some_of_the_allocators_is_refused(self):
        done = subprocess.run([sys.executable, GPU / "batch.py", "--guess", "30,34"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("2 batches for 3 allocators", done.stderr)

    def test_a_command_that_hangs_is_ended(self):
        rows, error = launch.call([sys.executable, "-c", "import time; print('{}', flush=True); time.sleep(60)"], [], 1)
        self.assertEqual((rows, error), ([{}], "ended after 1 s: there was no time left for more"))

    def test_json_lines_of_a_command(self):
        code = "print('noise'); print('{\"a\": 1}'); raise SystemExit(3)"
        rows, error = launch.call([sys.executable, "-c", code], [], 20)
        self.assertEqual(rows, [{"a": 1}])
        self.assertIn("exit code 3", error)

    def test_rounds_are_shared_out(self):
        done = []
        launch.share_out(list(range(9)), ["0", "1", "2"], lambda one, gpus: done.append((one, gpus[0])))
        self.assertEqual(sorted(one for one, _ in done), list(range(9)))

    def test_results_are_logged_as_they_come(self):
        with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
            log = launch.Log(out, "x.jsonl", launch.Clock(10))
            log.add({"a": 1}, "one")
            log.file.close()
            [(header, rows)] = launch.runs(log.path)
            self.assertEqual(rows, [{"a": 1}])
            self.assertTrue(header["machine"] and header["date"] and header["command"])


if __name__ == "__main__":
    unittest.main()
