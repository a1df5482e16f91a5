"""torch.cuda.MemPool with an allocator of its own: NCCL's memory, engines whose workers sleep. As it is without glake."""
import ctypes, gc, pathlib, subprocess, tempfile, unittest

import torch

import fixture
from fixture import MIB

WHY = "a pluggable allocator has no createOrIncrefPool: torch.cuda.MemPool() raises"


class Brought:
    """own_allocator.c, built and loaded once a process."""

    def __init__(self):
        import sys

        import glake

        sys.path.insert(0, str(pathlib.Path(glake.__file__).parent))
        import compiled

        self.folder = tempfile.TemporaryDirectory()
        library = f"{self.folder.name}/own_allocator.so"
        headers = [word for folder in compiled.cuda_headers(compiled.Torch.installed()) for word in ("-I", str(folder))]
        subprocess.run([*compiled.compiler(), "-x", "c", "-shared", "-fPIC", *headers, str(fixture.PROGRAMS / "own_allocator.c"), "-x", "none",
                        "-l:libcuda.so.1", "-o", library], check=True)
        self.library = ctypes.CDLL(library)
        self.torchs = torch.cuda.memory.CUDAPluggableAllocator(library, "own_alloc", "own_free")

    def pool(self):
        return torch.cuda.MemPool(self.torchs.allocator())

    def count(self, name):
        return ctypes.c_int.in_dll(self.library, name).value

    def map(self, tensor, mapped):
        error = (self.library.own_map if mapped else self.library.own_unmap)(ctypes.c_uint64(tensor if isinstance(tensor, int) else tensor.data_ptr()))
        assert error == 0, error


@fixture.only("compiled", WHY)
class OwnAllocators(unittest.TestCase):
    brought = None

    def setUp(self):
        OwnAllocators.brought = OwnAllocators.brought or Brought()
        self.own = self.brought
        self.given, self.taken = self.own.count("own_given"), self.own.count("own_taken")
        self.pool = self.own.pool()

    def tearDown(self):
        self.pool = None
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.assertEqual(self.own.count("own_wrong"), 0)

    def test_tensors_come_and_go(self):
        live = []
        for round in range(300):
            with torch.cuda.use_mem_pool(self.pool):
                live.append((fixture.stamp(fixture.new((40_000, 3 * MIB, 25 * MIB)[round % 3]), round), round))
            live.append((fixture.stamp(fixture.new(7 * MIB), round), round))
            if len(live) > 20:
                tensor, seed = live.pop(round % 20)
                self.assertEqual(fixture.wrong(tensor, seed), 0)
        self.assertGreater(fixture.ours("foreign_reserved_bytes"), 60 * MIB)
        self.assertEqual(fixture.ours("foreign_pools"), 1)
        live = tensor = self.pool = None
        gc.collect()
        torch.cuda.empty_cache()
        self.assertEqual(self.own.count("own_given") - self.given, self.own.count("own_taken") - self.taken)

    def test_a_worker_sleeps_and_wakes(self):
        with torch.cuda.use_mem_pool(self.pool):
            weights = [fixture.stamp(fixture.new(40 * MIB), seed) for seed in range(8)]
        saved = [tensor.cpu() for tensor in weights]
        torch.cuda.synchronize()
        for tensor in weights:
            self.own.map(tensor, False)
        torch.cuda.empty_cache()
        other = fixture.stamp(fixture.new(100 * MIB), 9)
        torch.cuda.empty_cache()
        for tensor in weights:
            self.own.map(tensor, True)
        for tensor, bytes_ in zip(weights, saved):
            tensor.copy_(bytes_)
        for seed, tensor in enumerate(weights):
            self.assertEqual(fixture.wrong(tensor, seed), 0)
        self.assertEqual(fixture.wrong(other, 9), 0)
        self.assertEqual(self.own.count("own_taken"), self.taken)

    def test_what_its_owner_unmapped_is_nobodys(self):
        for size in (1000, 40 * MIB):
            with torch.cuda.use_mem_pool(self.pool):
                tensor = fixture.new(size)
                gone = tensor.data_ptr()
                del tensor
                torch.cuda.synchronize()
                self.own.map(gone, False)
                again = fixture.stamp(fixture.new(size), 1)
            self.assertNotEqual(again.data_ptr(), gone)
            self.assertEqual(fixture.wrong(again, 1), 0)
            del again

    def test_a_graph_is_captured_in_it(self):
        still = torch.ones(5 * MIB, device="cuda")
        still * 2 + 1
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool.id):
            kept = still * 2
            result = kept + 1
            del kept
        self.assertGreater(self.own.count("own_given"), self.given)
        for value in range(20):
            still.fill_(value)
            graph.replay()
            self.assertTrue(bool((result == 2 * value + 1).all()))
            fixture.new(60 * MIB).fill_(255)
        before = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        self.assertLess(torch.cuda.memory_reserved(), before, "nothing is given back after a capture")
        del graph, result

    def test_other_streams_are_recorded(self):
        side = torch.cuda.Stream()
        with torch.cuda.use_mem_pool(self.pool):
            for round in range(20):
                tensor = fixture.stamp(fixture.new(30 * MIB), round)
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    torch.cuda._sleep(2_000_000)
                    seen = tensor.clone()
                tensor.record_stream(side)
                del tensor
                fixture.new(30 * MIB).fill_(255)
                side.synchronize()
                self.assertEqual(fixture.wrong(seen, round), 0)

    @fixture.limit(150)
    def test_nccl_registers_its_own(self):
        ended = fixture.ranks("nccl_pool.py", min(2, torch.cuda.device_count()))
        for rank in ended:
            self.assertEqual((rank.code, rank.out.split()[-1:]), (0, ["done"]), rank.text())
