"""Agents that decide which worker's memory is on the GPU: `glake serve`, and baselines that drain whole workers."""

import json, os, pathlib, shutil, socket, struct, subprocess, threading, time

import launch
from . import setup as setups


def command():
    """The command glake: the one that GLAKE names, that beside GLAKE_LIBRARY, or the first in PATH."""
    if os.environ.get("GLAKE"):
        return os.environ["GLAKE"]
    library = os.environ.get("GLAKE_LIBRARY")
    beside = pathlib.Path(library).with_name("glake") if library else None
    found = str(beside) if beside and beside.exists() else shutil.which("glake")
    if not found:
        raise SystemExit("serve: no command glake: name it with GLAKE=PATH, or put it beside the library that GLAKE_LIBRARY names")
    return found


class Agent:
    """`glake serve` on a socket of its own. It may be ended or killed, and started again with another file, under
    living workers."""

    def __init__(self, setup, folder):
        self.setup, self.folder, self.process, self.patience = setup, pathlib.Path(folder), None, 120
        (self.folder / "glake").mkdir(mode=0o700, exist_ok=True)
        self.socket = self.folder / "glake" / "agent.sock"

    def start(self, **node):
        """Seconds of the monotonic clock at which workers can connect."""
        file = setups.text(self.folder / "node.toml", self.setup.node(**node))
        env = launch.environment()
        if self.setup.simulated:
            env["GLAKE_DEVICE"] = self.setup.device
        self.log = open(self.folder / "agent.log", "a")
        self.process = subprocess.Popen(
            [command(), "serve", str(file), "--socket", str(self.socket)], env=env, stderr=subprocess.PIPE, text=True
        )
        said = []
        for line in self.process.stderr:
            said.append(line)
            if "serving" in line:
                break
        else:
            raise RuntimeError(f"glake serve: {''.join(said)}")
        back = time.monotonic()
        process, log = self.process, self.log
        threading.Thread(
            target=lambda: [log.write(line) and log.flush() for line in process.stderr], daemon=True
        ).start()
        return back

    def end(self, kill=False):
        if self.process:
            self.process.kill() if kill else self.process.terminate()
            self.process.wait()
            self.process = None

    def restart(self, names, **node):
        """Another file for the same workers."""
        self.end()
        self.start(**node)
        self.wait_for(names)

    def ask(self, op, **more):
        """The rows of an answer."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(self.patience)
            connection.connect(str(self.socket))
            body = json.dumps({"v": 1, "seq": 0, "ack": 0, "op": op, **more}).encode()
            connection.sendall(struct.pack("<I", len(body)) + body)
            rows, file = [], connection.makefile("rb")
            while True:
                head = file.read(4)
                if len(head) < 4:
                    raise OSError("the agent ended before it had answered")
                row = json.loads(file.read(struct.unpack("<I", head)[0]))
                if row["op"] == "end":
                    return rows
                if row["op"] in ("error", "refused"):
                    raise RuntimeError(f"the agent: {row.get('why')}")
                rows.append(row)

    def do(self, op, worker):
        """A worker's memory leaves, or comes back: seconds until it has."""
        begin = time.monotonic()
        self.ask(op, worker=worker)
        return time.monotonic() - begin

    def ps(self):
        return {row["worker"]: row for row in self.ask("ps")}

    def metrics(self, name):
        """The values of a metric."""
        text = "".join(row["text"] for row in self.ask("metrics"))
        found = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{")]
        if not found:
            raise RuntimeError(f"the agent has no metric {name}")
        return found

    def wait_for(self, names, patience=30):
        end = time.monotonic() + patience
        while True:
            rows = self.ps()
            if all(name in rows and rows[name]["state"] != "silent" for name in names):
                return
            if time.monotonic() > end:
                raise RuntimeError(f"workers have not joined within {patience} s: {rows}")
            time.sleep(0.05)


class Front:
    """Whole workers, least recently used, once their requests have ended; the oldest request that waits goes first. So
    do `glake plan`'s policies drain-per-tensor (`sleep` and `wake` copy each tensor) and start-stop (they end a process
    and start another)."""

    def __init__(self, names, room, sleep, wake, port):
        self.room, self.sleep, self.wake, self.port = room, sleep, wake, port
        self.awake, self.open, self.used, self.queue = (
            set(),
            {name: 0 for name in names},
            {name: 0.0 for name in names},
            [],
        )
        self.changed, self.over, self.failed = threading.Condition(), False, None
        self.sleeps, self.wakes = [], []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def send(self, asked):
        with self.changed:
            if asked.worker in self.awake:
                self._pass_on(asked)
            else:
                self.queue.append(asked)
                self.changed.notify()

    def _pass_on(self, asked):
        self.open[asked.worker] += 1
        self.port(asked.worker).send(asked)
        threading.Thread(target=self._await, args=[asked], daemon=True).start()

    def _await(self, asked):
        asked.over.wait()
        with self.changed:
            self.open[asked.worker] -= 1
            self.used[asked.worker] = time.monotonic()
            self.changed.notify()

    def _victim(self):
        """Returns the worker to put to sleep, idle longest; None if there is room, False if no worker is idle."""
        if len(self.awake) < self.room:
            return None
        idle = [name for name in self.awake if not self.open[name]]
        return min(idle, key=self.used.get) if idle else False

    def _run(self):
        while True:
            with self.changed:
                victim = self._victim()
                while not self.over and (not self.queue or victim is False):
                    self.changed.wait()
                    victim = self._victim()
                if self.over:
                    return
                wanted = self.queue[0].worker
                self.awake.discard(victim)
            try:
                if victim:
                    begin = time.monotonic()
                    self.sleep(victim)
                    self.sleeps.append(time.monotonic() - begin)
                begin = time.monotonic()
                self.wake(wanted)
                self.wakes.append(time.monotonic() - begin)
            except Exception as error:
                return self._give_up(f"{type(error).__name__}: {error}")
            with self.changed:
                self.awake.add(wanted)
                for asked in [asked for asked in self.queue if asked.worker == wanted]:
                    self.queue.remove(asked)
                    self._pass_on(asked)

    def _give_up(self, why):
        with self.changed:
            self.failed, self.over = why, True
            for asked in self.queue:
                asked.end(why)

    def end(self):
        with self.changed:
            self.over = True
            self.changed.notify()
        self.thread.join()
