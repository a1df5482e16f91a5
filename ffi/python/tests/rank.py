"""One rank of several on simulated GPUs: a process group whose store is a file and whose all-reduce goes over a socket.

    python rank.py RANK RANKS STORE SOCKET SCENE

It prints what it found as JSON.
"""

import asyncio
import ctypes
import fcntl
import itertools
import json
import os
import pathlib
import random
import signal
import socket
import sys
import threading
import time
import types

import glake
from glake import _agreement, _library, _ranks, _safepoint

OWN, RANKS, SOCKET = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
SCENE = sys.argv[5]
SIZE, SEED = 1 << 23, OWN + 1


class Store:
    """torch's ``FileStore``: each write makes the file longer."""

    fails = blocks = False

    def __init__(self, path):
        self.path, self.place, self.values = pathlib.Path(path), 0, {}

    def clone(self):
        while self.blocks:
            time.sleep(0.1)
        raise NotImplementedError

    def change(self, key, how):
        if self.fails:
            raise RuntimeError("Connection reset by peer")
        with self.path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(self.place)
            self.values.update(map(json.loads, file))
            value = how(self.values.get(key))
            if value is not None:
                file.write(json.dumps([key, value]) + "\n")
                self.values[key] = value
            self.place = file.seek(0, os.SEEK_END)
        return self.values.get(key)

    def compare_set(self, key, expected, desired):
        found = self.change(key, lambda value: desired if (value or "") == expected else None)
        return (expected if found is None else found).encode()

    def keys(self):
        self.change("", lambda value: None)
        return list(self.values)

    def size(self):
        return self.path.stat().st_size


store = Store(sys.argv[3])
torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: False)
torch.distributed = types.SimpleNamespace(
    is_available=lambda: True,
    is_initialized=lambda: True,
    get_world_size=lambda: RANKS,
    get_rank=lambda: OWN,
    distributed_c10d=types.SimpleNamespace(_get_default_store=lambda: store),
)

api = _library.api()
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
with glake.region("kv"):
    other_address = api.alloc(0, SIZE)
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
    """Only one of them shrinks, again and again: nobody waits for it, and nothing is left of it."""
    shrinks = Shrinks(0 if OWN else 10, timeout=0.1)
    shrinks.start()
    steps = Steps().run(shrinks.is_over)
    found = {"waited_at": steps.waited_at, "failed": shrinks.failed, "error": shrinks.error, "longest": steps.longest}
    return {**found, "keys": len(store.keys())}


def nested():
    """In each step other uses begin and end, in the same thread and in another, which no shrink waits for."""
    over = threading.Event()

    def uses():
        while not over.is_set():
            with glake.active("kv"):
                time.sleep(0.0005)

    class Nested(Steps):
        def work(self, is_over):
            with glake.active("kv"):
                return super().work(is_over)

    user = threading.Thread(target=uses)
    user.start()
    shrinks = Shrinks(5, timeout=8.0)
    shrinks.start()
    steps = Nested().run(shrinks.is_over)
    over.set()
    user.join()
    return {"waited_at": steps.waited_at, "parked": shrinks.parked, "failed": shrinks.failed, "error": shrinks.error}


def quanta():
    """One of two own uses has been parked and runs for its quantum, when a shrink waits for both."""
    failed = []

    def shrink():
        begun.wait()
        for tags in (["weights"], []):
            try:
                glake.shrink(*tags, timeout=20.0)
            except glake.ClosedError as error:
                failed.append(str(error))
            glake.refill(*tags)

    class Both(Steps):
        def run(self, is_over):
            with glake.active("kv"):
                return super().run(is_over)

    shrinks = threading.Thread(target=shrink)
    shrinks.start()
    steps = Both().run(lambda: not shrinks.is_alive())
    return {"waited_at": steps.waited_at, "failed": failed, "longest": steps.longest}


def groups():
    """A group is destroyed with a wish in its store, and the next one has the same store."""
    global store
    shrinks = Shrinks(2)
    shrinks.start()
    before = Steps().run(shrinks.is_over)
    shrinks = Shrinks(1 - OWN, timeout=0.5)
    shrinks.start()
    with glake.active("weights"):
        for _ in range(100):
            time.sleep(0.001)
            glake.safepoint()
        store = Store(store.path)
    shrinks.join()
    all_reduce(0)
    begun.clear()
    shrinks = Shrinks(3, timeout=8.0)
    shrinks.start()
    steps = Steps().run(shrinks.is_over)
    return {"before": before.waited_at, "waited_at": steps.waited_at, "failed": shrinks.failed, "error": shrinks.error}


def signals():
    """Signals come to one of them at safe points, two at a time, at whatever place: it can be parked after them."""
    random.seed(7)
    _agreement.PAUSE_SECONDS = 0.01
    rings = 0
    raised, parked, longest = 0, [], 0.0

    def ring(*_):
        nonlocal rings
        if rings:
            rings -= 1
            if rings:
                signal.setitimer(signal.ITIMER_REAL, random.choice([1e-6, 2e-5, 2e-4, 2e-3]))
            raise KeyboardInterrupt

    def safepoint(after):
        nonlocal rings
        rings = 2
        try:
            signal.setitimer(signal.ITIMER_REAL, after)
            return glake.safepoint()
        finally:
            rings = 0

    signal.signal(signal.SIGALRM, ring)
    for number in range(PARKS):
        is_last = number >= PARKS - 3
        # One that is raised before its safe point has been counted is of no step.
        _safepoint._steps = itertools.count(1000 * number)
        shrinks = Shrinks(1, timeout=5.0)
        begun.clear()
        shrinks.start()
        with glake.active("weights"):
            begun.set()
            waited, step = False, 0
            while True:
                begin = time.monotonic()
                try:
                    if OWN == 0 and not is_last:
                        waited = safepoint(10 ** random.uniform(-5.5, -1.5)) or waited
                    else:
                        waited = glake.safepoint() or waited
                except KeyboardInterrupt:
                    raised += 1
                    assert glake.gate()["parked"] == 0
                    check()
                longest, step = max(longest, time.monotonic() - begin), step + 1
                # Both have waited or go on without.
                if all_reduce(int(waited or step > (500 if is_last else 8)))[0] == 2:
                    break
        parked.append(waited)
        shrinks.join()
        glake.refill("weights")
    return {"raised": raised, "parked": parked, "longest": longest, "keys": len(store.keys())}


def dies():
    """One is gone once it has said that it wishes."""
    shrinks = Shrinks(1)
    shrinks.start()
    steps = Steps()
    if OWN == 1:
        meet = _agreement.Rank.meet

        def last(self, step):
            yield from meet(self, step)
            os._exit(0)

        _agreement.Rank.meet = last
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
    found = {"waited_at": steps.waited_at, "failed": shrinks.failed, "error": shrinks.error, "longest": steps.longest}
    return {**found, "size": store.size()}


def interrupted():
    """One has wished, and is busy; a signal comes to the other, which waits for it."""
    shrinks = Shrinks(1)
    raised = None

    def raises(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, raises)
    shrinks.start()
    begin = time.monotonic()
    with glake.active("weights"):
        begun.set()
        if OWN == 1:
            while not _ranks._known or not _ranks._known[1]._rank.has_wished():
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
    return {"raised": raised, "waited": waited}


def store_is_lost():
    return without_store("fails")


def store_does_not_answer():
    return without_store("blocks")


def without_store(how):
    shrinks = Shrinks(1, timeout=3.0)
    steps = Steps()
    if OWN == 1:
        setattr(store, how, True)
    shrinks.start()
    steps.run(shrinks.is_over)
    return {"waited_at": steps.waited_at, "failed": shrinks.failed, "longest": steps.longest}


_agreement.MEET_SECONDS = float(os.environ.get("MEET_SECONDS", "10"))
_agreement.DRAIN_SECONDS = float(os.environ.get("DRAIN_SECONDS", "30"))
_ranks._ANSWER_SECONDS = float(os.environ.get("ANSWER_SECONDS", "5"))
PARKS = int(os.environ.get("PARKS", "20"))
found = globals()[SCENE]()
api.free(address)
api.free(other_address)
print(json.dumps(found))
