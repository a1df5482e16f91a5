"""One rank of several on simulated GPUs: a process group whose store is a file and whose all-reduce goes over a socket.

    python rank.py RANK RANKS STORE SOCKET SCENE

It prints what it found as JSON.
"""

import asyncio
import ctypes
import fcntl
import json
import os
import pathlib
import signal
import socket
import sys
import threading
import time
import types

import glake
from glake import _agreement, _library, _ranks

OWN, RANKS, SOCKET = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
SIZE, SEED = 1 << 23, OWN + 1


class Store:
    """What torch's stores can, in a file."""

    fails = False

    def __init__(self, path):
        self.path = pathlib.Path(path)

    def change(self, how):
        if self.fails:
            raise RuntimeError("Connection reset by peer")
        with self.path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            values = json.loads(file.read() or "{}")
            answer = how(values)
            file.seek(0)
            file.truncate()
            file.write(json.dumps(values))
        return answer

    def add(self, key, amount):
        def how(values):
            values[key] = values.get(key, 0) + amount
            return values[key]

        return self.change(how)

    def compare_set(self, key, expected, desired):
        def how(values):
            if values.get(key, "") == expected:
                values[key] = desired
            return values.get(key, expected).encode()

        return self.change(how)

    def delete_key(self, key):
        return self.change(lambda values: values.pop(key, None) is not None)


class Prefix:
    def __init__(self, prefix, store):
        self.prefix, self.store = prefix, store

    def add(self, key, amount):
        return self.store.add(f"{self.prefix}/{key}", amount)

    def compare_set(self, key, expected, desired):
        return self.store.compare_set(f"{self.prefix}/{key}", expected, desired)

    def delete_key(self, key):
        return self.store.delete_key(f"{self.prefix}/{key}")


store = Store(sys.argv[3])
torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: False)
torch.distributed = types.SimpleNamespace(
    is_available=lambda: True,
    is_initialized=lambda: True,
    get_world_size=lambda: RANKS,
    get_rank=lambda: OWN,
    PrefixStore=Prefix,
    distributed_c10d=types.SimpleNamespace(_get_default_store=lambda: store),
)

api = _library.api()
api.configure(None, None, "tiers.park_quantum_ms = 2\n")
other = socket.socket(fileno=SOCKET)


def all_reduce(*numbers):
    """The sums over both ranks: neither goes on before the other has come."""
    other.sendall(json.dumps(numbers).encode().ljust(64))
    theirs = b""
    while len(theirs) < 64:
        part = other.recv(64 - len(theirs))
        if not part:
            raise EOFError
        theirs += part
    return [own + their for own, their in zip(numbers, json.loads(theirs))]


with glake.region("weights"):
    address = api.alloc(0, SIZE)
sent = bytes((SEED + place * 7) % 251 for place in range(4096)) * (SIZE // 4096)
memory = types.SimpleNamespace(__cuda_array_interface__={"data": (address, False), "shape": (SIZE,), "typestr": "|u1", "version": 3})
glake.copy_(memory, sent, wait=True)
sys.modules["torch"] = torch


def evicted():
    return next(region for region in glake.regions() if region["tag"] == "weights")["evicted"]


def check():
    assert ctypes.string_at(address, SIZE) == sent, "other bytes"


class Steps:
    """A use of many steps; where it waited, and for how long at most."""

    def __init__(self):
        self.step, self.waited_at, self.longest = 0, [], 0.0

    def work(self, is_over):
        begun.set()
        check()
        total, over = all_reduce(self.step, int(is_over()))
        assert total == 2 * self.step, "the other is at another step"
        self.step += 1
        return over == RANKS

    def note(self, begin, waited):
        self.longest = max(self.longest, time.monotonic() - begin)
        if waited:
            self.waited_at.append(self.step)
            assert evicted() == 0

    def run(self, is_over):
        with glake.active("weights"):
            while not self.work(is_over):
                begin = time.monotonic()
                self.note(begin, glake.safepoint())
        return self

    async def run_async(self, is_over):
        async with glake.active("weights"):
            while not self.work(is_over):
                begin = time.monotonic()
                self.note(begin, await glake.safepoint_async())
        return self


# A use has begun: what is shrunk before that waits for nobody.
begun = threading.Event()


class Shrinks(threading.Thread):
    """Takes the memory and brings it back so often."""

    def __init__(self, parks, timeout=30.0):
        super().__init__()
        self.parks, self.timeout, self.parked, self.failed, self.error = parks, timeout, 0, 0, None

    def run(self):
        begun.wait()
        try:
            for number in range(self.parks):
                time.sleep(0.003 * ((number * (OWN + 2)) % 5))
                try:
                    assert glake.shrink("weights", timeout=self.timeout)["resident"] == 0
                except glake.ClosedError as error:
                    self.failed, self.error = self.failed + 1, str(error)
                    assert evicted() == 0
                    continue
                self.parked += glake.gate()["parked"]
                time.sleep(0.002)
                glake.refill("weights")
        except BaseException as error:
            self.error = repr(error)
            raise

    def is_over(self):
        return not self.is_alive()


def parks(run):
    shrinks = Shrinks(20)
    shrinks.start()
    steps = run(Steps(), shrinks.is_over)
    return {"waited_at": steps.waited_at, "parked": shrinks.parked, "failed": shrinks.failed, "error": shrinks.error}


def threads():
    return parks(Steps.run)


def tasks():
    return parks(lambda steps, is_over: asyncio.run(steps.run_async(is_over)))


def alone():
    """Only one of them shrinks: nobody waits for it."""
    shrinks = Shrinks(0 if OWN else 3, timeout=0.3)
    shrinks.start()
    steps = Steps().run(shrinks.is_over)
    return {"waited_at": steps.waited_at, "failed": shrinks.failed, "error": shrinks.error, "longest": steps.longest}


def dies():
    """One is gone once it has said that it wishes."""
    shrinks = Shrinks(1, timeout=3.0)
    shrinks.start()
    steps = Steps()
    if OWN == 1:
        meet = _ranks.Ranks.meet

        def last(self, step):
            yield from meet(self, step)
            os._exit(0)

        _ranks.Ranks.meet = last
    try:
        steps.run(shrinks.is_over)
    except (EOFError, ConnectionError):
        pass
    shrinks.join()
    check()
    return {"waited_at": steps.waited_at, "failed": shrinks.failed, "longest": steps.longest}


def in_use():
    """On one of them another thread uses the memory, and comes to no safe point."""
    over = threading.Event()

    def uses():
        with glake.active("weights"):
            uses_it.set()
            while not over.is_set():
                check()
                time.sleep(0.01)

    uses_it = threading.Event()
    user = threading.Thread(target=uses)
    if OWN == 1:
        user.start()
        uses_it.wait()
    shrinks = Shrinks(1, timeout=3.0)
    shrinks.start()
    steps = Steps().run(shrinks.is_over)
    over.set()
    if OWN == 1:
        user.join()
    return {"waited_at": steps.waited_at, "failed": shrinks.failed, "error": shrinks.error, "longest": steps.longest}


def interrupted():
    """One has wished, and is busy; a signal comes to the other, which waits for it."""
    shrinks = Shrinks(1, timeout=3.0)
    raised = None

    def raises(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, raises)
    shrinks.start()
    begin = time.monotonic()
    with glake.active("weights"):
        begun.set()
        if OWN == 1:
            while not _ranks._known or not _ranks._known[1].has_wished():
                glake.safepoint()
            all_reduce(0)
        else:
            all_reduce(0)
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            try:
                while True:
                    glake.safepoint()
            except KeyboardInterrupt:
                raised = time.monotonic() - begin
                check()
        all_reduce(0)
        # Both find that nothing is agreed, and go on.
        waited = glake.safepoint()
    shrinks.join()
    glake.refill("weights")
    check()
    return {"raised": raised, "waited": waited, "outcomes": [value for key, value in store.change(dict).items() if key.endswith("/step")]}


def store_is_lost():
    shrinks = Shrinks(1, timeout=2.0)
    steps = Steps()
    if OWN == 1:
        store.fails = True
    shrinks.start()
    steps.run(shrinks.is_over)
    return {"waited_at": steps.waited_at, "failed": shrinks.failed, "longest": steps.longest}


_agreement.MEET_SECONDS = float(os.environ.get("MEET_SECONDS", "10"))
_agreement.DRAIN_SECONDS = float(os.environ.get("DRAIN_SECONDS", "30"))
found = globals()[sys.argv[5]]()
api.free(address)
print(json.dumps(found))
