"""The api to the library, on the simulated device."""

import ast
import os
import pathlib
import shutil
import subprocess
import tempfile
import threading
import unittest

os.environ["GLAKE_DEVICE"] = "sim"

import glake  # noqa: E402
from glake import _library  # noqa: E402

import child  # noqa: E402

api = _library.api()
MIB = 1 << 20


class Bindings(unittest.TestCase):
    def live(self):
        return glake.memory_stats(0)["allocated_bytes.all.current"]

    def test_the_stub_names_what_the_module_has(self):
        stub = ast.parse((pathlib.Path(glake.__file__).parent / "_glake.pyi").read_text(encoding="utf-8"))
        named = {node.name for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        there = {name for name in dir(api) if not name.startswith("_")}
        self.assertEqual(named, there)

    def test_versions(self):
        self.assertEqual(api.version(), glake.__version__)
        self.assertEqual(api.abi(), 2)
        self.assertEqual(api.path(), glake.library_path())

    @unittest.skipUnless(shutil.which("cc"), "there is no C compiler")
    def test_a_library_of_another_release_is_refused(self):
        stand_in = pathlib.Path(__file__).resolve().parents[2] / "preload/tests/gmlake.c"
        with tempfile.TemporaryDirectory() as scratch:
            library = str(pathlib.Path(scratch).resolve() / "libgmlake.so")
            options = ["-shared", "-fPIC", "-DCOPIES", '-DRELEASE="9.8.7"']
            subprocess.run(["cc", *options, str(stand_in), "-o", library], check=True)
            done = child.run("import glake; glake._library.api()", GLAKE_LIBRARY=library)
        self.assertEqual(done.returncode, 1)
        ours = f"this package is of release {glake.__version__} with interface {api.abi()}: take both from one release"
        found = f"cannot use {library}: it is of release 9.8.7 with interface {api.abi()}, {ours}"
        self.assertIn(found, done.stderr.splitlines()[-1])

    def test_another_library_is_refused(self):
        with self.assertRaisesRegex(glake.Error, "open already"):
            api.open("/nowhere/libgmlake.so")

    def test_a_block(self):
        before = self.live()
        address = api.alloc(0, 20 * MIB)
        self.assertEqual(api.find(address + 5)[:3:2], (address, 20 * MIB))
        self.assertEqual(api.find(address)[3], 0)
        self.assertEqual(self.live() - before, 20 * MIB)
        api.record_stream(address, 0)
        api.free(address)
        self.assertEqual(self.live(), before)

    def test_nothing(self):
        self.assertEqual(api.alloc(0, 0), 0)
        api.free(0)
        self.assertIsNone(api.find(0x1234))

    def test_misuse_names_the_address_and_changes_nothing(self):
        address = api.alloc(0, MIB)
        with self.assertRaises(glake.InvalidError) as inside:
            api.free(address + 512)
        self.assertIn(hex(address + 512), str(inside.exception))
        api.free(address)
        with self.assertRaises(glake.InvalidError):
            api.free(address)
        with self.assertRaises(glake.InvalidError):
            api.record_stream(address, 0)
        with self.assertRaises(glake.InvalidError):
            api.alloc(99, MIB)

    def test_errors_are_runtime_errors(self):
        for name in glake.__all__:
            if name.endswith("Error"):
                self.assertTrue(issubclass(getattr(glake, name), RuntimeError), name)

    def test_out_of_memory_and_its_observer(self):
        out = child.check(
            self,
            """
            import glake
            from glake import _library
            api = _library.api()
            seen = []
            api.on_out_of_memory(lambda *what: seen.append((what, glake.memory_stats(0)["num_ooms"])))
            api.set_fraction(0, 0.01)
            assert api.fraction(0) == 0.01
            largest = api.largest(0)
            try:
                api.alloc(0, largest + (64 << 20))
            except glake.OutOfMemoryError as error:
                assert str(error).startswith("CUDA out of memory. Tried to allocate"), error
            else:
                raise AssertionError("served")
            (device, requested, total, free), _ = seen.pop()
            assert (device, requested) == (0, largest + (64 << 20)) and 0 < free <= total, (requested, total, free)
            api.on_out_of_memory(lambda *what: 1 / 0)
            try:
                api.alloc(0, largest + (64 << 20))
            except glake.OutOfMemoryError:
                pass
            api.on_out_of_memory(None)
            assert not seen
            api.free(api.alloc(0, largest))
            print("ok")
            """,
        )
        self.assertEqual(out, "ok\n")

    def test_trim(self):
        api.free(api.alloc(0, 64 * MIB))
        glake.trim()
        reserved = glake.memory_stats(0)["reserved_bytes.all.current"]
        api.free(api.alloc(0, reserved + 64 * MIB))
        self.assertGreaterEqual(glake.trim(device="cuda:0"), 64 * MIB)
        with self.assertRaises(glake.InvalidError):
            glake.trim(keep=-1)
        with self.assertRaises(glake.InvalidError):
            glake.trim(device=77)
        with self.assertRaises(ValueError):
            glake.trim(device="cpu")

    def test_statistics(self):
        block = api.alloc(0, 4 * MIB)
        stats = glake.memory_stats(0)
        for key in ("active_bytes.all.peak", "requested_bytes.small_pool.current", "num_ooms", "glake.stitches"):
            self.assertIn(key, stats)
        table = glake.memory_summary(0).splitlines()[2:]
        self.assertIn("GPU reserved memory", "\n".join(table))
        # Columns end at two places, whatever the names.
        ends = sorted(set(map(len, table)))
        self.assertEqual((len(ends), ends[1] - ends[0]), (2, 12), table)
        self.assertLessEqual(ends[1], 80)
        api.free(block)
        api.reset_peaks(0)
        api.reset_totals(0)
        stats = glake.memory_stats(0)
        self.assertEqual(stats["allocated_bytes.all.peak"], stats["allocated_bytes.all.current"])
        self.assertEqual(stats["allocation.all.freed"], 0)

    def test_snapshot_and_history(self):
        api.record_history(True, 100, True)
        self.assertTrue(api.history_enabled())
        block = api.alloc(0, 3 * MIB)
        taken = glake.snapshot()
        api.record_history(False)
        self.assertFalse(api.history_enabled())
        places = [(part["address"], part["state"]) for segment in taken["segments"] for part in segment["blocks"]]
        self.assertIn((block, "active_allocated"), places)
        self.assertIn(("alloc", block), [(entry["action"], entry.get("addr")) for entry in taken["device_traces"][0]])
        self.assertTrue(all(isinstance(segment["segment_pool_id"], tuple) for segment in taken["segments"]))
        api.free(block)

    def test_private_pools(self):
        pool = (7, 1)
        api.pool_create(0, pool)
        api.pool_create(0, pool)
        self.assertEqual(api.pool_use_count(0, pool), 2)
        api.pool_trim(0, pool)
        api.pool_release(0, pool)
        api.pool_release(0, pool)
        with self.assertRaises(glake.InvalidError):
            api.pool_release(0, pool)

    def test_threads(self):
        failed = []

        def work(seed):
            try:
                for turn in range(200):
                    blocks = [api.alloc(0, (1 + (seed * turn + i) % 40) * 100_000) for i in range(5)]
                    for block in blocks:
                        api.free(block)
            except glake.Error as error:
                failed.append(error)

        before = self.live()
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(0, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual((failed, self.live()), ([], before))

    def test_what_is_no_amount_is_told(self):
        for call in (glake.lease.set, glake.lease.grant, glake.lease.take):
            with self.assertRaisesRegex(glake.InvalidError, "bytes is -1: a number of bytes, 0 or more"):
                call(0, -1)
            with self.assertRaisesRegex(TypeError, "bytes is 0.5: a number of bytes"):
                call(0, 0.5)

    def test_what_is_no_pair_is_told(self):
        for pair in ((bytearray(1),), 3):
            with self.assertRaisesRegex(TypeError, "pair 0 is .*: a destination and a source"):
                glake.copy_list([pair])

    def test_text_with_a_null_byte(self):
        with self.assertRaises(glake.InvalidError):
            api.configure("a\0b")


class Process(unittest.TestCase):
    def test_a_forked_child_is_told_and_frees_nothing(self):
        out = child.check(
            self,
            """
            import os, sys, glake
            from glake import _library
            api = _library.api()
            block = api.alloc(0, 5 << 20)
            pid = os.fork()
            if pid == 0:
                api.free(block)
                try:
                    api.alloc(0, 1 << 20)
                except glake.UnavailableError as error:
                    print("told:", error, flush=True)
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(pid, 0)[1] == 0
            assert api.find(block) is not None
            """,
        )
        self.assertIn("fork", out)

    def test_a_process_ends_with_blocks_alive_and_an_observer_in_place(self):
        child.check(
            self,
            """
            import threading, glake
            from glake import _library
            api = _library.api()
            api.on_out_of_memory(lambda *what: None)
            api.alloc(0, 5 << 20)
            def churn():
                while True:
                    api.free(api.alloc(0, 3 << 20))
            threading.Thread(target=churn, daemon=True).start()
            """,
        )

    def test_no_driver_is_an_error(self):
        if pathlib.Path("/dev/nvidiactl").exists():
            self.skipTest("this machine has a driver")
        out = child.check(
            self,
            """
            import glake
            from glake import _library
            try:
                _library.api().start()
            except glake.UnavailableError as error:
                print(error)
            """,
            device=None,
        )
        self.assertIn("driver", out)

    def test_a_missing_library_is_an_error(self):
        out = child.check(
            self,
            """
            import glake
            try:
                glake.memory_stats()
            except glake.Error as error:
                print(error)
            """,
            GLAKE_LIBRARY="/nowhere/libgmlake.so",
        )
        self.assertIn("GLAKE_LIBRARY", out)

    def test_a_library_that_is_another_is_an_error(self):
        libc = next(path for path in pathlib.Path("/").glob("lib*/x86_64-linux-gnu/libm.so.6"))
        out = child.check(
            self,
            """
            import glake
            try:
                glake.memory_stats()
            except glake.Error as error:
                print(error)
            """,
            GLAKE_LIBRARY=str(libc),
        )
        self.assertIn("not GLake's library", out)


if __name__ == "__main__":
    unittest.main()
