"""A machine's calibration out of measured rows, and what `glake plan` says with it."""

import json, statistics, subprocess

from .agents import command


def contention(measured):
    """Whether workers that compute slow each other down, as two at once without pace did beside one alone: how much of
    a GPU each of them needs is in the calibration."""
    return "on" if measured["unpaced_pair_ms"] >= 1.5 * measured["unpaced_ms"] else "off"


def calibration(rows, setup, names):
    """The text of a calibration's file: the row of `calibrate`, and other policies' runs where there are some."""
    (measured,) = [row for row in rows if row.get("run") == "calibrate"][-1:]
    gib, moved = 1 << 30, measured["weight_bytes"] / 1e9
    # A switch is a shrink and then a refill, each with what it takes whatever its size.
    fixed = 5e-4
    link = moved / max(measured["refill_s"] - fixed, 1e-3)
    leaving = measured["switch_s"] - measured["refill_s"] - fixed
    parked = measured["parked_s"] - measured["switch_s"]
    text = {
        "refill_gbps": link,
        "shrink_gbps": link,
        "switch_ms": fixed * 1e3,
        "clean_ms_per_gib": max(leaving * 1e3, 0.1) / (measured["share_bytes"] / gib),
        "park_ms": max(parked * 1e3 - measured["decode_ms"] / 2, 1.0),
    }
    for row in rows:
        if row.get("run") == "per-tensor" and row.get("sleep_s"):
            text.update(
                per_tensor_shrink_gbps=moved / row["sleep_s"],
                per_tensor_refill_gbps=moved / row["wake_s"],
                per_tensor_switch_ms=1.0,
            )
        if row.get("run") == "start-stop" and row.get("wake_s"):
            load = max(row["load_s"], 1e-3)
            text.update(
                start_s=max(row["wake_s"] - load, 1e-3), start_gbps=moved / load, stop_s=max(row["sleep_s"], 1e-3)
            )
    lines = [f"{key} = {value:.6g}" for key, value in text.items()]
    for name in names:
        lines += [
            f"[worker.{name}]",
            f"prefill_tok_s = {measured['prefill_tok_s']:.6g}",
            f"decode_ms = {measured['decode_ms']:.6g}",
            f"step_ms = {min(measured['unpaced_ms'], measured['decode_ms']):.6g}",
        ]
    # TOML wants a decimal point in a float.
    return (
        "\n".join(
            line if "=" not in line or any(mark in line.split("= ")[1] for mark in ".e") else line + ".0"
            for line in lines
        )
        + "\n"
    )


def plan(workers, trace, timeout=300, **options):
    """The rows of `glake plan --json`."""
    asked = [command(), "plan", str(workers), str(trace), "--json"]
    for name, value in options.items():
        asked += [f"--{name}", str(value)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"{' '.join(asked)}: {done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def median(values):
    return statistics.median(values) if values else None
