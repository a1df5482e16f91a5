"""The wheel as users install it: one install has everything, and it runs with nothing but Python beside it.

Needs GLAKE_WHEEL, the wheel that is installed here: `make test-python` and `ffi/python/wheel.sh --test` set it.
"""

from __future__ import annotations

import email
import os
import pathlib
import re
import struct
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import unittest
import zipfile

WHEEL = os.environ.get("GLAKE_WHEEL")
BINARIES = ("_glake.abi3.so", "glake", "libglake_preload.so", "libgmlake.so")


def sections(elf):
    """The names of the sections of an ELF file of 64 bits."""
    assert elf[:5] == b"\x7fELF\x02", elf[:5]
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + size * number) for number in range(count)]
    names = headers[of_names][4]
    return [elf[names + header[0] : elf.index(b"\0", names + header[0])].decode() for header in headers]


@unittest.skipUnless(WHEEL, "this is not the installed wheel (GLAKE_WHEEL)")
class TheWheel(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.scratch = pathlib.Path(scratch.name)

    def run_alone(self, *command, **environment):
        """Its output, in an empty folder and with nothing of this environment: no path, no cargo, no compiler."""
        environment = {"HOME": str(self.scratch), "PATH": "/nowhere", **environment}
        done = subprocess.run(command, cwd=self.scratch, env=environment, capture_output=True, text=True, timeout=240, check=False)
        self.assertEqual(done.returncode, 0, f"{command}: {done.stdout}\n{done.stderr}")
        return done.stdout

    def command(self):
        return os.path.join(sysconfig.get_path("scripts"), "glake")

    def path(self, name):
        return pathlib.Path(self.run_alone(sys.executable, "-m", "glake", f"--{name}").rstrip("\n"))

    def test_it_has_every_part(self):
        with zipfile.ZipFile(WHEEL) as wheel:
            names = wheel.namelist()
            for binary in BINARIES:
                content = wheel.read(f"glake/{binary}")
                self.assertFalse({".debug_info", ".debug_line", ".symtab"} & set(sections(content)), f"{binary} is not stripped")
            self.assertTrue(wheel.getinfo("glake/glake").external_attr >> 16 & 0o111, "the command is not executable")
        for part in ("glake/gmlake.h", "glake/native/torch.h", "glake_switch.pth", "glake_switch/path/sitecustomize.py"):
            self.assertIn(part, names)
        self.assertTrue([name for name in names if name.endswith("/licenses/LICENSE")], names)

    def test_it_names_what_others_wrote(self):
        with zipfile.ZipFile(WHEEL) as wheel:
            (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/licenses/THIRD_PARTY_LICENSES")]
            document = wheel.read(name).decode()
        works = re.findall(r"^(\S+ \d\S*|Rust's standard library \(.*\)): (.+)\n    .*\n    text (.+)$", document, re.MULTILINE)
        licenses = {name.split()[0]: license for name, license, _ in works}
        self.assertEqual([licenses.get(name) for name in ("libloading", "serde", "Rust's")], ["ISC", *["MIT OR Apache-2.0"] * 2])
        self.assertGreater(len(works), 50)
        texts = set(re.findall(r"^text (\d+), of ", document, re.MULTILINE))
        self.assertEqual({number for *_, numbers in works for number in numbers.split(", ")}, texts)
        self.assertNotIn("glake-", document)

    def test_what_pip_show_and_an_index_show(self):
        with zipfile.ZipFile(WHEEL) as wheel:
            (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
            metadata = email.message_from_bytes(wheel.read(name))
        shown = {name: metadata[name] for name in ("Name", "Version", "Author", "License-Expression", "Requires-Python")}
        version = self.run_alone(sys.executable, "-c", "import glake; print(glake.__version__)").rstrip("\n")
        self.assertEqual(list(shown.values()), ["glake", version, "The GLake contributors", "Apache-2.0", ">=3.10"])
        self.assertIn("memory", metadata["Summary"])
        self.assertIn("pytorch", metadata["Keywords"].split(","))
        self.assertIn("Operating System :: POSIX :: Linux", metadata.get_all("Classifier"))
        self.assertTrue(metadata["Description-Content-Type"].startswith("text/markdown"))
        text = metadata.get_payload()
        self.assertTrue(text.startswith("# glake\n"), text[:80])
        self.assertNotRegex(text, r"\]\((?!https://)", "a link of the repository leads nowhere on an index")

    def test_the_tag_says_what_it_needs(self):
        name = pathlib.Path(WHEEL).name
        found = re.fullmatch(r"glake-[\d.]+-cp310-abi3-manylinux_2_(\d+)_x86_64\.whl", name)
        self.assertTrue(found, name)

    def test_the_command_tells_the_whole_story(self):
        out = self.run_alone(self.command(), "--device", "sim:h200x4", "demo")
        stages = [line.split() for line in out.splitlines() if line.startswith(("✓", "✗"))]
        self.assertEqual([stage[:2] for stage in stages], [["✓", name] for name in ("stitch", "streams", "compare", "copy", "shrink")])

    def test_the_command_is_of_the_same_release(self):
        version = self.run_alone(sys.executable, "-c", "import glake; print(glake.__version__)")
        self.assertEqual(self.run_alone(self.command(), "--version"), f"glake {version}")

    def test_the_exit_code_is_the_commands(self):
        done = subprocess.run([self.command(), "no-such-command"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertIn("no-such-command", done.stderr)

    def test_the_package_on_simulated_memory(self):
        code = """
            import ctypes, glake
            from glake import _library

            api = _library.api()
            sent, back = bytes(range(256)) * 4096, bytearray(1 << 20)
            address = api.alloc(0, len(sent))
            class Array:
                __cuda_array_interface__ = {"data": (address, False), "shape": (len(sent),), "typestr": "|u1", "version": 3}
            glake.copy_(Array(), sent, wait=True)
            assert ctypes.string_at(address, len(sent)) == sent
            glake.copy_(back, Array(), wait=True)
            assert bytes(back) == sent
            print(glake.memory_stats(0)["allocated_bytes.all.current"])
        """
        out = self.run_alone(sys.executable, "-c", textwrap.dedent(code), GLAKE_DEVICE="sim")
        self.assertEqual(int(out), 1 << 20)

    def test_other_programs_find_its_parts(self):
        package = pathlib.Path(self.run_alone(sys.executable, "-c", "import glake; print(glake.__path__[0])").rstrip("\n"))
        parts = {"include": package, "library": "libgmlake.so", "preload": "libglake_preload.so", "command": "glake"}
        for name, part in parts.items():
            self.assertEqual(self.path(name), package / part)
        self.assertTrue((self.path("include") / "gmlake.h").is_file())

    def test_one_variable_switches_the_allocator_on(self):
        code = "import sys; print('glake' in sys.modules, sys.modules['glake_switch'].allocator())"
        out = self.run_alone(sys.executable, "-c", code, GLAKE_ALLOCATOR="1")
        self.assertEqual(out, "False (True, 'GLAKE_ALLOCATOR=1')\n")
        given = self.run_alone(self.command(), "run", "--allocator", "--", "/usr/bin/env").splitlines()
        package = self.path("include").parent
        self.assertIn(f"PYTHONPATH={package / 'glake_switch' / 'path'}", given)

    def test_a_program_runs_under_the_preload_library(self):
        given = self.run_alone(self.command(), "run", "--multi-path", "--", "/usr/bin/env").splitlines()
        self.assertIn(f"LD_PRELOAD={self.path('preload')}", given)
        self.assertIn(f"GLAKE_LIBRARY={self.path('library')}", given)
        self.assertIn("GLAKE_MULTI_PATH=1", given)


if __name__ == "__main__":
    unittest.main()
