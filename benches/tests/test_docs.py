"""What tests/docs.py finds wrong in made-up pages."""
import pathlib, sys, tempfile, unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))
import docs


class Names(unittest.TestCase):
    def wrong(self, text):
        with tempfile.TemporaryDirectory(dir=docs.ROOT / "docs") as folder:
            page = pathlib.Path(folder, "page.md")
            page.write_text(text)
            with mock.patch.object(docs, "pages", lambda: [page]):
                return [found.split(": ", 1)[1] for found in docs.wrong_names(docs.Names())]

    def test_what_exists_is_right(self):
        self.assertEqual(self.wrong("`docs/PYTHON.md`, `region/tests`, `driver.rs`, `pool.borrow = \"wait\"`, `glake bench copy --paths 1`, `libgmlake.so`\n"), [])

    def test_files_that_are_no_more(self):
        self.assertEqual(self.wrong("one `docs/MEASUREMENTS.md`\n\n`tiers/src/lodge.rs`\n"), ["docs/MEASUREMENTS.md: there is no such file", "tiers/src/lodge.rs: there is no such file"])

    def test_keys_that_have_moved(self):
        self.assertEqual(self.wrong("`tiers.relays_rest = true`\n"), ["tiers.relays_rest: there is no such key"])

    def test_options_that_the_command_lacks(self):
        self.assertEqual(self.wrong("`glake bench copy --no-such`, `glake run -- python --theirs`\n"), ["glake bench copy --no-such: the command has no --no-such"])

    def test_long_lines(self):
        self.assertEqual(self.wrong("x" * 121 + "\n|" + "x" * 200 + "|\n```text\n" + "x" * 130 + "\n```\n"), ["121 characters, at most 120"])


if __name__ == "__main__":
    unittest.main()
