"""The build, the cache and the refusals of glake.compiled. No GPU; where torch is absent a fake tree of headers stands in for it."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import os
import stat
import subprocess
import sys
import tempfile
import textwrap
import unittest
import warnings
from pathlib import Path
from unittest import mock

PACKAGE = Path(__file__).resolve().parents[1] / "glake"


def _module():
    # By its path: the package itself needs the built library, this does not.
    spec = importlib.util.spec_from_file_location("glake_compiled", PACKAGE / "compiled.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


compiled = _module()

try:
    compiled.compiler()
    NO_COMPILER = ""
except compiled.CompileError as error:
    NO_COMPILER = str(error)


class Scratch(unittest.TestCase):
    """Each test has its own cache, temporary folder and fake torch."""

    def setUp(self):
        held = tempfile.TemporaryDirectory()
        self.addCleanup(held.cleanup)
        self.root = Path(held.name)
        self.cache = self.root / "cache"
        (self.root / "tmp").mkdir()
        environment = {"XDG_CACHE_HOME": str(self.cache), "TMPDIR": str(self.root / "tmp"), "PATH": os.environ["PATH"]}
        for patch in (
            mock.patch.dict(os.environ, environment, clear=True),
            mock.patch.object(tempfile, "tempdir", None),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def recipe(self, answer=1, flags=(), **changes):
        """A library that includes a header of a fake torch and one of ours."""
        self.write("torch/include/c10/cuda/CUDACachingAllocator.h", "#define FAKE_TORCH 1\n")
        self.write("include/gmlake.h", "#pragma once\n")
        source = self.write(
            "source/allocator.cpp",
            f"""
            #include <c10/cuda/CUDACachingAllocator.h>
            #include <gmlake.h>
            extern "C" int answer() {{ return FAKE_TORCH * {answer}; }}
            """,
        )
        made = compiled.Recipe(
            compiler=tuple(compiled.compiler()),
            source=source,
            include=(self.root / "include",),
            system=(self.root / "torch" / "include",),
            flags=("-shared", "-fPIC", *flags),
            libraries=(),
            stamp="torch 0 cuda 0",
        )
        return dataclasses.replace(made, **changes) if changes else made

    def torch(self, version="2.11.0", cuda="13.0"):
        self.write("torch/include/c10/cuda/CUDACachingAllocator.h", "")
        self.write("include/gmlake.h", "")
        return compiled.Torch(version=version, cuda=cuda, root=self.root / "torch", cxx11_abi=True)


@unittest.skipIf(NO_COMPILER, NO_COMPILER)
class Builds(Scratch):
    def answer(self, library):
        return ctypes.CDLL(str(library)).answer()

    def compilations(self):
        return mock.patch.object(compiled, "_compile", wraps=compiled._compile)

    def test_a_library_is_built_once(self):
        with self.compilations() as calls:
            first = compiled.build(self.recipe(answer=41))
            second = compiled.build(self.recipe(answer=41))
        self.assertEqual(first, second)
        self.assertEqual(calls.call_count, 1)
        self.assertEqual(self.answer(first), 41)

    def test_the_cache_is_the_users_alone(self):
        library = compiled.build(self.recipe())
        self.assertEqual(library.parent, self.cache / "glake")
        self.assertEqual(stat.S_IMODE(library.parent.stat().st_mode), 0o700)
        self.assertEqual([path.name for path in library.parent.iterdir() if path.is_dir()], [])

    def test_whatever_it_depends_on_is_in_the_key(self):
        keys = [
            self.recipe().key(),
            self.recipe(answer=2).key(),
            self.recipe(flags=("-O1",)).key(),
            self.recipe(stamp="torch 1 cuda 0").key(),
        ]
        self.write("source/native/part.h", "// a part of the source\n")
        keys.append(self.recipe().key())
        recipe = self.recipe()
        (self.root / "include" / "gmlake.h").write_text("// another contract\n")
        keys.append(recipe.key())
        self.assertEqual(len(set(keys)), len(keys))

    def test_a_truncated_library_is_built_anew(self):
        library = compiled.build(self.recipe(answer=7))
        library.write_bytes(library.read_bytes()[:100])
        self.assertEqual(self.answer(compiled.build(self.recipe(answer=7))), 7)

    def test_a_library_without_its_digest_is_built_anew(self):
        library = compiled.build(self.recipe(answer=8))
        library.with_suffix(".sha256").unlink()
        with self.compilations() as calls:
            compiled.build(self.recipe(answer=8))
        self.assertEqual(calls.call_count, 1)

    def test_what_does_not_compile_says_so_with_the_first_errors(self):
        recipe = self.recipe()
        recipe.source.write_text("int answer() { return nonsense; }\n#error asked for\n")
        with self.assertRaises(compiled.CompileError) as raised:
            compiled.build(recipe)
        self.assertIn("nonsense", str(raised.exception))
        self.assertIn("The command was", str(raised.exception))
        self.assertEqual(list((self.cache / "glake").glob("*.so")), [])

    def test_a_cache_that_others_may_write_to_is_not_used(self):
        (self.cache / "glake").mkdir(parents=True)
        (self.cache / "glake").chmod(0o777)
        library = compiled.build(self.recipe())
        self.assertEqual(library.parent, self.root / "tmp" / f"glake-{os.getuid()}")

    def test_a_link_in_the_place_of_the_cache_is_not_followed(self):
        self.cache.mkdir()
        (self.root / "elsewhere").mkdir(mode=0o700)
        (self.cache / "glake").symlink_to(self.root / "elsewhere")
        self.assertNotEqual(compiled.build(self.recipe()).parent, self.cache / "glake")

    def test_a_missing_home_falls_back_to_the_temporary_folder(self):
        self.cache.write_text("a file where the folder of caches should be")
        library = compiled.build(self.recipe(answer=9))
        self.assertEqual(library.parent.parent, self.root / "tmp")
        self.assertEqual(self.answer(library), 9)

    def test_processes_that_ask_at_once_build_it_once(self):
        recipe = self.recipe(answer=5)
        counting = self.write(
            "counting",
            f"""\
            #!/bin/sh
            case "$*" in *--version*) ;; *) echo once >> {self.root}/count; sleep 0.3;; esac
            exec {recipe.compiler[0]} "$@"
            """,
        )
        counting.chmod(0o755)
        script = self.write(
            "build.py",
            f"""
            import sys
            from pathlib import Path
            sys.path.insert(0, {str(PACKAGE)!r})
            import compiled
            root = Path({str(self.root)!r})
            print(compiled.build(compiled.Recipe(
                (str(root / "counting"),), root / "source" / "allocator.cpp", (root / "include",),
                (root / "torch" / "include",), ("-shared", "-fPIC"), (), "torch 0")))
            """,
        )
        running = [subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) for _ in range(4)]
        libraries = {process.communicate(timeout=120)[0].strip() for process in running}
        self.assertEqual([process.returncode for process in running], [0] * 4)
        self.assertEqual(len(libraries), 1)
        self.assertEqual((self.root / "count").read_text().count("once"), 1)


class Refusals(Scratch):
    def refusal(self, torch):
        with self.assertRaises(compiled.CompileError) as raised:
            compiled.recipe(torch, self.root / "include")
        return str(raised.exception)

    def test_a_torch_without_cuda(self):
        self.assertIn("without CUDA", self.refusal(self.torch(cuda=None)))

    def test_a_torch_that_is_too_old(self):
        self.assertIn("older than 2.8", self.refusal(self.torch(version="2.1.0")))

    def test_a_torch_without_headers(self):
        torch = self.torch()
        (self.root / "torch/include/c10/cuda/CUDACachingAllocator.h").unlink()
        self.assertIn("without its headers", self.refusal(torch))

    def test_no_compiler(self):
        with mock.patch.dict(os.environ, {"PATH": str(self.root)}):
            self.assertIn("no C++ compiler", self.refusal(self.torch()))

    def test_a_compiler_that_is_not_there(self):
        with mock.patch.dict(os.environ, {"CXX": "no-such-compiler -m64"}):
            self.assertIn("no-such-compiler", self.refusal(self.torch()))


class Registration(Scratch):
    NAME = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"

    def test_registering_every_segment_with_nccl_is_switched_off_aloud(self):
        with mock.patch.dict(os.environ, {self.NAME: "1"}):
            with self.assertWarnsRegex(RuntimeWarning, self.NAME):
                compiled._switch_registration_off()
            self.assertEqual(os.environ[self.NAME], "0")

    def test_nothing_is_said_where_nobody_asked(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled._switch_registration_off()
        self.assertNotIn(self.NAME, os.environ)


@unittest.skipIf(NO_COMPILER, NO_COMPILER)
class CudaHeaders(Scratch):
    def toolkit(self, folder, major, crt=True):
        self.write(f"{folder}/cuda_runtime_api.h", f"#define CUDART_VERSION {major}000\n")
        self.write(f"{folder}/cuda_runtime.h", "")
        if crt:
            self.write(f"{folder}/crt/host_config.h", "")
        return self.root / folder

    def found(self):
        # Whatever this machine has stays out of it.
        folders = [folder for folder in compiled._cuda_folders(self.torch()) if self.root in folder.parents]
        with mock.patch.object(compiled, "_cuda_folders", return_value=folders):
            return compiled.cuda_headers(self.torch())

    def test_the_toolkit_of_torchs_major_version_is_taken(self):
        self.toolkit("nvidia/cu13/include", 13)
        self.toolkit("old/include", 12)
        with mock.patch.dict(os.environ, {"CUDA_HOME": str(self.root / "old")}):
            self.assertEqual(self.found(), [self.root / "nvidia/cu13/include"])

    def test_what_the_runtimes_package_lacks_comes_from_elsewhere(self):
        runtime = self.toolkit("nvidia/cu13/include", 13, crt=False)
        triton = self.toolkit("triton/backends/nvidia/include", 12)
        self.assertEqual(self.found(), [runtime, triton])

    def test_without_any_the_refusal_says_what_to_install(self):
        with self.assertRaisesRegex(compiled.CompileError, "CUDA_HOME"):
            self.found()
        self.toolkit("nvidia/cu13/include", 13, crt=False)
        with self.assertRaisesRegex(compiled.CompileError, "nvidia-cuda-crt"):
            self.found()


@unittest.skipIf(NO_COMPILER, NO_COMPILER)
@unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not installed: the allocator itself is not compiled here")
class Installed(Scratch):
    def test_the_allocator_compiles_against_this_torch(self):
        include = PACKAGE if (PACKAGE / "gmlake.h").is_file() else PACKAGE.parents[1] / "include"
        if not (include / "gmlake.h").is_file():
            self.skipTest(f"gmlake.h is not in {include}")
        torch = compiled.Torch.installed()
        if torch.cuda is None:
            self.skipTest(f"torch {torch.version} is built without CUDA")
        library = compiled.build(compiled.recipe(torch, include))
        self.assertGreater(library.stat().st_size, 0)


if __name__ == "__main__":
    unittest.main()
