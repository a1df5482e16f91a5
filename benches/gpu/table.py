"""Figures of runs against the project's bars: medians with spread, and ok or MISSED. Pure: rows in, text out.

A row is what harness.py prints. Runs that failed or ran out of memory count against the allocator they ran under.
"""
import statistics

GIB = 1 << 30
SINGLE = ("opt13_LR", "gpt2_full", "convmix")


class Sample:
    """A figure over the runs of one allocator: median, least, greatest."""

    def __init__(self, values):
        self.values = [value for value in values if value is not None]
        self.known = bool(self.values)
        self.median = statistics.median(self.values) if self.known else float("nan")
        self.least, self.greatest = (min(self.values), max(self.values)) if self.known else (float("nan"),) * 2

    def spread(self):
        """(greatest - least) / median."""
        return (self.greatest - self.least) / self.median if self.known and self.median else 0.0

    def text(self, form="{:.2f}", scale=1):
        if not self.known:
            return "-"
        shown = [form.format(value / scale) for value in (self.median, self.least, self.greatest)]
        return shown[0] if shown[1] == shown[2] else f"{shown[0]} ({shown[1]}-{shown[2]})"


def good(row):
    return not row.get("error") and not row.get("oom")


def figures(rows, alloc, name):
    return Sample([row.get(name) for row in rows if row["alloc"] == alloc and good(row)])


def distance(one, other):
    """Returns the greatest difference between two runs' losses at a step."""
    if len(one) != len(other):
        return float("inf")
    return max((abs(a - b) for a, b in zip(one, other)), default=0.0)


def losses(rows, alloc):
    return [row["losses"] for row in rows if row["alloc"] == alloc and good(row)]


def losses_apart(rows, alloc, native="native"):
    """(how far alloc's runs are from native's nearest run at worst, how far two native runs are apart at most)."""
    theirs = losses(rows, native)
    between = max((distance(a, b) for i, a in enumerate(theirs) for b in theirs[:i]), default=0.0)
    ours = [min(distance(one, other) for other in theirs) for one in losses(rows, alloc)] if theirs else []
    return (max(ours) if ours else float("nan")), between


def bar(name, text, holds):
    return {"bar": name, "found": text, "ok": bool(holds)}


def bars(workload, rows):
    """The bars of one workload, each with what was found."""
    allocs = {row["alloc"] for row in rows}
    found = []
    for alloc in sorted(a for a in allocs if a.startswith("glake")):
        failed = [row for row in rows if row["alloc"] == alloc and not good(row)]
        if failed:
            why = failed[0].get("error") or failed[0]["oom"]
            found.append(bar(f"{alloc}: every run completes", f"{len(failed)} failed: {why[:120]}", False))
        if any(row["alloc"] == alloc and good(row) for row in rows):
            found += memory_bars(workload, rows, alloc) + time_bars(rows, alloc) + loss_bars(rows, alloc)
    return found


def memory_bars(workload, rows, alloc):
    use, theirs = figures(rows, alloc, "utilization"), figures(rows, "expandable", "utilization")
    taken, expandable = figures(rows, alloc, "taken_peak"), figures(rows, "expandable", "taken_peak")
    ratio = taken.median / expandable.median if expandable.known else float("nan")
    if workload in SINGLE and alloc in ("glake", "glake-pluggable"):
        found = [bar(f"{alloc}: utilization >= 0.96", f"{use.median:.4f}", use.median >= 0.96)]
        if theirs.known:
            least = theirs.median - 0.01
            found.append(bar(f"{alloc}: utilization >= expandable's - 0.01", f"{use.median:.4f} >= {least:.4f}", use.median >= least))
        return found
    if not expandable.known:
        return []
    if workload.startswith("fsdp_") and alloc != "glake-wait":
        return [bar(f"{alloc}: taken at least 6 % below expandable's", f"{ratio:.3f} x", ratio <= 0.94)]
    if workload == "wavelet_bert":
        most = 0.85 if alloc == "glake-wait" else 1.01
        return [bar(f"{alloc}: taken at most {most} of expandable's", f"{ratio:.3f} x", ratio <= most)]
    return []


def time_bars(rows, alloc):
    ours = figures(rows, alloc, "steady_s")
    others = [s for s in (figures(rows, other, "steady_s") for other in ("native", "expandable")) if s.known]
    if not others or alloc == "glake-wait":
        return []
    ratio = ours.median / min(other.median for other in others)
    most = max(1.01, 1 + ours.spread())
    return [bar(f"{alloc}: steady_s <= 1.01 of the better of the others, or its spread", f"{ratio:.4f} x, spread {ours.spread():.2%}", ratio <= most)]


def loss_bars(rows, alloc):
    ours, between = losses_apart(rows, alloc)
    if not losses(rows, "native"):
        return []
    # Losses are printed to three decimals: one unit of the last is rounding.
    text = f"{ours:.3f} from native's nearest, two native runs {between:.3f}"
    return [bar(f"{alloc}: losses as far from native's as those from each other", text, ours <= between + 0.001)]


COLUMNS = ["allocator", "runs", "utilization", "requested GiB", "taken GiB", "reserved GiB", "steady s", "of the better",
           "lag ms p50 / p95 / max", "GPU waits ms", "stitches", "maps", "losses off"]


def table(rows, allocs):
    """A Markdown table of one workload's runs: medians, with the least and the greatest where they differ."""
    others = [s.median for s in (figures(rows, a, "steady_s") for a in ("native", "expandable")) if s.known]
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for alloc in allocs:
        mine = [row for row in rows if row["alloc"] == alloc]
        if not mine:
            continue
        passed = sum(map(good, mine))
        steady = figures(rows, alloc, "steady_s")
        lag = [figures(rows, alloc, f"completion_lag_ms_{part}").text("{:.1f}") for part in ("p50", "p95", "max")]
        apart = losses_apart(rows, alloc)
        cells = [
            alloc, str(passed) if passed == len(mine) else f"{passed} of {len(mine)}",
            figures(rows, alloc, "utilization").text("{:.4f}"),
            *[figures(rows, alloc, f"{name}_peak").text(scale=GIB) for name in ("requested", "taken", "reserved")],
            steady.text("{:.3f}"), f"{steady.median / min(others):.4f}" if others and steady.known else "-",
            " / ".join(lag) if lag[0] != "-" else "-",
            *[figures(rows, alloc, name).text("{:.0f}") for name in ("gpu_wait_ms", "stitches", "extent_maps")],
            f"{apart[1] if alloc == 'native' else apart[0]:.3f}" if losses(rows, "native") and passed else "-",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdicts(found):
    """The bars as lines of text."""
    return "\n".join(f"{'ok     ' if one['ok'] else 'MISSED '} {one['bar']}: {one['found']}" for one in found)
