"""A capture that fails: torch's own state of it is spoilt (its generator's), so that it has a process of its own."""
import unittest

import bed

ISOLATED = True


class Captures(unittest.TestCase):
    def test_a_capture_that_fails_leaves_the_allocator_well(self):
        done = bed.code("""
            import gc, torch, bed
            from bed import MIB
            bed.enable()
            before = torch.cuda.memory_allocated()
            for _ in range(3):
                try:
                    with torch.cuda.graph(torch.cuda.CUDAGraph()):
                        kept = torch.ones(5 * MIB, device="cuda")
                        float(kept.sum())
                    print("no error")
                except RuntimeError:
                    kept = None
            torch.cuda.synchronize()
            gc.collect()
            tensor = bed.stamp(bed.new(100 * MIB), 4)
            assert bed.wrong(tensor, 4) == 0
            graph, still = torch.cuda.CUDAGraph(), torch.ones(1000, device="cuda")
            with torch.cuda.graph(graph):
                result = still + 1
            graph.replay()
            assert float(result.sum()) == 2000.0
            del tensor, result, graph
            left = torch.cuda.memory_allocated() - before
            assert left <= 64 * MIB, left
            whole, kept = bed.stitched(256 * MIB)
            assert bed.wrong(whole, 0) == 0
            print("done")
        """)
        self.assertEqual((done.code, done.out.split()), (0, ["done"]), done.text())
