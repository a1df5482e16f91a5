"""glake.copy_ on torch's tensors: every end, stream and size, over one link and over all, and who keeps what meanwhile."""
import threading, time, unittest

import torch

import fixture, races
from fixture import GIB, MIB

# The copies are of every GPU, and captured ones shall be split too.
CONFIG = {"transfer": {"graphs": True, "shared_gpus": True}}
SIZES = (4, 4096, MIB - 4, MIB, 5 * MIB + 4, 96 * MIB)


def ready():
    """Relays on, and there."""
    import glake

    glake.multi_path()
    for _ in range(3000):
        if glake.copy_stats()["ready"]:
            return
        time.sleep(0.01)
    raise AssertionError(f"no relays: {glake.copy_stats()}")


class Copies(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        import glake

        cls.glake = glake
        if torch.cuda.device_count() > 1:
            ready()

    def there_and_back(self, host, back, device, stream=None):
        size = host.numel()
        tensor = fixture.new(size, device)
        stamped = fixture.stamp(host.view(-1), size)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            self.glake.copy_(tensor, stamped)
            self.assertEqual(fixture.wrong(tensor, size), 0)
            tensor.view(torch.int32).add_(1)
            self.glake.copy_(back, tensor).wait()
        self.assertEqual(fixture.wrong(back, size + 1), 0)

    def test_every_size_on_every_stream(self):
        for size in SIZES:
            host, back = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
            for stream in (None, torch.cuda.Stream(), torch.cuda.default_stream()):
                with self.subTest(size=size, stream=stream):
                    self.there_and_back(host, back, "cuda:0", stream)

    def test_pageable_memory(self):
        for size in SIZES:
            host, back = (torch.empty(size, dtype=torch.uint8) for _ in range(2))
            with self.subTest(size):
                self.there_and_back(host, back, "cuda:0")

    @fixture.gpus(2)
    def test_every_gpu_whichever_is_current(self):
        host, back = (torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        for device in range(torch.cuda.device_count()):
            with self.subTest(device):
                self.there_and_back(host, back, f"cuda:{device}")
                # The current device is another's.
                tensor = fixture.new(64 * MIB, f"cuda:{device}")
                fixture.stamp(host, device)
                self.glake.copy_(tensor, host)
                torch.cuda.synchronize(device)
                with torch.cuda.device(device):
                    self.assertEqual(fixture.wrong(tensor, device), 0)

    def test_behind_and_before_kernels(self):
        host = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
        back = torch.empty_like(host, pin_memory=True)
        stream, tensor = torch.cuda.Stream(), fixture.new(64 * MIB)
        for turn in range(10):
            fixture.stamp(host, turn)
            with torch.cuda.stream(stream):
                races.late(1_000_000)
                fixture.stamp(tensor, 1000)
                self.glake.copy_(tensor, host)
                tensor.view(torch.int32).add_(7)
                self.glake.copy_(back, tensor)
                races.late(1_000_000)
                fixture.stamp(tensor, 2000)
            stream.synchronize()
            self.assertEqual(fixture.wrong(back, turn + 7), 0, turn)

    def test_a_copy_keeps_its_ends(self):
        stream = torch.cuda.Stream()
        tensor = fixture.new(64 * MIB)
        torch.cuda.synchronize()
        for turn in range(10):
            pinned = fixture.stamp(torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True), turn)
            with torch.cuda.stream(stream):
                races.late(3_000_000)
                self.glake.copy_(tensor, pinned)
            del pinned
            # The host allocator would hand the same pages out.
            for _ in range(3):
                torch.full((64 * MIB,), 255, dtype=torch.uint8, pin_memory=True)
            stream.synchronize()
            self.assertEqual(fixture.wrong(tensor, turn), 0, turn)

    def test_a_freed_target_is_withheld(self):
        one, other = torch.cuda.Stream(), torch.cuda.Stream()
        host = fixture.stamp(torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True), 1)
        for turn in range(20):
            with torch.cuda.stream(one):
                races.late(1_000_000)
                tensor = fixture.new(64 * MIB)
                copy = self.glake.copy_(tensor, host)
            del tensor, copy
            with torch.cuda.stream(other):
                fresh = fixture.stamp(fixture.new(64 * MIB), turn)
            torch.cuda.synchronize()
            self.assertEqual(fixture.wrong(fresh, turn), 0, turn)

    def test_lists_and_everybody(self):
        block = 16 * 1024
        host = fixture.stamp(torch.empty(32 * MIB, dtype=torch.uint8, pin_memory=True), 3)
        tensor, back = fixture.new(32 * MIB), torch.empty_like(host, pin_memory=True)
        order = torch.randperm(host.numel() // block).tolist()
        there = list(zip((tensor.split(block)[place] for place in order), host.split(block)))
        self.glake.copy_list(there)
        self.glake.copy_list(list(zip(back.split(block), (tensor.split(block)[place] for place in order))), wait=True)
        self.assertEqual(fixture.wrong(back, 3), 0)
        tensors = [fixture.new(32 * MIB, f"cuda:{device}") for device in range(torch.cuda.device_count())]
        self.glake.copy_to_all(tensors, host, wait=True)
        for device, copy in enumerate(tensors):
            with torch.cuda.device(device):
                self.assertEqual(fixture.wrong(copy, 3), 0)

    def test_threads(self):
        failed = []

        def work(seed):
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    tensor = fixture.new(8 * MIB)
                    host, back = (torch.empty(8 * MIB, dtype=torch.uint8, pin_memory=True) for _ in range(2))
                    for turn in range(20):
                        fixture.stamp(host, seed + turn)
                        self.glake.copy_(tensor, host, priority=("normal", "critical", "background")[turn % 3])
                        self.glake.copy_(back, tensor, wait=True)
                        if fixture.wrong(back, seed + turn):
                            failed.append((seed, turn))
            except Exception as error:  # noqa: BLE001
                failed.append(error)

        threads = [threading.Thread(target=work, args=(100 * seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failed, [])

    def test_what_is_refused(self):
        tensor = fixture.new(4096).view(64, 64)
        for source, error in [
            (torch.empty(64, 65, dtype=torch.uint8), ValueError),
            (torch.empty(64, 64, dtype=torch.uint8).t(), ValueError),
            (torch.empty(64, 64, dtype=torch.uint8).to_sparse(), TypeError),
            (torch.empty(512, dtype=torch.complex64).conj(), ValueError),
            (torch.empty(4096, dtype=torch.uint8, device="meta"), TypeError),
            ("text", TypeError),
        ]:
            with self.subTest(type(source)), self.assertRaises(error):
                self.glake.copy_(tensor, source)

    @fixture.gpus(2)
    def test_large_copies_take_several_links(self):
        host = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
        tensor = fixture.new(256 * MIB)
        before = self.glake.copy_stats()["split_copies"]
        self.glake.copy_(tensor, host, wait=True, verify=True)
        stats = self.glake.copy_stats()
        self.assertGreater(stats["split_copies"], before)
        self.assertEqual(stats["lost_copies"], 0)


class Captures(unittest.TestCase):
    def test_a_captured_copy_replays(self):
        import glake

        host = torch.empty(32 * MIB, dtype=torch.uint8, pin_memory=True)
        tensor, graph = fixture.new(32 * MIB), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            copy = glake.copy_(tensor, host)
            with self.assertRaisesRegex(glake.InvalidError, "captured into a graph"):
                copy.done()
        for turn in range(3):
            fixture.stamp(host, turn)
            graph.replay()
            torch.cuda.synchronize()
            self.assertEqual(fixture.wrong(tensor, turn), 0, turn)


class Foreign(unittest.TestCase):
    @fixture.gpus(2)
    def test_memory_of_cudamalloc(self):
        done = fixture.code("""
            import time, torch, glake, fixture
            from fixture import MIB
            glake.multi_path()
            for _ in range(3000):
                if glake.copy_stats()["ready"]:
                    break
                time.sleep(0.01)
            host = fixture.stamp(torch.empty(128 * MIB, dtype=torch.uint8, pin_memory=True), 5)
            back, tensor = torch.empty_like(host, pin_memory=True), fixture.new(128 * MIB)
            for _ in range(5):
                glake.copy_(tensor, host)
                glake.copy_(back.zero_(), tensor, wait=True)
            print(fixture.wrong(back, 5), fixture.wrong(tensor, 5), glake.copy_stats()["split_copies"] > 0)
        """)
        self.assertEqual((done.code, done.out.strip()), (0, "0 0 True"), done.text())
