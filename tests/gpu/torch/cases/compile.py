"""torch.compile with graph trees (mode="reduce-overhead"): several shapes, results as in eager mode."""
import os, tempfile, unittest

os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "glake-test-inductor"))
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")

import torch

import fixture
from fixture import MIB

ORDER = 0  # compiling takes longest: first


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128), torch.nn.LayerNorm(128)).cuda()


@fixture.only("compiled", "graph trees need checkPoolLiveAllocations, which a pluggable allocator has no way to answer")
class Compile(unittest.TestCase):
    @fixture.limit(180)
    def test_inference(self):
        model = net().eval()
        fast = torch.compile(model, mode="reduce-overhead", dynamic=False)
        with torch.no_grad():
            for rows in (16, 64, 16, 33):
                for _ in range(5):
                    x = torch.randn(rows, 128, device="cuda")
                    torch.compiler.cudagraph_mark_step_begin()
                    torch.testing.assert_close(fast(x).clone(), model(x), rtol=1e-4, atol=1e-4)
                    fixture.new(33 * MIB).fill_(255)
                torch.cuda.empty_cache()

    @fixture.limit(240)
    def test_training(self):
        model, copy = net(), net()
        fast = torch.compile(model, mode="reduce-overhead", dynamic=False)
        opts = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, copy)]
        for rows in (32, 48):
            for _ in range(6):
                x = torch.randn(rows, 128, device="cuda")
                losses = []
                torch.compiler.cudagraph_mark_step_begin()
                for m, opt in zip((fast, copy), opts):
                    loss = m(x).square().mean()
                    loss.backward()
                    opt.step()
                    opt.zero_grad(set_to_none=True)
                    losses.append(loss.detach().clone())
                torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)
                fixture.new(33 * MIB).fill_(255)

    @fixture.limit(180)
    def test_several_functions_that_share_a_tree(self):
        fast = torch.compile(lambda x: torch.relu(x @ x.T).sum(0) * 2, mode="reduce-overhead", dynamic=False)
        more = torch.compile(lambda x: (x + 1).cumsum(0), mode="reduce-overhead", dynamic=False)
        for _ in range(6):
            x = torch.randn(64, 64, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                one = fast(x)
                two = more(one).clone()
                expected = torch.relu(x @ x.T).sum(0) * 2
                torch.testing.assert_close(one.clone(), expected, rtol=1e-3, atol=1e-3)
                torch.testing.assert_close(two, (expected + 1).cumsum(0), rtol=1e-3, atol=1e-2)
                del one
