"""Results of licenses.py for crates and their folders."""

import importlib.util
import pathlib
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "licenses.py"
spec = importlib.util.spec_from_file_location("licenses", SCRIPT)
licenses = importlib.util.module_from_spec(spec)
spec.loader.exec_module(licenses)


class Licenses(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def package(self, name, license="MIT", kind="lib", source="registry", **texts):
        folder = self.folder / name
        folder.mkdir()
        for file, text in texts.items():
            (folder / file).write_text(text)
        return {
            "id": name, "name": name, "version": "1.0.0", "license": license, "license_file": None, "source": source, "homepage": None,
            "repository": f"https://{name}.invalid", "authors": ["An Author"], "manifest_path": str(folder / "Cargo.toml"),
            "targets": [{"kind": [kind]}],
        }  # fmt: skip

    def test_only_what_is_linked_is_named(self):
        packages = [
            self.package("binary", source=None),
            self.package("linked"),
            self.package("macro", kind="proc-macro"),
            self.package("of-the-macro"),
            self.package("builds"),
        ]
        arrows = {"binary": [("linked", None), ("macro", None), ("builds", "build")], "macro": [("of-the-macro", None)]}
        nodes = [
            {"id": one["id"], "deps": [{"pkg": pkg, "dep_kinds": [{"kind": kind}]} for pkg, kind in arrows.get(one["id"], [])]}
            for one in packages
        ]
        found = licenses.linked({"packages": packages, "resolve": {"nodes": nodes}}, ["binary"])
        self.assertEqual([one["name"] for one in found], ["linked"])

    def test_equal_texts_are_written_once(self):
        one = self.package("one", "MIT OR Zlib", LICENSE="the same\n", NOTICE="of one\n")
        other = self.package("other", "Zlib", COPYING="the same\r\n")
        document = licenses.document([licenses.work(one), licenses.work(other)])
        self.assertIn("one 1.0.0: MIT OR Zlib\n    https://one.invalid\n    text 1, 2\n", document)
        self.assertIn("other 1.0.0: Zlib\n    https://other.invalid\n    text 1\n", document)
        self.assertIn("text 1, of one 1.0.0, other 1.0.0\n", document)
        self.assertEqual(document.count("the same"), 1)

    def test_a_crate_without_a_text(self):
        self.assertIn("Copyright (c) An Author\n", licenses.work(self.package("terse")).texts[0])
        with self.assertRaisesRegex(LookupError, r"silent 1\.0\.0 \(Zlib\) has no licence text"):
            licenses.work(self.package("silent", "Zlib"))


if __name__ == "__main__":
    unittest.main()
