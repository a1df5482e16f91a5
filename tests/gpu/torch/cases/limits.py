"""What the device shows as taken: empty_cache, fractions, out of memory. Alone on its GPU: others would be in the figures."""
import unittest

import torch

import fixture
from fixture import GIB, MIB

ALONE = True


def out_of_memory(test, size):
    """Asks for more than there is; returns the error's text."""
    kind = torch.OutOfMemoryError if fixture.BACKEND == "compiled" else RuntimeError
    with test.assertRaises(kind) as caught:
        fixture.new(size)
    test.assertTrue(str(caught.exception).startswith("CUDA out of memory."), str(caught.exception))
    return str(caught.exception)


class Limits(unittest.TestCase):
    def tearDown(self):
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def test_empty_cache_gives_back(self):
        torch.cuda.empty_cache()
        kept = fixture.stamp(fixture.new(100 * MIB), 3)
        free = torch.cuda.mem_get_info()[0]
        blocks = [fixture.new(GIB) for _ in range(3)]
        self.assertLessEqual(torch.cuda.mem_get_info()[0], free - 3 * GIB + 128 * MIB)
        del blocks
        self.assertGreaterEqual(torch.cuda.memory_reserved(), 3 * GIB)
        torch.cuda.empty_cache()
        self.assertLessEqual(torch.cuda.memory_reserved() - torch.cuda.memory_allocated(), 128 * MIB)
        self.assertGreaterEqual(torch.cuda.mem_get_info()[0], free - 128 * MIB)
        self.assertEqual(fixture.wrong(kept, 3), 0)

    def test_mem_get_info_follows_reserved(self):
        torch.cuda.empty_cache()
        free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        kept = fixture.new(2 * GIB)
        taken, grown = free - torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved() - reserved
        self.assertLessEqual(abs(taken - grown), 64 * MIB)
        del kept

    def test_trim(self):
        import glake

        kept, gone = fixture.new(GIB), fixture.new(GIB)
        before = torch.cuda.memory_reserved()
        del gone
        glake.trim()
        self.assertLessEqual(torch.cuda.memory_reserved(), before - GIB + 64 * MIB)
        del kept

    def test_fraction(self):
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(0.1)
        self.assertAlmostEqual(torch.cuda.get_per_process_memory_fraction(), 0.1)
        out_of_memory(self, int(total * 0.11))
        kept = fixture.new(int(total * 0.05))
        self.assertLessEqual(torch.cuda.memory_reserved(), total * 0.1)
        torch.cuda.set_per_process_memory_fraction(1.0)
        self.assertAlmostEqual(torch.cuda.get_per_process_memory_fraction(), 1.0)
        del kept

    def test_out_of_memory_says_what_was_there(self):
        torch.cuda.set_per_process_memory_fraction(0.1)
        ooms = torch.cuda.memory_stats()["num_ooms"]
        total = torch.cuda.mem_get_info()[1]
        kept = [fixture.new(64 * MIB) for _ in range(16)]
        text = out_of_memory(self, int(total * 0.2))
        for words in ("Tried to allocate", "GPU 0", "free", "stitch"):
            self.assertIn(words, text)
        self.assertEqual(torch.cuda.memory_stats()["num_ooms"], ooms + 1)
        del kept

    def test_the_program_goes_on_after_out_of_memory(self):
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(0.1)
        kept = fixture.stamp(fixture.new(256 * MIB), 1)
        for _ in range(5):
            out_of_memory(self, int(total * 0.1))
        smaller = fixture.stamp(fixture.new(int(total * 0.05) // 4 * 4), 2)
        self.assertEqual((fixture.wrong(kept, 1), fixture.wrong(smaller, 2)), (0, 0))
        del smaller
        larger = fixture.new(int(total * 0.09))
        del larger, kept

    def test_free_memory_is_collected_before_out_of_memory(self):
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(0.1)
        small = [fixture.new(8 * MIB) for _ in range(int(total * 0.09) // (8 * MIB))]
        side = torch.cuda.Stream()
        for tensor in small:
            tensor.record_stream(side)
        del small, tensor
        kept = fixture.stamp(fixture.new(int(total * 0.09) // 4 * 4), 5)
        self.assertEqual(fixture.wrong(kept, 5), 0)
        del kept

    def test_more_than_the_device_has(self):
        out_of_memory(self, 4 * torch.cuda.mem_get_info()[1])
        with self.assertRaises(RuntimeError):
            fixture.new(1 << 60)
        self.assertEqual(fixture.wrong(fixture.stamp(fixture.new(MIB), 9), 9), 0)

    def test_observers_are_told(self):
        seen = []
        torch._C._cuda_attach_out_of_memory_observer(lambda *told: seen.append(told))
        torch.cuda.set_per_process_memory_fraction(0.05)
        size = int(torch.cuda.mem_get_info()[1] * 0.2)
        out_of_memory(self, size)
        self.assertGreaterEqual(len(seen), 1)
        self.assertEqual(len(seen[0]), 4)
        self.assertEqual(seen[0][0], 0)
        self.assertGreaterEqual(seen[0][1], size)

    def test_a_model_that_runs_out_trains_on_with_a_smaller_batch(self):
        torch.cuda.set_per_process_memory_fraction(0.06)
        model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]).cuda()
        rows, failed = 1 << 22, 0
        while True:
            try:
                model(torch.randn(rows, 2048, device="cuda")).sum().backward()
                break
            except RuntimeError as error:
                self.assertTrue(str(error).startswith("CUDA out of memory."), str(error))
                failed, rows = failed + 1, rows // 2
        self.assertGreater(failed, 0)
        self.assertTrue(all(p.grad.isfinite().all() for p in model.parameters()))
