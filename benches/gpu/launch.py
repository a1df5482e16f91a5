"""Starts harness.py once for each run, takes its JSON line, and shares the GPUs out among the runs.

A *round* is a list of runs that go one after another on one GPU (the allocators, interleaved); rounds go side by side on as
many GPUs as are visible. A run that hangs is ended after its time limit and counts as failed.
"""
import argparse, contextlib, json, os, pathlib, queue, shlex, signal, subprocess, sys, tempfile, threading, time

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
ALLOCS = ["native", "expandable", "glake", "glake-pluggable", "glake-wait"]


def gpus():
    """The names by which CUDA_VISIBLE_DEVICES knows the visible GPUs; none where there is no driver."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    try:
        lines = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(index) for index in range(sum(line.startswith("GPU ") for line in lines))]


def chosen(only, known):
    """Splits a list with commas, and refuses names that are not known; for an argument's `type`."""
    names = only.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return names


class Parser(argparse.ArgumentParser):
    """The arguments of a script: its docstring as help, --out, and --only for a script of several parts. Unknown parts are an error."""

    def __init__(self, doc, parts=(), default=None, help="of "):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        if parts:
            self.add_argument("--only", type=lambda only: chosen(only, parts), default=default or ",".join(parts), help=help + ", ".join(parts))
        self.add_argument("--out", default="bench-results", help="the folder for rows")


def environment(visible=None):
    """The environment of a measured process: glake is the installed one, or else this repository's."""
    env = dict(os.environ, PYTHONUNBUFFERED="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(REPOSITORY / "ffi" / "python")]))
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        env.pop(name, None)
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    return env


def end(child):
    """Ends a child that leads its own session: asked first, because torchrun's ranks are in sessions of their own and it ends them."""
    for word, seconds in ((signal.SIGTERM, 35), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(child.pid, word)
            child.wait(seconds)
            return


def rows_of(printed):
    """The JSON objects among lines; one that was cut off is none."""
    rows = []
    for line in printed.splitlines():
        if line.startswith("{"):
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return rows


def call(command, visible, timeout, more=None, heard=lambda row: None):
    """Runs a command that prints JSON lines, with `more` in its environment; `heard` is told each object as it is printed. Returns (all of
    them, why it failed or None)."""
    rows, late = [], threading.Event()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            child = subprocess.Popen(command, env={**environment(visible), **(more or {})}, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        except OSError as error:
            return [], f"{command[0]} could not be started: {error.strerror}" + (" (GLAKE names it)" if command[0] == "glake" else "")
        limit = threading.Timer(max(timeout, 1), lambda: (late.set(), end(child)))
        limit.start()
        with child.stdout:
            for line in child.stdout:
                for row in rows_of(line):
                    rows.append(row)
                    heard(row)
        code = child.wait()
        limit.cancel()
        if late.is_set():
            return rows, f"ended after {max(timeout, 0):.0f} s: there was no time left for more"
        errors.seek(0)
        if code != 0:
            return rows, f"exit code {code}: " + " | ".join(errors.read().strip().splitlines()[-6:])[-800:]
    return rows, None if rows else "printed no JSON line"


def harness(workload, alloc, visible, timeout, extra=()):
    """Runs the harness once and returns a dict, with "error" if it failed."""
    command = [str(HERE / "harness.py"), "--alloc", alloc, "--workload", workload, *extra]
    if workload.startswith("fsdp_"):
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(visible)), *command]
    begin = time.time()
    rows, error = call([sys.executable, *command], visible, timeout)
    row = {"workload": workload, "alloc": alloc, **(rows[-1] if rows else {})}
    row.update(gpus=visible, process_s=round(time.time() - begin, 1))
    if error:
        row["error"] = error
    return row


class Clock:
    """The time that a script may take in all."""

    def __init__(self, limit):
        self.begin, self.limit = time.time(), limit

    def spent(self):
        return time.time() - self.begin

    def left(self):
        return self.limit - self.spent()


def asked(command):
    """Returns the output of a command, or an empty text if it fails."""
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        return ""


def machine():
    """The GPUs, the driver and the cores, in words."""
    found = asked(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]).splitlines()
    if not found:
        return f"no GPU, {os.cpu_count()} cores"
    name, driver = found[0].split(", ")
    return f"{len(found)} x {name}, driver {driver}, {os.cpu_count()} cores"


def commit():
    """The commit that is measured: what GLAKE_COMMIT says, or else git; None where neither tells."""
    if os.environ.get("GLAKE_COMMIT"):
        return os.environ["GLAKE_COMMIT"]
    name = asked(["git", "rev-parse", "--short", "HEAD"])
    return name + ("+" if asked(["git", "status", "--porcelain", "--untracked-files=no"]) else "") if name else None


def header():
    """The row that begins a run in a file of results: machine, date, commit, command."""
    script, *arguments = sys.argv
    if "--out" in arguments[:-1]:
        at = arguments.index("--out")
        del arguments[at:at + 2]
    with contextlib.suppress(ValueError):
        script = str(pathlib.Path(script).resolve().relative_to(REPOSITORY))
    return {"machine": machine(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": commit(),
            "command": shlex.join(["python", script, *arguments])}


def runs(path):
    """The runs of a file of results: (header, rows) of each; rows before the first header have an empty one."""
    found = []
    for row in rows_of(pathlib.Path(path).read_text()):
        if {"machine", "commit", "command"} <= row.keys():
            found.append((row, []))
        else:
            found = found or [({}, [])]
            found[-1][1].append(row)
    return found


class Log:
    """JSON lines in a file, each run's behind a row that says where it was measured, and a line of progress on the terminal, from several
    threads."""

    def __init__(self, out, name, clock):
        self.clock, self.rows, self.lock = clock, [], threading.Lock()
        out = pathlib.Path(out)
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / name
        self.file = open(self.path, "a")
        self.file.write(json.dumps(header()) + "\n")
        self.file.flush()

    def say(self, text):
        with self.lock:
            print(f"[{self.clock.spent():5.0f} s] {text}", flush=True)

    def add(self, row, text):
        with self.lock:
            self.rows.append(row)
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        self.say(text)


def told(log, name, rows):
    """Logs what a scenario reported; returns what was missed."""
    missed = []
    for row in rows:
        value, bar, most = row["value"], row["bar"], row["most"]
        good = bar is None or (value <= bar if most else value >= bar)
        if not good:
            missed.append(row["what"])
        said = "" if bar is None else f" ({'at most' if most else 'at least'} {bar:.3g})"
        shown = f"{value:.3f}" if isinstance(value, (int, float)) else json.dumps(value)
        extra = "  ".join(f"{key} {beside if isinstance(beside, str) else format(beside, '.4g')}" for key, beside in row.items()
                          if key not in ("what", "value", "bar", "most"))
        log.add({"scenario": name, **row}, f"{'ok     ' if good else 'MISSED '} {row['what']}: {shown}{said} {extra}")
    return missed


def scenario(log, script, name, arguments, limit):
    """Runs a scenario of a script in a process of its own and logs its figures as they come; returns what was missed."""
    missed = []
    _, failed = call([sys.executable, str(script), "--child", name, *map(str, arguments)], None, limit,
                     heard=lambda row: missed.extend(told(log, name, [row])))
    if failed:
        missed.append(name)
        log.say(f"FAILED  {name}: {failed}")
    return missed


def scenarios(script, names, arguments, out, limit):
    """Runs scenarios of a script one after another, and ends with 1 if a bar was missed."""
    script = pathlib.Path(script)
    needs_gpus(script.name)
    log, missed = Log(out, f"{script.stem}.jsonl", Clock(float("inf"))), []
    for name in names:
        missed += scenario(log, script, name, arguments, limit)
    print(f"{script.stem}: {len(log.rows)} figures, {len(missed)} bars missed", flush=True)
    sys.exit(1 if missed else 0)


def share_out(rounds, visible, work):
    """Calls work(round, [gpu]) for each round, the rounds side by side on the visible GPUs."""
    todo = queue.Queue()
    for one in rounds:
        todo.put(one)

    def take(gpu):
        while True:
            try:
                one = todo.get_nowait()
            except queue.Empty:
                return
            work(one, [gpu])

    threads = [threading.Thread(target=take, args=(gpu,)) for gpu in visible[: len(rounds)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def needs_gpus(script):
    """The visible GPUs, or an end with a word and exit code 0 where there is none."""
    found = gpus()
    if not found:
        print(f"{script}: SKIPPED: no NVIDIA GPU on this machine")
        sys.exit(0)
    return found
