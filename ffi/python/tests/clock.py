"""A virtual clock that stands still while any of its threads runs: results depend on no machine's speed, and waits take no time.

Each of its threads runs, or waits until a time, for a queue or for another thread's end. Once all wait, it is the time
at which the next goes on.
"""

import collections
import contextlib
import queue
import threading
import types
from unittest import mock


class Clock:
    """A virtual clock; the creating thread is its first thread."""

    def __init__(self):
        # A queue's item may be put by whatever thread drops an object, at whatever place.
        self.changed = threading.Condition(threading.RLock())
        self.now, self.running, self.waits = 0.0, 1, []

    @contextlib.contextmanager
    def of(self, *modules):
        """Replaces the time, the queues and the threads of these modules by the clock's."""
        time = types.SimpleNamespace(monotonic=self.monotonic, sleep=self.sleep)
        queues = types.SimpleNamespace(SimpleQueue=lambda: Queue(self), Empty=queue.Empty)
        threads = types.SimpleNamespace(**{**vars(threading), "Thread": self.thread})
        with contextlib.ExitStack() as patches:
            for module in modules:
                for name, stands in (("time", time), ("queue", queues), ("threading", threads)):
                    if hasattr(module, name):
                        patches.enter_context(mock.patch.object(module, name, stands))
            yield

    def monotonic(self):
        with self.changed:
            return self.now

    def sleep(self, seconds):
        with self.changed:
            self.wait(self.now + seconds)

    def thread(self, **arguments):
        return Thread(self, **arguments)

    # Of those that hold `changed`:

    def wait(self, until=float("inf"), thing=None):
        """Waits until a time, or until the condition holds."""
        own = types.SimpleNamespace(until=until, thing=thing, is_over=False)
        self.waits.append(own)
        self.running -= 1
        self.advance()
        while not own.is_over:
            self.changed.wait()

    def advance(self):
        until = min((wait.until for wait in self.waits), default=float("inf"))
        # While all wait for one another only what is none of its threads can change that.
        if self.running == 0 and until < float("inf"):
            self.now = max(self.now, until)
            self.wake(lambda wait: wait.until <= self.now)

    def wake(self, which):
        for wait in [wait for wait in self.waits if which(wait)]:
            self.waits.remove(wait)
            # From here on, and not only once it has been woken.
            self.running += 1
            wait.is_over = True
        self.changed.notify_all()


class Queue:
    """Replacement of ``queue.SimpleQueue`` under the clock."""

    def __init__(self, clock):
        self.clock, self.items = clock, collections.deque()

    def put(self, item, _block=True):
        with self.clock.changed:
            self.items.append(item)
            self.clock.wake(lambda wait: wait.thing is self)

    def get(self, timeout=None):
        with self.clock.changed:
            if not self.items:
                self.clock.wait(float("inf") if timeout is None else self.clock.now + timeout, self)
            if not self.items:
                raise queue.Empty
            return self.items.popleft()

    def empty(self):
        return not self.items


class Thread(threading.Thread):
    """A thread that counts as running from its start, not only once it has a processor."""

    def __init__(self, clock, **arguments):
        super().__init__(**arguments)
        self.clock, self.has_ended = clock, False

    def start(self):
        with self.clock.changed:
            self.clock.running += 1
        super().start()

    def run(self):
        try:
            super().run()
        finally:
            with self.clock.changed:
                self.clock.running -= 1
                self.has_ended = True
                self.clock.wake(lambda wait: wait.thing is self)
                self.clock.advance()

    def join(self, timeout=None):
        with self.clock.changed:
            if not self.has_ended:
                self.clock.wait(self.clock.now + timeout if timeout is not None else float("inf"), self)
        if self.has_ended:
            super().join()
