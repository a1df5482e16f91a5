"""Replays all traces under GLake and under models of other allocators and compares reserved memory. Needs no GPU.

    python benches/gpu/replay.py [--device sim] [--lags 0,20,100,500] [--out DIR]

Every policy at each lag of the GPU behind the host; GLake once more with borrow = wait; the least limit under which each trace completes, at
the middle lag of 100 ms. GLAKE names the command. Reserved memory is the same on every device and machine; times are not. Writes
DIR/replay.jsonl. Ends with 1 if a bar was missed: GLake reserves at most 1.02 of what expandable segments do, and no trace needs a stream to wait
unless it may borrow so.
"""
import os, sys

import launch

TRACES = launch.REPOSITORY / "tests" / "traces"
MOST = 1.02


def bars(rows):
    """(what, value, most) of each trace, at every lag."""
    ours = [row for row in rows if row["part"] == "every policy" and row["policy"] == "glake"]
    theirs = {row["trace"]: row["reserved_peak"] for row in rows if row["policy"] == "expandable"}
    for row in ours:
        name = f"{row['trace']}, {row['gpu_lag_ms']} ms"
        if row["trace"] in theirs:
            yield f"{name}: reserved, of expandable segments'", row["reserved_peak"] / theirs[row["trace"]], MOST
        yield f"{name}: waits of a stream", row["stream_waits"], 0


def main():
    p = launch.Parser(__doc__)
    p.add_argument("--device", default="sim", help="as glake takes it")
    p.add_argument("--lags", default="0,20,100,500", help="how far the GPU is behind the host, ms")
    p.add_argument("--time-limit", type=float, default=300, help="seconds a part")
    a = p.parse_args()
    traces = [str(path) for path in sorted(TRACES.glob("*.trace.gz"))]
    log, missed = launch.Log(a.out, "replay.jsonl", launch.Clock(float("inf"))), 0
    parts = {
        "every policy": ["--gpu-lag-ms", a.lags],
        "borrow = wait": ["--gpu-lag-ms", a.lags, "--policy", "glake", "--borrow", "wait"],
        "least limits": ["--gpu-lag-ms", "100", "--find-limit"],
    }
    for name, options in parts.items():
        command = [os.environ.get("GLAKE", "glake"), "replay", "--device", a.device, "--json", *options, *traces]
        rows, failed = launch.call(command, None, a.time_limit)
        if failed:
            missed += 1
            log.say(f"FAILED  {name}: {failed}")
        for row in rows:
            told = "" if row["fit_limit"] is None else f", fits in {row['fit_limit'] / 2**30:.2f}"
            lag = "" if row["gpu_lag_ms"] is None else f" {row['gpu_lag_ms']} ms"
            log.add({"part": name, **row}, f"{name:14} {row['trace']:16} {row['policy'] + lag:16} {row['reserved_peak'] / 2**30:6.2f} GiB{told}")
    for what, value, most in bars(log.rows):
        if value > most:
            missed += 1
            log.say(f"MISSED  {what}: {value:.3f} (at most {most})")
    print(f"replay: {len(log.rows)} rows in {log.clock.spent():.0f} s, {missed} bars missed", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
