"""Training over graphs of many sizes: what the allocators reserve for what is live, and the time a step.

    python benches/gpu/graphs.py --out DIR                      (a GPU of 141 GB)
    python benches/gpu/graphs.py --scale 0.25 --steps 100       (a smaller one, sooner)

One graph a step, layers of graph convolution and of attention over each node's edges, forward, backward, optimizer; written
with gathers, scatters and index_add of torch alone. The numbers of nodes and edges are drawn anew for every step from a
distribution with a heavy tail, so that hardly any size comes twice. One process a run, the same seed in all; allocators are
interleaved, rounds go side by side on all visible GPUs. Writes DIR/graphs.jsonl. Ends with 1 if a run of glake fails, or its
losses are further from native's than those from each other.
"""
import sys

import launch, table

WORKLOAD, STEPS = "graphs", 300
LEAST_NODES, MOST_NODES, TAIL = 4_000, 250_000, 1.1
LEAST_DEGREE, MOST_DEGREE = 4, 24


def sizes(scale, random, steps=STEPS):
    """(nodes, edges) of each step: nodes by Pareto's distribution, most of them few, and edges for each node evenly."""
    found = []
    for _ in range(steps):
        nodes = min(LEAST_NODES * random.paretovariate(TAIL), MOST_NODES) * scale
        found.append((max(int(nodes), 2), max(int(nodes * random.uniform(LEAST_DEGREE, MOST_DEGREE)), 2)))
    return found


def summary(rows, allocs):
    """(lines of text, bars missed)."""
    form = "{:16} {:>4} {:>22} {:>22} {:>22} {:>14} {:>24} {:>8} {:>11}"
    lines = [form.format("allocator", "runs", "reserved GiB, peak", "live GiB, peak", "taken GiB, peak", "reserved/live", "ms a step", "retries", "losses off")]
    for alloc in allocs:
        mine = [row for row in rows if row["alloc"] == alloc]
        good = [{**row, "mean_ms": row["steady_s"] / max(len(row["losses"]) - 2, 1) * 1e3, "ratio": row["reserved_peak"] / row["active_peak"]}
                for row in mine if table.good(row)]
        figure = lambda name, **how: table.figures(good, alloc, name).text(**how)
        apart = table.losses_apart(rows, alloc)
        lines.append(form.format(
            alloc, str(len(good)) if len(good) == len(mine) else f"{len(good)}/{len(mine)}",
            *[figure(f"{name}_peak", scale=table.GIB) for name in ("reserved", "active", "taken")], figure("ratio"), figure("mean_ms"),
            figure("retries", form="{:.0f}"), f"{apart[1] if alloc == 'native' else apart[0]:.3f}" if good and table.losses(rows, "native") else "-"))
    found = []
    for alloc in sorted({row["alloc"] for row in rows if row["alloc"].startswith("glake")}):
        failed = [row for row in rows if row["alloc"] == alloc and not table.good(row)]
        found += [table.bar(f"{alloc}: every run completes", (failed[0].get("error") or failed[0]["oom"])[:120], False)] if failed else []
        found += table.loss_bars(rows, alloc)
    return [*lines, table.verdicts(found)], sum(not one["ok"] for one in found)


def arguments():
    p = launch.Parser(__doc__)
    p.add_argument("--allocs", default="native,expandable,glake", help="comma-separated, of " + ", ".join(launch.ALLOCS))
    p.add_argument("--scale", type=float, default=1.0, help="of the numbers of nodes and edges: memory grows as they do")
    p.add_argument("--steps", type=int, help=f"only the first of {STEPS} steps")
    p.add_argument("--runs", type=int, default=3)
    p.add_argument("--time-limit", type=float, default=900, help="seconds in all: no run is started that would pass it")
    p.add_argument("--run-limit", type=float, default=150, help="seconds for one run")
    p.add_argument("--read", nargs="+", metavar="FILE", help="no runs: the table of these JSON lines")
    a = p.parse_args()
    a.allocs = a.allocs.split(",")
    unknown = [alloc for alloc in a.allocs if alloc not in launch.ALLOCS]
    if unknown:
        p.error(f"--allocs: {', '.join(unknown)} is none of {', '.join(launch.ALLOCS)}")
    if not 0 < a.scale <= 16:
        p.error(f"--scale: {a.scale} is not above 0 and at most 16")
    return a


def measure(a, clock):
    visible = launch.needs_gpus("graphs.py")
    log = launch.Log(a.out, "graphs.jsonl", clock)
    extra = ["--scale", str(a.scale), *(["--steps", str(a.steps)] if a.steps else [])]

    def round_of(number, gpus):
        for alloc in a.allocs:
            if clock.left() < 25:
                log.say(f"{alloc} run {number}: left out, the time limit is near")
                continue
            row = launch.harness(WORKLOAD, alloc, gpus, min(a.run_limit, clock.left()), extra)
            if table.good(row):
                text = f"{row['reserved_peak'] / table.GIB:.2f} GiB reserved for {row['active_peak'] / table.GIB:.2f} live"
            else:
                text = "FAILED: " + (row.get("error") or row["oom"])
            log.add({**row, "run": number}, f"{alloc:12} run {number} on GPU {gpus[0]}: {text} ({row['process_s']:.0f} s)")

    launch.share_out(list(range(1, a.runs + 1)), visible, round_of)
    return log.rows


def main():
    a = arguments()
    clock = launch.Clock(a.time_limit)
    rows = [row for path in a.read for _, rows in launch.runs(path) for row in rows] if a.read else measure(a, clock)
    lines, missed = summary(rows, list(dict.fromkeys([*a.allocs, *(row["alloc"] for row in rows)])))
    print("\n" + "\n".join(lines))
    print(f"graphs: {len(rows)} runs in {clock.spent():.0f} s, {missed} bars missed", flush=True)
    sys.exit(1 if missed or not rows else 0)


if __name__ == "__main__":
    main()
