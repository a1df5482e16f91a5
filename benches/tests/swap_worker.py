"""A worker of swap.py without a GPU: its memory is a number, a model is a word, and a step takes a millisecond."""
import operator, pathlib, sys, threading, time, types

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "gpu"))
import swap

NEED, GROWTH = 24 << 30, 1 << 30


class Worker(swap.Worker):
    def __init__(self, kind, lease):
        self.kind, self.printing, self.over, self.changed = kind, threading.Lock(), threading.Event(), threading.Condition()
        self.torch = types.SimpleNamespace(equal=operator.eq)
        self.glake = types.SimpleNamespace(lease=types.SimpleNamespace(grant=self.grant), refill=self.wake, shrink=self.shrink)
        self.steps, self.runs, self.marked = [], [], 0
        self.leased, self.made, self.wanted, self.parked = lease, 0, False, 0

    def grant(self, _, size):
        with self.changed:
            self.leased += size
            self.changed.notify_all()

    def load(self):
        self.made = NEED
        if self.kind == "start":
            self.say(bytes=True)
            self.say(logits=self.passes())
        else:
            self.say(ready=self.passes(), took=0.001, out=50.0, back=50.0, size=NEED)

    def passes(self):
        if self.made != NEED:
            raise RuntimeError(f"only {self.made} bytes are there")
        return "word"

    def shrink(self):
        with self.changed:
            self.wanted = True
            self.changed.wait_for(lambda: self.parked or not self.generating_now, 10)
            returned, self.leased, self.made = self.leased, 0, 0
        if self.kind.startswith("glake"):
            for part in (returned // 2, returned - returned // 2):
                self.say(event="returned", bytes=part)

    def sleep(self):
        begin = time.perf_counter()
        self.shrink()
        self.say(asleep=True, parked=self.parked, safe_point=self.steps[-1] if self.parked else begin, took=time.perf_counter() - begin,
                 copied=1 << 30, freed=NEED, resident=0)

    def wake(self):
        if self.kind.startswith("glake"):
            self.say(event="want", bytes=NEED + GROWTH - self.leased)
        with self.changed:
            if self.kind.startswith("glake") and not self.changed.wait_for(lambda: self.leased >= NEED, 10):
                raise RuntimeError("nobody granted enough")
            self.made, self.wanted = NEED, False
            self.changed.notify_all()

    generating_now = False

    def tokens(self):
        with self.changed:
            self.changed.wait_for(lambda: not self.wanted, 10)
            self.generating_now = True
        self.steps.append(None)
        for _ in range(30):
            time.sleep(0.001)
            self.steps.append(time.perf_counter())
            with self.changed:
                if self.wanted:
                    self.parked = 1
                    self.changed.notify_all()
                    self.changed.wait_for(lambda: not self.wanted, 10)
                    self.parked = 0
            self.passes()
        with self.changed:
            self.generating_now = False
            self.changed.notify_all()
        return "tokens"

    def save(self):
        self.say(saved=True)


if __name__ == "__main__":
    Worker(sys.argv[sys.argv.index("--kind") + 1], int(sys.argv[sys.argv.index("--lease") + 1])).run()
