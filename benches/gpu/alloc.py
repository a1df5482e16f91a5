"""torch.empty and its free, of a size that the allocator has cached: nanoseconds, native and glake in turn.

    python benches/gpu/alloc.py --allocs native,glake --repeat 3 --out DIR

One process an allocator, interleaved; in each, every size has many rounds of many pairs, the sizes in turn. The figure is the
median of the rounds; the table has the median over the processes. Bar: at most 1.05 of native's. Writes DIR/alloc.jsonl.
"""
import argparse, gc, json, statistics, sys, time

import launch
from table import Sample

SIZES = {"512 B": 512, "2 MiB": 2 << 20, "64 MiB": 64 << 20}
BAR = 1.05


def measure(alloc, rounds, pairs):
    """Runs in a process of its own; prints one JSON line."""
    import torch
    from harness import GLAKE

    if alloc in GLAKE:
        import glake
        glake.enable(**GLAKE[alloc])
    kept = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(200)]  # a pool that is in use
    del kept[::2]
    torch.cuda.synchronize()
    times = {name: [] for name in SIZES}
    empty, byte, clock = torch.empty, torch.uint8, time.perf_counter_ns
    gc.disable()
    for number in range(rounds + 3):
        for name, size in SIZES.items():
            begin = clock()
            for _ in range(pairs):
                empty(size, dtype=byte, device="cuda")
            if number >= 3:
                times[name].append((clock() - begin) / pairs)
    print(json.dumps({"alloc": alloc, "ns": {name: round(statistics.median(t), 1) for name, t in times.items()},
                      "least_ns": {name: round(min(t), 1) for name, t in times.items()}}))


def arguments():
    p = launch.Parser(__doc__)
    p.add_argument("--allocs", default="native,glake")
    p.add_argument("--repeat", type=int, default=3, help="processes an allocator")
    p.add_argument("--rounds", type=int, default=60)
    p.add_argument("--pairs", type=int, default=4000)
    p.add_argument("--time-limit", type=float, default=300)
    p.add_argument("--measure", metavar="ALLOC", help=argparse.SUPPRESS)
    return p.parse_args()


def main():
    a = arguments()
    if a.measure:
        return measure(a.measure, a.rounds, a.pairs)
    visible = launch.needs_gpus("alloc.py")
    clock = launch.Clock(a.time_limit)
    log = launch.Log(a.out, "alloc.jsonl", clock)
    allocs, failed = a.allocs.split(","), 0
    for number in range(1, a.repeat + 1):
        for alloc in allocs:
            command = [sys.executable, __file__, "--measure", alloc, "--rounds", str(a.rounds), "--pairs", str(a.pairs)]
            rows, error = launch.call(command, visible[:1], min(90, clock.left()))
            failed += bool(error)
            log.add({**(rows[-1] if rows else {"alloc": alloc}), "run": number, "error": error},
                    f"{alloc:16} run {number}: " + (error or "  ".join(f"{name} {ns:.0f} ns" for name, ns in rows[-1]["ns"].items())))
    print(f"\n{'torch.empty + free':20}" + "".join(f"{alloc:>26}" for alloc in allocs))
    for name in SIZES:
        found = {alloc: Sample([r["ns"][name] for r in log.rows if r["alloc"] == alloc and "ns" in r]) for alloc in allocs}
        line = f"{name:20}" + "".join(f"{sample.text('{:.0f}') + ' ns':>26}" for sample in found.values())
        if found[allocs[0]].known:
            for alloc in allocs[1:]:
                ratio = found[alloc].median / found[allocs[0]].median
                failed += not ratio <= BAR
                line += f"   {alloc} {ratio:.3f} x {'ok' if ratio <= BAR else 'MISSED'}"
        print(line, flush=True)
    print(f"alloc: {clock.spent():.0f} s", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
