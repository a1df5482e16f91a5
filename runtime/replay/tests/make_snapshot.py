"""Writes snapshot.pickle, a small file of the shape that torch.cuda.memory._dump_snapshot writes, without torch.

    python runtime/replay/tests/make_snapshot.py [OUT.pickle] [--entries N]

Two devices, two streams, private frames, an expandable segment, blocks that are older than the history (one is freed
in it, one lives on, one waits for another stream) and a free that is completed later than it was requested. With
--entries, the history is followed by that many allocations and frees, to measure reading.
"""
import argparse
import pathlib
import pickle

MIB = 1 << 20
BASE = 0x7F3A40000000
SIDE = 0x5570C0FFEE00  # a stream is the address of its handle; the default stream is 0


def frames(depth):
    # torch shares the list of a call site between all events of that site.
    return [{"name": f"layer_{i}", "filename": f"/opt/model/layers/{i}.py", "line": 40 + i} for i in range(depth)]


def entry(action, addr, size, time_us, stream=0, site=None):
    where = {"device_free": addr} if action == "oom" else {"addr": addr}
    return {
        "action": action, **where, "size": size, "stream": stream, "time_us": time_us,
        "compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0), "frames": site or [],
    }


def block(address, size, requested, state):
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": []}


def segment(address, total, stream, blocks, kind, expandable=False, device=0):
    active = sum(b["size"] for b in blocks if b["state"].startswith("active"))
    return {
        "device": device, "address": address, "total_size": total, "allocated_size": active, "active_size": active,
        "requested_size": sum(b["requested_size"] for b in blocks), "stream": stream, "segment_type": kind,
        "segment_pool_id": (0, 0), "is_expandable": expandable, "frames": [], "blocks": blocks,
    }


def snapshot(entries):
    site, start = frames(24), 1_764_000_000_000_000
    large, small = BASE, BASE + 64 * MIB
    history = [
        # Allocated before the history began:
        entry("free_requested", large, 6 * MIB, start, site=site),
        entry("free_completed", large, 6 * MIB, start + 1, site=site),
        entry("segment_alloc", small, 2 * MIB, start + 4, site=site),
        entry("alloc", small, 700, start + 5, site=site),
        entry("alloc", large, 5 * MIB + 100, start + 9, SIDE, site),
        # Used on another stream: completed later than requested.
        entry("free_requested", large, 5 * MIB + 100, start + 12, SIDE, site),
        entry("alloc", small + 1024, 4096, start + 15, site=site),
        entry("free_completed", large, 5 * MIB + 100, start + 30, SIDE, site),
        entry("oom", 3 * MIB, 900 * MIB, start + 31, site=site),
        entry("snapshot", 0, 0, start + 40),
    ]
    for i in range(entries // 3):
        at = start + 50 + 3 * i
        history += [entry("alloc", large, 2 * MIB + i, at, site=site),
                    entry("free_requested", large, 2 * MIB + i, at + 1, site=site),
                    entry("free_completed", large, 2 * MIB + i, at + 2, site=site)]
    blocks = [
        block(large, 8 * MIB, 0, "inactive"),
        block(large + 8 * MIB, 3 * MIB, 3 * MIB - 12, "active_allocated"),  # older than the history
        block(large + 11 * MIB, MIB, MIB, "active_pending_free"),  # older, and waits for another stream
        block(large + 12 * MIB, 8 * MIB, 0, "inactive"),
    ]
    little = [
        block(small, 1024, 700, "active_allocated"),
        block(small + 1024, 4096, 4096, "active_allocated"),
        block(small + 5120, 2 * MIB - 5120, 0, "inactive"),
    ]
    return {
        "segments": [segment(large, 20 * MIB, 0, blocks, "large", expandable=True),
                     segment(small, 2 * MIB, 0, little, "small")],
        "device_traces": [history, [entry("alloc", BASE, 512, start + 2), entry("snapshot", 0, 0, start + 3)]],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "max_split_size": -1,
            "garbage_collection_threshold": 0.0, "expandable_segments": True, "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False, "pinned_use_cuda_host_register": False, "roundup_power2_divisions": {},
        },
        "external_annotations": [{"device": 0, "name": "step 1", "stage": "START", "time_us": start + 3}],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", default=pathlib.Path(__file__).with_name("snapshot.pickle"))
    parser.add_argument("--entries", type=int, default=0)
    args = parser.parse_args()
    with open(args.out, "wb") as file:
        pickle.dump(snapshot(args.entries), file, protocol=4)
