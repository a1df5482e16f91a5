"""Exceptions: each failure of the library is also what Python or torch calls it."""

import asyncio
import os
import pathlib
import pickle
import re
import threading
import unittest

os.environ["GLAKE_DEVICE"] = "sim"

import glake  # noqa: E402
from glake import _library, errors  # noqa: E402

import child  # noqa: E402
from regions import made  # noqa: E402

# What a user catches who has never seen GLake.
KNOWN_AS = {
    "OUT_OF_MEMORY": (glake.OutOfMemoryError, MemoryError),
    "INVALID": (glake.InvalidError, ValueError),
    "DRIVER": (glake.DriverError, RuntimeError),
    "UNAVAILABLE": (glake.UnavailableError, RuntimeError),
    "UNSUPPORTED": (glake.UnsupportedError, NotImplementedError),
    "CLOSED": (glake.ClosedError, RuntimeError),
    "TIMEOUT": (glake.TimedOutError, TimeoutError),
}


class Kinds(unittest.TestCase):
    def test_each_status_of_the_header_has_its_exception(self):
        header = (_library.include() / "gmlake.h").read_text(encoding="utf-8")
        statuses = header[header.index("#define GLAKE_OK 0") : header.index("#define GLAKE_WHEN_CLOSED_REFILL")]
        named = {int(number): name for name, number in re.findall(r"#define GLAKE_(\w+) (\d+)", statuses) if name != "OK"}
        self.assertEqual(set(named), set(errors.BY_STATUS))
        for status, name in named.items():
            kind, known_as = KNOWN_AS[name]
            error = errors.of_status(status, "the text")
            self.assertEqual((errors.BY_STATUS[status], str(error)), (kind, "the text"))
            for base in (kind, glake.Error, RuntimeError, known_as):
                self.assertIsInstance(error, base)
            again = pickle.loads(pickle.dumps(error))
            self.assertEqual((type(again), again.args), (type(error), error.args))
        self.assertIs(type(errors.of_status(99, "later")), glake.Error)

    def test_a_wrong_value_is_an_error_of_glake(self):
        scattered = memoryview(bytearray(16))[::2]
        calls = [
            lambda: glake.enable(backend="other"),
            lambda: glake.copy_(bytearray(8), bytearray(4)),
            lambda: glake.copy_(bytearray(8), scattered),
            lambda: glake.copy_(bytes(8), bytearray(8)),
            lambda: glake.copy_(bytearray(8), bytearray(8), verify=True),
            lambda: glake.offload(None),
            lambda: glake.offload(object(), budget="60 bananas"),
            lambda: glake.offload(object(), budget="60g"),
            lambda: glake.offload(object(), budget=-1),
            lambda: glake.offload(object(), preset="hidden"),
            lambda: glake.offload(object(), preset="other"),
            lambda: glake.offload.activations(object(), least=-1),
            lambda: glake.offload.OffloadActivations(min_offload_size=-1),
            lambda: glake.fix((-1, 5)),
            lambda: glake.fix((1 << 70, 5)),
            lambda: glake.unfix((5, -1)),
        ]
        for number, call in enumerate(calls):
            with self.subTest(number), self.assertRaises(glake.InvalidError):
                call()
        bare = [str(file) for file in _library.PACKAGE.rglob("*.py") if "raise ValueError" in file.read_text(encoding="utf-8")]
        self.assertEqual(bare, [])

    def test_the_page_has_every_exception(self):
        page = pathlib.Path(__file__).resolve().parents[3] / "docs/PYTHON.md"
        named = dict(re.findall(r"^\| `glake\.(\w+Error)` \| `(\w+)`", page.read_text(encoding="utf-8"), re.MULTILINE))
        there = {kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.Error)}
        self.assertEqual(set(named), set(there) - {"Error"})
        self.assertLessEqual(set(there), set(glake.__all__))
        for name, base in named.items():
            self.assertTrue(issubclass(there[name], eval(base)), name)


class Timeouts(unittest.TestCase):
    def fails(self, call, text):
        with self.assertRaisesRegex(TimeoutError, text) as raised:
            call()
        self.assertIs(type(raised.exception), glake.TimedOutError)

    def test_each_wait(self):
        tag, _arrays = made(size=1 << 20)
        begun, go_on = threading.Event(), threading.Event()

        def slow(event):
            begun.set()
            go_on.wait()

        async def held():
            async with glake.active(tag, when_closed="hold", timeout=0.02):
                self.fail("it is closed")

        entered, leave = threading.Event(), threading.Event()

        def uses():
            with glake.active(tag):
                entered.set()
                leave.wait()

        worker = threading.Thread(target=uses)
        worker.start()
        entered.wait()
        self.fails(lambda: glake.shrink(tag, timeout=0.02), "1 use of .* still running")
        leave.set()
        worker.join()
        glake.hooks(before=slow, timeout=0.02)
        self.fails(lambda: glake.shrink(tag), "the hook before took longer")
        go_on.set()
        glake.hooks()
        glake.shrink(tag)
        self.fails(glake.active(tag, when_closed="hold", timeout=0.02).__enter__, "was held for")
        self.fails(lambda: asyncio.run(held()), "was held for")
        go_on.clear()
        glake.hooks(before=slow)
        begun.clear()
        self.fails(lambda: glake.refill(tag, timeout=0.02), "it goes on in the background")
        self.fails(glake.active(tag, timeout=0.02).__enter__, "was held for")
        go_on.set()
        with glake.active(tag, when_closed="hold"):
            pass
        glake.hooks()
        glake.shrink(tag)
        with self.assertRaises(glake.ClosedError) as raised:
            glake.active(tag, when_closed="refuse").__enter__()
        self.assertNotIsInstance(raised.exception, TimeoutError)
        glake.refill(tag)


class OutOfMemory(unittest.TestCase):
    CODE = """
        import pickle, sys, types
        import glake
        from glake import _library
        api = _library.api()
        with glake.region("r"):
            api.alloc(0, 64 << 20)
        glake.shrink("r")
        api.set_fraction(0, (64 << 20) / api.largest(0))
        others = api.alloc(0, 32 << 20)
        try:
            glake.refill("r")
        except MemoryError as error:
            assert type(error) is glake.OutOfMemoryError, type(error)
        else:
            raise AssertionError("refilled")
        TORCH
        for call in (lambda: glake.refill("r"), glake.active("r").__enter__):
            try:
                call()
            except torch.OutOfMemoryError as error:
                assert isinstance(error, glake.OutOfMemoryError) and type(error).__name__ == "OutOfMemoryError", type(error)
                assert "refill" in str(error) or "memory" in str(error), error
                again = pickle.loads(pickle.dumps(error))
                assert type(again) is type(error) and again.args == error.args
            else:
                raise AssertionError("refilled")
        api.free(others)
        glake.refill("r")
        print("ok")
        """

    def test_a_refill_without_memory_is_torch_s_where_torch_is_loaded(self):
        torch = "torch = sys.modules['torch'] = types.ModuleType('torch'); torch.OutOfMemoryError = type('OutOfMemoryError', (RuntimeError,), {})"
        self.assertEqual(child.check(self, self.CODE.replace("TORCH", torch)), "ok\n")


if __name__ == "__main__":
    unittest.main()
