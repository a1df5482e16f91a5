"""torch on simulated memory, through the compiled allocator: what can be shown of it without a GPU.

Needs a torch built for CUDA, a C++ compiler and libgmlake.so (GLAKE_LIBRARY, the package's, or target/release's); is skipped elsewhere.
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
PACKAGE = HERE.parent / "glake"
ROOT = HERE.parents[2]


def _library():
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    candidates = [os.environ.get("GLAKE_LIBRARY"), PACKAGE / "libgmlake.so", target / "release/libgmlake.so", target / "debug/libgmlake.so"]
    return next((Path(path).resolve() for path in candidates if path and Path(path).is_file()), None)


def _include():
    return PACKAGE if (PACKAGE / "gmlake.h").is_file() else ROOT / "ffi" / "include"


@unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not installed: the compiled allocator is not run here")
class OnTheSimulator(unittest.TestCase):
    def test_torch_runs_on_the_pool(self):
        library = _library()
        if library is None:
            self.skipTest("libgmlake.so is not built: cargo build --release -p glake-ffi")
        sys.path.insert(0, str(PACKAGE))
        self.addCleanup(sys.path.remove, str(PACKAGE))
        import compiled

        torch = compiled.Torch.installed()
        try:
            recipe = compiled.recipe(torch, _include())
        except compiled.CompileError as error:
            self.skipTest(str(error))
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch)
            system = [word for folder in recipe.system for word in ("-isystem", str(folder))]
            shared = ["-shared", "-fPIC", "-O1"]
            self.run_tool("cc", *shared, *system, str(HERE / "simulated/cudart.c"), "-o", str(made / "cudart.so"))
            self.run_tool("cc", *shared, str(HERE / "simulated/cuda.c"), "-Wl,-soname,libcuda.so.1", "-o", str(made / "libcuda.so.1"))
            flags = [flag for flag in recipe.flags if flag not in ("-O2", "-fvisibility=hidden")]
            self.run_tool(
                *recipe.compiler, *flags, *system, str(HERE / "simulated/probe.cpp"), "-o", str(made / "probe.so"), *recipe.libraries
            )
            environment = {
                **os.environ,
                "GLAKE_DEVICE": "sim:h200x4",
                "GLAKE_LIBRARY": str(library),
                "LD_LIBRARY_PATH": scratch,
                "LD_PRELOAD": str(made / "cudart.so"),
                "SIMULATED_CUDART": str(made / "cudart.so"),
                "SIMULATED_DEVICES": "2",
                "SIMULATED_INCLUDE": str(_include()),
                "SIMULATED_PROBE": str(made / "probe.so"),
                "XDG_CACHE_HOME": str(made / "cache"),
            }
            command = [sys.executable, "-W", "ignore", "-m", "unittest", "-v", "checks", "own_allocators"]
            where = HERE / "simulated"
            done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, errors="replace", timeout=600)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def run_tool(self, *command):
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=600)
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
