"""refill.py and swap.py on the host alone: memory that is touched, and two workers that swap a number; needs neither GPU nor torch."""
import argparse, contextlib, ctypes, io, json, pathlib, sys, tempfile, unittest
from unittest import mock

GPU = pathlib.Path(__file__).resolve().parents[1] / "gpu"
sys.path.insert(0, str(GPU))
import launch, refill, swap

MIB, GIB = 1 << 20, 1 << 30


def rows_of(work):
    """What is reported meanwhile, by name."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        work()
    return {row["what"].strip(): row for row in launch.rows_of(printed.getvalue())}


class Touching(unittest.TestCase):
    def test_all_of_it_is_touched(self):
        memory, took = refill.touched(64 * MIB)
        self.assertGreater(took, 0)
        self.assertEqual(memory[2 * MIB:64 * MIB:4096].count(b"\1"), 62 * MIB // 4096)

    def test_it_is_private_memory(self):
        memory, _ = refill.touched(32 * MIB)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
            places, access, *_, inode = line.split()[:5]
            begin, end = (int(place, 16) for place in places.split("-"))
            if begin <= address < end:
                self.assertEqual((access, inode), ("rw-p", "0"))
                return
        self.fail("it is not mapped")

    def test_a_shrink_stands_beside_its_neighbours(self):
        rates = [30.0, 16.0, 10.0, 9.0, 8.0, 3.0, 4.0]
        rows = rows_of(lambda: refill.compare([{"gbps": rate, "free_gib": 100.0, "uptime_s": 60.0} for rate in rates]))
        first = rows["first shrink, of touching alone with 16 threads"]
        self.assertEqual((first["value"], first["lowest"], first["highest"], first["bar"], first["most"]), (0.8, 0.5, 1.0, 0.9, False))

    def test_parts_hold_their_memory_until_all_have_ended(self):
        said = json.dumps(dict(gbps=2.0, free_gib=1.0, uptime_s=1.0))
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(refill, "__file__", f"{folder}/part.py"):
            part = pathlib.Path(refill.__file__)
            # Who starts sees all that started before.
            part.write_text(f"""
import os, pathlib, sys
here = pathlib.Path(__file__).parent
alive = list(here.glob("*.alive"))
mine = here / f"{{len(alive)}}-{{os.getpid()}}.alive"
mine.touch()
print("word")
print({said!r}, flush=True)
sys.stdin.read()
mine.rename(mine.with_suffix(".ended"))
""")
            self.assertEqual(rows_of(lambda: refill.first(0, GIB, 0))["first shrink, of touching alone with 16 threads"]["value"], 1.0)
            self.assertEqual(sorted(path.name[0] for path in pathlib.Path(folder).glob("*.ended")), list("0123456"))
            part.write_text("raise SystemExit(1)")
            with self.assertRaisesRegex(RuntimeError, "touch ended early"):
                refill.first(0, GIB, 0)


class Steps(unittest.TestCase):
    def test_what_lies_between_two_batches_is_no_step(self):
        self.assertEqual(swap.inside([3, None, 10, 12, 15, None, 40, 41]), [2, 3, 1])
        self.assertEqual(swap.inside([None]), [])

    def test_percentile(self):
        self.assertEqual(swap.p95(range(1, 61)), 57)
        self.assertEqual(swap.p95([5]), 5)


class Leases(unittest.TestCase):
    def test_their_sum_is_never_above_the_capacity(self):
        class Told:
            def __init__(self, lease):
                self.lease, self.wants, self.granted, self.lines = lease, 0, 0.0, []
            def tell(self, line):
                self.lines.append(line)
        agent, one, other = swap.Agent(40), Told(30), Told(0)
        agent.workers = [one, other]
        agent.event(other, "want", 25)
        agent.event(one, "returned", 10)
        agent.event(one, "returned", 20)
        self.assertEqual((other.lines, other.lease, other.wants, one.lease), (["grant 10", "grant 10", "grant 5"], 25, 0, 0))
        agent.event(one, "want", 30)
        self.assertEqual((one.lines, one.wants), (["grant 15"], 15))


class Swaps(unittest.TestCase):
    def measured(self, only, **more):
        asked = dict(repeat=2, slow_repeat=2, parks=4, capacity=40, only=only, **more)
        worker = [sys.executable, str(pathlib.Path(__file__).with_name("swap_worker.py"))]
        with tempfile.TemporaryDirectory() as out, mock.patch.multiple(swap, COMMAND=worker, REST=0.01, TURN=0.02), \
                mock.patch.object(launch, "gpus", lambda: ["0", "1"]), mock.patch("importlib.util.find_spec", lambda _: True):
            rows = rows_of(lambda: swap.everything(argparse.Namespace(**asked, out=out)))
            log = pathlib.Path(out, "swap-wants.txt")
            return rows, [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def test_every_part_is_told_of(self):
        rows, wants = self.measured(",".join(swap.PARTS))
        for name in ("idle: want to logits, of the bar's seconds", "links: want to the bytes over two links, of one",
                     "tensors: per tensor, of ours: want to logits", "saver: torch_memory_saver, of ours: want to logits",
                     "start: stop and start, of ours: want to logits", "busy: want to logits, p95 of the bar's seconds",
                     "beside: steps a second, of those alone"):
            self.assertGreater(rows[name]["value"], 0, name)
        self.assertEqual((rows["busy: parks"]["value"], rows["busy: runs whose tokens differ"]["value"]), (4, 0))
        self.assertEqual([want["number"] for want in wants], list(range(1, len(wants) + 1)))
        for want in wants:
            self.assertLessEqual(0, want["safe_point"])
            self.assertTrue(want["granted"] <= want["refilled"] <= want["logits"], want)
        slowest = rows["busy: the slowest want, s"]
        self.assertEqual(slowest["value"], max(want["logits"] for want in wants))
        with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
            log = launch.Log(out, "swap.jsonl", launch.Clock(10))
            launch.told(log, "all", list(rows.values()))
            log.file.close()

    def test_a_part_that_fails_keeps_no_other_from_being_measured(self):
        def fails(*_):
            raise RuntimeError("no such thing")
        with mock.patch.dict(swap.PARTS, {"tensors": fails}), contextlib.redirect_stderr(io.StringIO()), \
                self.assertRaisesRegex(SystemExit, "tensors: RuntimeError: no such thing$"):
            self.measured("tensors,busy")

    def test_wants_between_two_uses_do_not_count(self):
        phases = {"resident_gib": 0.0, "copied_gib": 1.0, "freed_gib": 24.0}
        found = [{"parked": number % 2, "logits": 1.0 + number, **phases} for number in range(20)]
        ours = mock.Mock(said={"out": 50.0}, take_and_return=mock.Mock(side_effect=found))
        ours.awake.answer.side_effect = [{"step": 0.01, "deterministic": True}, {"runs": 3, "wrong": 0}]
        with tempfile.TemporaryDirectory() as out, mock.patch.object(swap, "REST", 0):
            rows = rows_of(lambda: swap.busy(argparse.Namespace(parks=4, out=out), ours, 1.0))
        self.assertEqual((rows["busy: parks"]["value"], rows["busy: parks"]["wants"]), (4, 8))
        told = rows["busy: want to logits, p95 of the bar's seconds"]
        self.assertEqual((told["most_s"], told["median"], told["p95"], told["p95_of_all"]), (8.0, 5.0, 6.0, 7.0))

    def test_a_worker_that_ends_is_told_of_again_and_again(self):
        with mock.patch.object(swap, "COMMAND", [sys.executable, "-c", "print('{\"error\": \"no memory\"}')"]):
            worker = swap.Remote(swap.Agent(0), "tensors")
            for _ in range(3):
                with self.assertRaisesRegex(RuntimeError, "ready was waited for"):
                    worker.answer("ready")
            swap.end(worker)


class Told(unittest.TestCase):
    def test_words_stand_beside_a_figure(self):
        with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()) as printed:
            log = launch.Log(out, "engine.jsonl", launch.Clock(10))
            launch.told(log, "busy", [dict(what="parks", value=20, bar=20, most=False, verified=10, vllm="0.23.0")])
            log.file.close()
        self.assertIn("verified 10  vllm 0.23.0", printed.getvalue())


if __name__ == "__main__":
    unittest.main()
