#!/usr/bin/env python3
"""Everything with torch that needs a GPU, over both backends: one line a test, a summary, exit code 1 if one failed.

    python tests/gpu/torch/run.py [-k PATTERN] [--backend compiled|pluggable|native] [--time-limit S] [--out DIR]

Where there is no GPU or no torch it says SKIPPED and ends with 0. glake is the installed package, or else this repository's
ffi/python with the library that GLAKE_LIBRARY names. Tests that want more GPUs than there are are skipped with a word.
`--backend native` runs a test under torch's own allocator, to see what torch itself does.
"""
import argparse, fnmatch, importlib.util, json, os, pathlib, subprocess, sys, threading, time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import schedule

PACKAGE = HERE.parents[2] / "ffi" / "python"
BACKENDS = ["compiled", "pluggable"]
# Names of GPUs, free memory of the first in bytes; in a process of its own, which holds no context afterwards.
PROBE = """
import json, torch
n = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps([torch.__version__, [torch.cuda.get_device_name(i) for i in range(n)], torch.cuda.mem_get_info(0)[0] if n else 0]))
"""
# What a user sees at first use: how long enable() takes with an empty cache or a full one.
ENABLE = """
import json, sys, time, torch
begin = time.time()
import glake
glake.enable(backend=sys.argv[1])
took = time.time() - begin
torch.ones(1, device="cuda").add_(1)
print(json.dumps([glake.backend(), round(took, 2), glake.__file__]))
"""


def python(code, env, *args, timeout=240):
    """(the JSON of the last line that the code prints, None) or (None, what it said instead)."""
    try:
        done = subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, text=True, timeout=timeout)
        return json.loads(done.stdout.strip().splitlines()[-1]), None
    except subprocess.TimeoutExpired:
        return None, f"no answer in {timeout} s"
    except (ValueError, IndexError):
        return None, f"exit code {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"


def skipped(why):
    print(f"tests/gpu/torch: SKIPPED: {why}", flush=True)
    sys.exit(0)


class Report:
    """A line a test as it ends, the failures' texts at the end, and all of it in files where a folder was named."""

    def __init__(self, out):
        self.begin, self.lock, self.rows = time.time(), threading.Lock(), []
        self.files = []
        if out:
            out = pathlib.Path(out)
            out.mkdir(parents=True, exist_ok=True)
            self.files = [open(out / "torch-tests.jsonl", "w"), open(out / "torch-tests.log", "w")]

    def say(self, text, whole=None):
        """A line on the terminal; in the file `whole`, where there is more to say."""
        print(text, flush=True)
        if self.files:
            self.files[1].write((whole or text) + "\n")
            self.files[1].flush()

    def tell(self, row):
        with self.lock:
            self.rows.append(row)
            word = f"  ({row['text']})" if row["outcome"] == "skipped" else ""
            self.say(f"{row['outcome']:8} {row['backend']:10} {row['test']:60} {row['seconds']:7.2f} s{word}")
            if self.files:
                self.files[0].write(json.dumps(row) + "\n")
                self.files[0].flush()

    def end(self):
        bad = [row for row in self.rows if row["outcome"] not in ("ok", "skipped")]
        told = set()
        for row in bad:
            head, text = f"\n=== {row['outcome']}: {row['backend']} {row['test']}\n", row["text"].strip()
            # Many may fail for one reason: it is printed once.
            self.say(head + ("as above" if text in told else text[-1500:]), head + text)
            told.add(text)
        counts = {outcome: sum(row["outcome"] == outcome for row in self.rows) for outcome in ("ok", "FAILED", "skipped", "NOT RUN")}
        self.say("")
        for row in bad:
            self.say(f"{row['outcome']:8} {row['backend']:10} {row['test']}")
        self.say(f"tests/gpu/torch: {', '.join(f'{n} {outcome}' for outcome, n in counts.items() if n)} in {time.time() - self.begin:.0f} s")
        return 1 if bad or not self.rows else 0


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-k", metavar="PATTERN", action="append", help="only tests whose name has it (or matches it, with * and ?); may be repeated")
    p.add_argument("--backend", choices=[*BACKENDS, "native"], action="append", help="only this one; default both of ours")
    p.add_argument("--time-limit", type=float, default=900, help="seconds in all")
    p.add_argument("--places", type=int, help="workers side by side on one GPU; default by its memory and the processor's cores, 8 at most")
    p.add_argument("--out", help="a folder for torch-tests.jsonl and torch-tests.log")
    p.add_argument("--list", action="store_true", help="the tests there are")
    return p.parse_args()


def wanted(test, patterns):
    return not patterns or any(fnmatch.fnmatch(test, one if set(one) & set("*?[") else f"*{one}*") for one in patterns)


def main():
    a = arguments()
    if importlib.util.find_spec("torch") is None:
        skipped(f"no torch for {sys.executable}")
    env = dict(os.environ)
    if importlib.util.find_spec("glake") is None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE), env.get("PYTHONPATH")]))
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        env.pop(name, None)
    os.environ.clear()
    os.environ.update(env)
    listed = subprocess.run([sys.executable, str(HERE / "worker.py"), str(HERE / "cases"), "--list"], capture_output=True, text=True, env=env)
    if listed.returncode != 0:
        sys.exit(f"tests/gpu/torch: the tests cannot be listed\n{listed.stderr}")
    tests = [test for test in json.loads(listed.stdout.splitlines()[-1]) if wanted(test["test"], a.k)]
    if a.list:
        print("\n".join(test["test"] for test in tests))
        return
    found, why = python(PROBE, env)
    if found is None or not found[1]:
        skipped(f"no GPU that torch can use{': ' + why if why else ''}")
    version, devices, free = found
    report, backends = Report(a.out), list(a.backend or BACKENDS)
    report.say(f"torch {version}, {len(devices)} x {devices[0]}, Python {sys.version.split()[0]}")
    for backend in [backend for backend in backends if backend in BACKENDS]:
        enabled, why = python(ENABLE, env, backend)
        if enabled:
            report.say(f"enable(backend={backend!r}) gave {enabled[0]!r} in {enabled[1]} s ({enabled[2]})")
        if not enabled or enabled[0] != backend:
            report.tell(dict(test="enable", backend=backend, outcome="FAILED", seconds=0, text=why or f"gave the backend {enabled[0]!r}"))
            if not enabled:  # nothing of it can run: the reason once, not a hundred times
                backends.remove(backend)
    names = os.environ["CUDA_VISIBLE_DEVICES"].split(",") if os.environ.get("CUDA_VISIBLE_DEVICES") else [str(n) for n in range(len(devices))]
    for test in [test for test in tests if test["gpus"] > len(devices)]:
        tests.remove(test)
        report.tell(dict(test=test["test"], backend="-", outcome="skipped", seconds=0, text=f"needs {test['gpus']} GPUs, {len(devices)} here"))
    places = a.places or max(1, min(8, free // (8 << 30), (os.cpu_count() or 4) * 2 // 3 // len(devices)))
    deadline = report.begin + a.time_limit
    schedule.Schedule(HERE / "cases", names, places, deadline, report.tell).run(schedule.jobs(tests, backends))
    sys.exit(report.end())


if __name__ == "__main__":
    main()
