"""The workers of one kind: starts them within the budget, tells them what to do, and ends them."""

import json, pathlib, queue, subprocess, sys, threading, time

import launch
from . import setup as setups
from .client import Port

PATIENCE = 240


class Worker:
    """One worker process and its connection."""

    def __init__(self, kind, name, folder, setup, seed, environment, file=None):
        self.name, self.kind, self.setup, self.answers = name, kind, setup, queue.Queue()
        self.port_path = str(folder / f"{kind}-{name}-{time.monotonic_ns()}.port")
        self.errors = folder / f"{kind}-{name}.log"
        command = [
            sys.executable,
            str(pathlib.Path(__file__).with_name("worker.py")),
            kind,
            name,
            self.port_path,
            setup.worker(seed=seed, file=file),
        ]
        with open(self.errors, "a") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        self.port, self.warnings, self.digest, self.told = None, [], None, {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue
            self.warnings.append(said["warning"]) if "warning" in said else self.answers.put(said)
        self.answers.put({"error": f"{self.name} ended: {self.last_words()}"})

    def last_words(self):
        return " | ".join(self.errors.read_text(errors="replace").strip().splitlines()[-4:])[-600:]

    def answer(self, name, patience=PATIENCE):
        try:
            said = self.answers.get(timeout=max(patience, 0.01))
        except queue.Empty:
            raise RuntimeError(f"{self.name} has not answered {name} within {patience:.0f} s") from None
        if said.get("answer") != name:
            raise RuntimeError(f"{self.name}: {name} was waited for, and there came {said}")
        return said

    def do(self, name, patience=PATIENCE, **more):
        self.process.stdin.write(json.dumps({"do": name, **more}) + "\n")
        self.process.stdin.flush()
        return self.answer(name, patience)

    def load(self, patience=PATIENCE):
        self.told = self.do("load", patience)
        self.digest = self.told["digest"]
        self.port = Port(self.name, self.port_path)
        return self.told

    def alive(self):
        return self.process.poll() is None

    def kill(self):
        self.process.kill()
        self.process.wait()


class Fleet:
    """Workers of one kind, by name."""

    def __init__(self, kind, setup, folder, agent=None, file=None):
        self.kind, self.setup, self.folder, self.agent, self.file = kind, setup, folder, agent, file
        self.workers = {}

    def environment(self, name):
        env = launch.environment()
        if self.setup.simulated:
            env["GLAKE_DEVICE"] = self.setup.device
        if self.agent:
            env["GLAKE_AGENT"] = str(self.agent.socket)
        if self.agent or self.setup.simulated:
            env["GLAKE_CONFIG"] = str(setups.text(self.folder / f"{name}.toml", self.setup.configuration(name)))
        return env

    def spawn(self, name, seed=None):
        seed = self.setup.names.index(name) if seed is None else seed
        worker = Worker(self.kind, name, self.folder, self.setup, seed, self.environment(name), self.file)
        self.workers[name] = worker
        return worker

    def start(self, say):
        """Starts all workers: the first alone, because it builds what the others find, then as many at a time as fit.

        Each sleeps once it has loaded, with a host copy of its weights."""
        begin = time.monotonic()
        first, *others = self.setup.names
        self.spawn(first).answer("begun")
        for name in others:
            self.spawn(name)
        for name in others:
            self.workers[name].answer("begun")
        say(f"{self.kind}: {self.setup.count} processes in {time.monotonic() - begin:.0f} s")
        room, failed = threading.Semaphore(self.setup.room()), []

        def load(name):
            with room:
                try:
                    self.workers[name].load()
                    self.sleep(name)
                except Exception as error:
                    failed.append(f"{name}: {error}")

        threads = [threading.Thread(target=load, args=[name]) for name in self.setup.names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise RuntimeError("; ".join(failed))
        say(f"{self.kind}: all have loaded and given their memory back in {time.monotonic() - begin:.0f} s")

    def sleep(self, name):
        if not self.agent:
            return self.workers[name].do("sleep")
        for left in (2, 1, 0):
            try:
                return self.agent.do("shrink", name)
            except RuntimeError:
                # It may have been asked for in the same moment.
                if not left:
                    raise
                time.sleep(0.5)

    def digests(self, names=None):
        """Weights beside what they were when they had been loaded, of workers that have them; who differs, how many
        requests since this was asked last had other bytes in the cache, and how often workers were parked."""
        wrong, cache, parks = [], 0, 0
        for name, worker in self.workers.items():
            if worker.alive() and (names is None or name in names):
                said = worker.do("digest")
                wrong += [name] if said["digest"] != worker.digest else []
                cache, parks = cache + said["wrong"], parks + said["parks"]
        return {"wrong_weights": wrong, "wrong_cache": cache, "parks": parks}

    def pace(self, ms):
        for worker in self.workers.values():
            if worker.alive():
                worker.do("pace", ms=ms)

    def end(self):
        for worker in self.workers.values():
            if worker.alive():
                worker.kill()
