"""Processes that are forked while glake is enabled: DataLoader's workers, and children that end in every way."""
import unittest

import fixture

ISOLATED = True


class Loaders(unittest.TestCase):
    def silent(self, done, out="done"):
        self.assertEqual(done.code, 0, done.text())
        self.assertEqual(done.out.split(), out.split(), done.text())
        self.assertNotIn("glake", done.err, done.text())
        self.assertNotIn("Traceback", done.err, done.text())

    @fixture.limit(90)
    def test_workers_of_a_data_loader(self):
        self.silent(fixture.code("""
            import torch, fixture
            fixture.enable()
            kept = fixture.stamp(fixture.new(50 << 20), 1)
            data = torch.utils.data.TensorDataset(torch.arange(4096, dtype=torch.float32))
            total = 0.0
            for epoch in range(2):
                for (x,) in torch.utils.data.DataLoader(data, 64, num_workers=3, pin_memory=True, multiprocessing_context="fork"):
                    total += float(x.cuda(non_blocking=True).sum())
            assert total == 4096 * 4095, total
            assert fixture.wrong(kept, 1) == 0
            print("done")
        """, timeout=80))

    def test_children_that_free_and_exit(self):
        self.silent(fixture.code("""
            import os, sys, torch, fixture
            fixture.enable()
            kept = [fixture.stamp(fixture.new(20 << 20), n) for n in range(4)]
            children = []
            for way in ("return", "exit", "free"):
                child = os.fork()
                if child == 0:
                    if way == "free":
                        kept.clear()
                    if way != "return":
                        sys.exit(0)
                    os._exit(0)
                children.append(child)
            for child in children:
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                assert code == 0, code
            assert [fixture.wrong(t, n) for n, t in enumerate(kept)] == [0] * 4
            more = fixture.stamp(fixture.new(20 << 20), 9)
            assert fixture.wrong(more, 9) == 0
            print("done")
        """))

    def test_a_child_that_allocates_is_refused(self):
        done = fixture.code("""
            import os, sys, torch, fixture
            fixture.enable()
            kept = fixture.new(1 << 20)
            child = os.fork()
            if child == 0:
                try:
                    torch.ones(10, device="cuda")
                    os._exit(3)
                except RuntimeError:
                    os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            print("done")
        """)
        self.assertEqual((done.code, done.out.split()), (0, ["done"]), done.text())

    def test_enabled_before_the_fork_without_cuda(self):
        done = fixture.code("""
            import os, torch, fixture
            fixture.enable()
            child = os.fork()
            if child == 0:
                try:
                    torch.ones(10, device="cuda")
                except RuntimeError:
                    pass
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            print("done", int(float(torch.ones(10, device="cuda").sum())))
        """)
        self.assertEqual((done.code, done.out.split()), (0, ["done", "10"]), done.text())
