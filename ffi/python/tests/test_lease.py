"""Leases: a refill waits for what it is granted, growth beyond them is out of memory, and a watcher may grant from inside its call."""

import pathlib
import tempfile
import textwrap
import unittest

import child

BEGIN = """
import ctypes, threading
import glake
from glake import _library

api = _library.api()
MIB = 1 << 20
EXTENT = 16 * MIB
told = []
sent = bytes(range(256)) * (16 * MIB // 256)
with glake.region("weights"):
    address = api.alloc(0, 16 * MIB)

class Array:
    __cuda_array_interface__ = {"data": (address, False), "shape": (16 * MIB,), "typestr": "|u1", "version": 3}

glake.copy_(Array, sent, wait=True)

def raises(kind, call, *arguments):
    try:
        call(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError(f"{call} raised nothing")
"""


class Lease(unittest.TestCase):
    def check(self, body, config=""):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "glake.toml")
            path.write_text(config)
            child.check(self, BEGIN + textwrap.dedent(body), GLAKE_CONFIG=str(path))

    def test_a_refill_waits_for_grants(self):
        self.check(
            """
            glake.lease.set(0, 2 * EXTENT)
            wanted = threading.Event()

            def watch(event, device, bytes):
                told.append((event, device, bytes))
                if event == "want":
                    wanted.set()

            glake.lease.watch(watch)
            glake.shrink()
            assert sum(bytes for event, _, bytes in told if event == "returned") == 2 * EXTENT, told
            refill = threading.Thread(target=glake.refill)
            refill.start()
            assert wanted.wait(20)
            for _ in range(2):
                refill.join(0.05)
                assert refill.is_alive()
                glake.lease.grant(0, EXTENT // 2)
            refill.join(20)
            assert not refill.is_alive()
            assert ("want", 0, EXTENT + (1 << 30)) in told, told
            assert ctypes.string_at(address, len(sent)) == sent
            assert glake.lease.take(0, 64 * MIB) == 0
            """,
            "lease.refill_timeout_ms = 20000",
        )

    def test_growth_is_asked_for_and_then_out_of_memory(self):
        self.check(
            """
            glake.lease.set(0, EXTENT)
            grants = [16 * MIB]

            def watch(event, device, bytes):
                told.append((event, bytes))
                if event == "grow" and grants:
                    glake.lease.grant(device, grants.pop())

            glake.lease.watch(watch)
            first = api.alloc(0, 8 * MIB)
            assert told == [("grow", 8 * MIB)], told
            text = raises(glake.OutOfMemoryError, api.alloc, 0, 64 * MIB)
            assert "lease" in text, text
            api.free(first)
            assert glake.lease.take(0, 64 * MIB) == 16 * MIB
            glake.lease.set(0, None)
            api.free(api.alloc(0, 64 * MIB))
            """,
            "lease.grow_timeout_ms = 20",
        )

    def test_bad_input_and_a_watcher_that_raises(self):
        self.check(
            """
            assert "no lease" in raises(glake.InvalidError, glake.lease.grant, 0, 1)
            raises(Exception, glake.lease.set, 99, 1)
            raises(Exception, glake.lease.set, 0, -1)

            def bad(*told):
                raise RuntimeError("not told")

            glake.lease.set(0, 16 * MIB)
            glake.lease.watch(bad)
            glake.shrink()
            glake.lease.set(0, None)
            glake.refill()
            assert ctypes.string_at(address, len(sent)) == sent
            """
        )


if __name__ == "__main__":
    unittest.main()
