"""Several streams, record_stream, and nobody's bytes before their time."""
import random, unittest

import torch

import fixture, races
from fixture import MIB

SIZES = (4096, 512 * 1024, 3 * MIB, 48 * MIB)


class Streams(unittest.TestCase):
    def setUp(self):
        self.one, self.other = torch.cuda.Stream(), torch.cuda.Stream()

    def test_a_block_freed_while_its_stream_writes(self):
        for size in SIZES:
            with self.subTest(size):
                self.assertEqual(races.freed_while_writing(size, 40, self.one, self.other), 0)

    def test_a_block_recorded_on_another_stream(self):
        for size in SIZES:
            with self.subTest(size):
                self.assertEqual(races.recorded_elsewhere(size, 40, self.one, self.other), 0)

    def test_the_default_stream(self):
        default = torch.cuda.default_stream()
        for size in (4096, 3 * MIB):
            self.assertEqual(races.freed_while_writing(size, 20, default, self.one), 0)
            self.assertEqual(races.recorded_elsewhere(size, 20, self.one, default), 0)

    def test_a_block_read_late(self):
        for size in (4096, 3 * MIB):
            self.assertEqual(races.read_while_reused(size, 40, self.one, self.other), 0)

    def test_stitching_what_another_stream_still_writes(self):
        self.assertEqual(races.stitched_while_writing(20, self.one, self.other), 0)

    def test_stitching_what_the_own_stream_still_writes(self):
        self.assertEqual(races.stitched_while_writing(20, self.one, self.one), 0)

    def test_the_own_stream_has_its_memory_at_once(self):
        block = fixture.new(64 * MIB)
        del block
        before = torch.cuda.memory_reserved()
        races.late()
        for _ in range(50):
            fixture.new(64 * MIB)
        self.assertEqual(torch.cuda.memory_reserved(), before)

    def use_recorded(self, seen, value):
        """A block of one stream that another one reads and that is freed."""
        with torch.cuda.stream(self.one):
            block = torch.empty_like(seen).fill_(value)
        self.other.wait_stream(self.one)
        with torch.cuda.stream(self.other):
            seen.copy_(block)
        block.record_stream(self.other)
        del block
        self.other.synchronize()
        self.assertEqual(int(seen[-1]), value)

    def test_a_long_kernel_elsewhere_keeps_no_recorded_block(self):
        for size in SIZES[1:]:
            with self.subTest(size):
                seen, long, ended = fixture.new(size), torch.cuda.Stream(), torch.cuda.Event()
                self.use_recorded(seen, 0)  # loads the kernels, which may wait for the GPU
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                before = torch.cuda.memory_reserved()
                self.use_recorded(seen, 1)
                one = torch.cuda.memory_reserved() - before
                with torch.cuda.stream(long):
                    torch.cuda._sleep(2_000_000_000)
                    ended.record()
                for step in range(120):
                    self.use_recorded(seen, step)
                reserved = torch.cuda.memory_reserved() - before
                self.assertFalse(ended.query(), "the long kernel is over: nothing was measured")
                self.assertLessEqual(reserved, 2 * one)
                torch.cuda.synchronize()

    def test_many_streams_at_random(self):
        rng, streams = random.Random(1), [torch.cuda.Stream() for _ in range(6)]
        live = []
        for step in range(600):
            home, guest = rng.choice(streams), rng.choice(streams)
            if live and rng.random() < 0.5:
                tensor, value, stream = live.pop(rng.randrange(len(live)))
                with torch.cuda.stream(stream):
                    bad = (tensor != value).sum()
                    if rng.random() < 0.5:
                        guest.wait_stream(stream)
                        with torch.cuda.stream(guest):
                            tensor.mul_(1)
                            tensor.record_stream(guest)
                    del tensor
                    self.assertEqual(int(bad), 0, step)
            else:
                if rng.random() < 0.1:
                    with torch.cuda.stream(home):
                        races.late(500_000)
                live.append((races.filled(4 * int(2 ** rng.uniform(5, 23)), step, home), step, home))

    def test_stats_say_what_is_pending(self):
        with torch.cuda.stream(self.one):
            block = fixture.new(64 * MIB)
        with torch.cuda.stream(self.other):
            races.late(30_000_000)
            block.fill_(1)
        block.record_stream(self.other)
        allocated, active = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["active_bytes.all.current"]
        del block
        self.assertEqual(torch.cuda.memory_allocated(), allocated - 64 * MIB)
        self.assertLessEqual(torch.cuda.memory_stats()["active_bytes.all.current"], active)
        torch.cuda.synchronize()
