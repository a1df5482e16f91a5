"""Rows of runs to figures with bars: (what, value, bar, whether the bar is the most)."""

from .steps import FIRST, OURS


def bars(rows):
    by = {row["run"]: row for row in rows if "step_s" in row or row["run"] == "links"}
    if "links" in by:
        yield from of_links(by["links"])
    for name in OURS:
        if name in by:
            yield from of_ours(name, by)
    if "keep" in by:
        yield "keep: first step, cold, of a steady one", by["keep"]["cold_s"] / by["keep"]["step_s"], None, True
        yield from longest("keep", by["keep"])
        for name in ("save-on-cpu", "trl", "torchtune"):
            if by.get(name, {}).get("copied_bytes"):
                yield f"{name}: bytes out, of the unique ones", by[name]["copied_bytes"] / max(by["keep"]["unique_bytes"], 1), None, True
    for name in ("inputs", "hybrid", "hybrid-multi-path", "ddp-hybrid"):
        theirs = "ddp-checkpoint" if name.startswith("ddp-") else "checkpoint"
        if name in by and theirs in by:
            yield from beside_recomputing(name, theirs, by)
    for row in rows:
        if row["run"] in ("exact", "exact-ranks"):
            if row["plain_agrees"]:
                yield f"exact: {row['case']}{': ' * bool(row['why'])}{row['why']}", float(row["same"]), 1.0, False
            else:
                yield f"exact: {row['case']}: left out, {row['why']}", 0.0, None, False
        if row["run"] == "digest":
            # Where nothing came back nothing was shown.
            said = f"digest: {row['preset']}: of what came back"
            yield f"{said}, tensors that differ", float(row["differ"] or not row["compared"]), 0.0, True
            yield f"{said}, GiB compared", row["bytes"] / (1 << 30), None, False
        if row["run"] == "calls":
            yield "us a pack that keeps", row["keeps"], 4, True
            yield "us a pack that offloads", row["offloads"], 15, True
        if row["run"] == "fit":
            yield "fit: step where all fits, of the same without", row["ratio"], 1.01, True
            yield "fit: step of one of two that are alike, of the other", row["alike"], None, True
    yield from under_a_budget([row for row in rows if row["run"] == "budget"])


def memory(ours, theirs):
    return ours["most_bytes"] / max(theirs["most_bytes"], 1)


def called(name, ours):
    """Returns the name of a row's figures; long sequences, and hybrid at a size without bars, carry their tokens in it."""
    is_other = ours["tokens"] >= 131072 or (name.startswith("hybrid") and ours["tokens"] != 16384)
    return f"{name} of {ours['tokens']:,} tokens" if is_other else name


def of_ours(name, by):
    ours, keep = by[name], by.get("keep")
    said = called(name, ours)
    wide = name.endswith("multi-path")
    if keep and not name.startswith("ddp-"):
        # A module's hooks have what it saves, and nothing of the loss.
        unique = keep.get("unique_bytes" if name in ("offload", "multi-path") else "unique_layers_bytes")
        if unique and name in ("offload", "multi-path", "memory", "memory-multi-path"):
            expected = max(unique - ours["narrowed_bytes"], 1)
            yield f"{said}: bytes out, of the unique ones less what goes narrow", ours["step_bytes"] / expected, 1.01, True
        yield f"{said}: step, of keeping", ours["step_s"] / keep["step_s"], None, True
        yield f"{said}: most memory, of keeping", memory(ours, keep), None, True
        yield f"{said}: losses differ by", max(abs(x - y) for x, y in zip(ours["losses"], keep["losses"])), None, True
    if name in ("memory", "memory-multi-path"):
        for theirs, faster in (("save-on-cpu", 2.5), ("trl", 1.3), ("torchtune", 1.3)):
            if theirs in by:
                yield f"{said}: steps, of {theirs}", by[theirs]["step_s"] / ours["step_s"], faster if wide else None, False
                yield f"{said}: most memory, of {theirs}", memory(ours, by[theirs]), 1.05, True
    blind = by.get(name.replace("hybrid", "blind"), {}) if name.startswith("hybrid") else {}
    if blind.get("blind_back_bytes"):
        part = (ours["step_bytes"] + ours["step_bytes_in"]) / (blind["blind_bytes"] + blind["blind_back_bytes"])
        yield f"{said}: steps, of blind copies of {part:.2f} x as many bytes", blind["step_s"] / ours["step_s"], 0.92, False
    if ours["live_host_bytes"]:
        yield f"{said}: pinned host memory, of what is away at the most", ours["pinned_host_bytes"] / ours["live_host_bytes"], 1.08, True
    for way in ("out", "in"):
        rate, alone = ours.get(f"gbps_{way}"), by.get("links", {}).get(f"{'all' if wide else 'one'}_{way}")
        if rate:
            yield f"{said}: GB/s {way} while a queue was busy", rate, None, False
        if rate and alone and not name.startswith("ddp-"):
            bar = 0.93 if name.startswith(("hybrid", "memory")) else None
            yield f"{said}: GB/s {way} while a queue was busy, of {'all links' if wide else 'the link'} alone", rate / alone, bar, False
    ahead = ", host memory pinned before" if ours.get("host_memory") else ""
    yield f"{said}: first step, of a steady one{ahead}", ours["first_s"] / ours["step_s"], 1.5, True
    yield from longest(said, ours)


def longest(said, row):
    """Returns the longest of the steps between the first and the steady ones, which check saves and pin host memory."""
    if len(row["times"]) > 1:
        yield f"{said}: longest of steps 2 to {FIRST}, of a steady one", max(row["times"][1:FIRST]) / row["step_s"], None, True


def of_links(row):
    for which, said in (("one", "its own"), ("all", "all at once"), ("ours", "all, by GLake")):
        for way in ("out", "in"):
            if f"{which}_{way}" in row:
                yield f"links: GB/s {way}, {said}", row[f"{which}_{way}"], None, False


def beside_recomputing(name, theirs, by):
    ours, recomputes = by[name], by[theirs]
    said = called(name, ours)
    if name == "inputs":
        yield f"{said}: step, of checkpoint", ours["step_s"] / recomputes["step_s"], 1.01, True
        yield f"{said}: most memory, of checkpoint", memory(ours, recomputes), 0.75 if ours["tokens"] >= 131072 else None, True
        for others in ("trl-inputs", "hf-offload"):
            if others in by:
                yield f"{said}: most memory, of {others}", memory(ours, by[others]), 1.0, True
                yield f"{said}: steps, of {others}", by[others]["step_s"] / ours["step_s"], None, False
    else:
        # Of two busy ranks each has the links that the other's multi_path would take.
        faster = 1.10 if name.startswith("ddp-") else 1.25 if name.endswith("multi-path") else 1.12
        yield f"{said}: steps, of {theirs}", recomputes["step_s"] / ours["step_s"], faster, False
        yield f"{said}: most memory, of {theirs}", memory(ours, recomputes), 1.03, True


def under_a_budget(rows):
    ours = next((row for row in rows if row["fraction"] is None), None)
    by_hand = [row for row in rows if row["fraction"] is not None]
    for row in by_hand:
        said = "out of memory" if "out_of_memory" in row else f"{row.get('cycle_s', 0):.2f} s of 40 steps"
        yield f"budget: {row['fraction']:.0%} of the layers by hand, {said}, GiB at most", row["most_bytes"] / (1 << 30), None, True
    if ours:
        yield "budget: out of memory", float("out_of_memory" in ours), 0.0, True
        yield "budget: most memory, of the budget", ours["most_bytes"] / ours["budget"], 1.02, True
        fit = [row["cycle_s"] for row in by_hand if "cycle_s" in row and "out_of_memory" not in row and row["most_bytes"] <= 1.02 * ours["budget"]]
        if fit and "cycle_s" in ours:
            yield "budget: 40 steps, of the best fraction within the budget", ours["cycle_s"] / min(fit), 1.05, True
