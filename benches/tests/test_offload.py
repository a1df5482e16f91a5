"""What offload.py makes of rows, what a part has of those before it, and what it measures with; GPUs are not needed, torch where it says so."""
import importlib.util, pathlib, sys, types, unittest, unittest.mock

GPU = pathlib.Path(__file__).resolve().parents[1] / "gpu"
sys.path.insert(0, str(GPU))
import offload
from offloading import bars, bare, baselines, digest, host, models, steps

GIB = 1 << 30
torch = None
if importlib.util.find_spec("torch"):
    import torch
needs_torch = unittest.skipUnless(torch, "torch is not installed")


def step(run, seconds=2.0, **more):
    times = [3 * seconds, 2 * seconds, *[seconds] * 6]
    row = dict(run=run, tokens=16384, layers=32, first_s=times[0], step_s=seconds, cold_s=9.0, most_bytes=20 * GIB, times=times, losses=[1.0])
    return {**row, **more}


def ours(run, seconds=2.0, **more):
    moved = dict(step_bytes=27e9, step_bytes_in=26e9, narrowed_bytes=0, live_host_bytes=10, pinned_host_bytes=10, gbps_out=54.0, gbps_in=50.0)
    return step(run, seconds, **{**moved, **more})


LINKS = dict(run="links", gpus=2, one_out=55.0, one_in=55.0, all_out=110.0, all_in=110.0, ours_out=104.0, ours_in=105.0)


class Bars(unittest.TestCase):
    def found(self, *rows):
        return {what: (value, bar) for what, value, bar, _ in bars.bars(list(rows))}

    def test_the_limit_is_of_the_same_bytes(self):
        blind = [step(name, took, blind_bytes=27e9, blind_back_bytes=26e9) for name, took in (("blind", 1.9), ("blind-multi-path", 2.0))]
        found = self.found(ours("hybrid"), ours("memory"), ours("hybrid-multi-path"), *blind)
        name = "steps, of blind copies of 1.00 x as many bytes"
        self.assertEqual(found[f"hybrid: {name}"], (0.95, 0.92))
        self.assertEqual(found[f"hybrid-multi-path: {name}"], (1.0, 0.92))
        self.assertEqual(len([what for what in found if "blind" in what]), 2)
        smaller = self.found(ours("hybrid", tokens=8192), *blind)
        self.assertIn(f"hybrid of 8,192 tokens: {name}", smaller)

    def test_rates_are_of_the_links_that_were_measured_beside_them(self):
        found = self.found(LINKS, ours("hybrid"), ours("hybrid-multi-path", gbps_out=99.0), ours("inputs"), ours("ddp-hybrid"))
        rate = "GB/s out while a queue was busy"
        self.assertEqual(found[f"hybrid: {rate}"], (54.0, None))
        self.assertEqual(found[f"hybrid: {rate}, of the link alone"], (54 / 55, 0.93))
        self.assertEqual(found[f"hybrid-multi-path: {rate}, of all links alone"], (0.9, 0.93))
        self.assertEqual(found[f"inputs: {rate}, of the link alone"], (54 / 55, None))
        self.assertNotIn(f"ddp-hybrid: {rate}, of the link alone", found)
        self.assertFalse([what for what in self.found(ours("hybrid")) if "alone" in what])

    def test_bytes_are_of_the_unique_ones_that_the_hooks_had(self):
        keep = step("keep", unique_bytes=30e9, unique_layers_bytes=27e9, saved_bytes=60e9)
        found = self.found(keep, ours("memory"), ours("offload"), step("save-on-cpu", copied_bytes=90e9), step("torchtune", copied_bytes=0))
        self.assertEqual(found["memory: bytes out, of the unique ones less what goes narrow"], (1.0, 1.01))
        self.assertEqual(found["offload: bytes out, of the unique ones less what goes narrow"], (0.9, 1.01))
        self.assertEqual(found["save-on-cpu: bytes out, of the unique ones"], (3.0, None))
        self.assertNotIn("torchtune: bytes out, of the unique ones", found)

    def test_first_and_longest_steps(self):
        found = self.found(ours("hybrid"), step("keep", unique_bytes=1, unique_layers_bytes=1))
        self.assertEqual(found["hybrid: first step, of a steady one"], (3.0, 1.5))
        self.assertEqual(found["hybrid: longest of steps 2 to 6, of a steady one"], (2.0, None))
        self.assertEqual(found["keep: longest of steps 2 to 6, of a steady one"], (2.0, None))
        for count, steady in ((12, 6), (7, 6), (6, 1), (3, 1), (2, 1), (1, 0)):
            self.assertEqual(steps.steady(list(range(count))), sum(range(steady, count)) / (count - steady), count)

    def test_digests(self):
        row = dict(run="digest", preset="memory", bytes=3 * GIB, compared=7, differ=0)
        name = "digest: memory: of what came back, tensors that differ"
        self.assertEqual(self.found(row)[name], (0.0, 0.0))
        self.assertEqual(self.found(dict(row, differ=2))[name], (2.0, 0.0))
        self.assertEqual(self.found(dict(row, compared=0))[name], (1.0, 0.0))


class Needs(unittest.TestCase):
    def runs(self, *rows, **more):
        made = offload.Runs.__new__(offload.Runs)
        made.a = types.SimpleNamespace(**{"budget": None, "blind_bytes": [], "device": "cpu", "tokens": 16384, **more})
        made.before, made.log = list(rows), types.SimpleNamespace(rows=[])
        return made

    def test_blind_copies_are_those_of_the_last_hybrid(self):
        made = self.runs(ours("hybrid", step_bytes=GIB, step_bytes_in=GIB), ours("hybrid", step_bytes=4 * GIB, step_bytes_in=3 * GIB))
        self.assertEqual(made._needs("blind"), ["--blind-bytes", 4, 3])
        self.assertIn("the part hybrid-multi-path before it", made._missing("blind-multi-path"))
        self.assertEqual(self.runs(blind_bytes=[GIB])._needs("blind"), ["--blind-bytes", 1])

    def test_rows_of_older_plans_are_none(self):
        old = ours("hybrid")
        del old["step_bytes_in"]
        self.assertEqual(self.runs(old)._needs("blind"), [])

    def test_digests_have_the_budget_of_hybrid_and_room_of_their_own(self):
        [_, size] = self.runs(step("checkpoint"))._needs("digest")
        self.assertAlmostEqual(size, 1.02 * 20 + 1, 6)
        self.assertEqual(self.runs(budget=4 * GIB)._needs("digest"), ["--budget", 5])
        self.assertIn("under which budget", self.runs()._missing("digest"))

    def test_every_part_is_one(self):
        known = {*steps.OURS, *steps.BLIND, *baselines.THEIRS, *offload.CHILDREN}
        self.assertEqual(sorted(offload.PARTS), sorted(known))

    def test_links_are_a_gpus(self):
        with self.assertRaises(baselines.Skipped):
            bare.links(types.SimpleNamespace(device="cpu"))


class Host(unittest.TestCase):
    def test_memory_is_touched_as_far_as_there_is_time_and_room(self):
        self.assertGreater(host.available(), 0)
        self.assertEqual(host.touch(host.GIB, 0), 0)
        with unittest.mock.patch.object(host, "available", lambda: 0), unittest.mock.patch.object(host.time, "sleep", lambda _: None):
            self.assertEqual(host.touch(host.GIB, 60), 0)
        with unittest.mock.patch.multiple(host, PIECE=1 << 20, PART=1 << 18, SPARE=0):
            self.assertEqual(host.touch(3 << 20, 60, threads=2), 3 << 20)


@needs_torch
class Measures(unittest.TestCase):
    def test_blind_copies_are_as_many_as_asked_for(self):
        with unittest.mock.patch.object(baselines.Blind, "PIECE", 100):
            blind = baselines.Blind(torch, types.SimpleNamespace(device="cpu"), 250, 120)
        self.assertEqual((blind.pieces_out, blind.pieces_back, blind.there.nbytes), ([100, 100, 50], [100, 20], 100))
        with unittest.mock.patch.object(blind, "_copy") as copy:
            blind.out()
            blind.back()
            blind.end()
        self.assertEqual([call.args[2] for call in copy.call_args_list], [100, 100, 50, 100, 20])

    def test_copies_of_baselines_are_counted(self):
        before = torch.Tensor.copy_
        self.addCleanup(setattr, torch.Tensor, "copy_", before)
        copied = baselines.Copied(torch)
        torch.empty(10).copy_(torch.ones(10))
        self.assertEqual(copied.taken(), 0)
        copied.bytes = 7
        self.assertEqual((copied.taken(), copied.taken()), (7, 0))

    def test_unique_bytes_of_layers_and_of_all(self):
        layer = torch.nn.Linear(1024, 1024)
        unique = models.Unique(torch, layer)
        layer.register_forward_hook(unique.layers_ended)
        with unique.hooks:
            x = torch.randn(256, 1024, requires_grad=True)
            (layer(x).square().sum() + x.square().sum()).backward()
        self.assertEqual((unique.of_layers, unique.bytes, unique.saved), (1 << 20, 2 << 20, 3 << 20))

    def test_a_digest_tells_every_byte_and_where_it_is(self):
        with unittest.mock.patch.object(digest.Digests, "WORDS", 64):
            made = digest.Digests(torch, "cpu")
            values = torch.arange(2003, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
            expected = made.of(values)
            for at in (0, 700, 1999, 2002):
                other = values.clone()
                other.view(torch.int16)[at] ^= 1
                self.assertNotEqual(made.of(other), expected, at)
            # Whole parts that change places.
            self.assertNotEqual(made.of(torch.cat([values[256:512], values[:256], values[512:]])), expected)
            self.assertEqual(made.of(values[1:2003]), made.of(values[1:2003].clone()))
            square = values[:2000].view(40, 50)
            self.assertEqual(made.of(square.t()), made.of(square.t().contiguous()))
            made.came_back(expected, values)
            made.came_back(expected, values + 1)
            self.assertEqual(made.taken(), {"compared": 2, "bytes": 2 * 2 * 2003, "differ": 1})
            self.assertEqual(made.taken(), {"compared": 0, "bytes": 0, "differ": 0})


if __name__ == "__main__":
    unittest.main()
