"""Workers whose memory does not fit together share one GPU under `glake serve`, on one trace for all policies, beside
`glake plan`.

    python benches/gpu/serve.py [--setup six|ten] [--only PART,...] [--seeds 1,2,3] [--out DIR] [--device cuda]
    python benches/gpu/serve.py --read FILE...            pools kept rows and prints the table again

Parts, done in this order:

    calibrate     what one worker does alone, and two; written to DIR/calibration-SETUP.toml, for plan
    plan          `glake plan` with it, 20 seeds that are none of the runs', each as long as the runs that are pooled
    glake         the trace under `glake serve`
    no-preempt    the same where no busy worker is parked; the same processes serve both
    overload      each worker answers --streams requests without pause, with all resident and within the budget
    kill-agent    the trace, and the agent is killed three times
    kill-workers  workers are killed while they shrink, refill, and are parked
    per-tensor    whole workers leave once their requests have ended, copied tensor by tensor to pinned buffers
    start-stop    whole workers: a process ends, another starts, with weights from safetensors in memory
    density       by plan alone, no GPU: how many workers of 12+2 GiB in 65 GiB have their first token within 2 s

six: 6 x (8+1) GiB in 23 GiB, 1 request a second, 120 s. ten: 10 x (6+1) GiB in 33, 0.5 a second, 300 s. Lengths are
Azure's (2023), halved.

A worker is a Llama in plain torch, bfloat16, random weights; its requests run beside each other, as in plan's model; a
step takes --decode-ms at least (12, as plan has it; 0: as long as it takes). The budget is the GPU's memory above what
is used before the script begins, every 50 ms.

--device sim:h200x4@/FOLDER: simulated workers whose sizes are divided by --scale; it needs neither GPU nor torch.
Writes DIR/serve.jsonl. Ends with 1 if a bar was missed.
"""

import pathlib, shutil, sys, tempfile

import launch
from sharing import bars, client, planned
from sharing.runs import Runs
from sharing.setup import Setup, text

PARTS = [
    "calibrate",
    "plan",
    "glake",
    "no-preempt",
    "overload",
    "kill-agent",
    "kill-workers",
    "per-tensor",
    "start-stop",
    "density",
]
# count, weights, kv, budget, rate, duration, and how many runs are pooled beside a plan
SETUPS = {"six": (6, 8, 1, 23, 1.0, 120, 3), "ten": (10, 6, 1, 33, 0.5, 300, 1)}


def arguments():
    p = launch.Parser(__doc__, PARTS, default="calibrate,plan,glake,no-preempt")
    p.add_argument("--setup", choices=SETUPS, default="six")
    p.add_argument("--seeds", default="1", help="of the trace, a run each, with commas")
    p.add_argument("--rate", type=float, help="requests a second in all")
    p.add_argument("--duration", type=float, help="seconds of the trace")
    p.add_argument("--lengths", type=float, default=0.5, help="times the tokens of each request")
    p.add_argument("--zipf", type=float, default=0.0, help="whom requests are for: the n-th worker as often as 1 / n^S")
    p.add_argument("--trace", default=str(client.SAMPLE), help="Azure's rows, whose lengths are drawn from")
    p.add_argument("--decode-ms", type=float, default=12.0)
    p.add_argument("--streams", type=int, default=4, help="of each worker in overload")
    p.add_argument("--overload-s", type=float, default=45, help="seconds of each half of overload")
    p.add_argument("--device", default="cuda", help="cuda, or sim:TOPOLOGY@/FOLDER")
    p.add_argument("--scale", type=int, default=64, help="of a simulated GPU")
    p.add_argument("--time-limit", type=float, default=570)
    p.add_argument("--read", nargs="+", metavar="FILE", help="rows to print the table of")
    a = p.parse_args()
    try:
        a.seeds = [int(seed) for seed in a.seeds.split(",")]
    except ValueError:
        p.error(f"--seeds: {a.seeds!r} is no list of numbers with commas")
    if a.device != "cuda" and not (a.device.startswith("sim") and "@/" in a.device):
        p.error(f"--device: {a.device!r} is neither cuda nor sim:TOPOLOGY@/FOLDER")
    count, weights, kv, budget, rate, duration, a.pooled = SETUPS[a.setup]
    a.rate, a.duration = a.rate or rate, a.duration or duration
    a.sizes = Setup(count, weights, kv, budget, a.device, a.scale if a.device != "cuda" else 1, a.decode_ms)
    return a


def density(a, log):
    """Plans how many workers one GPU could serve, with calibrated speeds where DIR has them."""
    rows, folder = [], pathlib.Path(a.out)
    node = '[node]\nbudget = "65GiB"\n[[worker]]\nname = "w01"\nweights = "12GiB"\nkv = "2GiB"\n'
    workers = text(folder / "density.toml", node)
    options = {}
    kept = [row for _, each in launch.runs(folder / "serve.jsonl") for row in each]
    if any(row.get("run") == "calibrate" for row in kept):
        options["calibration"] = text(folder / "calibration-density.toml", planned.calibration(kept, None, ["w01"]))
    for contention in ("on", "off"):
        asked = {
            "assign": "zipf:0",
            "rate": 0.02,
            "duration": 600,
            "seeds": 5,
            "slo": 2,
            "lengths": a.lengths,
            "contention": contention,
            "policy": "glake,glake-no-preempt,drain-per-tensor,start-stop",
            **options,
        }
        rows += [{"contention": contention, **row} for row in planned.plan(workers, a.trace, 500, **asked)]
    log.add(
        {"run": "density", "calibrated": bool(options), "rows": rows},
        "density: " + ", ".join(f"{row['policy']} {row['density']} ({row['contention']})" for row in rows),
    )


def measure(a, clock):
    if a.only != ["density"] and a.device == "cuda":
        launch.needs_gpus("serve.py")
    log = launch.Log(a.out, "serve.jsonl", clock)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="glake-serve-"))
    runs = Runs(a, log, clock, folder)
    try:
        runs.all()
        if "density" in a.only:
            density(a, log)
    finally:
        runs.end()
        kept = pathlib.Path(a.out, "serve-logs")
        kept.mkdir(exist_ok=True)
        for path in [*folder.glob("*.log"), *folder.glob("node.toml")]:
            shutil.copy(path, kept)
        shutil.rmtree(folder, ignore_errors=True)
    return log.rows, runs.left_out


def main():
    a, left_out = arguments(), []
    if a.read:
        try:
            rows = [row for path in a.read for _, rows in launch.runs(path) for row in rows]
        except OSError as error:
            sys.exit(f"serve.py: --read: {error.filename}: {error.strerror}: name files that --out DIR has, DIR/serve.jsonl")
    else:
        rows, left_out = measure(a, launch.Clock(a.time_limit))
    found = bars.figures(rows)
    missed = [one for one in found if not bars.meets(one)]
    print("\n" + bars.table(found), flush=True)
    if left_out:
        print(f"left out for want of time, or because what they need failed: {', '.join(left_out)}")
    print(f"serve: {len(found)} figures, {len(missed)} bars missed", flush=True)
    sys.exit(1 if missed or left_out or not found else 0)


if __name__ == "__main__":
    main()
