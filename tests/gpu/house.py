#!/usr/bin/env python3
"""A build beside an earlier one, in turns: the hot path, memory of recorded runs, copies, and regions that leave and come back.

    python tests/gpu/house.py NEW OLD [--device cuda] [--only hot,memory,copies,shrink] [--rounds 5] [--out DIR]

NEW and OLD each hold `glake` and the libgmlake.so beside it. A round runs every part with both builds, one directly after the other, the old
one first in every second round. A figure is the median over the rounds, its ratio the median of new to old of each round. `noise` is the
way between the least and the greatest of these ratios, and never below what the part is known to vary by. Where the ratio is worse than 1 by
more than the noise, the figure is WORSE: half of that way would cry wolf once in a few runs of equal builds.

hot: `glake bench alloc`. memory: `glake replay` of all traces in tests/traces, on the simulated device whatever --device says: reserved
memory, mappings and calls of the driver are the same on both. copies: `glake bench copy` over the GPU's own link, and over all.
shrink: `glake bench shrink` over the GPU's own link.

A run that stops before its end, or at --time-limit, goes on where it was when the same command is given again: rows of the same two builds
in DIR/house.jsonl are kept. Ends with 1 if a figure is worse or a command failed, with 2 for usage, with 3 if rounds are left to run.
"""
import argparse
import hashlib
import json
import os
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "benches" / "gpu"))
import launch  # noqa: E402

MIB = 1 << 20
# What figures of a part vary by on a machine that does nothing else.
LEAST_NOISE = {"hot": 0.02, "memory": 0.0, "copies": 0.01, "shrink": 0.02}
PARTS = list(LEAST_NOISE)
LEAST_ROUNDS = 3  # fewer show no noise
TURNS = ("old", "new")


def commands(part, device, sizes, size):
    """What a part runs: (a word for it, arguments of glake)."""
    if part == "hot":
        return [("", ["bench", "alloc"])]
    if part == "memory":
        traces = [str(path) for path in sorted((ROOT / "tests" / "traces").glob("*.trace.gz"))]
        return [("", ["replay", "--policy", "glake", "--gpu-lag-ms", "0,100", *traces])]
    if part == "copies":
        asked = ["bench", "copy", "--sizes", sizes]
        return [("one link", [*asked, "--paths", "1"]), ("all links", asked)]
    return [("", ["bench", "shrink", "--paths", "1", *(["--bytes", size] if size else []), "--tensors", "32", "--runs", "3"])]


def figures(part, word, row):
    """The figures of a row of JSON: (what, value, whether less is better)."""
    if part == "hot":
        name = f"{row['streams']} stream{'s' * (row['streams'] > 1)}"
        yield f"malloc and free through C, {name}, ns", row["pair_ns"], True
        yield f"malloc and free of the pool, {name}, ns", row["pool_pair_ns"], True
    elif part == "memory":
        name = f"{row['trace']}, {row['gpu_lag_ms']} ms"
        yield f"{name}: reserved, MiB", row["reserved_peak"] / MIB, True
        yield f"{name}: mappings", row["extent_maps"], True
        yield f"{name}: calls of the driver", row["driver_calls"], True
    elif part == "copies":
        yield f"{row['direction']} {row['bytes'] / MIB:g} MiB, {word}, GB/s", row["engine_gbps"], False
    elif row["tier"] == "host":
        yield f"{row['phase']}, {'warm' if row['warm'] else 'the first'}, GB/s", row["gbps"], False


def wrong(row):
    """Why a row cannot be right, or nothing."""
    # Of copies in virtual time only small ones are compared.
    return "bytes differ" if row.get("verified") is False and not row.get("virtual_time") else f"{row['leaked_bytes']} bytes leaked" if row.get("leaked_bytes") else None


def build_of(folder):
    """A name of a build's bytes."""
    found = hashlib.sha256()
    for name in ("glake", "libgmlake.so"):
        with open(pathlib.Path(folder, name), "rb") as file:
            while piece := file.read(1 << 22):
                found.update(piece)
    return found.hexdigest()[:12]


def judged(samples):
    """A row for each figure that both builds have in some round. samples: {(part, what): {"less": bool, round: {"old": x, "new": y}}}"""
    rows = []
    for (part, what), found in samples.items():
        pairs = [pair for name, pair in found.items() if name != "less" and len(pair) == 2]
        if not pairs:
            continue
        ratios = [pair["new"] / pair["old"] if pair["old"] else 1.0 if pair["new"] == pair["old"] else float("inf") for pair in pairs]
        ratio, noise = statistics.median(ratios), max(max(ratios) - min(ratios), LEAST_NOISE[part])
        loss = ratio - 1 if found["less"] else 1 - ratio
        outcome = "WORSE" if loss > noise else "better" if -loss > noise else "as before"
        if part != "memory" and len(pairs) < LEAST_ROUNDS:
            outcome = "too few rounds"
        rows.append({"part": part, "what": what, "old": statistics.median(pair["old"] for pair in pairs), "new": statistics.median(pair["new"] for pair in pairs),
                     "ratio": ratio, "noise": noise, "rounds": len(pairs), "outcome": outcome})
    return rows


def text(rows):
    """The table: every figure but those of memory that are as before, which are counted."""
    same = [row for row in rows if row["part"] == "memory" and row["outcome"] == "as before"]
    lines = [f"{'part':8} {'what':58} {'old':>10} {'new':>10} {'new/old':>8} {'noise':>7}  outcome"]
    for row in rows:
        if row not in same:
            lines.append(f"{row['part']:8} {row['what']:58} {row['old']:10.2f} {row['new']:10.2f} {row['ratio']:8.3f} {row['noise']:7.1%}  {row['outcome']}")
    return [*lines, *([f"memory   {len(same)} more figures, all as before"] if same else [])]


class House:
    """The samples that are there, and those to be made."""

    def __init__(self, a, log):
        self.a, self.log, self.failed, self.samples, self.longest = a, log, [], {}, {}
        self.folders = {"new": a.new, "old": a.old}
        self.builds = {name: build_of(folder) for name, folder in self.folders.items()}

    def key(self):
        return [self.builds["old"], self.builds["new"], self.a.device, self.a.sizes, self.a.size]

    def keep(self, row):
        found = self.samples.setdefault((row["part"], row["what"]), {"less": row["less"]})
        found.setdefault(row["round"], {})[row["build"]] = row["value"]

    def earlier(self, rows):
        """Takes what an earlier run of the same builds measured; the (part, round) that are whole."""
        whole = set()
        for row in rows:
            if row.get("of") == self.key():
                if "value" in row:
                    self.keep(row)
                else:
                    whole.add((row["part"], row["round"]))
        return whole

    def measure(self, part, round):
        begin = self.log.clock.spent()
        made = []
        for word, arguments in commands(part, self.a.device, self.a.sizes, self.a.size):
            for build in TURNS if round % 2 == 0 else TURNS[::-1]:
                device = "sim" if part == "memory" else self.a.device
                command = [str(pathlib.Path(self.folders[build], "glake")), *arguments, "--device", device, "--json"]
                rows, failed = launch.call(command, None, self.a.command_limit)
                failed = failed or next(filter(None, map(wrong, rows)), None)
                if failed:
                    self.failed.append(f"{part}, {build}: {failed}")
                    self.log.say(f"FAILED  {self.failed[-1]}")
                    return
                for row in rows:
                    made += [{"part": part, "round": round, "build": build, "what": what, "value": value, "less": less, "of": self.key()}
                             for what, value, less in figures(part, word, row)]
        for row in made:
            self.keep(row)
            self.log.file.write(json.dumps(row) + "\n")
        took = self.log.clock.spent() - begin
        self.longest[part] = max(took, self.longest.get(part, 0))
        self.log.add({"part": part, "round": round, "of": self.key()}, f"round {round + 1}, {part}: {took:.0f} s")

    def run(self, names, whole):
        """Rounds until all are there or the time is over; how many are left."""
        todo = [(part, round) for round in range(self.a.rounds) for part in names if (part, round) not in whole]
        left = 0
        for part, round in todo:
            if part == "memory" and round:
                continue  # the same in every round
            if any(told.startswith(f"{part},") for told in self.failed):
                continue
            if self.log.clock.left() < self.longest.get(part, 10) * 1.3:
                left += 1
                continue
            self.measure(part, round)
        return left


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("new", metavar="NEW", help="the folder with glake and libgmlake.so of the build to judge")
    p.add_argument("old", metavar="OLD", help="the folder with those of an earlier build")
    p.add_argument("--device", default=os.environ.get("GLAKE_DEVICE", "cuda"), help="as glake takes it; sim tries the script without a GPU")
    p.add_argument("--only", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--sizes", default="4MiB,64MiB,1GiB", help="of copies")
    p.add_argument("--size", help="of the region [default: glake's own]")
    p.add_argument("--out", default="bench-results")
    p.add_argument("--time-limit", type=float, default=440, help="seconds in all: no part is started that would pass it")
    p.add_argument("--command-limit", type=float, default=120, help="seconds of one command")
    a = p.parse_args()
    names = launch.chosen(p, a.only, PARTS)
    if a.rounds < LEAST_ROUNDS:
        p.error(f"--rounds: at least {LEAST_ROUNDS}")
    for folder in (a.new, a.old):
        for name in ("glake", "libgmlake.so"):
            if not pathlib.Path(folder, name).is_file():
                p.error(f"there is no {name} in {folder}: cargo build --release --workspace makes it")
    if a.device == "cuda":
        launch.needs_gpus("house.py")
    # Each command opens the library beside it.
    for name in ("GLAKE_LIBRARY", "GLAKE_DEVICE", "GLAKE_CONFIG"):
        os.environ.pop(name, None)
    path = pathlib.Path(a.out, "house.jsonl")
    before = [row for _, rows in launch.runs(path) for row in rows] if path.is_file() else []
    log = launch.Log(a.out, "house.jsonl", launch.Clock(a.time_limit))
    house = House(a, log)
    log.say(f"old {house.builds['old']}, new {house.builds['new']}" + (": the same bytes" if len(set(house.builds.values())) == 1 else ""))
    left = house.run(names, house.earlier(before))
    rows = judged(house.samples)
    for row in rows:
        log.file.write(json.dumps(row) + "\n")
    log.file.flush()
    print("\n" + "\n".join(text(rows)))
    worse = [row for row in rows if row["outcome"] == "WORSE"]
    print(f"house: {len(rows)} figures in {log.clock.spent():.0f} s, {len(worse)} worse, {len(house.failed)} parts failed"
          + (f", {left} rounds of parts left: the same command goes on with them" if left else ""), flush=True)
    return 1 if worse or house.failed else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
