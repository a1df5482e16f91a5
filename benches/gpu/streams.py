"""Two training jobs on two streams of one process (wavelet_bert) beside one job alone (wavelet_bert_single).

    python benches/gpu/streams.py --allocs native,glake,glake-wait --runs 3 --out DIR

Throughput is steps a second in the window in which all jobs run; the bar is 1.1 of one job's under glake. Reserved and taken
memory stand beside one job's. Rounds go side by side on all visible GPUs. Writes DIR/streams.jsonl.
"""
import sys

import launch, table

ONE, TWO, BAR = "wavelet_bert_single", "wavelet_bert", 1.1


def summary(rows, allocs):
    """(lines of text, bars missed)."""
    form = "{:16} {:>24} {:>24} {:>8} {:>22} {:>22}  {}"
    lines = [form.format("allocator", "one job, steps/s", "two jobs, steps/s", "ratio", "reserved GiB 1 / 2", "taken GiB 1 / 2", "GPU waits ms")]
    missed = 0
    for alloc in allocs:
        mine = [{**row, "speed": row["window_steps"] / row["window_s"]} for row in rows if row["alloc"] == alloc and table.good(row)]
        one, two = ([row for row in mine if row["workload"] == name] for name in (ONE, TWO))
        speeds = [table.figures(part, alloc, "speed") for part in (one, two)]
        if not (speeds[0].known and speeds[1].known):
            lines.append(f"{alloc:16} no pair of runs completed")
            missed += 1
            continue
        ratio = speeds[1].median / speeds[0].median
        memory = [" / ".join(table.figures(part, alloc, name).text(scale=table.GIB) for part in (one, two)) for name in ("reserved_peak", "taken_peak")]
        verdict = ""
        if alloc.startswith("glake"):
            missed += ratio < BAR
            verdict = "ok" if ratio >= BAR else f"MISSED (at least {BAR})"
        lines.append(form.format(alloc, speeds[0].text(), speeds[1].text(), f"{ratio:.3f}", *memory,
                                 f"{table.figures(two, alloc, 'gpu_wait_ms').text('{:.0f}')} {verdict}"))
    return lines, missed


def main():
    p = launch.Parser(__doc__)
    p.add_argument("--allocs", default="native,glake,glake-wait")
    p.add_argument("--runs", type=int, default=3)
    p.add_argument("--time-limit", type=float, default=900)
    p.add_argument("--run-limit", type=float, default=150)
    a = p.parse_args()
    visible = launch.needs_gpus("streams.py")
    clock = launch.Clock(a.time_limit)
    log, allocs = launch.Log(a.out, "streams.jsonl", clock), a.allocs.split(",")

    def round_of(number, gpus):
        for alloc in allocs:
            for workload in (ONE, TWO):
                if clock.left() < 25:
                    log.say(f"{workload} {alloc} run {number}: left out, the time limit is near")
                    continue
                row = launch.harness(workload, alloc, gpus, min(a.run_limit, clock.left()))
                text = f"{row['window_steps'] / row['window_s']:.2f} steps/s" if table.good(row) else "FAILED: " + (row.get("error") or row["oom"])
                log.add({**row, "run": number}, f"{workload:20} {alloc:12} run {number} on GPU {gpus[0]}: {text} ({row['process_s']:.0f} s)")

    launch.share_out(list(range(1, a.runs + 1)), visible, round_of)
    lines, missed = summary(log.rows, allocs)
    print("\n" + "\n".join(lines))
    print(f"streams: {len(log.rows)} runs in {clock.spent():.0f} s", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
