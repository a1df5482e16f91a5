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
