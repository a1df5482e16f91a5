"""Regions of simulated GPUs: bytes leave and come back, errors say why they cannot, programs end in the midst."""

import copy
import os
import pickle
import sys
import tempfile
import textwrap
import threading
import time
import types
import unittest
from unittest import mock

os.environ["GLAKE_DEVICE"] = "sim"

import glake  # noqa: E402
from glake import _regions  # noqa: E402

import child  # noqa: E402
from regions import MIB, Array, api, made, tags, view  # noqa: E402


class Cleaned(unittest.TestCase):
    """Bytes that are copied while no use runs, one second after the last use (tiers.clean_after_ms)."""

    def made_clean(self, size=8 * MIB):
        tag = next(tags)
        with glake.active(), glake.region(tag, clean=True):
            array = Array(size, 1)
        self.wait(tag, size)
        return tag, array

    def wait(self, tag, size):
        end = time.monotonic() + 30
        while view(tag)["clean"]["now"] != size:
            self.assertLess(time.monotonic(), end, view(tag))
            time.sleep(0.02)

    def test_it_leaves_without_a_copy_and_comes_back(self):
        tag, array = self.made_clean()
        gone = glake.shrink(tag)
        self.assertEqual((gone["clean"], gone["copied"]), (array.size, 0))
        glake.refill(tag)
        self.assertTrue(array.is_right())
        self.assertEqual(view(tag)["clean"]["released"], array.size)

    def test_a_use_voids_it_at_once(self):
        tag, array = self.made_clean()
        with glake.active(tag):
            self.assertEqual(view(tag)["clean"]["now"], 0)
        self.assertEqual(glake.shrink(tag)["copied"], array.size)
        glake.refill(tag)
        self.assertTrue(array.is_right())

    def test_a_copy_voids_it_at_once(self):
        tag, array = self.made_clean()
        glake.copy_(array, array.sent, wait=True)
        self.assertEqual(view(tag)["clean"]["now"], 0)

    def test_others_are_not_cleaned(self):
        tag, _ = made()
        self.assertIsNone(view(tag)["clean"])
        with self.assertRaises(glake.InvalidError):
            glake.region(tag, clean=True)
        self.assertIn("clean=True", repr(glake.region(next(tags), clean=True)))


class Plain(unittest.TestCase):
    """The simulated device has no IPC handles to ask for here: tests in Rust do, and tests/gpu/torch/plain.py on a GPU."""

    def test_it_stays_while_everything_else_leaves(self):
        tag = next(tags)
        with glake.region(tag):
            leaves = Array(8 * MIB, 1)
            with glake.plain():
                array = Array(8 * MIB, 2)
        self.assertEqual((glake.region_of(leaves), glake.region_of(array)), (tag, None))
        report = glake.shrink()
        self.assertGreaterEqual(report["freed"], 8 * MIB)
        self.assertTrue(array.is_right())
        plain = [used["bytes"] for used in glake.memory_usage() if "plain memory" in used["holder"]]
        self.assertGreaterEqual(sum(plain), 8 * MIB)
        glake.refill()
        self.assertTrue(leaves.is_right())
        glake.fix(array)
        with self.assertRaisesRegex(glake.UnsupportedError, "is plain"):
            glake.live(array, [(0, MIB)])

    def test_as_a_decorator_and_on_its_own_thread(self):
        @glake.plain()
        def inside():
            other = []
            thread = threading.Thread(target=lambda: other.append(Array(4 * MIB, 3)))
            thread.start()
            thread.join()
            return Array(4 * MIB, 4), other[0]

        plain, other = inside()
        glake.fix(plain)
        report = glake.shrink()
        self.assertTrue(plain.is_right())
        self.assertGreaterEqual(report["freed"], 4 * MIB)
        glake.refill()
        self.assertTrue(other.is_right())

    def test_without_the_library_it_does_nothing(self):
        text = child.check(self, """
            import os
            os.environ["GLAKE_LIBRARY"] = "/nowhere/libgmlake.so"
            import glake
            with glake.plain(), glake.plain():
                print(repr(glake.plain()))
        """)
        self.assertEqual(text.strip(), "glake.plain()")


    def test_a_block_that_encloses_the_start_is_plain(self):
        child.check(self, """
            import glake
            from glake import _library
            with glake.plain():
                assert not _library.api().started(), "the driver is open"
                with glake.plain():
                    pass
                address = glake.allocate(8 << 20)
                assert glake.shrink()["freed"] == 0
            plain = [used["bytes"] for used in glake.memory_usage() if "plain memory" in used["holder"]]
            assert sum(plain) >= 8 << 20, plain
            other = glake.allocate(8 << 20)
            assert glake.shrink()["freed"] >= 8 << 20
        """)

    def test_without_a_driver_it_does_nothing(self):
        child.check(self, """
            import glake
            from glake import _library
            with glake.plain():
                pass
            assert not _library.api().started()
        """, device=None)


class Blocks(unittest.TestCase):
    def test_functions_that_let_other_code_run_are_refused(self):
        async def coroutine():
            pass

        async def several():
            yield

        def generator():
            yield

        for block in (glake.plain(), glake.region(next(tags))):
            for function in (coroutine, several, generator):
                with self.assertRaisesRegex(TypeError, f"{function.__name__} (awaits|yields)"):
                    block(function)
            with self.assertRaisesRegex(TypeError, "the decorated object is 5"):
                block(5)

    def test_an_exit_without_an_entry_is_refused(self):
        region = glake.region(next(tags))
        for block in (glake.plain(), region):
            with self.assertRaisesRegex(glake.StateError, "left as often as it entered"):
                block.__exit__(None, None, None)
        with glake.region(next(tags)) as outer:
            with self.assertRaisesRegex(glake.StateError, "not inside"):
                region.__exit__(None, None, None)
            array = Array(MIB)
        self.assertEqual(glake.region_of(array), outer.tag)

    def test_blocks_may_end_in_another_order(self):
        one, other = glake.region(next(tags)), glake.region(next(tags))
        one.__enter__()
        other.__enter__()
        one.__exit__(None, None, None)
        other.__exit__(None, None, None)
        self.assertIsNone(glake.region_of(Array(MIB)))

    def test_copies_keep_the_definition(self):
        region = glake.region(next(tags), policy="discard")
        for copied in (copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
            other = copied(region)
            self.assertEqual(repr(other), repr(region))
            del other
        # One of the library's definitions is left, and no more.
        api.region_release(region.tag)
        with self.assertRaises(glake.InvalidError):
            api.region_release(region.tag)


class Registered(unittest.TestCase):
    """Memory that other libraries know by more than its address."""

    def test_a_pool_is_fixed_by_its_number_before_it_exists(self):
        pool = (0, 1234)
        glake.fix(pool)
        glake.fix(pool)
        glake.unfix(pool)
        glake.unfix(pool)
        with self.assertRaisesRegex(glake.InvalidError, r"private pool \(0, 1234\) is not fixed"):
            glake.unfix(pool)

    def test_a_pool_is_fixed_by_torchs_objects(self):
        class Graph:
            def pool(self):
                return 7, 0

        class Pool:
            id = (0, 9)

        torch = types.SimpleNamespace(cuda=types.SimpleNamespace(CUDAGraph=Graph, MemPool=Pool))
        with mock.patch.dict(sys.modules, torch=torch):
            numbers = [_regions._pool_of(thing) for thing in (Graph(), Pool(), (7, 0), bytes(2), [1, 2])]
        self.assertEqual(numbers, [(7, 0), (0, 9), (7, 0), None, None])

    def test_a_shrink_warns_of_graphs_where_nccl_registers_them(self):
        def warns(tag="graph (0, 1)", freed=1, backend="cuda:nccl", ranks=2, **environment):
            torch = types.SimpleNamespace(
                is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: ranks, get_backend=lambda: backend
            )
            report = {"regions": [{"tag": tag, "freed": freed}], "warnings": []}
            with (
                mock.patch.dict(sys.modules, {"torch.distributed": torch}),
                mock.patch.dict(os.environ, environment),
                mock.patch.object(_regions, "_asked", return_value=report),
                mock.patch.object(_regions.logger, "warning") as logged,
            ):
                self.assertEqual(len(glake.shrink()["warnings"]), logged.call_count)
                return logged.call_count == 1 and "NCCL_GRAPH_REGISTER=0" in logged.call_args.args[0]

        self.assertTrue(warns())
        self.assertFalse(warns(tag="default"))
        self.assertFalse(warns(freed=0))
        self.assertFalse(warns(backend="gloo"))
        self.assertFalse(warns(ranks=1))
        self.assertFalse(warns(NCCL_GRAPH_REGISTER="0"))


class Life(unittest.TestCase):
    def test_out_and_back(self):
        tag, arrays = made()
        other = Array(4 * MIB, 9)
        self.assertEqual((glake.region_of(arrays[0]), glake.region_of(other), glake.region_of(bytes(8))), (tag, None, None))
        report = glake.shrink(tag)
        self.assertEqual((report["copied"], report["resident"]), (16 * MIB, 0))
        self.assertGreaterEqual(report["freed"], 16 * MIB)
        self.assertGreater(view(tag)["evicted"], 0)
        self.assertTrue(other.is_right())
        back = glake.refill(tag)
        self.assertEqual((back["copied"], back["evicted"]), (16 * MIB, 0))
        self.assertTrue(all(array.is_right() for array in arrays))

    def test_everything(self):
        tag, arrays = made()
        loose = Array(4 * MIB, 3)
        report = glake.shrink()
        self.assertEqual(report["resident"], 0)
        self.assertTrue({tag, "default"} <= {region["tag"] for region in report["regions"]})
        self.assertTrue(all({"device", "holder", "bytes"} <= set(holder) for holder in report["gpu"]))
        glake.refill()
        self.assertTrue(all(array.is_right() for array in [*arrays, loose]))

    def test_by_bytes(self):
        _tag, arrays = made(64 * MIB, 3)
        freed = glake.shrink(bytes=MIB)["freed"]
        self.assertGreaterEqual(freed, MIB)
        glake.refill()
        self.assertTrue(all(array.is_right() for array in arrays))

    def test_sealed(self):
        tag, arrays = made(policy="sealed", host_copy="retain")
        glake.seal(tag)
        with glake.region(tag, policy="sealed", host_copy="retain"), self.assertRaises(glake.Error):
            api.alloc(0, MIB)
        self.assertEqual(glake.shrink(tag)["copied"], 16 * MIB)
        glake.refill(tag)
        self.assertEqual(glake.shrink(tag)["copied"], 0)
        glake.refill(tag)
        glake.unseal(tag)
        self.assertEqual(glake.shrink(tag)["copied"], 16 * MIB)
        glake.refill(tag)
        self.assertTrue(all(array.is_right() for array in arrays))

    def test_discarded(self):
        tag, arrays = made(policy="discard")
        self.assertEqual(glake.shrink(tag)["copied"], 0)
        glake.refill(tag)
        glake.copy_(arrays[0], arrays[0].sent, wait=True)
        self.assertTrue(arrays[0].is_right())

    def test_a_prepared_region_pins_when_its_block_ends(self):
        tag, arrays = made(host_copy="prepare")
        glake.shrink(tag)
        glake.refill(tag, verify=True)
        self.assertTrue(arrays[1].is_right())

    def test_a_copy_brings_it_back(self):
        tag, arrays = made()
        glake.shrink(tag)
        back = bytearray(arrays[0].size)
        glake.copy_(back, arrays[0], wait=True)
        self.assertEqual((bytes(back), view(tag)["evicted"]), (arrays[0].sent, 0))

    def test_freed_while_away(self):
        tag, arrays = made()
        glake.shrink(tag)
        arrays.clear()
        self.assertEqual(glake.refill(tag)["copied"], 0)

    def test_in_the_background(self):
        groups = [made() for _ in range(3)]
        glake.order([tag for tag, _ in reversed(groups)])
        names = [tag for tag, _ in groups]
        glake.shrink(names)
        glake.refill(names, wait=False)
        for tag, arrays in groups:
            glake.wait(tag)
            api.stream_synchronize(0, 0)
            self.assertTrue(all(array.is_right() for array in arrays))

    def test_as_a_decorator(self):
        tag = next(tags)

        @glake.region(tag)
        def load():
            return Array(2 * MIB)

        self.assertEqual(glake.region_of(load()), tag)
        self.assertEqual(glake.region_of(Array(2 * MIB)), None)

    def test_hooks(self):
        told = []
        tag, arrays = made()
        glake.hooks(lambda event: told.append(("before", event["event"])), lambda event: told.append(("after", event["event"])))
        glake.shrink(tag)
        glake.refill(tag)
        self.assertEqual(told, [("before", "shrink"), ("after", "shrink"), ("before", "refill"), ("after", "refill")])
        glake.hooks(before=lambda event: time.sleep(2), timeout=0.05)
        with self.assertRaises(glake.Error):
            glake.shrink(tag)
        glake.hooks()
        self.assertTrue(all(array.is_right() for array in arrays))


class Refusals(unittest.TestCase):
    def test_what_is_wrong_is_said(self):
        for call, error, text in [
            (lambda: glake.region(""), glake.InvalidError, "cannot be called ''"),
            (lambda: glake.region("x", policy="kept"), ValueError, "'keep', 'sealed' and 'discard'"),
            (lambda: glake.region("x", host_copy="no"), ValueError, "'drop', 'retain' and 'prepare'"),
            (lambda: glake.shrink("nobody's"), glake.InvalidError, "nobody's"),
            (lambda: glake.shrink(tier="moon"), glake.InvalidError, "moon"),
            (lambda: glake.refill("nobody's"), glake.InvalidError, "nobody's"),
            (lambda: glake.seal("nobody's"), glake.InvalidError, "nobody's"),
            (lambda: glake.wait("nobody's"), glake.InvalidError, "nobody's"),
            (lambda: glake.order(["nobody's"]), glake.InvalidError, "nobody's"),
            (lambda: glake.active(when_closed="open"), ValueError, "'refill', 'hold' and 'refuse'"),
            (lambda: glake.active(timeout=-1), glake.InvalidError, "-1"),
            (lambda: glake.refill(timeout=-1), glake.InvalidError, "-1"),
            (lambda: glake.fix(bytes(8)), glake.InvalidError, ""),
        ]:
            with self.subTest(text), self.assertRaisesRegex(error, text):
                call()

    def test_a_tag_has_one_policy(self):
        tag, _arrays = made()
        with self.assertRaisesRegex(glake.InvalidError, tag):
            glake.region(tag, policy="discard")

    def test_shrink_inside_active(self):
        tag, _arrays = made()
        with glake.active(tag), self.assertRaises(glake.StateError):
            glake.shrink(tag)

    def test_a_forked_child(self):
        out = child.check(
            self,
            """
            import os, glake
            from glake import _library
            api = _library.api()
            with glake.region("r"):
                place = api.alloc(0, 1 << 20)
            glake.shrink("r")
            if not (pid := os.fork()):
                try:
                    glake.refill("r")
                except glake.UnavailableError:
                    os._exit(0)
                os._exit(1)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            """,
        )
        self.assertEqual(out.strip(), "0")

    def test_the_end_of_a_process_that_is_shrunk(self):
        child.check(self, "import glake\nfrom glake import _library\nwith glake.region('r'):\n    _library.api().alloc(0, 1 << 24)\nglake.shrink()")


class Ends(unittest.TestCase):
    """A program that ends in any way ends cleanly and leaves no state behind."""

    def test_nothing_stays_in_files(self):
        for end in ("", "raise SystemExit(0)", "thread = threading.Thread(target=time.sleep, args=(0.1,)); thread.start()"):
            with self.subTest(end), tempfile.TemporaryDirectory() as folder:
                files = os.path.join(folder, "files")
                out = child.check(
                    self,
                    f"""
                    import os, threading, time, glake
                    from glake import _library
                    api = _library.api()
                    api.configure(None, None, 'tiers.files = "{files}"')
                    with glake.region("r"):
                        place = api.alloc(0, 1 << 24)
                    glake.shrink("r", tier="file")
                    print(len(os.listdir("{files}")))
                    {end}
                    """,
                )
                self.assertGreater(int(out), 1)
                self.assertEqual(os.listdir(files), [])

    def test_hooks_that_run_at_the_end(self):
        begin = """
            import sys, threading, time, glake
            from glake import _library
            with glake.region("r"):
                place = _library.api().alloc(0, 1 << 24)
            begun = threading.Event()
            def hook(event):
                begun.set()
                for _ in range(30):
                    time.sleep(0.01)
                    sum(range(1000))
                print("ran", event["when"], flush=True)
            """
        ends = {
            "before, in the background": 'glake.shrink("r"); glake.hooks(before=hook); glake.refill("r", wait=False); begun.wait()',
            "after, in the background": 'glake.shrink("r"); glake.hooks(after=hook); glake.refill("r", wait=False); begun.wait()',
            "one that took too long": """
glake.hooks(before=hook, timeout=0.05)
try:
    glake.shrink("r")
except glake.ClosedError:
    pass
""",
            "beside what is touched": """
glake.shrink("r")
glake.hooks(before=hook, after=hook)
with glake.region("r"):
    _library.api().alloc(0, 1 << 20)
begun.wait()
""",
            "one that has not begun": 'glake.shrink("r"); glake.hooks(before=hook, after=hook); glake.refill("r", wait=False)',
        }
        for name, end in ends.items():
            for _ in range(3):
                with self.subTest(name):
                    done = child.run(textwrap.dedent(begin) + end)
                    self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)

    def test_hooks_in_a_forked_child(self):
        out = child.check(
            self,
            """
            import os, sys, threading, glake
            from glake import _library
            with glake.region("r"):
                place = _library.api().alloc(0, 1 << 24)
            begun, go_on = threading.Event(), threading.Event()
            def hook(event):
                begun.set()
                go_on.wait()
            glake.shrink("r")
            glake.hooks(before=hook)
            glake.refill("r", wait=False)
            begun.wait()
            if not (pid := os.fork()):
                sys.exit(3)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            go_on.set()
            """,
        )
        self.assertEqual(out.strip(), "3")


if __name__ == "__main__":
    unittest.main()
