"""Safe points: a program's memory leaves between two of its passes and comes back, whatever runs the passes; the results are the same."""
import importlib.util, os, tempfile, threading, time, unittest

os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "glake-test-inductor"))
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")

import torch
from torch.utils.checkpoint import checkpoint

import fixture
from fixture import MIB

ORDER = 0  # compiling takes long: first
ALONE = True  # it looks at what the whole GPU has given out
CONFIG = {"tiers": {"extent": "8MiB"}}
PARKS = 4


def net():
    import glake

    torch.manual_seed(0)
    parts = [torch.nn.Linear(512, 512) for _ in range(4)]
    with glake.region("safepoints weights"):
        return torch.nn.Sequential(*parts).cuda()


class Model(torch.nn.Module):
    """Of a class of its own, as models are: its hooks run before the compiler begins."""

    def __init__(self):
        super().__init__()
        self.parts = net()

    def forward(self, inputs):
        return self.parts(inputs)


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
    def test_a_whole_graph_of_what_is_followed(self):
        import glake

        inner = Model()
        following = glake.follow(inner, safepoints=True)
        model = torch.compile(inner, fullgraph=True, dynamic=False)
        with torch.no_grad():
            self.same(lambda step: model(at(step)))
        following.remove()

    @fixture.limit(180)
    def test_hooks_inside_of_a_whole_graph(self):
        import glake

        # Another's graph would serve, whatever hooks it has.
        torch._dynamo.reset()
        inner = net()
        following = glake.follow(inner, safepoints=True)
        model = torch.compile(inner, fullgraph=True, dynamic=False)
        with self.assertLogs("glake", "WARNING"), torch.no_grad():
            model(at(0))
        with torch.no_grad():
            self.same(lambda step: model(at(step)), glake.safepoint)
        following.remove()

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

        for reentrant in (False, True):
            with self.subTest(use_reentrant=reentrant):
                model = net()
                following = glake.follow(model, safepoints=True)

                def step(number):
                    model.zero_grad(set_to_none=True)
                    loss = checkpoint(model, at(number).requires_grad_(), use_reentrant=reentrant).square().mean()
                    loss.backward()
                    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

                self.same(step)
                following.remove()

    def test_a_capture_while_a_shrink_waits(self):
        import glake

        model, still, graph, parked = net(), at(0), torch.cuda.CUDAGraph(), []

        def swap():
            glake.shrink(timeout=50)
            parked.append(glake.gate()["parked"])
            glake.refill()

        def replays():
            results = []
            for step in range(3):
                still.copy_(at(step))
                graph.replay()
                results.append(result.clone())
            return results

        other = threading.Thread(target=swap)
        with torch.no_grad(), glake.active():
            expected = [model(at(step)) for step in range(3)]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    model(still)
            torch.cuda.current_stream().wait_stream(side)
            other.start()
            while other.is_alive() and not glake.gate()["closing"]:
                time.sleep(0.001)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                waited = [glake.safepoint()]
                result = model(still)
                waited.append(glake.safepoint())
            self.assertEqual((waited, parked), ([False, False], []))
            before = replays()
            torch.testing.assert_close(before, expected)
            self.assertTrue(glake.safepoint())
            self.assertEqual(parked, [1])
            torch.testing.assert_close(replays(), before, rtol=0, atol=0)
        other.join()

    @unittest.skipUnless(importlib.util.find_spec("transformers"), "transformers is not installed: no model of its generates here")
    @fixture.limit(180)
    @torch.no_grad()
    def test_tokens_that_are_generated(self):
        import glake, transformers

        shape = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
        torch.manual_seed(0)
        with glake.region("safepoints weights"), torch.device("cuda"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_key_value_heads=2)).eval()

        def step(number):
            prompt = (torch.arange(3 * 8, device="cuda").view(3, 8) * 37 + number) % 512
            how = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
            mask = torch.ones_like(prompt)
            return model.generate(prompt, attention_mask=mask, stopping_criteria=[glake.generation.SafePoint()], **how)

        self.same(step)
