"""torch's counters answer with the pool's truth."""
import json, unittest

import torch

import fixture
from fixture import MIB


def now(name, device=None):
    return torch.cuda.memory_stats(device)[name]


class Counters(unittest.TestCase):
    def test_keys_are_torchs(self):
        native = fixture.code("""
            import json, torch
            torch.ones(1, device="cuda")
            print(json.dumps({k: type(v).__name__ for k, v in torch.cuda.memory_stats().items()}))
        """)
        self.assertEqual(native.code, 0, native.text())
        theirs, mine = native.json(), torch.cuda.memory_stats()
        self.assertEqual(sorted(set(theirs) - set(mine)), [])
        self.assertEqual([key for key in mine if key not in theirs and not key.startswith("glake.")], [])
        self.assertEqual({k: type(mine[k]).__name__ for k in theirs}, theirs)

    def test_allocated_is_what_was_asked_for(self):
        sizes = [1, 512, 513, 100_000, MIB, MIB + 1, 5 * MIB, 64 * MIB + 100]
        torch.cuda.synchronize()
        begin = torch.cuda.memory_allocated()
        before = torch.cuda.memory_stats()
        kept = [fixture.new(size) for size in sizes]
        after = torch.cuda.memory_stats()
        rounded = sum((size + 511) // 512 * 512 for size in sizes)
        self.assertEqual(torch.cuda.memory_allocated() - begin, rounded)
        self.assertEqual(after["requested_bytes.all.current"] - before["requested_bytes.all.current"], sum(sizes))
        self.assertEqual(after["allocation.all.current"] - before["allocation.all.current"], len(sizes))
        self.assertEqual(after["allocation.all.allocated"] - before["allocation.all.allocated"], len(sizes))
        self.assertEqual(after["allocated_bytes.all.allocated"] - before["allocated_bytes.all.allocated"], rounded)
        self.assertGreaterEqual(torch.cuda.max_memory_allocated(), begin + rounded)
        self.assertGreaterEqual(torch.cuda.memory_reserved(), torch.cuda.memory_allocated())
        del kept
        self.assertEqual(torch.cuda.memory_allocated(), begin)
        self.assertEqual(now("allocation.all.current"), before["allocation.all.current"])
        self.assertEqual(now("allocation.all.freed") - before["allocation.all.freed"], len(sizes))

    def test_pools_add_up(self):
        kept = [fixture.new(size) for size in (1000, MIB, 2 * MIB, 40 * MIB)]
        stats = torch.cuda.memory_stats()
        for name in ("allocation", "active", "allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes", "segment"):
            with self.subTest(name):
                parts = stats[f"{name}.small_pool.current"] + stats[f"{name}.large_pool.current"]
                self.assertEqual(stats[f"{name}.all.current"], parts)
        self.assertGreaterEqual(stats["allocated_bytes.small_pool.current"], MIB + 1024)
        self.assertGreaterEqual(stats["allocated_bytes.large_pool.current"], 42 * MIB)
        self.assertEqual(stats["reserved_bytes.all.current"], torch.cuda.memory_reserved())
        del kept

    def test_peaks_are_reset(self):
        big = fixture.new(256 * MIB)
        del big
        self.assertGreaterEqual(torch.cuda.max_memory_allocated(), 256 * MIB)
        torch.cuda.reset_peak_memory_stats()
        self.assertEqual(torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())
        self.assertEqual(torch.cuda.max_memory_reserved(), torch.cuda.memory_reserved())
        big = fixture.new(32 * MIB)
        peak = torch.cuda.memory_allocated()
        del big
        self.assertEqual(torch.cuda.max_memory_allocated(), peak)

    def test_totals_are_reset(self):
        kept = fixture.new(3 * MIB)
        torch.cuda.reset_accumulated_memory_stats()
        self.assertEqual(now("allocation.all.allocated"), 0)
        self.assertEqual(now("allocation.all.freed"), 0)
        del kept
        self.assertEqual(now("allocation.all.freed"), 1)
        self.assertEqual(now("allocated_bytes.all.freed"), 3 * MIB)

    def test_old_names_of_the_resets(self):
        torch.cuda.reset_max_memory_allocated()
        torch.cuda.reset_max_memory_cached()
        self.assertEqual(torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())

    def test_summary(self):
        text = torch.cuda.memory_summary()
        for words in ("PyTorch CUDA memory summary", "Allocated memory", "GPU reserved memory", "Non-releasable memory", "cudaMalloc retries"):
            self.assertIn(words, text)
        self.assertIn("Allocated memory", torch.cuda.memory_summary(0, abbreviated=True))

    def test_nested_form(self):
        nested = torch.cuda.memory_stats_as_nested_dict()
        self.assertEqual(nested["allocated_bytes"]["all"]["current"], torch.cuda.memory_allocated())

    def test_accelerator_forms(self):
        kept, a = fixture.new(10 * MIB), torch.accelerator
        self.assertEqual(a.memory_allocated(), torch.cuda.memory_allocated())
        self.assertEqual(a.max_memory_allocated(), torch.cuda.max_memory_allocated())
        self.assertEqual(a.memory_reserved(), torch.cuda.memory_reserved())
        self.assertEqual(a.max_memory_reserved(), torch.cuda.max_memory_reserved())
        stats = a.memory_stats()
        self.assertEqual(stats["allocated_bytes.all.current"], torch.cuda.memory_allocated())
        theirs = {key for key in torch.cuda.memory_stats() if "_bytes.all." in key and not key.startswith("glake.")}
        self.assertEqual(sorted(theirs - set(stats)), [])
        del kept
        a.reset_peak_memory_stats()
        self.assertEqual(a.max_memory_allocated(), a.memory_allocated())
        a.reset_accumulated_memory_stats()
        self.assertEqual(a.memory_stats()["allocation.all.allocated"], 0)
        free, total = a.get_memory_info() if hasattr(a, "get_memory_info") else torch.cuda.mem_get_info()
        self.assertEqual(total, torch.cuda.mem_get_info()[1])
        self.assertLessEqual(free, total)
        a.empty_cache()

    def test_glakes_own_forms(self):
        import glake

        kept = fixture.new(10 * MIB)
        self.assertEqual(glake.memory_stats()["allocated_bytes.all.current"], torch.cuda.memory_allocated())
        self.assertIn("Allocated memory", glake.memory_summary())
        json.dumps(glake.snapshot()["segments"])
        glake.trim()
        del kept

    def test_zero_bytes(self):
        before = torch.cuda.memory_allocated()
        empty = torch.empty(0, device="cuda")
        self.assertEqual(torch.cuda.memory_allocated(), before)
        self.assertEqual((empty + 1).sum().item(), 0)

    @fixture.gpus(2)
    def test_each_device_has_its_own(self):
        torch.cuda.set_device(0)
        first, second = (torch.cuda.memory_allocated(device) for device in (0, 1))
        kept = fixture.new(20 * MIB, "cuda:1")
        self.assertEqual(torch.cuda.memory_allocated(0), first)
        self.assertEqual(torch.cuda.memory_allocated(1), second + 20 * MIB)
        self.assertEqual(torch.cuda.memory_allocated("cuda:1"), torch.accelerator.memory_allocated(1))
        self.assertEqual(now("allocated_bytes.all.current", torch.device("cuda", 1)), second + 20 * MIB)
        torch.cuda.reset_peak_memory_stats(1)
        self.assertEqual(torch.cuda.max_memory_allocated(1), second + 20 * MIB)
        del kept
