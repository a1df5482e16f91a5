"""Snapshots and the history of allocations, in the format that torch's visualiser opens."""
import os, pickle, unittest

import torch
from torch.cuda import _memory_viz as viz

import fixture
from fixture import MIB

# The fields that a native process shows, of a segment, of a block and of a trace's entries.
NATIVE = """
import json, torch
torch.cuda.memory._record_memory_history(max_entries=1000)
kept = torch.ones(5 << 20, device="cuda")
gone = torch.ones(5 << 20, device="cuda")
del gone
s = torch.cuda.memory._snapshot()
entries = {e["action"]: sorted(e) for trace in s["device_traces"] for e in trace}
segment = s["segments"][0]
print(json.dumps([sorted(s), sorted(segment), sorted({k for b in segment["blocks"] for k in b}), entries]))
"""


def blocks(snapshot, *states):
    return [b for s in snapshot for b in s["blocks"] if b["state"] in states]


def stitched():
    """Where stitched segments begin. torch's own types of segments, which the compiled backend answers with, have no word for them."""
    import glake

    return {s["address"] for s in glake.snapshot()["segments"] if s["segment_type"] == "stitched"}


class History(unittest.TestCase):
    def setUp(self):
        torch.cuda.memory._record_memory_history(enabled=None)

    tearDown = setUp

    def test_snapshot_adds_up(self):
        kept = [fixture.new(size) for size in (700, 3 * MIB, 30 * MIB)]
        segments = torch.cuda.memory_snapshot()
        for s in segments:
            self.assertEqual(sum(b["size"] for b in s["blocks"]), s["total_size"], s["address"])
            self.assertIn(s["segment_type"], ("small", "large", "stitched"))
            starts = [b["address"] for b in s["blocks"]]
            self.assertEqual(starts, sorted(starts))
        aliases = stitched()
        at_home = [s for s in segments if s["address"] not in aliases]
        self.assertEqual(sum(s["total_size"] for s in at_home), sum(torch.cuda.memory_reserved(d) for d in range(torch.cuda.device_count())))
        live = {b["address"]: b for b in blocks(segments, "active_allocated")}
        for tensor in kept:
            self.assertIn(tensor.data_ptr(), live)
            self.assertEqual(live[tensor.data_ptr()]["requested_size"], tensor.numel())

    def test_a_stitched_segment_shows(self):
        whole, _ = fixture.stitched(512 * MIB)
        aliases = stitched()
        found = [s for s in torch.cuda.memory_snapshot() if s["address"] in aliases]
        live = {b["address"] for b in blocks(found, "active_allocated")}
        self.assertIn(whole.data_ptr(), live)

    def test_fields_are_torchs(self):
        native = fixture.code(NATIVE)
        self.assertEqual(native.code, 0, native.text())
        top, segment, block, entries = native.json()
        torch.cuda.memory._record_memory_history(max_entries=1000)
        kept, gone = fixture.new(20 * MIB), fixture.new(20 * MIB)
        del gone
        s = torch.cuda.memory._snapshot()
        self.assertEqual(sorted(set(top) - set(s)), [])
        for one in s["segments"]:
            self.assertEqual(sorted(set(segment) - set(one)), [])
        found = {key for one in s["segments"] for b in one["blocks"] for key in b}
        self.assertEqual(sorted(set(block) - found), [])
        mine = {e["action"]: set(e) for trace in s["device_traces"] for e in trace}
        for action in ("alloc", "free_requested", "free_completed"):
            self.assertEqual(sorted(set(entries[action]) - mine[action]), [], action)
        del kept

    def test_what_happened_stands_in_the_trace(self):
        torch.cuda.memory._record_memory_history(max_entries=10_000, clear_history=True)
        addresses = []
        for size in (1000, 3 * MIB, 70 * MIB):
            tensor = fixture.new(size)
            addresses.append((tensor.data_ptr(), size))
            del tensor
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        times = [e["time_us"] for e in trace]
        self.assertEqual(times, sorted(times))
        for address, size in addresses:
            actions = [e["action"] for e in trace if e["addr"] == address and e["action"] in ("alloc", "free_requested", "free_completed")]
            self.assertEqual(actions[:3], ["alloc", "free_requested", "free_completed"])
            # One address may be handed out again.
            self.assertGreaterEqual(max(e["size"] for e in trace if e["addr"] == address and e["action"] == "alloc"), size)

    @fixture.only("compiled", "a library in Rust has no frames of Python's to tell")
    def test_frames_name_who_asked(self):
        torch.cuda.memory._record_memory_history(max_entries=1000, stacks="python", clear_history=True)
        tensor = fixture.new(33 * MIB)
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        entry = next(e for e in trace if e["action"] == "alloc" and e["addr"] == tensor.data_ptr())
        self.assertIn("test_frames_name_who_asked", [frame["name"] for frame in entry["frames"]])

    def test_the_ring_keeps_the_last_entries(self):
        torch.cuda.memory._record_memory_history(max_entries=10, clear_history=True)
        for _ in range(50):
            fixture.new(2048)
        last = fixture.new(4096)
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        self.assertLessEqual(len(trace), 12)
        self.assertIn(last.data_ptr(), [e.get("addr") for e in trace])

    def test_recording_stops(self):
        torch.cuda.memory._record_memory_history(max_entries=1000)
        fixture.new(MIB)
        torch.cuda.memory._record_memory_history(enabled=None)
        before = len(torch.cuda.memory._snapshot()["device_traces"][0])
        fixture.new(MIB)
        self.assertLessEqual(len(torch.cuda.memory._snapshot()["device_traces"][0]), before + 1)

    def test_the_visualiser_opens_a_dump(self):
        torch.cuda.memory._record_memory_history(max_entries=100_000, clear_history=True)
        whole, kept = fixture.stitched(512 * MIB)
        del whole
        small = [torch.randn(n, device="cuda") for n in (10, 1000, 500_000)]
        with fixture.folder() as out:
            path = os.path.join(out, "dump.pickle")
            torch.cuda.memory._dump_snapshot(path)
            with open(path, "rb") as f:
                data = pickle.load(f)
        self.assertIn("snapshot.pickle", viz.trace_plot(data))
        self.assertIn("snapshot.pickle", viz.trace_plot(data, plot_segments=True))
        self.assertIn("snapshot.pickle", viz.segment_plot(data))
        self.assertIn("Legend", viz.segsum(data))
        self.assertIn("64.0MiB", viz.trace(data))
        for draw in (viz.segments, viz.memory):
            self.assertIn("active_allocated", draw(data, format_flamegraph=lambda lines: lines))
        viz.compare(data["segments"], data["segments"], format_flamegraph=lambda lines: lines)
        del kept, small
