"""Workloads under several allocators, interleaved (a b c a b c ...): medians with spread, against the project's bars.

    python benches/gpu/compare.py opt13_LR gpt2_full convmix --allocs native,expandable,glake --runs 3 --out DIR
    python benches/gpu/compare.py wavelet_bert --allocs native,expandable,glake,glake-wait --out DIR
    python benches/gpu/compare.py fsdp_llama_full --out DIR          (torchrun over all visible GPUs)
    python benches/gpu/compare.py --read DIR/compare.jsonl           (the table of earlier runs again)

One process a run. Where several GPUs are visible, workloads for one GPU run on all of them side by side, every round of
the interleaving on one GPU from its first allocator to its last. Writes DIR/compare.jsonl and DIR/compare.md. Ends with 1
if a bar was missed.
"""
import pathlib, sys

import launch, table


def arguments():
    p = launch.Parser(__doc__)
    p.add_argument("workloads", nargs="*", metavar="WORKLOAD")
    p.add_argument("--allocs", default="native,expandable,glake", help="comma-separated, of " + ", ".join(launch.ALLOCS))
    p.add_argument("--runs", type=int, default=3)
    p.add_argument("--time-limit", type=float, default=1800, help="seconds in all: no round is started that would pass it")
    p.add_argument("--run-limit", type=float, default=180, help="seconds for one run")
    p.add_argument("--steps", type=int, help="only the first steps of a workload (for a quick look: bars are for all steps)")
    p.add_argument("--one-gpu", action="store_true", help="workloads for one GPU on the first GPU only")
    p.add_argument("--read", nargs="+", metavar="FILE", help="no runs: the table of these JSON lines")
    a = p.parse_args()
    a.allocs = a.allocs.split(",")
    unknown = [alloc for alloc in a.allocs if alloc not in launch.ALLOCS]
    if unknown:
        p.error(f"--allocs: {', '.join(unknown)} is none of {', '.join(launch.ALLOCS)}")
    if not a.workloads and not a.read:
        p.error("name a workload, or --read FILE")
    return a


def measure(a, clock):
    visible = launch.needs_gpus("compare.py")
    log = launch.Log(a.out, "compare.jsonl", clock)
    extra = ["--steps", str(a.steps)] if a.steps else []
    longest = {}

    def round_of(one, gpus):
        workload, number = one
        for alloc in a.allocs:
            need = longest.get((workload, alloc), 0)
            if clock.left() < max(need, 15):
                log.say(f"{workload} {alloc} run {number}: left out, {clock.left():.0f} s of the time limit are left")
                continue
            row = launch.harness(workload, alloc, gpus, min(a.run_limit, clock.left()), extra)
            longest[workload, alloc] = max(need, row["process_s"])
            row["run"] = number
            if table.good(row):
                text = f"utilization {row['utilization']:.4f}  taken {row['taken_peak'] / table.GIB:.2f} GiB  steady {row['steady_s']:.3f} s"
            else:
                text = "FAILED: " + (row.get("error") or row["oom"])
            log.add(row, f"{workload:16} {alloc:12} run {number} on GPU {','.join(gpus):8} {text}  ({row['process_s']:.0f} s)")

    rounds = [(workload, number) for number in range(1, a.runs + 1) for workload in a.workloads]
    together = [one for one in rounds if one[0].startswith("fsdp_")]
    apart = [one for one in rounds if not one[0].startswith("fsdp_")]
    for one in together:
        round_of(one, visible)
    if apart:
        used = visible[:1] if a.one_gpu else visible
        if len(used) > 1:
            log.say(f"rounds of workloads for one GPU run side by side on {len(used)} GPUs")
        launch.share_out(apart, used, round_of)
    return log.rows


def main():
    a = arguments()
    clock = launch.Clock(a.time_limit)
    if a.read:
        rows = [row for path in a.read for _, rows in launch.runs(path) for row in rows]
    else:
        rows = measure(a, clock)
    text, missed = [], 0
    for workload in dict.fromkeys(row["workload"] for row in rows):
        mine = [row for row in rows if row["workload"] == workload]
        found = table.bars(workload, mine)
        missed += sum(not one["ok"] for one in found)
        allocs = dict.fromkeys([*a.allocs, *(row["alloc"] for row in mine)])
        text += [f"### {workload}", "", table.table(mine, allocs), "", "```text", table.verdicts(found), "```", ""]
    text = "\n".join(text)
    print("\n" + text, flush=True)
    if not a.read:
        pathlib.Path(a.out, "compare.md").write_text(text)
        print(f"compare: {len(rows)} runs in {clock.spent():.0f} s, {missed} bars missed", flush=True)
    sys.exit(1 if missed or not rows else 0)


if __name__ == "__main__":
    main()
