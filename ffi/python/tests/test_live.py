"""Live ranges: only they are copied, a callback is asked at each shrink, and where it does not tell all is copied."""

import textwrap
import unittest

import child

BEGIN = """
import ctypes, time
import glake
from glake import _library

api = _library.api()
MIB = 1 << 20
sent = bytes(range(256)) * (16 * MIB // 256)
with glake.region("cache"):
    address = api.alloc(0, 16 * MIB)

def array(start, size):
    class Array:
        __cuda_array_interface__ = {"data": (address + start, False), "shape": (size,), "typestr": "|u1", "version": 3}
    return Array

whole = array(0, 16 * MIB)
glake.copy_(whole, sent, wait=True)

def moved():
    report = glake.shrink("cache")
    glake.refill()
    return report

def raises(kind, call, *arguments):
    try:
        call(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError(f"{call} raised nothing")
"""


class Commit(unittest.TestCase):
    def test_a_slice_gives_its_memory_and_has_it_again(self):
        small = "api.configure(None, None, 'tiers.extent = \"2MiB\"')\n"
        child.check(
            self,
            BEGIN.replace("MIB = 1 << 20\n", f"MIB = 1 << 20\n{small}")
            + textwrap.dedent(
                """
                tail = array(8 * MIB, 8 * MIB)
                (before,) = [region for region in glake.regions() if region["tag"] == "cache"]
                went = glake.decommit(tail)
                (after,) = [region for region in glake.regions() if region["tag"] == "cache"]
                assert went == after["decommitted"] == before["resident"] - after["resident"] > 0, (went, before, after)
                assert "commit it first" in raises(glake.InvalidError, glake.copy_, bytearray(8 * MIB), tail)
                assert moved()["copied"] == 16 * MIB - went
                assert ctypes.string_at(address, 16 * MIB - went) == sent[:16 * MIB - went]
                assert glake.commit(tail) == went and glake.commit(tail) == 0
                glake.copy_(tail, sent[8 * MIB:], wait=True)
                assert moved()["copied"] == 16 * MIB
                assert ctypes.string_at(address, 16 * MIB) == sent
                assert "block" in raises(glake.InvalidError, glake.decommit, array(8 * MIB, 9 * MIB))
                raises(TypeError, glake.commit, 3)
                for call in (glake.decommit, glake.commit):
                    said = raises(ValueError, call, bytes(8))
                    assert said == f"tensor may only be read: {call.__name__} changes its values", said
                """
            ),
        )


class Live(unittest.TestCase):
    def check(self, body):
        child.check(self, BEGIN + textwrap.dedent(body))

    def test_only_live_ranges_are_copied(self):
        self.check(
            """
            glake.live(whole, [(MIB, 3 * MIB), (0, 512)])
            report = moved()
            assert report["copied"] == 2 * MIB + 512, report
            assert report["undefined"] == 14 * MIB - 512, report
            assert report["warnings"] == [], report
            assert ctypes.string_at(address + MIB, 2 * MIB) == sent[MIB:3 * MIB]
            assert ctypes.string_at(address, 512) == sent[:512]
            glake.live(whole, [])
            assert moved()["copied"] == 0
            glake.live(whole, None)
            assert moved()["copied"] == 16 * MIB
            """
        )

    def test_what_lies_around_a_view_counts(self):
        self.check(
            """
            glake.live(array(4 * MIB, 8 * MIB), [(0, MIB)])
            assert moved()["copied"] == 9 * MIB
            assert ctypes.string_at(address, 5 * MIB) == sent[:5 * MIB]
            assert ctypes.string_at(address + 12 * MIB, 4 * MIB) == sent[12 * MIB:]
            """
        )

    def test_a_callback_is_asked_at_each_shrink(self):
        self.check(
            """
            used = [4 * MIB]
            glake.live(whole, lambda: [(0, used[0])])
            assert moved()["copied"] == 4 * MIB
            used[0] = MIB
            assert moved()["copied"] == MIB
            assert ctypes.string_at(address, MIB) == sent[:MIB]
            for bad in (lambda: [(0, 17 * MIB)], lambda: 1 / 0, lambda: "text"):
                glake.live(whole, bad)
                report = moved()
                assert report["copied"] == 16 * MIB, report
                assert len(report["warnings"]) == 1, report
            glake.hooks(timeout=0.2)
            glake.live(whole, lambda: time.sleep(2) or [])
            report = moved()
            assert report["copied"] == 16 * MIB and "0.2 s" in report["warnings"][0], report
            """
        )

    def test_bad_input(self):
        self.check(
            """
            assert "do not lie in the tensor" in raises(glake.InvalidError, glake.live, whole, [(0, 17 * MIB)])
            raises(glake.InvalidError, glake.live, whole, [(2, 1)])
            raises(glake.InvalidError, glake.live, bytearray(64), [])
            raises(TypeError, glake.live, object(), [])
            raises(glake.InvalidError, api.live_ranges, address + 512, [])
            raises(glake.InvalidError, api.live_callback, address + 512, list)
            """
        )


if __name__ == "__main__":
    unittest.main()
