#!/usr/bin/env python3
"""Copies of an unchanged program between all kinds of memory: with the preload library as without it.

    python tests/gpu/kinds.py DIR [--only NAME,...] [--quick] [--most MIB] [--shared-gpus] [--wrap COMMAND] [--out FILE]
    python tests/gpu/kinds.py DIR --old DIR2 [--rounds 3] [--only NAME,...]

DIR holds libgmlake.so and libglake_preload.so. kinds.c is built with $CC (cc) against the libcudart of this Python's
packages (or --cudart FILE) and the machine's libcuda, and run for each kind of the GPU's memory twice: as it is, and
with LD_PRELOAD=libglake_preload.so GLAKE_MULTI_PATH=1. Line by line, the second run must have the first one's error
number, right bytes wherever the first has, and a context that lives wherever the first one's does. The table says how
fast the second is, of the first: the least, the median and the most of all memory of the host, ways to copy and
directions.

With --old, both libraries run under the preload library in turns, each round in a process of its own; the table says
how fast the new one is, of the old one, by the medians of the rounds. A library that ends its program is said so.

Ends with 1 if anything differs, and with 0 and a word where there is no GPU.
"""
import argparse
import collections
import ctypes
import json
import os
import pathlib
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "benches" / "gpu"))
import launch  # noqa: E402
import preload  # noqa: E402

MEMORY = ["malloc", "async", "mempool", "managed", "vmm", "ipc", "pool"]
OTHER = ["wrong", "peers", "contexts"]
LOST = 3           # kinds.c: the context is lost, the next process goes on
RESTARTS = 12      # of one kind under one library
PATIENCE = 100     # seconds for one process
BEGIN = time.time()


def say(text):
    print(f"[{time.time() - BEGIN:5.0f} s] {text}", flush=True)


def libcuda():
    """The file of the machine's driver library."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        sys.exit(f"kinds: libcuda.so.1 cannot be loaded: {error}")
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        if "/libcuda.so" in line:
            return line.split(maxsplit=5)[5]
    return sys.exit("kinds: libcuda.so.1 is loaded from no file")


def build(folder, cudart, driver):
    """The program; says what is missing where it cannot be built."""
    if not os.path.isfile(cudart):
        sys.exit(f"kinds: there is no {cudart}: name libcudart with --cudart FILE")
    program = os.path.join(folder, "kinds")
    paths = [f"-Wl,-rpath,{os.path.dirname(os.path.realpath(file))}" for file in (cudart, driver)]
    command = [os.environ.get("CC", "cc"), "-std=gnu11", "-O2", "-Wall", "-Wextra", str(HERE / "kinds.c"),
               "-o", program, cudart, driver, *paths, "-lpthread", "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        sys.exit(f"kinds: {command[0]}: {error.strerror}: CC names the compiler")
    if done.returncode != 0:
        sys.exit(f"kinds: kinds.c was not built:\n{done.stderr}")
    return program


class Libraries:
    """A folder with both libraries; or none, for the native run."""

    def __init__(self, folder, name):
        self.name, self.folder = name, pathlib.Path(folder).resolve()
        for file in ("libgmlake.so", "libglake_preload.so"):
            if not (self.folder / file).is_file():
                sys.exit(f"kinds: there is no {file} in {self.folder}: cargo build --release --workspace makes it")

    def environment(self, hooked):
        env = dict(os.environ, KINDS_LIBRARY=str(self.folder / "libgmlake.so"))
        for name in ("LD_PRELOAD", "GLAKE_MULTI_PATH", "GLAKE_LIBRARY"):
            env.pop(name, None)
        if hooked:
            env.update(LD_PRELOAD=str(self.folder / "libglake_preload.so"), GLAKE_MULTI_PATH="1",
                       GLAKE_LIBRARY=str(self.folder / "libgmlake.so"))
        return env


def key_of(row):
    return row["host"], row["direction"], row["bytes"], row["way"]


class Run:
    """All cases of one name under one library, over as many processes as it took."""

    def __init__(self, program, name, libraries, hooked, options, wrap=()):
        self.name, self.rows, self.deaths, self.notes = name, {}, [], []
        self.failed = None  # why it ended, but for a lost context
        first = 0
        for _ in range(RESTARTS + 1):
            ended, first = self.process([*wrap, program, name, "--first", str(first), *options],
                                        libraries.environment(hooked), hooked, first)
            if ended:
                return
        self.failed = f"given up after {RESTARTS} new processes"
        self.deaths.append(self.failed)

    def process(self, command, env, hooked, first):
        """One process: whether all is done, and the case that the next one begins with."""
        if not hooked:
            command = [*command, "--relays", "0"]
        child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True)
        try:
            out, err = child.communicate(timeout=PATIENCE)
            why = None
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            out, err = child.communicate()
            why = f"hung: ended after {PATIENCE} s"
        except BaseException:  # whoever ends this script ends the program too
            os.killpg(child.pid, signal.SIGKILL)
            raise
        last = first - 1
        for line in out.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if "note" in row:
                self.notes.append(row["note"] + (f" after {row['after']} s" if "after" in row else ""))
            elif "case" in row:
                self.rows[key_of(row)] = row
                last = row["case"]
        if child.returncode == 0 and why is None:
            return True, 0
        text = " | ".join(line for line in err.strip().splitlines()[-3:])[-300:]
        if child.returncode == LOST:
            self.deaths.append(f"the context was lost in case {last}")
            return False, last + 1
        if why is None and child.returncode < 0:
            self.deaths.append(f"signal {-child.returncode} in case {last + 1} {text}".rstrip())
            return False, last + 2
        self.failed = why or f"exit code {child.returncode}: {text}"
        self.deaths.append(self.failed)
        return True, 0


def told(row):
    """A case's outcome in words."""
    if row is None:
        return "no line: the program had ended"
    bytes_are = {True: "right", False: "WRONG", None: "not compared"}[row["right"]]
    return f"error {row['error']}, bytes {bytes_are}, context {'alive' if row['alive'] else 'LOST'}"


def differs(plain, ours):
    if ours is None:
        return plain["alive"]
    same = ours["error"] == plain["error"]
    return not same or (plain["right"] is True and ours["right"] is not True) or (plain["alive"] and not ours["alive"])


def mib(size):
    return f"{size >> 20} MiB" if size < 1 << 30 else f"{size >> 30} GiB"


def table(ratios, what):
    """Of ratios by (name, bytes)."""
    print(f"\n{what}\n{'memory':10} {'size':>8} {'least':>7} {'median':>7} {'most':>7}  cases  (least, most)")
    for (name, size), found in sorted(ratios.items(), key=lambda item: (MEMORY.index(item[0][0]), item[0][1])):
        found.sort()
        (least, at_least), (most, at_most) = found[0], found[-1]
        middle = statistics.median(ratio for ratio, _ in found)
        figures = f"{least:7.2f} {middle:7.2f} {most:7.2f} {len(found):6}"
        print(f"{name:10} {mib(size):>8} {figures}  ({at_least}; {at_most})")


def compare(program, names, libraries, options, wrap, keep):
    """Both runs of every name; the number of differences."""
    differences, odd, cases, ratios, failed = [], [], 0, collections.defaultdict(list), []
    for name in names:
        plain = Run(program, name, libraries, False, options)
        ours = Run(program, name, libraries, True, options, wrap)
        for run, which in ((plain, "native"), (ours, "hooked")):
            for row in run.rows.values():
                keep({**row, "run": which})
            for note in run.notes:
                say(note)
            for death in run.deaths:
                say(f"{name}, {which}: {death}")
        before = len(differences)
        for key, row in plain.rows.items():
            cases += 1
            other = ours.rows.get(key)
            where = f"{name}, {' '.join(map(str, key[:2]))} {mib(key[2])} {key[3]}".rstrip()
            if differs(row, other):
                differences.append(f"{where}: native {told(row)}; hooked {told(other)}")
            if row["right"] is False or not row["alive"]:
                odd.append(f"{where}: native {told(row)}")
            if name in MEMORY and other and row["gbps"] and other["gbps"]:
                ratios[name, key[2]].append((other["gbps"] / row["gbps"], " ".join((*key[:2], key[3]))))
        skipped = any("SKIPPED" in note for note in plain.notes)
        if not plain.rows and not skipped:
            failed.append(f"{name}: the native program gave no line: {'; '.join(plain.deaths)}")
        else:  # What ends the native run leaves cases untested.
            for which, run in (("native", plain), ("under the library", ours)):
                failed.extend([f"{name}: {which}: {run.failed}"] if run.failed else [])
        good = len(differences) == before and (plain.rows or skipped) and not plain.failed and not ours.failed
        say(f"{'ok     ' if good else 'DIFFERS'} {name}: "
            f"{len(plain.rows)} cases, {len(ours.rows)} under the library")
        for line in differences[before:before + 12]:
            print(f"          {line}", flush=True)
    if ratios:
        table(ratios, "speed with the library, of native:")
    for line in odd[:10]:
        print(f"note: {line}")
    for line in failed:
        print(f"FAILED  {line}")
    print(f"kinds: {cases} cases, {len(differences)} differ, {len(failed)} kinds failed, {time.time() - BEGIN:.0f} s")
    return len(differences) + len(failed)


def race(program, names, new, old, rounds, options, keep):
    """New and old libraries in turns; the number of rounds that the new one did not end."""
    ratios, bad = collections.defaultdict(list), 0
    for name in names:
        speeds = {libraries.name: collections.defaultdict(list) for libraries in (new, old)}
        for turn in range(rounds):
            for libraries in (new, old) if turn % 2 == 0 else (old, new):
                run = Run(program, name, libraries, True, options)
                for key, row in run.rows.items():
                    keep({**row, "run": libraries.name, "round": turn})
                    if row["gbps"] and row["right"]:
                        speeds[libraries.name][key].append(row["gbps"])
                wrong = sum(row["right"] is False for row in run.rows.values())
                for death in run.deaths:
                    say(f"{name}, round {turn}, {libraries.name}: {death}")
                if wrong:
                    say(f"{name}, round {turn}, {libraries.name}: WRONG bytes in {wrong} cases")
                bad += libraries is new and bool(run.deaths or wrong)
            say(f"{name}: round {turn} done")
        for key, found in speeds[new.name].items():
            if speeds[old.name].get(key):
                ratio = statistics.median(found) / statistics.median(speeds[old.name][key])
                ratios[name, key[2]].append((ratio, " ".join((*key[:2], key[3]))))
        if not speeds[old.name]:
            say(f"{name}: the old library made no copy that could be compared")
    table(ratios, f"speed of the new library, of the old one (medians of {rounds} rounds in turns):")
    print(f"kinds: {bad} rounds of the new library ended badly, {time.time() - BEGIN:.0f} s")
    return bad


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("dir", help="the folder with libgmlake.so and libglake_preload.so")
    p.add_argument("--old", metavar="DIR2", help="a folder with the libraries to compare with")
    p.add_argument("--rounds", type=int, default=3, help="of each library, with --old")
    p.add_argument("--only", type=lambda only: launch.chosen(only, MEMORY + OTHER), help="of " + ", ".join(MEMORY + OTHER))
    p.add_argument("--quick", action="store_true", help="1 GiB of two kinds of host memory, by two ways only")
    p.add_argument("--most", type=int, default=1024, help="the largest copy in MiB: 4, 64 or 1024")
    p.add_argument("--relays", type=float, default=15, help="seconds in which relays must get ready")
    p.add_argument("--shared-gpus", action="store_true", help="with transfer.shared_gpus = true")
    p.add_argument("--wrap", default="", help="a command before the program under the library (compute-sanitizer …)")
    p.add_argument("--cudart", help="libcudart, if not that of Python's packages or of /usr/local/cuda")
    p.add_argument("--cuda", help="libcuda.so.1, if not that which the loader finds")
    p.add_argument("--out", help="a file for all JSON lines")
    a = p.parse_args()
    if not a.cuda:
        launch.needs_gpus("kinds.py")
    known = MEMORY if a.old else MEMORY + OTHER
    names = a.only or known
    if unknown := set(names) - set(known):
        p.error(f"--only: {', '.join(sorted(unknown))}: not with --old")
    if a.old and a.shared_gpus:
        p.error("--shared-gpus: old libraries do not know it")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    new = Libraries(a.dir, "new")
    options = ["--most", str(a.most), *(["--quick"] if a.quick or a.old else [])]
    out = open(a.out, "w") if a.out else None

    def keep(row):
        if out:
            out.write(json.dumps(row) + "\n")
            out.flush()

    with tempfile.TemporaryDirectory() as folder:
        if a.shared_gpus:
            config = os.path.join(folder, "shared.toml")
            pathlib.Path(config).write_text("[transfer]\nshared_gpus = true\n")
            os.environ["GLAKE_CONFIG"] = config
        program = build(folder, a.cudart or preload.cudart(), a.cuda or libcuda())
        options += ["--relays", str(a.relays)]
        if a.old:
            bad = race(program, names, new, Libraries(a.old, "old"), a.rounds, options, keep)
        else:
            bad = compare(program, names, new, options, shlex.split(a.wrap), keep)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
