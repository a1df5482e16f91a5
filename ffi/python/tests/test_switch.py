"""``GLAKE_ALLOCATOR=1``: GLake is torch's allocator from the first use of CUDA, in a program that does not know of it."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest

import child
import glake_switch

PATH = pathlib.Path(glake_switch.__file__).resolve().parent / "path"

COMMON = """
import sys, os
def on():
    from torch import _C
    glake = sys.modules.get("glake")
    return glake is not None and glake.backend() is not None and len(_C.changed) == 1
"""


class Switch(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.scratch = pathlib.Path(scratch.name)

    def run_with(self, code, *arguments, first=(PATH,), behind=(), **environment):
        """Runs a program as ``glake run --allocator`` starts it."""
        environment = {"GLAKE_ALLOCATOR": "1", "CXX": "no-such-compiler", **environment}
        paths = [*first, *behind, child.FAKE_TORCH, pathlib.Path(glake_switch.__file__).parent.parent]
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTORCH_", "GLAKE_DEVICE", "GLAKE_CONFIG"))}
        variables["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        command = [sys.executable, *(arguments or ("-c", textwrap.dedent(COMMON + code)))]
        return subprocess.run(command, env={**variables, **environment}, capture_output=True, text=True, timeout=100, check=False)

    def check(self, code, *arguments, **more):
        done = self.run_with(code, *arguments, **more)
        self.assertEqual(done.returncode, 0, f"{done.stdout}\n{done.stderr}")
        return done

    def test_it_is_on_from_the_first_use_of_cuda(self):
        done = self.check(
            """
assert "torch" not in sys.modules and "glake" not in sys.modules
import torch
assert "glake" not in sys.modules, "the import of torch imported glake"
torch.cuda.device_count()
assert "glake" not in sys.modules
torch.cuda.init()
assert on() and torch.cuda.is_initialized()
torch.cuda.init()
assert len(torch._C.changed) == 1
assert type(torch.__loader__).__module__ != "glake_switch" and torch.__spec__.loader is torch.__loader__
"""
        )
        self.assertEqual(done.stderr, "")

    def test_a_look_up_before_the_import_changes_nothing(self):
        self.check(
            """
import importlib.util, threading
lookups = [threading.Thread(target=importlib.util.find_spec, args=("torch",)) for _ in range(8)]
for lookup in lookups:
    lookup.start()
for lookup in lookups:
    lookup.join()
assert importlib.util.find_spec("torch").origin and "torch" not in sys.modules

class Asks:
    # A finder that asks all finders.
    asking = False
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and not Asks.asking:
            Asks.asking = True
            assert importlib.util.find_spec(name) is not None
            Asks.asking = False
sys.meta_path.insert(1, Asks())
sys.meta_path.insert(0, Asks())
before = len(sys.meta_path)
import torch
assert len(sys.meta_path) == before - 1, sys.meta_path
torch.cuda.init()
assert on()
"""
        )

    def test_an_import_that_failed_is_repeated(self):
        (self.scratch / "torch.py").write_text("raise OSError('libcuda is not there yet')\n")
        self.check(
            f"""
sys.path.insert(0, {str(self.scratch)!r})
for _ in range(2):
    try:
        import torch
    except OSError:
        assert "torch" not in sys.modules
    else:
        raise AssertionError
sys.path.remove({str(self.scratch)!r})
import torch
torch.cuda.init()
assert on()
"""
        )

    def test_finders_that_the_program_replaces(self):
        self.check(
            """
kept, sys.meta_path = sys.meta_path, [finder for finder in sys.meta_path if type(finder).__module__ != "glake_switch"]
found, = set(map(id, kept)) - set(map(id, sys.meta_path))
spec = next(finder for finder in kept if id(finder) == found).find_spec("torch")
import importlib.util
module = sys.modules["torch"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import torch
torch.cuda.init()
assert on()
"""
        )

    def test_a_process_without_torch_imports_nothing(self):
        self.check("assert not {'glake', 'asyncio', 'importlib.metadata'} & set(sys.modules)")

    def test_a_program_that_enables_it_itself_goes_first(self):
        self.check(
            """
import glake
glake.enable({"pool": {"borrow": "wait"}}, backend="pluggable")
import torch
torch.cuda.init()
assert on()
glake.enable({"pool": {"borrow": "wait"}}, backend="pluggable")
"""
        )

    def test_an_allocator_of_the_program_wins(self):
        done = self.check(
            """
import torch
torch._C._cuda_changeCurrentAllocator("mine")
torch.cuda.init()
assert torch._C.changed == ["mine"] and "glake" not in sys.modules
"""
        )
        self.assertEqual(done.stderr, "")

    def test_children_that_are_forked_after_the_import_are_on_too(self):
        self.check(
            """
import torch
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        torch.cuda.init()
        os._exit(0 if on() else 1)
    assert os.waitpid(pid, 0)[1] == 0
assert not on()
torch.cuda.init()
assert on()
"""
        )

    def test_spawned_and_forkserver_children_are_on_too(self):
        (self.scratch / "work.py").write_text(
            textwrap.dedent(
                COMMON
                + """
import multiprocessing
def work(_):
    import torch
    torch.cuda.init()
    return on()
if __name__ == "__main__":
    for kind in ("spawn", "forkserver"):
        with multiprocessing.get_context(kind).Pool(1) as pool:
            assert pool.map(work, [1]) == [True], kind
"""
            )
        )
        self.check("", str(self.scratch / "work.py"))

    def test_a_failure_is_one_warning_and_torch_goes_on(self):
        done = self.check(
            """
import torch
torch.cuda.init()
assert torch.cuda.is_initialized() and torch._C.changed == []
""",
            GLAKE_LIBRARY="/nowhere/libgmlake.so",
        )
        self.assertEqual(done.stderr.count("Warning"), 1, done.stderr)
        self.assertRegex(done.stderr, r"GLake is not torch's allocator in process \d+: Error: GLAKE_LIBRARY is '/nowhere")

    def test_values_that_switch_it_off(self):
        for value in ("", "0", " 0 "):
            done = self.check("import torch\ntorch.cuda.init()\nassert not on()", GLAKE_ALLOCATOR=value)
            self.assertEqual(done.stderr, "")
        done = self.check("import torch\ntorch.cuda.init()\nassert not on()", GLAKE_DISABLE="1")
        self.assertEqual(done.stderr, "")
        done = self.check("import torch\ntorch.cuda.init()\nassert not on()", GLAKE_ALLOCATOR="yes")
        self.assertIn("GLAKE_ALLOCATOR is 'yes', which is neither 0 nor 1", done.stderr)

    def test_the_sitecustomize_behind_it_runs(self):
        (self.scratch / "sitecustomize.py").write_text("import builtins\nbuiltins.theirs = __file__\n")
        done = self.check(
            f"""
import sitecustomize, torch
assert theirs == sitecustomize.__file__ == {str(self.scratch / "sitecustomize.py")!r}
torch.cuda.init()
assert on()
""",
            behind=(self.scratch,),
        )
        self.assertEqual(done.stderr, "")

    def test_folders_that_are_twice_in_the_path(self):
        (self.scratch / "sitecustomize.py").write_text("import builtins\nbuiltins.runs = getattr(builtins, 'runs', 0) + 1\n")
        (self.scratch / "link").symlink_to(PATH)
        # Another installation.
        shutil.copytree(PATH.parent, self.scratch / "other" / "glake_switch")
        other = self.scratch / "other" / "glake_switch" / "path"
        code = "import torch\ntorch.cuda.init()\nassert on()\nassert runs == 1, runs"
        for more in ((self.scratch / "link",), (PATH,), (other,), (other, self.scratch / "link", other)):
            with self.subTest(more=more):
                self.assertEqual(self.check(code, first=(PATH, *more), behind=(self.scratch,)).stderr, "")

    def test_the_program_may_switch_it_off_before_its_first_call(self):
        self.check(
            """
os.environ["GLAKE_DISABLE"] = "1"
import torch
torch.cuda.init()
assert torch._C.changed == []
"""
        )

    def test_an_error_of_the_one_behind_it_is_shown_and_harmless(self):
        (self.scratch / "sitecustomize.py").write_text("1 / 0\n")
        done = self.check("import torch\ntorch.cuda.init()\nassert on()", behind=(self.scratch,))
        self.assertIn("ZeroDivisionError", done.stderr)

    def test_the_package_beside_the_switch_serves_a_python_without_one(self):
        (self.scratch / "torch").symlink_to(child.FAKE_TORCH / "torch")
        paths = os.pathsep.join(map(str, (PATH, self.scratch)))
        self.check("import torch\ntorch.cuda.init()\nassert on()", PYTHONPATH=paths)

    def test_the_line_of_the_wheel_does_the_same(self):
        line = (PATH.parent.parent / "glake_switch.pth").read_text()
        code = f"""
exec({line!r})
import torch
torch.cuda.init()
assert on() is (os.environ["GLAKE_ALLOCATOR"] == "1")
assert ("glake_switch" in sys.modules) is on()
"""
        for value in ("0", "1"):
            self.check(code, first=(), GLAKE_ALLOCATOR=value)

    def test_python_m_glake_says_whether_and_why(self):
        said = self.run_with("", "-m", "glake").stdout
        self.assertIn("switch   on (GLAKE_ALLOCATOR=1)", said)
        said = self.run_with("", "-m", "glake", GLAKE_DISABLE="1").stdout
        self.assertIn("switch   off (GLAKE_DISABLE=1)", said)
        self.assertIn("backend  none (GLAKE_DISABLE=1: glake.enable() does nothing)", said)
        said = self.run_with("", "-m", "glake", GLAKE_ALLOCATOR="").stdout
        self.assertIn("switch   off (GLAKE_ALLOCATOR is not set)", said)
        said = self.run_with("", "-m", "glake", first=()).stdout
        has_line = bool(os.environ.get("GLAKE_WHEEL"))
        self.assertIn("switch   on (" if has_line else "switch   off (GLAKE_ALLOCATOR=1, but this process was started with neither", said)


if __name__ == "__main__":
    unittest.main()
