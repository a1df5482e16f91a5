"""Safe points: a program's memory leaves between two of its passes and comes back, whatever runs the passes; the results are the same."""
import os, tempfile, threading, time, unittest

os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "glake-test-inductor"))
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")

import torch
from torch.utils.checkpoint import checkpoint

import fixture
from fixture import MIB

ORDER = 0  # compiling takes long: first
ALONE = True  # it looks at what the whole GPU has given out
CONFIG = {"tiers": {"park_quantum_ms": 5, "extent": "8MiB"}}
PARKS = 4


def net():
    import glake

    torch.manual_seed(0)
    parts = [torch.nn.Linear(512, 512) for _ in range(4)]
    with glake.region("safepoints weights"):
        return torch.nn.Sequential(*parts).cuda()


def at(step):
    return torch.sin(torch.arange(64 * 512, device="cuda", dtype=torch.float32).view(64, 512) + step)


class Parks:
    """Shrinks everything and refills it while it lives, from a thread of its own."""

    def __init__(self):
        self.over, self.count, self.failed = threading.Event(), 0, None
        self.thread = threading.Thread(target=self.run)

    def run(self):
        import glake

        try:
            while not self.over.is_set():
                gone = glake.shrink(timeout=120)
                self.count += glake.gate()["parked"]
                if gone["resident"] > 64 * MIB:
                    raise AssertionError(f"{gone['resident']} bytes stayed")
                glake.refill()
                time.sleep(0.01)
        except Exception as error:
            self.failed = error
            glake.refill()

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        if self.failed is not None:
            raise self.failed


class Safepoints(unittest.TestCase):
    def same(self, step, between=lambda: None):
        """A use of many steps that is parked meanwhile, and one that is not, have the same results."""
        import glake

        def run(goes_on):
            results = []
            with glake.active():
                while goes_on(len(results)):
                    results.append(step(len(results)).clone())
                    between()
            return results

        warm = step(0).clone()
        with Parks() as parks:
            disturbed = run(lambda steps: steps < 20 or parks.count < PARKS and parks.thread.is_alive())
        self.assertGreaterEqual(parks.count, PARKS)
        alone = run(lambda steps: steps < len(disturbed))
        torch.testing.assert_close(disturbed, alone, rtol=0, atol=0)
        torch.testing.assert_close(warm, alone[0], rtol=0, atol=0)

    def test_eager_passes_of_a_followed_module(self):
        import glake

        model = net()
        following = glake.follow(model, safepoints=True)
        with torch.no_grad():
            self.same(lambda step: model(at(step)))
        following.remove()

    def test_said_by_the_program(self):
        import glake

        model = net()
        with torch.no_grad():
            self.same(lambda step: model(at(step)), glake.safepoint)

    @fixture.limit(180)
    def test_a_whole_graph_that_is_followed(self):
        import glake

        model = torch.compile(net(), fullgraph=True, dynamic=False)
        following = glake.follow(model, safepoints=True)
        with torch.no_grad():
            self.same(lambda step: model(at(step)))
        following.remove()

    @fixture.limit(180)
    def test_a_hook_inside_of_a_whole_graph(self):
        import glake

        inner = net()
        inner.register_forward_pre_hook(glake._modules._between_passes)
        model = torch.compile(inner, fullgraph=True, dynamic=False)
        with torch.no_grad():
            self.same(lambda step: model(at(step)), glake.safepoint)

    @fixture.only("compiled", "graph trees need checkPoolLiveAllocations, which a pluggable allocator has no way to answer")
    @fixture.limit(240)
    def test_graph_trees(self):
        import glake

        model = torch.compile(net(), mode="reduce-overhead", dynamic=False)
        following = glake.follow(model, safepoints=True)

        def step(number):
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                return model(at(number))

        for number in range(4):
            step(number)
        self.same(step)
        following.remove()

    def test_training_that_computes_again(self):
        import glake

        model = net()
        following = glake.follow(model, safepoints=True)

        def step(number):
            model.zero_grad(set_to_none=True)
            loss = checkpoint(model, at(number).requires_grad_(), use_reentrant=False).square().mean()
            loss.backward()
            return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

        self.same(step)
        following.remove()
