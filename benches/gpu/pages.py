"""Writes the tables and charts of docs/benchmarks from the rows in docs/benchmarks/results.

    python3 benches/gpu/pages.py                      # rewrites what stands between <!-- table NAME … --> and <!-- end -->
    python3 benches/gpu/pages.py --check              # writes nothing; says which pages differ, and ends with 1 if any does
    python3 benches/gpu/pages.py --commit a1b2c3d     # names the commit of runs whose first row names none, then rewrites

NAME.jsonl is what NAME.py of this folder writes to its --out: a first row with machine, date, commit and command, then rows. A second word
in the marker chooses one of several tables of a file. Where there is no NAME.jsonl, the page says that no rows are kept. Charts lie beside
the pages. Standard library only: the same rows give the same bytes on any machine.
"""
import argparse, html, json, pathlib, re, sys, textwrap

import graphs, launch, serving, streams, table
import sharing.bars

DOCS = launch.REPOSITORY / "docs" / "benchmarks"
MARKED = re.compile(r"^(<!-- table (\w+)(?: (\w+))? -->\n).*?^(<!-- end -->)", re.DOTALL | re.MULTILINE)
GIB, MIB = 1 << 30, 1 << 20


def markdown(head, rows):
    """A table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def number(value):
    """Four digits of a figure, as a person writes it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return json.dumps(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def bars(rows):
    """What scripts with bars write: what, value, bar, whether the bar is the most, and what stands beside it."""
    # A run in parts tells some figures again: the last ones count.
    rows = list({(row.get("scenario", place), row["what"]): row for place, row in enumerate(rows) if "what" in row}.values())
    lines, several = [], len({row.get("scenario") for row in rows}) > 1
    for row in rows:
        value, bar, most = row["value"], row["bar"], row.get("most", False)
        met = bar is None or (value <= bar if most else value >= bar)
        said = "" if bar is None else f"{'at most' if most else 'at least'} {number(bar)}" + ("" if met else ": **missed**")
        beside = ", ".join(f"{name} {number(each)}" for name, each in row.items() if name not in ("scenario", "what", "value", "bar", "most"))
        first = [row.get("scenario", "")] if several else []
        lines.append([*first, row["what"].strip(), number(value), said, beside])
    return markdown([*(["scenario"] if several else []), "what", "figure", "bar", "beside it"], lines)


def links(rows):
    """What links.py writes: a copy's row of `glake bench copy` with what it is measured by."""
    def beside(row):
        if "engine_gbps" in row:
            return f"native {row['native_gbps']:.1f}, GLake {row['engine_gbps']:.1f}, limit {row['limit_gbps']:.1f} GB/s over {row['paths']} links"
        return ", ".join(f"{name} {number(row[name])}" for name in ("native_us", "engine_us", "alone_us", "beside_p99_us") if name in row)
    return bars([{"what": row["what"], "value": row["value"], "bar": row["bar"], "most": row.get("most", False), "told": beside(row)} for row in rows])


def text(summary):
    """A table that a script makes for the terminal."""
    def render(rows):
        lines = summary(rows, list(dict.fromkeys(row["alloc"] for row in rows)))[0]
        return ["```text", *"\n".join(lines).split("\n"), "```"]
    return render


def compare(rows):
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        mine = [row for row in rows if row["workload"] == workload]
        lines += [f"**{workload}**", "", *table.table(mine, list(dict.fromkeys(row["alloc"] for row in mine))).split("\n"), "",
                  "```text", *table.verdicts(table.bars(workload, mine)).split("\n"), "```", ""]
    return lines[:-1]


def alloc(rows):
    good = [row for row in rows if "ns" in row]
    allocs = list(dict.fromkeys(row["alloc"] for row in good))
    sample = lambda name, each: table.Sample([row["ns"][name] for row in good if row["alloc"] == each])
    lines = []
    for name in good[0]["ns"]:
        base = sample(name, allocs[0]).median
        lines.append([name, *[sample(name, each).text("{:.0f}") for each in allocs], *[f"{sample(name, each).median / base:.3f}" for each in allocs[1:]]])
    return markdown(["size", *[f"{each}, ns" for each in allocs], *[f"{each}, of {allocs[0]}" for each in allocs[1:]]], lines)


def batch(rows):
    of = lambda each, answer: ", ".join(str(n) for n in sorted({row["batch"] for row in rows if row["alloc"] == each and row["answer"] == answer})) or "-"
    return markdown(["allocator", "trains with", "not with"], [[each, of(each, "fits"), of(each, "out of memory")] for each in dict.fromkeys(row["alloc"] for row in rows)])


def preload(rows):
    return markdown(["copy", "real, us", "hooked, us", "added, us", "bar"], [
        [f"{row['direction']} {row['bytes'] >> 10} KiB{', with its wait' if row['synced'] else ''}", f"{row['real_us']:.2f}", f"{row['hooked_us']:.2f}",
         f"{row['added_us']:+.2f}", f"at most {row['bar_us']}" + ("" if row["added_us"] <= row["bar_us"] else ": **missed**")] for row in rows])


def foreign(rows):
    roles = list(rows[0]["gbps"])
    return markdown(["memory", "MiB", "way", *[f"{role}, GB/s" for role in roles], "bars"], [
        [row["memory"], row["bytes"] // MIB, row["direction"], *[f"{row['gbps'][role]:.1f}" if row["gbps"][role] else "-" for role in roles],
         "; ".join(row["bars"]).replace("MISSED", "**missed**")] for row in rows])


def house(rows):
    return markdown(["part", "what", "old", "new", "new of old", "noise", "outcome"], [
        [row["part"], row["what"], number(row["old"]), number(row["new"]), f"{row['ratio']:.3f}", f"{row['noise']:.1%}", row["outcome"].replace("WORSE", "**worse**")]
        for row in {(row["part"], row["what"]): row for row in rows if "ratio" in row}.values()])


class Replays:
    """The rows of replay.py by trace, policy and lag."""

    def __init__(self, rows):
        self.rows = rows
        self.traces = list(dict.fromkeys(row["trace"] for row in rows))

    def one(self, part, trace, policy, lag=None):
        for row in self.rows:
            if (row["part"], row["trace"], row["policy"]) == (part, trace, policy) and lag in (None, row["gpu_lag_ms"]):
                return row
        raise KeyError(f"there is no row of {policy} on {trace}: {part}, lag {lag}")

    def lags(self):
        return sorted({row["gpu_lag_ms"] for row in self.rows if row["part"] == "every policy" and row["policy"] == "glake"})


POLICIES = ["glake", "caching", "expandable", "gmlake"]


def replay_reserved(rows):
    found, lines = Replays(rows), []
    for trace in found.traces:
        each = {policy: found.one("every policy", trace, policy, 100 if policy == "glake" else None) for policy in POLICIES}
        lines.append([trace, f"{each['glake']['requested_peak'] / GIB:.2f}", *[
            ("**{:.2f}**" if policy == "glake" else "{:.2f}").format(each[policy]["reserved_peak"] / GIB) for policy in POLICIES],
            number(each["glake"]["extent_maps"]), number(each["gmlake"]["extent_maps"])])
    return markdown(["trace", "live", "GLake", "caching", "expandable", "gmlake", "GLake's mappings", "gmlake's"], lines)


def replay_lag(rows):
    found, lines = Replays(rows), []
    def row(part, trace, name):
        each = [found.one(part, trace, "glake", lag) for lag in found.lags()]
        return [trace, name, *[f"{one['reserved_peak'] / GIB:.2f}, {one['utilization']:.3f}" for one in each],
                " / ".join(number(one["stitches"]) for one in each), " / ".join(number(one["stream_waits"]) for one in each)]
    for trace in found.traces:
        lines += [row("every policy", trace, "completed"), row("borrow = wait", trace, "wait")]
    return markdown(["trace", "`pool.borrow`", *[f"lag {lag} ms" for lag in found.lags()], "stitches", "waits of streams"], lines)


def replay_limits(rows):
    found = Replays(rows)
    def cell(trace, policy):
        row = found.one("least limits", trace, policy)
        return f"{row['fit_limit'] / GIB:.2f}, {row['fit_limit'] / row['requested_peak']:.3f}"
    return markdown(["trace", *POLICIES], [[trace, *[cell(trace, policy) for policy in POLICIES]] for trace in found.traces])


def replay_chart(rows):
    """Live memory and what each policy reserves."""
    found = Replays(rows)
    groups = {trace: [found.one("every policy", trace, "glake", 100)["requested_peak"] / GIB, *[
        found.one("every policy", trace, policy, 100 if policy == "glake" else None)["reserved_peak"] / GIB for policy in POLICIES]] for trace in found.traces}
    return chart("GiB: live, and reserved under each policy (GPU 100 ms behind the host)", ["live", *POLICIES], groups)


def compare_chart(rows):
    """Memory taken at the peak, by allocator."""
    allocs = list(dict.fromkeys(row["alloc"] for row in rows))
    groups = {workload: [table.figures([row for row in rows if row["workload"] == workload], each, "taken_peak").median / GIB for each in allocs]
              for workload in dict.fromkeys(row["workload"] for row in rows)}
    return chart("GiB of a GPU taken at the peak", allocs, groups)


COLOURS = ["#9aa0a6", "#1a73e8", "#e8710a", "#188038", "#a142f4"]


def chart(title, names, groups):
    """Horizontal bars, a group a key, as SVG."""
    wide, left, bar, gap = 760, 150, 13, 12
    longest = max(value for values in groups.values() for value in values if value == value)
    out, y = [], 54
    for place, name in enumerate(names):
        out.append(f'<rect x="{left + place * 115}" y="26" width="12" height="12" fill="{COLOURS[place % len(COLOURS)]}"/>'
                   f'<text x="{left + place * 115 + 17}" y="36">{html.escape(name)}</text>')
    for group, values in groups.items():
        out.append(f'<text x="{left - 8}" y="{y + len(values) * bar / 2 + 4:g}" text-anchor="end">{html.escape(group)}</text>')
        for place, value in enumerate(values):
            if value != value:
                continue
            size = value / longest * (wide - left - 60)
            out.append(f'<rect x="{left}" y="{y + place * bar}" width="{size:.1f}" height="{bar - 2}" fill="{COLOURS[place % len(COLOURS)]}"/>'
                       f'<text x="{left + size + 5:.1f}" y="{y + place * bar + 10}">{value:.2f}</text>')
        y += len(values) * bar + gap
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {y}" font-family="sans-serif" font-size="11">',
                      f'<rect width="{wide}" height="{y}" fill="white"/>', f'<text x="8" y="16" font-size="13">{html.escape(title)}</text>', *out, "</svg>", ""])


# What a file's rows become: the table that is named, or a file's only one. A table of `bars` needs no line here.
TABLES = {
    ("replay", "reserved"): replay_reserved, ("replay", "lag"): replay_lag, ("replay", "limits"): replay_limits,
    ("compare", None): compare, ("alloc", None): alloc, ("batch", None): batch, ("preload", None): preload, ("foreign", None): foreign,
    ("links", None): links, ("serve", None): lambda rows: bars(sharing.bars.figures(rows)), ("house", None): house,
    ("streams", None): text(streams.summary), ("graphs", None): text(graphs.summary), ("serving", None): text(lambda rows, _: serving.summary(rows)),
}
CHARTS = {("replay", "reserved"): replay_chart, ("compare", None): compare_chart}


class Pages:
    """The pages of a folder, and the rows and charts beside them."""

    def __init__(self, folder=DOCS):
        self.folder, self.results = pathlib.Path(folder), pathlib.Path(folder) / "results"

    def source(self, runs, name):
        """Where the rows come from, a line a run."""
        lines = []
        for header, rows in runs:
            if not header.get("commit"):
                raise SystemExit(f"pages: a run in {name}.jsonl names no commit: --commit NAME writes it there")
            lines.append(f"{header['machine']}; {header['date']}; commit {header['commit']}: `{header['command']}`.")
        wrap = lambda line: textwrap.fill(line, 118, subsequent_indent="  ", break_long_words=True, break_on_hyphens=False)
        return [f"Rows: [{name}.jsonl](results/{name}.jsonl). Measured on", "", *[wrap(f"- {line}") for line in dict.fromkeys(lines)]]

    def part(self, page, name, view, files):
        """What stands between two markers. Charts are added to `files`."""
        path = self.results / f"{name}.jsonl"
        if not path.is_file():
            script = f"benches/gpu/{name}.py" if (launch.HERE / f"{name}.py").is_file() else f"tests/gpu/{name}.sh"
            return f"*No rows of `{script}` are kept yet. What this page tells of it was written by hand,\nat the commits it names.*\n"
        runs = launch.runs(path)
        rows = [row for _, rows in runs for row in rows]
        lines = []
        if (name, view) in CHARTS:
            drawing = page.with_name(f"{page.stem}-{name}.svg")
            files[drawing] = CHARTS[name, view](rows)
            lines += [f"![{CHARTS[name, view].__doc__}]({drawing.name})", ""]
        lines += TABLES[name, view](rows) if (name, view) in TABLES else bars(rows)
        return "\n".join(["", *lines, "", *self.source(runs, name), ""])

    def wanted(self):
        """Every file as it should be: path to text."""
        files = {}
        for page in sorted(self.folder.glob("*.md")):
            files[page] = MARKED.sub(lambda found: found[1] + self.part(page, found[2], found[3], files) + found[4], page.read_text())
        return files

    def differing(self):
        return {path: wanted for path, wanted in self.wanted().items() if not path.is_file() or path.read_text() != wanted}

    def unused(self):
        """Files of rows that no page shows."""
        shown = {found[2] for page in self.folder.glob("*.md") for found in MARKED.finditer(page.read_text())}
        return sorted(path.name for path in self.results.glob("*.jsonl") if path.stem not in shown)

    def name_commit(self, commit):
        """Writes the commit into runs that name none."""
        for path in self.results.glob("*.jsonl"):
            lines = path.read_text().splitlines()
            for place, line in enumerate(lines):
                row = json.loads(line)
                if "command" in row and "machine" in row and not row.get("commit"):
                    lines[place] = json.dumps({**row, "commit": commit})
            path.write_text("\n".join(lines) + "\n")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--check", action="store_true", help="write nothing")
    p.add_argument("--commit", help="of runs whose first row names none")
    a = p.parse_args()
    pages = Pages()
    if a.commit:
        pages.name_commit(a.commit)
    for name in pages.unused():
        print(f"pages: results/{name} is shown on no page: <!-- table {pathlib.Path(name).stem} --> and <!-- end --> make room for it")
    differing = pages.differing()
    for path, wanted in differing.items():
        print(f"{'differs' if a.check else 'written'}: {path.relative_to(launch.REPOSITORY)}")
        if not a.check:
            path.write_text(wanted)
    sys.exit(1 if pages.unused() or (a.check and differing) else 0)


if __name__ == "__main__":
    main()
