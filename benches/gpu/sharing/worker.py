"""A worker: a process that answers requests on a Unix socket of its own, and does what it is told on its standard
input.

    python worker.py KIND NAME PORT TOLD    KIND: glake (joins GLAKE_AGENT's agent), tensors, start; TOLD: JSON

A request is a line {"id", "context", "generated"}; after each step comes a line {"tokens": [id, …], "done": [id, …]},
or {"failed": [id, …], "why"}. Requests run beside each other, as far as the cache has room, in one use of memory with a
safe point after each step and each chunk of a prompt: as `glake plan` models it. A step takes `decode_ms` at least; 0:
as long as it takes."""

import contextlib, json, os, pathlib, queue, socket, sys, threading, time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from sharing import models


def say(**what):
    with say.lock:
        print(json.dumps(what), flush=True)


say.lock = threading.Lock()


class Connection:
    """A client's, whose requests are known by its own numbers."""

    def __init__(self, accepted):
        self.socket, self.lock = accepted, threading.Lock()

    def send(self, what):
        with self.lock, contextlib.suppress(OSError):
            self.socket.sendall((json.dumps(what) + "\n").encode())


class Request:
    def __init__(self, told, connection):
        self.id, self.context, self.generated = told["id"], max(told["context"], 2), max(told["generated"], 1)
        self.connection, self.slot, self.given, self.sum = connection, None, 0, None


class Engine:
    """The GPU work of a worker, on the thread that calls `run`."""

    def __init__(self, kind, told):
        self.kind, self.told, self.inbox = kind, told, queue.Queue()
        self.pace, self.waiting, self.active, self.model = told["decode_ms"] / 1e3, [], [], None
        self.glake, self.wrong, self.parks, self.unpaced = None, 0, 0, []
        simulated = told["device"].startswith("sim")
        if kind == "glake" or simulated:
            import glake

            self.glake = glake
        if not simulated:
            if kind == "glake":
                glake.enable()
            # It takes seconds, and nothing of the GPU: the turn to load what is held begins with the first allocation.
            import torch  # noqa: F401

    def load(self):
        joins = self.kind == "glake"
        make = models.Simulated if self.told["device"].startswith("sim") else models.Llama
        region = (lambda *a, **k: self.glake.region(*a, **k)) if joins else (lambda *a, **k: contextlib.nullcontext())
        with region("weights", policy="sealed", host_copy="retain"):
            self.model = make(
                self.told["weights"], self.told["kv"], self.told["device"], self.told["seed"], self.told.get("file")
            )
        with region("cache"):
            self.model.make_kv()
        if joins:
            cache = self.model.kv
            if isinstance(cache, int):
                cache = self.model._array(cache, self.told["kv"])
            self.glake.live(cache, self.live)
            self.glake.seal("weights")
            self.glake.join()
        self.warm()
        return {"digest": self.digest(), "per_token": self.model.per_token, "tokens": self.model.tokens}

    def live(self):
        each = self.model.per_token
        return [
            (slot.start * each, (slot.start + slot.length) * each)
            for slot in [request.slot for request in list(self.active)]
        ]

    def warm(self):
        """Runs each shape once so that libraries' workspaces and kernels exist before the measurement.

        A first prompt of a length took 10 to 30 ms more. Skipped if starting is what is measured."""
        lost, pace, self.pace = Connection(None), self.pace, 0
        lost.send = lambda what: None
        for contexts in self.model.shapes() if self.kind != "start" else [[300, 2]]:
            for context in contexts:
                self.waiting.append(
                    Request({"id": 0, "context": min(context, self.model.tokens // 4), "generated": 3}, lost)
                )
            self.use()
        self.pace, self.unpaced = pace, []

    def digest(self):
        with self.glake.active() if self.kind == "glake" else contextlib.nullcontext():
            return self.model.digest()

    def run(self):
        while True:
            what = self.inbox.get()
            if isinstance(what, Request):
                self.waiting.append(what)
                self.use()
            elif what is None:
                return
            else:
                what()

    def use(self):
        later = []
        try:
            with self.glake.active() if self.kind == "glake" else contextlib.nullcontext():
                while self.active or self.waiting:
                    self.step(later)
        except Exception as error:  # whoever waits is told, and the next request is tried anew
            for request in self.active + self.waiting:
                request.connection.send({"failed": [request.id], "why": f"{type(error).__name__}: {error}"[:900]})
            self.active, self.waiting = [], []
            say(warning=f"{type(error).__name__}: {error}"[:900])
        for what in later:
            what() if what else self.inbox.put(None)

    def safepoint(self):
        if self.kind == "glake" and self.glake.safepoint():
            self.parks += 1

    def step(self, later):
        begin = time.monotonic()
        with contextlib.suppress(queue.Empty):
            while True:
                what = self.inbox.get_nowait()
                (self.waiting if isinstance(what, Request) else later).append(what)
        self.admit()
        self.model.step([request.slot for request in self.active])
        self.unpaced.append(time.monotonic() - begin)
        lines = {}
        for request in list(self.active):
            request.given += 1
            line = lines.setdefault(request.connection, {"tokens": [], "done": []})
            line["tokens"].append(request.id)
            if request.given == request.generated:
                self.wrong += request.sum != self.model.kv_sum(request.slot, request.context - 1)
                line["done"].append(request.id)
                self.active.remove(request)
        rest = self.pace - (time.monotonic() - begin)
        if rest > 0:
            time.sleep(rest)
        for connection, line in lines.items():
            connection.send(line)
        self.safepoint()

    def admit(self):
        while self.waiting:
            request = self.waiting[0]
            tokens = request.context + request.generated
            if not self.active:
                tokens = min(tokens, self.model.tokens)
            start = models.place([other.slot for other in self.active], tokens, self.model.tokens)
            if start is None:
                return
            request.slot = models.Slot(start, tokens)
            self.active.append(self.waiting.pop(0))
            request.context = max(min(request.context, tokens - request.generated), 2)
            for _ in self.model.prefill(request.slot, request.context):
                self.safepoint()
            request.sum = self.model.kv_sum(request.slot, request.context - 1)

    # What the fleet tells it, on the thread that uses the GPU.

    def do(self, told):
        name = told["do"]
        begin = time.monotonic()
        answer = {
            "load": self.load,
            "digest": self.sums,
            "sleep": self.sleep,
            "wake": self.wake,
            "save": lambda: self.model.save(told["path"]),
            "unseal": lambda: self.glake.unseal("weights"),
            "steps": self.steps,
        }[name]()
        say(answer=name, seconds=time.monotonic() - begin, **(answer or {}))

    def sums(self):
        """Returns the digest of the weights and the counters since the last call."""
        said = {"digest": self.digest(), "wrong": self.wrong, "parks": self.parks}
        self.wrong = self.parks = 0
        return said

    def steps(self):
        """Seconds of steps, without their pace, since this was asked."""
        taken, self.unpaced = self.unpaced, []
        return {"steps": taken[-4000:]}

    def sleep(self):
        self.model.sleep()

    def wake(self):
        self.model.wake()


def listen(path, engine):
    def read(connection):
        with contextlib.suppress(OSError, ValueError):
            for line in connection.socket.makefile("r"):
                engine.inbox.put(Request(json.loads(line), connection))

    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()

    def accept():
        while True:
            connection = Connection(server.accept()[0])
            threading.Thread(target=read, args=[connection], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def main():
    kind, name, port, told = sys.argv[1:]
    told = json.loads(told)
    engine = Engine(kind, told)
    listen(port, engine)
    say(answer="begun", name=name)

    def failing(work):
        try:
            work()
        except Exception as error:
            say(error=f"{type(error).__name__}: {error}"[:800])

    def obey():
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "pace":
                engine.pace = command["ms"] / 1e3
                say(answer="pace")
            else:
                engine.inbox.put(lambda command=command: failing(lambda: engine.do(command)))
        os._exit(0)

    threading.Thread(target=obey, daemon=True).start()
    engine.run()


if __name__ == "__main__":
    main()
