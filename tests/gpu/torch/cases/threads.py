"""Frees and allocations from many threads, autograd's among them."""
import threading, unittest

import torch

import fixture
from fixture import MIB


def together(count, work):
    """Runs work(i) on `count` threads; raises what the first of them raised."""
    errors = []

    def one(i):
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def gradients(seed, stream=None):
    with torch.cuda.stream(stream):
        made = torch.Generator(device="cuda").manual_seed(seed)
        weights = [torch.randn(512, 512, device="cuda", generator=made).requires_grad_() for _ in range(6)]
        x = torch.randn(256, 512, device="cuda", generator=made)
        for weight in weights:
            x = torch.relu(x @ weight / 16)
        x.square().mean().backward()
        torch.cuda.current_stream().synchronize()
    return [weight.grad for weight in weights]


class Threads(unittest.TestCase):
    def test_backward_on_many_threads(self):
        expected = [gradients(seed) for seed in range(6)]

        def work(i):
            stream = torch.cuda.Stream()
            for _ in range(15):
                for mine, theirs in zip(gradients(i, stream), expected[i]):
                    torch.testing.assert_close(mine, theirs)

        together(6, work)

    def test_memory_comes_back_after_backward(self):
        def allocated():
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()  # one a stream, kept by cuBLAS' handles
            return torch.cuda.memory_allocated()

        gradients(0)
        before = allocated()
        for _ in range(3):
            together(4, lambda i: gradients(i, torch.cuda.Stream()))
        self.assertEqual(allocated(), before)

    def test_frees_on_another_thread(self):
        before = torch.cuda.memory_allocated()
        tensors = [fixture.stamp(fixture.new(size), 1) for size in (4096, 3 * MIB, 40 * MIB) for _ in range(20)]
        after = torch.cuda.memory_allocated()
        self.assertGreaterEqual(after - before, 20 * 43 * MIB)

        def work(i):
            for n in range(i, len(tensors), 4):
                tensors[n] = None

        together(4, work)
        self.assertLessEqual(torch.cuda.memory_allocated() - before, 8 * MIB)

    def test_hammer(self):
        def work(i):
            with torch.cuda.stream(torch.cuda.Stream()):
                live = []
                for step in range(300):
                    size = (4096, 700_000, 5 * MIB, 24 * MIB)[(step * 7 + i) % 4]
                    live.append((torch.full((size // 4,), i * 1000 + step, dtype=torch.int32, device="cuda"), i * 1000 + step))
                    if len(live) > 10:
                        tensor, value = live.pop(step % 10)
                        if int((tensor != value).sum()):
                            raise AssertionError(f"thread {i}, step {step}: bytes of another")
                    if step % 100 == 50:
                        torch.cuda.empty_cache()

        together(8, work)

    def test_hooks_free_in_the_autograd_thread(self):
        held = {"block": fixture.new(64 * MIB)}
        before, seen = torch.cuda.memory_allocated(), []

        def hook(gradient):
            seen.append(threading.get_ident())
            held.pop("block", None)
            return gradient * 2

        x = torch.ones(1000, device="cuda", requires_grad=True)
        y = x * 3
        y.register_hook(hook)
        y.sum().backward()
        self.assertTrue(torch.equal(x.grad, torch.full((1000,), 6.0, device="cuda")))
        self.assertNotEqual(seen, [threading.get_ident()])
        self.assertLess(torch.cuda.memory_allocated(), before)

    def test_statistics_while_others_allocate(self):
        done = threading.Event()

        def work(i):
            if i:
                while not done.is_set():
                    stats = torch.cuda.memory_stats()
                    if stats["reserved_bytes.all.current"] < stats["allocated_bytes.all.current"]:
                        raise AssertionError("more allocated than reserved")
                    torch.cuda.memory_snapshot()
                return
            try:
                for step in range(2000):
                    fixture.new(4096 + 4096 * (step % 700))
            finally:
                done.set()

        together(3, work)
