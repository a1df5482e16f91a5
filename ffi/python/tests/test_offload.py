"""Bytes of simulated GPUs' blocks in host memory, owned by objects of Python."""

import ctypes
import gc
import json
import os
import threading
import unittest
import weakref

os.environ["GLAKE_DEVICE"] = "sim"

import glake  # noqa: E402
from glake import _library  # noqa: E402

import child  # noqa: E402

api = _library.api()
MIB = 1 << 20


def pattern(size, seed=0):
    return bytes((seed + i * 7) % 251 for i in range(256)) * (size // 256) + bytes(size % 256)


def block(size, seed=None, device=0):
    address = api.alloc(device, size)
    if seed is not None:
        ctypes.memmove(address, pattern(size, seed), size)
    return address


def stats():
    return json.loads(api.offload_stats_json())


class Offload(unittest.TestCase):
    def tearDown(self):
        gc.collect()
        left = stats()
        self.assertEqual((left["entries"], left["host_bytes"], left["held_bytes"]), (0, 0, 0), left)
        self.assertEqual(glake.memory_stats(0)["allocated_bytes.all.current"], 0)

    def check(self, address, size, expected):
        api.stream_synchronize(0, 0)
        self.assertEqual(ctypes.string_at(address, size), expected)
        api.free(address)

    def test_parts_of_leaves_have_known_numbers(self):
        site = api.Site()
        site.untimed()
        # Without a layer that computes it again a leaf's output is offloaded as anything else.
        for item, part in enumerate(range(3)):
            self.assertEqual(site.packed(MIB, leaf=part)[:2], (item, 1))
        with self.assertRaisesRegex(glake.InvalidError, "leaf is 3: give a number from 0 to 2"):
            site.packed(MIB, leaf=3)

    def test_there_and_back(self):
        for size in (1, 4096, 300_001, 5 * MIB):
            sent = block(size, 3)
            packed = api.offload_begin(0, sent, size)
            self.assertEqual((packed.bytes, stats()["entries"]), (size, 1))
            self.assertRegex(repr(packed), rf"^<glake\._glake\.Packed \d+: {size} bytes>$")
            api.free(sent)
            between, back = block(size), block(size)
            packed.reload(0, back)
            self.check(back, size, pattern(size, 3))
            again = block(size)
            packed.begin(0, again)
            packed.wait(0)
            self.check(again, size, pattern(size, 3))
            api.free(between)
            del packed

    def test_a_view_is_bytes_of_its_own(self):
        sent = block(2 * MIB, 5)
        parts = [api.offload_begin(0, sent + start, size) for start, size in ((0, 4096), (512, 4096), (MIB, MIB))]
        api.free(sent)
        for packed, (start, size) in zip(parts, ((0, 4096), (512, 4096), (MIB, MIB))):
            back = block(size)
            packed.reload(0, back)
            self.check(back, size, pattern(2 * MIB, 5)[start : start + size])

    def test_what_stays_where_it_is(self):
        foreign = ctypes.create_string_buffer(4096)
        self.assertIsNone(api.offload_begin(0, ctypes.addressof(foreign), 4096))
        address = block(4096, 1)
        for bad in ((address, MIB), (address + 5000, 4096)):
            with self.assertRaises(glake.InvalidError):
                api.offload_begin(0, *bad)
        packed = api.offload_begin(0, address, 4096)
        with self.assertRaisesRegex(glake.InvalidError, "begin to reload it first"):
            packed.wait(0)
        with self.assertRaises(glake.UnsupportedError):
            packed.begin(0, ctypes.addressof(foreign))
        small = block(512)
        with self.assertRaises(glake.InvalidError):
            packed.reload(0, small)
        api.free(small)
        self.check(address, 4096, pattern(4096, 1))

    def test_no_bytes(self):
        packed = api.offload_begin(0, 0, 0)
        packed.reload(0, 0)
        self.assertEqual(packed.bytes, 0)

    def test_a_generation_is_of_one_block(self):
        address = block(4096)
        first = api.generation(address + 100)
        self.assertEqual(api.generation(address), first)
        api.free(address)
        again = block(4096)
        self.assertNotEqual(api.generation(again), first)
        api.free(again)
        with self.assertRaises(glake.InvalidError):
            api.generation(again)
        with self.assertRaises(glake.UnsupportedError):
            api.generation(12345)

    def test_what_a_site_checks_is_what_the_block_had_last(self):
        site, size = api.Site(), 4 * MIB
        for turn, (state, after) in enumerate(((0, 0), (0, 1), (1, 1))):
            self.assertEqual(site.check(5), state)
            sent = block(size, turn)
            packed = site.offload_checked(0, sent, size, 5)
            api.free(sent)
            back = block(size)
            packed.reload(0, back)
            self.check(back, size, pattern(size, turn))
            self.assertEqual(site.check(5), after)
            del packed
        self.assertEqual(site.check(6), 0)

    def test_it_ends_with_its_object_on_any_thread_and_in_a_cycle(self):
        address = block(4096, 1)
        packed = api.offload_begin(0, address, 4096)
        gone = []
        weak = weakref.ref(packed, gone.append)
        holder = [packed]
        holder.append(holder)
        del packed
        thread = threading.Thread(target=holder.clear)
        self.assertIsNotNone(weak())
        thread.start()
        thread.join()
        gc.collect()
        self.assertEqual((weak(), len(gone), stats()["entries"]), (None, 1, 0))
        with self.assertRaises(TypeError):
            api.Packed()
        api.free(address)

    def test_threads(self):
        failed = []

        def work(seed):
            try:
                for turn in range(20):
                    size = 4096 * (seed + turn + 1)
                    sent = block(size, seed)
                    packed = api.offload_begin(0, sent, size)
                    api.free(sent)
                    back = block(size)
                    packed.reload(0, back)
                    del packed
                    api.stream_synchronize(0, 0)
                    if ctypes.string_at(back, size) != pattern(size, seed):
                        failed.append((seed, turn))
                    api.free(back)
            except Exception as error:  # noqa: BLE001
                failed.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failed, [])

    def test_host_memory_comes_ahead_and_goes_with_a_trim(self):
        api.offload_prepare(0, 3 * MIB)
        self.assertGreaterEqual(stats()["host_pinned_bytes"], 3 * MIB)
        api.trim()
        self.assertEqual(stats()["host_pinned_bytes"], 0)

    def test_without_host_memory(self):
        child.check(
            self,
            """
            import json
            import glake
            from glake import _library
            api = _library.api()
            api.configure(overrides='tiers.host_budget = "4MiB"')
            address = api.alloc(0, 8 << 20)
            assert api.offload_begin(0, address, 8 << 20) is None
            first = api.offload_begin(0, address, 3 << 20)
            assert first is not None and api.offload_begin(0, address, 3 << 20) is None
            assert json.loads(api.offload_stats_json())["refused"] == 2
            del first
            assert api.offload_begin(0, address, 3 << 20) is not None
            """,
        )

    def test_a_forked_child_and_the_end_of_the_process(self):
        out = child.check(
            self,
            """
            import os, sys
            import glake
            from glake import _library
            api = _library.api()
            address = api.alloc(0, 8 << 20)
            packed = api.offload_begin(0, address, 8 << 20)
            if os.fork() == 0:
                del packed
                try:
                    api.offload_begin(0, address, 4096)
                except glake.UnavailableError as error:
                    print("child:", "forked" in str(error), flush=True)
                os._exit(0)
            os.wait()
            # Left to the interpreter's end, with copies under way.
            sys.kept = [api.offload_begin(0, address, 8 << 20) for _ in range(8)]
            sys.kept[3].begin(0, api.alloc(0, 8 << 20))
            # Some are still to be looked at when their block is freed, of one both copies and digests are under way.
            sys.site, freed = api.Site(), api.alloc(0, 4 << 20)
            sys.checked = [sys.site.offload_checked(0, of, 4 << 20, save) for save, of in enumerate((address, freed, address))]
            api.free(freed)
            print("parent")
            """,
        )
        self.assertEqual(out.split("\n"), ["child: True", "parent", ""])


if __name__ == "__main__":
    unittest.main()
