"""Starts of models under `glake serve` on one GPU: three models of which two fit, each started by the agent or by hand, killed while
it loads, idles or works, and started again. Every start has to end with a worker that serves, and every byte has to be what was
written.

    python tests/gpu/starts.py [--starts 20] [--size 40] [--budget 100] [--seed 0]

--size: GiB of a model; --budget: GiB for all three with their contexts. GLAKE names the command, else it is the one beside
GLAKE_LIBRARY or in PATH. Prints a row a start, and ends with 1 if one failed."""

import argparse, json, os, pathlib, random, shutil, socket, struct, subprocess, sys, tempfile, threading, time

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
GIB, MIB = 1 << 30, 1 << 20
NAMES = ["chat", "code", "search"]
PART = 2 * GIB  # of a load
STEP = 7919  # what tells the parts' bytes apart


def worker(folder, name):
    """A model's process: it loads in parts, then it answers each line of its script."""
    sys.path[:0] = [str(REPOSITORY / "ffi" / "python")]
    import torch

    import glake

    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{folder}/control")
    lines = connection.makefile("rw")

    def say(**answer):
        print(json.dumps(answer), file=lines, flush=True)

    say(name=name, pid=os.getpid())
    plan = json.loads(lines.readline())
    glake.enable()
    parts, seed = [], os.getpid() << 8
    with glake.region("weights"):
        for number in range(plan["parts"]):
            part = torch.empty(plan["bytes"] // plan["parts"] // 4, dtype=torch.int32, device="cuda")
            parts.append(torch.arange(part.numel(), dtype=torch.int32, device="cuda", out=part).add_(seed + STEP * number))
            del part
            say(loaded=number + 1)
            time.sleep(plan["pause"])
    # Compared in pieces: the comparison's own memory is small.
    pieces = 64 * MIB // 4
    base = torch.arange(pieces, dtype=torch.int32, device="cuda")

    def wrong():
        count = torch.zeros((), dtype=torch.int64, device="cuda")
        for number, part in enumerate(parts):
            for at, piece in enumerate(part.split(pieces)):
                count += (piece - base[: piece.numel()] != seed + STEP * number + at * pieces).sum()
        return int(count)

    for line in lines:
        ask = json.loads(line)
        begin, found, parked = time.monotonic(), 0, 0
        with glake.active():
            waited = time.monotonic() - begin
            found = wrong()
            while time.monotonic() - begin < waited + ask["lasts"]:
                if ask["safe"] and glake.safepoint():
                    parked += 1
                    found += wrong()
                time.sleep(0.002)
            found += wrong()
        say(waited=round(waited, 3), wrong=found, parked=parked)


class Process:
    """The script's end of a worker's connection."""

    def __init__(self, connection):
        self.connection, self.lines = connection, connection.makefile("rw")
        hello = json.loads(self.lines.readline())
        self.name, self.pid = hello["name"], hello["pid"]

    def say(self, **what):
        print(json.dumps(what), file=self.lines, flush=True)

    def hear(self, patience):
        self.connection.settimeout(patience)
        line = self.lines.readline()
        if not line:
            raise RuntimeError(f"process {self.pid} has died")
        return json.loads(line)

    def ask(self, patience, **what):
        self.say(**what)
        return self.hear(patience)


class Server:
    def __init__(self, folder, a):
        self.folder, self.a, self.children = folder, a, []
        self.command = os.environ.get("GLAKE") or self.found()
        self.socket = folder / "agent.sock"
        self.env = dict(os.environ, PYTHONUNBUFFERED="1", STARTS_FOLDER=str(folder))
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "control"))
        self.listener.listen()
        text = [f'[node]\nbudget = "{a.budget}GiB"\n']
        for name in NAMES:
            text.append(f'[[worker]]\nname = "{name}"\nweights = "{a.size}GiB"\nkv = "1GiB"\nstart = "request"\n')
            text.append(f"command = {json.dumps([sys.executable, str(HERE / 'starts.py'), '--worker', name])}\n")
        (folder / "node.toml").write_text("".join(text))
        self.log = open(folder / "agent.log", "w")
        self.agent = subprocess.Popen([self.command, "serve", str(folder / "node.toml"), "--socket", str(self.socket),
                                       "--logs", str(folder / "logs")], env=self.env, stderr=self.log, stdin=subprocess.DEVNULL)
        end = time.monotonic() + 30
        while "serving" not in (folder / "agent.log").read_text():
            if self.agent.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"glake serve: {(folder / 'agent.log').read_text()}")
            time.sleep(0.05)

    @staticmethod
    def found():
        library = os.environ.get("GLAKE_LIBRARY")
        beside = pathlib.Path(library).with_name("glake") if library else None
        found = str(beside) if beside and beside.exists() else shutil.which("glake")
        return found or sys.exit("starts.py: no command glake: name it with GLAKE=PATH, or put it beside GLAKE_LIBRARY")

    def glake(self, *words, patience=None):
        return subprocess.run([self.command, *words, "--socket", str(self.socket)], env=self.env, capture_output=True, text=True,
                              timeout=patience or self.a.patience)

    def rows(self):
        return [json.loads(line) for line in self.glake("ps", "--json").stdout.splitlines()]

    def start(self, name, by_hand):
        """A process of that model, which has said hello; an asked agent answers once it has loaded."""
        if by_hand:
            log = open(self.folder / f"{name}.log", "a")
            env = dict(self.env, GLAKE_AGENT=str(self.socket), GLAKE_WORKER=name)
            child = subprocess.Popen([sys.executable, HERE / "starts.py", "--worker", name], env=env, stdin=subprocess.DEVNULL,
                                     stdout=log, stderr=log)
            self.children.append(child)
        else:
            threading.Thread(target=self.glake, args=("start", name), daemon=True).start()
        self.listener.settimeout(self.a.patience)
        process = Process(self.listener.accept()[0])
        if process.name != name:
            raise RuntimeError(f"{process.name} starts, and {name} was to")
        return process

    def end_process(self, process, by_hand):
        """Kills it; one of the agent's is not started again."""
        if by_hand:
            child = next(child for child in self.children if child.pid == process.pid)
            self.children.remove(child)
            child.kill()
            child.wait()
        else:
            self.glake("stop", process.name)
        process.connection.close()

    def leases(self):
        """GiB that workers may hold, and whether that is within the budget."""
        rows = [row for row in self.rows() if row["pid"] and row["gpus"]]
        held = sum(row["leased"] for row in rows) + len(rows) * 640 * MIB
        return held / GIB, held <= self.a.budget * GIB

    def end(self):
        for name in NAMES:
            self.glake("stop", name)
        self.agent.terminate()
        self.agent.wait()
        for child in self.children:
            child.kill()
            child.wait()


class Watcher(threading.Thread):
    """Watches the agent ten times a second, and compares the sums of each snapshot with the meter and with the agent's own accounts."""

    TOLERANCE = 64 * MIB

    def __init__(self, path):
        super().__init__(daemon=True)
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(str(path))
        self.count = self.moving = self.missed = self.largest = self.largest_moving = 0
        self.wrong, self.error, self.is_over = [], None, False

    def read(self, length):
        data = b""
        while len(data) < length:
            more = self.connection.recv(length - len(data))
            if not more:
                raise EOFError("the agent has ended")
            data += more
        return data

    def snapshot(self):
        whole, more = {"gpus": [], "workers": [], "requests": [], "decisions": []}, True
        while more:
            part = json.loads(self.read(*struct.unpack("<I", self.read(4))))
            if part["op"] != "snapshot":
                raise RuntimeError(part)
            for key, value in part.items():
                whole[key] = whole[key] + value if isinstance(whole.get(key), list) else value
            more = part.get("more", False)
        return whole

    def run(self):
        ask = json.dumps(dict(v=1, seq=0, ack=0, op="watch", every_ms=100)).encode()
        try:
            self.connection.sendall(struct.pack("<I", len(ask)) + ask)
            while True:
                self.check(self.snapshot())
        except Exception as error:
            # The end of the agent ends it too.
            self.error = None if self.is_over else repr(error)

    def check(self, snapshot):
        self.count, self.missed = self.count + 1, self.missed + snapshot.get("missed", 0)
        moves = any(worker.get("operation") for worker in snapshot["workers"]) or snapshot["requests"]
        self.moving += bool(moves)
        for gpu in snapshot["gpus"]:
            shares = [of for worker in snapshot["workers"] for of in worker.get("gpus", []) if of["gpu"] == gpu["gpu"]]
            total = lambda *names: sum(of.get(name, 0) for of in shares for name in names)
            if total("context", "leased", "overrun") + gpu.get("reclaiming", 0) != gpu.get("claimed", 0):
                self.wrong.append(f"snapshot {snapshot['number']}: GPU {gpu['gpu']} claims {gpu.get('claimed')}, its workers {shares}")
            if gpu.get("used") is None:
                continue
            # By the meter's list of processes, and by what the workers say.
            apart = abs(total("used") + gpu.get("unmanaged", 0) - gpu["used"])
            said = abs(total("context", "resident") + gpu.get("unmanaged", 0) - gpu["used"])
            self.largest_moving = max(self.largest_moving, said)
            if not moves:
                self.largest = max(self.largest, said)
            if apart > self.TOLERANCE:
                self.wrong.append(f"snapshot {snapshot['number']}: GPU {gpu['gpu']} uses {gpu['used']}, its workers {shares} and others {gpu.get('unmanaged', 0)}")

    def report(self):
        self.is_over = True
        passed = self.count > 0 and not self.wrong and not self.error
        print(f"{'ok' if passed else 'FAIL':4} {self.count} snapshots, {self.missed} missed, {self.moving} while memory moved: workers and meter differ "
              f"by {self.largest / MIB:.0f} MiB at most while nothing moved, by {self.largest_moving / MIB:.0f} MiB at any time; {len(self.wrong)} sums wrong "
              f"{self.error or ''} {self.wrong[:1] or ''}")
        return passed


class Asker(threading.Thread):
    """Asks a worker one use after the other, until it is told to end."""

    def __init__(self, process, safe, patience):
        super().__init__()
        self.process, self.safe, self.patience = process, safe, patience
        self.is_over, self.error, self.longest, self.wrong, self.count = threading.Event(), None, 0.0, 0, 0

    def run(self):
        while not self.is_over.is_set():
            try:
                answer = self.process.ask(self.patience, lasts=0.2, safe=self.safe)
            except Exception as error:
                self.error = repr(error)
                return
            self.longest, self.wrong, self.count = max(self.longest, answer["waited"]), self.wrong + answer["wrong"], self.count + 1

    def end(self):
        self.is_over.set()
        self.join()
        return self


def one(server, rng, name, by_hand, askers, a):
    """One start, while the other models are asked; its row."""
    kills, parts = rng.random() < 0.2, max(2, a.size * GIB // PART)
    begin, process = time.monotonic(), server.start(name, by_hand)
    process.say(bytes=a.size * GIB, parts=parts, pause=rng.choice([0, 0, 0.05, 6.0 / parts if rng.random() < 0.3 else 0]))
    for number in range(parts):
        process.hear(a.patience)
        if kills and number + 1 == parts // 2:
            # Killed halfway; the same model starts again, as whoever has killed it would have it.
            server.end_process(process, by_hand)
            process = server.start(name, by_hand)
            process.say(bytes=a.size * GIB, parts=parts, pause=0)
            for _ in range(parts):
                process.hear(a.patience)
            break
    loaded = time.monotonic() - begin
    answer = process.ask(a.patience, lasts=0.0, safe=False)
    held, fits = server.leases()
    joined = any(row["worker"] == name and row["pid"] == process.pid for row in server.rows())
    busy = [asker for asker in askers.values() if asker]
    longest = max((asker.longest for asker in busy), default=0.0)
    errors = [asker.error for asker in busy if asker.error]
    wrong = answer["wrong"] + sum(asker.wrong for asker in busy)
    passed = not wrong and fits and joined and not errors
    row = dict(model=name, by="hand" if by_hand else "agent", killed=kills, loaded_s=round(loaded, 2), first_use_s=answer["waited"],
               others_waited_s=round(longest, 2), leased_gib=round(held, 1), wrong=wrong, joined=joined, errors=errors, passed=passed)
    return process, row


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--starts", type=int, default=20)
    p.add_argument("--size", type=int, default=40, metavar="GIB")
    p.add_argument("--budget", type=int, default=100, metavar="GIB")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--patience", type=int, default=120, help="seconds a start or a use may take")
    p.add_argument("--worker", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.worker:
        return worker(os.environ["STARTS_FOLDER"], a.worker)
    if not os.path.exists("/dev/nvidiactl"):
        print("SKIPPED starts.py: no NVIDIA GPU on this machine (/dev/nvidiactl is missing)")
        return
    folder = pathlib.Path(tempfile.mkdtemp(prefix="glake-starts-"))
    rng, failed, server = random.Random(a.seed), 0, Server(folder, a)
    living = {}  # name: (process, whether it was started by hand)
    askers = dict.fromkeys(NAMES)
    watcher = Watcher(server.socket)
    watcher.start()
    print(f"{'':4} {'model':7} {'by':6} {'loaded':>8} {'1st use':>8} {'others':>8} {'leased':>9}  wrong")
    try:
        for number in range(a.starts):
            name, by_hand = rng.choice(NAMES), rng.random() < 0.5
            if askers[name]:
                askers[name].end()
                askers[name] = None
            if name in living:
                server.end_process(*living.pop(name))
            try:
                process, row = one(server, rng, name, by_hand, askers, a)
            except Exception as error:
                failed += 1
                print(f"FAIL {name:7} {'hand' if by_hand else 'agent':6} {type(error).__name__}: {error}", flush=True)
                break
            failed += not row["passed"]
            killed = ", killed halfway and started again" if row["killed"] else ""
            print(f"{'ok' if row['passed'] else 'FAIL':4} {name:7} {row['by']:6} {row['loaded_s']:6.2f} s {row['first_use_s']:6.2f} s "
                  f"{row['others_waited_s']:6.2f} s {row['leased_gib']:5.1f} GiB  {row['wrong']}{killed}"
                  f"{'' if row['joined'] else ', has not joined'} {' '.join(row['errors'])}", flush=True)
            living[name] = process, by_hand
            askers[name] = Asker(process, rng.random() < 0.5, a.patience)
            askers[name].start()
        for name, asker in askers.items():
            if asker:
                asker.end()
                failed += bool(asker.error or asker.wrong)
                print(f"{'FAIL' if asker.error or asker.wrong else 'ok':4} {name:7} was asked {asker.count} times, waited {asker.longest:.2f} s at most, "
                      f"{asker.wrong} wrong {asker.error or ''}")
        failed += not watcher.report()
    finally:
        watcher.is_over = True
        server.end()
        if failed:
            for log in (folder / "agent.log", *(folder.glob("*.log")), *(folder.glob("logs/*.log"))):
                print(f"--- {log.name}", *log.read_text().splitlines()[-15:], sep="\n")
        shutil.rmtree(folder, ignore_errors=True)
    print(f"starts.py: {a.starts} starts, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
