"""Requests of a trace, sent when they are due, and when each of their tokens came."""

import csv, gzip, json, math, pathlib, random, socket, threading, time

SAMPLE = pathlib.Path(__file__).with_name("azure_llm_2023.csv.gz")


def lengths(path=SAMPLE):
    """Prompts and answers of Azure's rows."""
    opened = gzip.open(path, "rt") if str(path).endswith(".gz") else open(path)
    with opened as file:
        return [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]


def draw(names, seed, rate, duration, rows, factor=1.0, zipf=0.0):
    """Draws requests like `glake plan --rate --duration --lengths --assign zipf:S`: (t_s, worker, context, generated), from a seed of
    its own."""
    chance, at, found = random.Random(seed), 0.0, []
    weights = [(place + 1) ** -zipf for place in range(len(names))]
    while True:
        at -= math.log(1.0 - chance.random()) / rate
        if at > duration:
            return found
        context, generated = (max(round(tokens * factor), 1) for tokens in chance.choice(rows))
        found.append((at, chance.choices(names, weights)[0], context, generated))


def write(path, requests):
    """A trace for `glake plan`, which counts from the first request."""
    with open(path, "w") as file:
        file.write("t_s,worker,context_tokens,generated_tokens\n")
        file.writelines(f"{at:.6f},{name},{context},{generated}\n" for at, name, context, generated in requests)
    return path


class Asked:
    """A request that was sent, and what came of it."""

    def __init__(self, worker, context, generated, at):
        self.worker, self.context, self.generated, self.at = worker, context, generated, at
        self.first = self.last = None
        self.gap, self.tokens, self.failed, self.over = 0.0, 0, None, threading.Event()

    def token(self, now):
        if self.first is None:
            self.first = now
        else:
            self.gap = max(self.gap, now - self.last)
        self.last, self.tokens = now, self.tokens + 1

    def end(self, failed=None):
        if not self.over.is_set():
            self.failed = failed
            self.over.set()

    @property
    def ttft(self):
        return None if self.first is None else self.first - self.at

    @property
    def e2e(self):
        return None if self.failed or self.last is None else self.last - self.at


class Port:
    """A worker's socket, to which several requests are open at a time."""

    def __init__(self, name, path, patience=30):
        self.name, self.open, self.lock, self.number = name, {}, threading.Lock(), 0
        end = time.monotonic() + patience
        while True:
            self.socket = socket.socket(socket.AF_UNIX)
            try:
                self.socket.connect(path)
                break
            except OSError:
                self.socket.close()
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, asked):
        with self.lock:
            self.number += 1
            self.open[self.number] = asked
            line = {"id": self.number, "context": asked.context, "generated": asked.generated}
            try:
                self.socket.sendall((json.dumps(line) + "\n").encode())
            except OSError as error:
                asked.end(f"the worker's port: {error}")

    def _read(self):
        try:
            for line in self.socket.makefile("r"):
                now, said = time.monotonic(), json.loads(line)
                for number in said.get("tokens", []):
                    self.open[number].token(now)
                for number in said.get("done", []):
                    asked = self.open.pop(number)
                    asked.end(
                        None if asked.tokens == asked.generated else f"{asked.tokens} tokens of {asked.generated}"
                    )
                for number in said.get("failed", []):
                    self.open.pop(number).end(said["why"])
        except (OSError, ValueError) as error:
            self._lost(str(error))
        self._lost("it was closed")

    def _lost(self, why):
        with self.lock:
            for asked in self.open.values():
                asked.end(f"the worker's port: {why}")


def replay(requests, send, patience, began=lambda begin: None):
    """Sends each request when it is due; answers all of them once they are over, or `patience` seconds after the last
    was sent."""
    begin, all_asked = time.monotonic() + 0.2, []
    began(begin)
    for at, name, context, generated in requests:
        asked = Asked(name, context, generated, begin + at)
        time.sleep(max(asked.at - time.monotonic(), 0))
        all_asked.append(asked)
        send(asked)
    end = time.monotonic() + patience
    for asked in all_asked:
        asked.over.wait(max(end - time.monotonic(), 0))
    now = time.monotonic()
    for asked in all_asked:
        if not asked.over.is_set():
            # It has waited so long at least.
            asked.end("no answer")
            asked.first = asked.first or now
    return all_asked, begin


def figures(all_asked):
    """Lists over the requests, in seconds; those that failed stand in `failed` and, as far as they came, in `ttft`."""
    return {
        "requests": len(all_asked),
        "failed": [f"{asked.worker}: {asked.failed}" for asked in all_asked if asked.failed],
        "ttft": [round(asked.ttft, 4) for asked in all_asked if asked.ttft is not None],
        "e2e": [round(asked.e2e, 4) for asked in all_asked if asked.e2e is not None],
        "gaps": [round(asked.gap, 4) for asked in all_asked if asked.e2e is not None and asked.generated > 1],
        "tokens": sum(asked.tokens for asked in all_asked),
    }


def quantile(values, part):
    """The value that so many of all are no greater than, as `glake plan` counts; None of nothing."""
    return sorted(values)[max(math.ceil(part * len(values)), 1) - 1] if values else None
