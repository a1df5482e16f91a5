"""torch under libglake_preload.so, with stand-ins for CUDA's libraries and for libgmlake.so: which of its copies are asked of the engine.

Needs a torch built for CUDA, a C compiler and libglake_preload.so (GLAKE_PRELOAD, or the target folder's); is skipped elsewhere.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
STAND_INS = ROOT / "ffi/preload/tests"


def _preload():
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    candidates = [os.environ.get("GLAKE_PRELOAD"), *(target / kind / "libglake_preload.so" for kind in ("release", "debug"))]
    return next((Path(path).resolve() for path in candidates if path and Path(path).is_file()), None)


@unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not installed: its copies are not taken here")
class UnderThePreloadLibrary(unittest.TestCase):
    def run_program(self, multi_path):
        preload = _preload()
        if preload is None:
            self.skipTest("libglake_preload.so is not built: cargo build --release -p glake-preload")
        sys.path.insert(0, str(HERE.parent / "glake"))
        self.addCleanup(sys.path.remove, str(HERE.parent / "glake"))
        import compiled

        try:
            recipe = compiled.recipe(compiled.Torch.installed(), ROOT / "ffi/include")
        except compiled.CompileError as error:
            self.skipTest(str(error))
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch)
            system = [word for folder in recipe.system for word in ("-isystem", str(folder))]
            for name, sources in {
                "cudart.so": [HERE / "simulated/cudart.c"],
                "libcuda.so.1": [HERE / "simulated/cuda.c", STAND_INS / "cuda.c"],
                "libgmlake.so": ["-DCOPIES", STAND_INS / "gmlake.c"],
                "host.so": [HERE / "simulated/host.c"],
            }.items():
                options = ["-shared", "-fPIC", "-Wl,-Bsymbolic", f"-Wl,-soname,{name}", *system]
                command = ["cc", *options, *map(str, sources), "-o", str(made / name)]
                done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=600)
                self.assertEqual(done.returncode, 0, done.stderr)
            environment = {
                **os.environ,
                "GLAKE_LIBRARY": str(made / "libgmlake.so"),
                "GLAKE_MULTI_PATH": multi_path,
                "LD_LIBRARY_PATH": scratch,
                "LD_PRELOAD": f"{preload} {made / 'cudart.so'}",
                "SIMULATED_ALLOCATOR": str(made / "host.so"),
                "SIMULATED_DEVICES": "1",
            }
            command = [sys.executable, "-W", "ignore", str(HERE / "simulated/copies.py")]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", timeout=600)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout.split()

    def test_large_copies_are_asked_about(self):
        self.assertEqual(self.run_program("1"), ["small", "0", "to", "1", "cpu", "2", "copy_", "3"])

    def test_it_is_off_unless_it_is_switched_on(self):
        self.assertEqual(self.run_program("0"), ["small", "0", "to", "0", "cpu", "0", "copy_", "0"])


if __name__ == "__main__":
    unittest.main()
