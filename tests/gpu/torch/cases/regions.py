"""Regions leave the GPU and come back: the same bytes at the same addresses, graphs replay, nothing leaks."""
import asyncio, random, threading, time, unittest

import torch

import fixture
from fixture import GIB, MIB

ALONE = True  # it looks at what the whole GPU has given out


def evicted(*tags):
    import glake

    return sum(region["evicted"] for region in glake.regions() if not tags or region["tag"] in tags)


def host_memory():
    """Kilobytes that this process has, pinned ones among them."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def used():
    free, total = torch.cuda.mem_get_info()
    return total - free


class Regions(unittest.TestCase):
    def test_bytes_and_addresses_come_back(self):
        import glake

        sizes = [1000, 300_000, 3 * MIB, 64 * MIB, 200 * MIB]
        with glake.region("some"):
            tensors = [fixture.new(size // 4 * 4) for size in sizes]
        other = fixture.stamp(fixture.new(64 * MIB), 99)
        for seed, tensor in enumerate(tensors):
            fixture.stamp(tensor, seed)
        places = [tensor.data_ptr() for tensor in tensors]
        self.assertEqual(glake.region_of(tensors[0]), "some")
        before = used()
        gone = glake.shrink("some")
        self.assertEqual(gone["resident"], 0)
        self.assertLess(used(), before - sum(sizes) // 2)
        self.assertEqual(fixture.wrong(other, 99), 0)
        glake.refill("some")
        self.assertEqual([tensor.data_ptr() for tensor in tensors], places)
        self.assertEqual([fixture.wrong(tensor, seed) for seed, tensor in enumerate(tensors)], [0] * len(tensors))
        self.assertEqual(evicted("some"), 0)

    def test_a_clean_sealed_region_leaves_without_a_copy(self):
        import glake

        with glake.region("sealed", policy="sealed", host_copy="retain"):
            tensor = fixture.stamp(fixture.new(256 * MIB), 3)
        glake.seal("sealed")
        first = glake.shrink("sealed")
        glake.refill("sealed")
        second = glake.shrink("sealed")
        self.assertEqual((first["copied"] >= tensor.numel(), second["copied"]), (True, 0))
        glake.refill("sealed", verify=True)
        self.assertEqual(fixture.wrong(tensor, 3), 0)
        glake.unseal("sealed")

    def test_a_stitched_block_comes_back(self):
        import glake

        whole, kept = fixture.stitched()
        glake.shrink("default")
        glake.refill("default")
        self.assertEqual(fixture.wrong(whole, 0), 0)
        self.assertEqual([fixture.wrong(tensor, seed + 1) for seed, tensor in enumerate(kept)], [0] * len(kept))

    def test_a_discarded_region_keeps_its_addresses(self):
        import glake

        with glake.region("scratch", policy="discard"):
            tensor = fixture.new(128 * MIB)
        place = tensor.data_ptr()
        self.assertEqual(glake.shrink("scratch")["copied"], 0)
        glake.refill("scratch")
        self.assertEqual((tensor.data_ptr(), fixture.wrong(fixture.stamp(tensor, 1), 1)), (place, 0))

    def test_a_slice_gives_its_memory_and_has_it_again(self):
        import glake

        with glake.region("cache"):
            cache = fixture.new(1024 * MIB)
        front, tail = cache[: 512 * MIB], cache[512 * MIB :]
        fixture.stamp(front, 5)
        before = used()
        went = glake.decommit(tail)
        self.assertEqual(went, tail.numel())
        self.assertLessEqual(used(), before - went)
        with self.assertRaises(glake.InvalidError):
            glake.copy_(fixture.new(MIB), tail[:MIB])
        others = fixture.stamp(fixture.new(512 * MIB), 6)
        gone = glake.shrink("cache")
        self.assertEqual((gone["resident"], gone["copied"]), (0, front.numel()))
        glake.refill("cache")
        self.assertEqual((fixture.wrong(front, 5), fixture.wrong(others, 6), evicted("cache")), (0, 0, 0))
        self.assertEqual((glake.commit(tail), glake.commit(tail)), (went, 0))
        fixture.stamp(cache, 7)
        self.assertEqual(fixture.wrong(cache, 7), 0)

    def test_touching_it_through_our_functions_brings_it_back(self):
        import glake

        with glake.region("touched"):
            tensor = fixture.stamp(fixture.new(64 * MIB), 5)
        host = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
        glake.shrink("touched")
        glake.copy_(host, tensor, wait=True)
        self.assertEqual((evicted("touched"), fixture.wrong(tensor, 5)), (0, 0))
        self.assertTrue(torch.equal(host, tensor.cpu()))

    @fixture.limit(60)
    def test_the_first_layers_compute_while_later_ones_come_back(self):
        import glake

        torch.manual_seed(0)
        layers = []
        for number in range(8):
            with glake.region(f"layer{number}"):
                layers.append(torch.nn.Linear(4096, 4096, device="cuda"))
        model, x = torch.nn.Sequential(*layers), torch.randn(16, 4096, device="cuda")
        tags = [f"layer{number}" for number in range(8)]
        with torch.no_grad():
            expected = model(x)
            following = glake.follow(model)
            self.assertTrue(torch.equal(model(x), expected))
            for _ in range(5):
                glake.shrink(tags)
                glake.refill(tags, wait=False)
                self.assertTrue(torch.equal(model(x), expected))
            following.remove()

    @fixture.limit(60)
    def test_the_gate(self):
        import glake

        with glake.region("gated"):
            tensor = fixture.stamp(fixture.new(64 * MIB), 7)
        inside, out = threading.Event(), threading.Event()

        def works():
            with glake.active("gated"):
                inside.set()
                out.wait()

        thread = threading.Thread(target=works)
        thread.start()
        inside.wait()
        with self.assertRaises(glake.ClosedError):
            glake.shrink("gated", timeout=0.1)
        self.assertEqual(evicted("gated"), 0)
        out.set()
        thread.join()
        glake.shrink("gated")
        with self.assertRaises(glake.ClosedError), glake.active("gated", when_closed="refuse"):
            pass
        with glake.active("gated"):
            self.assertEqual(fixture.wrong(tensor, 7), 0)
            with self.assertRaises(glake.StateError):
                glake.shrink("gated")

    def test_requests_of_a_server(self):
        import glake

        with glake.region("served"):
            tensor = fixture.stamp(fixture.new(64 * MIB), 8)

        async def app(scope, receive, send):
            wrong = await asyncio.to_thread(fixture.wrong, tensor, 8)
            await send({"type": "http.response.start", "status": 200 if wrong == 0 else 500, "headers": []})

        async def ask(gated):
            sent = []

            async def send(message):
                sent.append(message)

            async def receive():
                return {"type": "http.request", "body": b"", "more_body": False}

            await gated({"type": "http", "path": "/", "method": "GET"}, receive, send)
            return sent[0]["status"]

        async def story():
            await asyncio.to_thread(glake.shrink, "served")
            refused = await ask(glake.asgi.Gate(app, tags=["served"], when_closed="refuse"))
            many = await asyncio.gather(*(ask(glake.asgi.Gate(app, tags=["served"])) for _ in range(8)))
            return refused, many

        self.assertEqual(asyncio.run(story()), (503, [200] * 8))

    @fixture.limit(60)
    def test_pinned_tensors_stay(self):
        import glake

        with glake.region("pinned"):
            tensors = [fixture.stamp(fixture.new(256 * MIB), seed) for seed in range(2)]
        glake.fix(tensors[0])
        gone = glake.shrink("pinned")
        self.assertEqual(fixture.wrong(tensors[0], 0), 0)
        self.assertGreaterEqual(gone["resident"], tensors[0].numel())
        self.assertEqual({skipped["reason"] for region in gone["regions"] for skipped in region["skipped"]}, {"fixed"})
        glake.unfix(tensors[0])
        glake.shrink("pinned")
        glake.refill("pinned")
        self.assertEqual([fixture.wrong(tensor, seed) for seed, tensor in enumerate(tensors)], [0, 0])

    @fixture.limit(60)
    def test_a_write_to_a_strictly_sealed_region_fails(self):
        out = fixture.code(
            """
            import fixture, glake, torch
            fixture.enable()
            with glake.region("strict", policy="sealed", host_copy="retain"):
                tensor = fixture.stamp(fixture.new(64 << 20), 1)
            torch.cuda.synchronize()
            glake.seal("strict", strict=True)
            glake.shrink("strict"); glake.refill("strict")
            assert fixture.wrong(tensor, 1) == 0
            print("reads", flush=True)
            try:
                tensor.zero_(); tensor.add_(1); torch.cuda.synchronize()
            except Exception as error:
                print("refused", type(error).__name__)
            import os; os._exit(0)
            """
        ).out
        self.assertIn("reads", out)
        self.assertIn("refused", out)


class Cycles(unittest.TestCase):
    @fixture.limit(240)
    def test_a_thousand_partial_cycles_with_graphs_between(self):
        import glake

        torch.manual_seed(1)
        with glake.region("weights"):
            weights = [torch.randn(2048, 2048, device="cuda") for _ in range(8)]
        with glake.region("state"):
            state, still = torch.zeros(4 * MIB, device="cuda"), torch.randn(64, 2048, device="cuda")
        loose = fixture.stamp(fixture.new(96 * MIB), 11)

        def first():
            x = still
            for weight in weights:
                x = torch.tanh(x @ weight)  # kernels
            kept = torch.empty_like(x)
            kept.copy_(x)  # a memcpy node
            return kept

        def second():
            scratch = torch.empty(2 * MIB, device="cuda")
            scratch.zero_()  # a memset node
            scratch.add_(state[: 2 * MIB]).mul_(3)
            return scratch

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            first(), second()
        torch.cuda.synchronize()
        graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
        with torch.cuda.graph(graphs[0]):
            one = first()
        with torch.cuda.graph(graphs[1], pool=graphs[0].pool()):
            two = second()
        state.copy_(torch.randn_like(state))
        for graph in graphs:
            graph.replay()
        expected = one.clone(), two.clone()
        torch.cuda.synchronize()
        rng = random.Random(5)
        tags = ["weights", "state", "default", [region["tag"] for region in glake.regions() if region["tag"].startswith("graph")][0]]
        taken, steady = None, None
        begin, cycles = time.time(), 0
        while cycles < 1000:
            cycles += 1
            for _ in range(rng.randint(1, 3)):
                some = rng.sample(tags, rng.randint(1, len(tags))) if rng.random() < 0.7 else None
                amount = rng.choice([None, None, rng.randint(1, 256) * MIB])
                (glake.shrink if rng.random() < 0.6 else glake.refill)(some, bytes=amount)
            glake.refill()
            if cycles % 4 == 0:
                one.zero_(), two.zero_()
                for graph in graphs if rng.random() < 0.5 else graphs[::-1]:
                    graph.replay()
                self.assertTrue(torch.equal(one, expected[0]), cycles)
                self.assertTrue(torch.equal(two, expected[1]), cycles)
            if cycles == 100:
                torch.cuda.synchronize()
                glake.trim()
                taken, steady = used(), host_memory()
        self.assertEqual(fixture.wrong(loose, 11), 0)
        torch.cuda.synchronize()
        glake.trim()
        self.assertEqual(evicted(), 0)
        self.assertLessEqual(used(), taken + 2 * MIB)
        self.assertLessEqual(host_memory(), steady * 1.02 + 16 * 1024)
        print(f"{cycles} cycles in {time.time() - begin:.0f} s")


if __name__ == "__main__":
    unittest.main()
