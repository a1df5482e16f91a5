"""The pages of docs/benchmarks agree with the rows they were made from; needs neither GPU nor torch."""
import json, pathlib, subprocess, sys, tempfile, unittest

GPU = pathlib.Path(__file__).resolve().parents[1] / "gpu"
sys.path.insert(0, str(GPU))
import launch, pages

HEADER = dict(machine="1 x a GPU", date="2026-01-02", commit="a1b2c3d", command="python benches/gpu/refill.py")


class Committed(unittest.TestCase):
    def test_no_page_differs_from_its_rows(self):
        names = [str(path.relative_to(launch.REPOSITORY)) for path in pages.Pages().differing()]
        self.assertEqual(names, [], "python3 benches/gpu/pages.py writes them")

    def test_every_file_of_rows_is_shown(self):
        self.assertEqual(pages.Pages().unused(), [])

    def test_every_file_of_rows_says_where_it_was_measured(self):
        for path in (pages.DOCS / "results").glob("*.jsonl"):
            self.assertEqual(len(launch.rows_of(path.read_text())), len(path.read_text().splitlines()), f"{path}: a line is no row")
            for header, rows in launch.runs(path):
                self.assertTrue({"machine", "date", "commit", "command"} <= header.keys(), path)
                self.assertTrue(header["commit"] and rows, path)

    def test_every_table_is_of_a_script(self):
        for page in pages.DOCS.glob("*.md"):
            for found in pages.MARKED.finditer(page.read_text()):
                there = [GPU / f"{found[2]}.py", launch.REPOSITORY / "tests" / "gpu" / f"{found[2]}.sh"]
                self.assertTrue(any(path.is_file() for path in there), f"{page.name}: {found[2]}")
            self.assertEqual(page.read_text().count("\n<!-- table "), len(pages.MARKED.findall(page.read_text())), page.name)


class Written(unittest.TestCase):
    def folder(self, rows, page="# P\n\n<!-- table refill -->\nold\n<!-- end -->\n\nprose\n", name="refill"):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        results = pathlib.Path(folder.name, "results")
        results.mkdir()
        if rows:
            (results / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pathlib.Path(folder.name, "p.md").write_text(page)
        return pages.Pages(folder.name)

    def text(self, made):
        return made.wanted()[made.folder / "p.md"]

    def test_bars(self):
        rows = [HEADER, dict(scenario="three", what="refill, of the link", value=0.99612, bar=0.95, most=False, gbps=55.271, gib=50),
                dict(scenario="first", what="first shrink, ms", value=1234.5, bar=60.0, most=True)]
        text = self.text(self.folder(rows))
        self.assertIn("| three | refill, of the link | 0.9961 | at least 0.95 | gbps 55.27, gib 50 |", text)
        self.assertIn("| first | first shrink, ms | 1,234 | at most 60: **missed** |  |", text)
        self.assertIn("1 x a GPU; 2026-01-02; commit a1b2c3d: `python benches/gpu/refill.py`.", text)
        self.assertIn("\n<!-- end -->\n\nprose\n", text)
        self.assertNotIn("old", text)

    def test_writing_twice_changes_nothing(self):
        made = self.folder([HEADER, dict(scenario="a", what="b", value=1, bar=None, most=False)])
        first = self.text(made)
        (made.folder / "p.md").write_text(first)
        self.assertEqual(self.text(made), first)
        self.assertEqual(made.differing(), {})

    def test_a_page_without_rows_says_so(self):
        self.assertIn("No rows of `benches/gpu/refill.py` are kept yet", self.text(self.folder([])))

    def test_a_run_without_a_commit_is_refused_until_it_is_named(self):
        made = self.folder([{**HEADER, "commit": None}, dict(scenario="a", what="b", value=1, bar=None, most=False)])
        with self.assertRaises(SystemExit):
            made.wanted()
        made.name_commit("feedbee")
        self.assertIn("commit feedbee", self.text(made))

    def test_files_that_no_page_shows_are_named(self):
        self.assertEqual(self.folder([HEADER], name="other").unused(), ["other.jsonl"])

    def test_a_chart_is_drawn_beside_the_page(self):
        row = dict(trace="t", requested_peak=1 << 30, utilization=0.5, fit_limit=None, stitches=0, extent_maps=3, stream_waits=0, part="every policy")
        rows = [dict(row, policy=policy, gpu_lag_ms=100 if policy == "glake" else None, reserved_peak=place << 30) for place, policy in enumerate(pages.POLICIES, 1)]
        made = self.folder([HEADER, *rows], "<!-- table replay reserved -->\n<!-- end -->\n", "replay")
        drawn = made.wanted()[made.folder / "p-replay.svg"]
        self.assertEqual(drawn.count("<rect"), 1 + 5 + 5)
        self.assertIn("](p-replay.svg)", self.text(made))


    def rendered(self, name, *rows):
        page = f"<!-- table {name} -->\n<!-- end -->\n"
        return self.text(self.folder([HEADER, *rows], page, name))

    def test_copies_over_links(self):
        row = dict(direction="h2d", memory="pool", bytes=4 << 20, native_gbps=48.96, engine_gbps=76.2, limit_gbps=106.6, paths=4, bar=1.8, most=False, value=1.556)
        critical = dict(what="critical h2d 16 MiB, p99 of the median alone", value=1.52, bar=1.5, most=True, alone_us=175.0, beside_p99_us=266.0)
        text = self.rendered("links", dict(row, what="pool h2d 4 MiB, of native"), dict(row, what="pool h2d 4 MiB, of native"), critical)
        self.assertEqual(text.count("at least 1.8: **missed**"), 2)
        self.assertIn("native 49.0, GLake 76.2, limit 106.6 GB/s over 4 links", text)
        self.assertIn("at most 1.5: **missed**", text)

    def test_runs_of_workloads(self):
        row = dict(workload="opt13_LR", utilization=0.97, taken_peak=10 << 30, requested_peak=9 << 30, reserved_peak=10 << 30, steady_s=9.0, losses=[1.0, 2.0], oom=None)
        text = self.rendered("compare", *[dict(row, alloc=alloc) for alloc in ("native", "expandable", "glake")])
        self.assertIn("**opt13_LR**", text)
        self.assertIn("ok      glake: utilization >= 0.96", text)
        self.assertIn("](p-compare.svg)", text)
        text = self.rendered("graphs", *[dict(row, workload="graphs", alloc=alloc, active_peak=5 << 30, retries=0) for alloc in ("native", "glake")])
        self.assertIn("reserved/live", text)
        streams = [dict(row, workload=name, alloc="glake", window_s=10.0, window_steps=steps, gpu_wait_ms=0) for name, steps in (("wavelet_bert_single", 10), ("wavelet_bert", 12))]
        self.assertIn("1.200", self.rendered("streams", *streams))

    def test_tries_calls_and_copies(self):
        self.assertIn("| native | 28, 30 | 31 |", self.rendered("batch", *[dict(alloc="native", batch=n, answer="fits" if n < 31 else "out of memory") for n in (28, 31, 30)]))
        text = self.rendered("alloc", *[dict(alloc=alloc, ns={"512 B": ns}) for alloc, ns in (("native", 2000.0), ("glake", 1700.0))], dict(alloc="glake", error="exit code 1"))
        self.assertIn("| 512 B | 2000 | 1700 | 0.850 |", text)
        text = self.rendered("preload", dict(direction="h2d", bytes=4096, synced=True, real_us=5.0, hooked_us=5.7, added_us=0.7, bar_us=0.5))
        self.assertIn("| h2d 4 KiB, with its wait | 5.00 | 5.70 | +0.70 | at most 0.5: **missed** |", text)
        text = self.rendered("foreign", dict(memory="async", bytes=4 << 20, direction="d2h", gbps={"native": 48.0, "new": 60.0, "old": None}, bars=["new 0.700 (0.9) MISSED"]))
        self.assertIn("| async | 4 | d2h | 48.0 | 60.0 | - | new 0.700 (0.9) **missed** |", text)

    def test_engines(self):
        row = dict(start_s=40.1, sleeps=[], digests=["a", "a", "a"], speeds=[500, 1000, 1000], alloc="native")
        self.assertIn("the same everywhere", self.rendered("serving", row, dict(row, alloc="glake")))
        figure = dict(scenario="engines", what="glake: out, s", bar=None, most=False)
        text = self.rendered("sleep", dict(engine="glake", sleeps=[]), dict(figure, value=1.5), dict(figure, value=1.35, freed_gib=70.2))
        self.assertIn("| glake: out, s | 1.35 |  | freed_gib 70.2 |", text)
        self.assertNotIn("1.5 |", text)

    def test_two_builds(self):
        row = dict(part="hot", what="malloc", old=100.0, new=130.0, ratio=1.3, noise=0.02, rounds=5, outcome="WORSE")
        text = self.rendered("house", dict(part="hot", round=0, build="old", what="malloc", value=100.0), row)
        self.assertIn("| hot | malloc | 100 | 130 | 1.300 | 2.0% | **worse** |", text)


class Runs(unittest.TestCase):
    def test_a_file_of_two_runs(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "x.jsonl")
            path.write_text("".join(json.dumps(row) + "\n" for row in (HEADER, {"a": 1}, {**HEADER, "commit": "b"}, {"a": 2}, {"a": 3})))
            self.assertEqual([(header["commit"], len(rows)) for header, rows in launch.runs(path)], [("a1b2c3d", 1), ("b", 2)])

    def test_the_command_names_the_script_and_not_the_folder_of_results(self):
        code = f"import sys; sys.path.insert(0, {str(GPU)!r}); import launch; sys.argv = [{str(GPU / 'alloc.py')!r}, '--out', '/x', '--repeat', '3']; print(launch.header()['command'])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout.strip(), "python benches/gpu/alloc.py --repeat 3")


if __name__ == "__main__":
    unittest.main()
