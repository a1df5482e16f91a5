"""enable(): too late, twice, with what does not parse, without a compiler. Errors that say what to do, never a crash."""
import sys, tempfile, unittest

import fixture

ISOLATED = True

ERROR = """
    import glake, torch, fixture
    {before}
    try:
        {call}
        print("no error")
    except RuntimeError as error:
        print("refused:", error)
"""
ALIVE = """
    import torch
    print("alive", float(torch.ones(1000, device="cuda").sum()))
"""


def refused(test, call, *words, before="", alive=True, **env):
    """The call raises, the error has the words, and the process computes on the GPU afterwards."""
    done = fixture.code(ERROR.format(before=before, call=call) + (ALIVE if alive else ""), **env)
    test.assertEqual(done.code, 0, done.text())
    test.assertIn("refused: ", done.out, done.text())
    for word in words:
        test.assertIn(word, done.out, done.text())
    if alive:
        test.assertIn("alive 1000.0", done.out, done.text())
    return done


class Enabling(unittest.TestCase):
    def test_too_late(self):
        refused(self, "fixture.enable()", "enable()", before='torch.ones(1, device="cuda")')

    def test_twice_alike_is_once(self):
        done = fixture.code("""
            import fixture, torch
            fixture.enable(); fixture.enable()
            kept = torch.ones(1000, device="cuda")
            fixture.enable()
            print(float(kept.sum()), torch.cuda.memory_allocated())
        """)
        self.assertEqual((done.code, done.out.split()[0]), (0, "1000.0"), done.text())

    def test_twice_with_another_configuration(self):
        refused(self, 'fixture.enable({"pool": {"alias": False}})', "already", before="fixture.enable()")

    def test_another_backend_afterwards(self):
        other = "pluggable" if fixture.BACKEND == "compiled" else "compiled"
        refused(self, f"glake.enable(backend={other!r})", "already", before="fixture.enable()")

    def test_configurations_that_do_not_parse(self):
        refused(self, 'fixture.enable({"pool": {"borow": "wait"}})', "borow")
        refused(self, 'fixture.enable({"pool": {"borrow": "maybe"}})', "maybe")

    def test_a_file_that_is_not_there(self):
        refused(self, 'fixture.enable("/nowhere/glake.toml")', "/nowhere/glake.toml")

    def test_a_file_that_does_not_parse(self):
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write("[pool]\nextent = = 3\n")
            file.flush()
            refused(self, f"fixture.enable({file.name!r})")

    def test_a_variable_that_does_not_parse(self):
        refused(self, "fixture.enable()", "vmmDefragment", vmmDefragment="7")

    def test_an_unknown_backend(self):
        done = fixture.code("""
            import glake
            try:
                glake.enable(backend="magic")
            except (ValueError, RuntimeError) as error:
                print("refused:", error)
        """)
        self.assertIn("magic", done.out, done.text())

    def test_torchs_own_settings_are_warned_of(self):
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            done = fixture.code("""
                import fixture, torch
                fixture.enable()
                print(float(torch.ones(1000, device="cuda").sum()))
            """, **{name: "expandable_segments:True"})
            self.assertEqual(done.code, 0, done.text())
            self.assertIn(name, done.err, done.text())
            self.assertIn("expandable_segments", done.err, done.text())

    def test_settings_without_effect_are_warned_of(self):
        done = fixture.code("""
            import warnings
            import fixture, torch
            fixture.enable()
            warnings.simplefilter("always")
            torch._C._accelerator_setAllocatorSettings("max_split_size_mb:64")
            torch._C._accelerator_setAllocatorSettings("pinned_use_background_threads:True")
            print(float(torch.ones(1000, device="cuda").sum()), torch.ones(1000).pin_memory().is_pinned())
        """, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        self.assertEqual((done.code, done.out.strip()), (0, "1000.0 True"), done.text())
        for word in ("PYTORCH_NO_CUDA_MEMORY_CACHING", "max_split_size_mb:64 have no effect"):
            self.assertIn(word, done.err, done.text())
        self.assertNotIn("pinned_use", done.err, done.text())

    def test_silent_where_all_is_well(self):
        done = fixture.code("import fixture, torch\nfixture.enable()\nprint(float(torch.ones(1000, device='cuda').sum()))")
        self.assertEqual((done.code, done.out.strip(), done.err), (0, "1000.0", ""), done.text())

    def test_a_configuration_takes_effect(self):
        done = fixture.code("""
            import fixture, torch
            from fixture import MIB
            fixture.enable({"pool": {"limit": "1GiB"}})
            try:
                fixture.new(1100 * MIB)
                print("no error")
            except RuntimeError as error:
                print(error)
        """)
        self.assertTrue(done.out.startswith("CUDA out of memory."), done.text())

    def test_what_is_in_force(self):
        done = fixture.code("""
            import fixture, glake, torch
            assert glake.backend() is None, glake.backend()
            fixture.enable()
            print(glake.backend(), torch.cuda.memory.get_allocator_backend())
        """)
        self.assertEqual(done.code, 0, done.text())
        self.assertEqual(done.out.split()[0], fixture.BACKEND)

    @fixture.only("compiled", "the plain backend needs no compiler")
    def test_no_compiler(self):
        with tempfile.TemporaryDirectory() as empty:
            nothing = dict(PATH=empty, CXX=None, XDG_CACHE_HOME=empty, HOME=empty)
            done = fixture.code("""
                import glake, torch
                glake.enable()
                print(glake.backend(), float(torch.ones(1000, device="cuda").sum()))
            """, **nothing)
            self.assertEqual(done.out.split(), ["pluggable", "1000.0"], done.text())
            refused(self, 'glake.enable(backend="compiled")', "compiler", alive=False, **nothing)
            done = fixture.code("""
                import glake, torch
                glake.enable()
                print(glake.backend(), float(torch.ones(1000, device="cuda").sum()))
            """, **{**nothing, "CXX": "/nowhere/c++"})
            self.assertEqual(done.out.split(), ["pluggable", "1000.0"], done.text())

    @fixture.limit(120)
    @fixture.only("compiled", "the plain backend builds nothing")
    def test_many_processes_build_at_once(self):
        with tempfile.TemporaryDirectory() as empty:
            text = f"import sys; sys.path[:0] = [{str(fixture.HERE)!r}]\nimport fixture, torch\nfixture.enable()\nprint(float(torch.ones(1000, device='cuda').sum()))"
            children = [fixture.start([sys.executable, "-c", text], XDG_CACHE_HOME=empty, HOME=empty) for _ in range(4)]
            for done in fixture.finish(children, 100):
                self.assertEqual((done.code, done.out.strip()), (0, "1000.0"), done.text())

    def test_a_second_copy_of_the_library(self):
        done = fixture.code("""
            import ctypes, os, shutil, tempfile
            import fixture, glake, torch
            fixture.enable()
            kept = fixture.stamp(fixture.new(1 << 20), 1)
            with tempfile.TemporaryDirectory() as folder:
                copy = shutil.copy(glake.library_path(), os.path.join(folder, "libgmlake-copy.so"))
                other = ctypes.CDLL(copy)
                other.gmlake_last_error.restype = ctypes.c_char_p
                out = ctypes.c_void_p()
                code = other.glake_alloc(ctypes.c_int32(0), ctypes.c_size_t(4096), None, ctypes.byref(out))
            print("code", code, "pointer", out.value, (other.gmlake_last_error() or b"").decode())
            print("alive", fixture.wrong(kept, 1))
        """)
        self.assertEqual(done.code, 0, done.text())
        self.assertIn("alive 0", done.out, done.text())
        self.assertRegex(done.out, r"code [1-9]\d* pointer None .+", done.text())

    def test_no_gpu_visible(self):
        done = fixture.code("""
            import glake
            try:
                glake.enable()
                print("no error")
            except RuntimeError as error:
                print("refused:", error)
        """, CUDA_VISIBLE_DEVICES="")
        self.assertEqual(done.code, 0, done.text())
        self.assertIn("refused: ", done.out, done.text())
