"""This process as one of several ranks: a dedicated thread runs the protocol of ``_agreement`` on the store of torch's process group.

::

    thread or task at a safe point                         the ranks' thread                     the store
    Arrival: the step, its uses ─────────────── queue ──►  meet ◄───── reads, swaps ─────►       one value
             whether it is there, wanted, drained ──────►  agree
             whether all are parked, whether it moves ◄──

No signal comes to the ranks' thread and no task of it is cancelled, so nothing cuts the agreement off: whoever leaves a safe point says so
with one word, and one that left without a word has not been heard of for a while. Nor does a store whose server is gone hold anybody but
that thread: one that takes too long is not asked again, nor one that failed.

A wish lasts as long as a shrink waits for one of the uses that were wished for, whatever else begins and ends meanwhile.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import random
import sys
import threading
import time
import weakref
from typing import Any

from . import _agreement, _gate, _library
from ._agreement import Action, Actions, Asked, Look, Moment, Read, State

_logger = logging.getLogger("glake")

# How long the store may take for an answer, and how long who is at a safe point may not be heard of.
_ANSWER_SECONDS = 5.0
# How often who waits looks, with few ranks: all ask one store.
_POLL_SECONDS = 0.001
_RANKS_A_POLL = 16
# How often it looks whether a shrink still waits for what it has wished for.
_WISH_SECONDS = 0.02

# The program's numbers stay as they are.
_random = random.Random()


class _Over(Exception):
    """Raised when there are no other ranks to agree with any more."""


class Arrival:
    """A thread or task at a safe point, with its uses that a shrink waits for: its requests to the ranks' thread, and the answers."""

    def __init__(self, ranks: Ranks, step: int, uses: list[_gate.Use]) -> None:
        self._ranks, self.step, self.uses = ranks, step, uses
        self._seen, self._is_there, self._asked = time.monotonic(), True, 0
        self._parks: bool | None = None
        self._moves: bool | None = None

    def come(self) -> None:
        """Enters the protocol: other ranks may wait for it until it leaves."""
        self._ranks.hear(self)

    def parks(self) -> bool | None:
        """Whether it must park here, as all ranks do; None: not known yet, ask again soon."""
        return self._heard(self._parks)

    def moves(self, asked: int) -> bool | None:
        """Whether the memory of all ranks moves, once it is parked. ``asked`` is the local state, as in ``_agreement.Asked``."""
        self._asked = asked
        return self._heard(self._moves)

    def leave(self) -> None:
        """Leaves the protocol: no memory moves, unless it is too late to say so."""
        self._is_there = False

    def _heard(self, answer: bool | None) -> bool | None:
        self._seen = time.monotonic()
        return False if answer is None and self._ranks.are_over() else answer

    # The ranks' thread asks and tells:

    def asked(self) -> int:
        is_there = self._is_there and time.monotonic() - self._seen < _ANSWER_SECONDS and threading.main_thread().is_alive()
        return self._asked if is_there else -1

    def is_wanted(self) -> bool:
        return self.asked() >= 0 and _is_wanted(self.uses)

    def tell(self, parks: bool, moves: bool | None = None) -> None:
        self._moves, self._parks = moves, parks


class Ranks:
    """The other ranks of the default process group."""

    def __init__(self, store: Any, ranks: int, own: int) -> None:
        self._rank = _agreement.Rank(ranks, own)
        self._key = f"glake/park/{ranks}"
        self._sleep = _POLL_SECONDS * max(1.0, ranks / _RANKS_A_POLL)
        self._wished_for: list[_gate.Use] = []
        # None: the group is gone.
        self._arrivals: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._are_over = False
        # The store is being asked since then; first of all for a connection.
        self._asks_since: float | None = time.monotonic()
        # Held no longer than by its group: one that lives on is the next group's too, with all that was written. Told by no code of Python's,
        # within which an interrupt would be lost, and with it that the group is gone.
        self._group_store = weakref.ref(store, functools.partial(self._arrivals.put, None))
        self._own_store: Any = None
        threading.Thread(target=self._serve, name="glake-ranks", daemon=True).start()

    def hear(self, arrival: Arrival) -> None:
        self._arrivals.put(arrival)

    def are_over(self) -> bool:
        """Whether there are no other ranks to agree with any more."""
        since = self._asks_since
        if since is not None and time.monotonic() - since > _ANSWER_SECONDS:
            self._end(f"no answer in {_ANSWER_SECONDS:g} s")
        return self._are_over

    def _end(self, why: str) -> None:
        if not self._are_over:
            self._are_over = True
            _logger.warning("the store of the process group failed (%s): this rank is not parked at safe points any more", why)

    def _serve(self) -> None:
        try:
            self._connect()
            while arrival := self._next():
                self._meet(arrival)
        except _Over:
            pass
        except Exception as error:
            self._end(str(error))
        self._are_over, self._own_store = True, None

    def _next(self) -> Arrival | None:
        while True:
            try:
                return self._arrivals.get(timeout=_WISH_SECONDS if self._rank.has_wished() else None)
            except queue.Empty:
                if not _is_wanted(self._wished_for):
                    self._run(self._rank.withdraw(), None)

    def _meet(self, arrival: Arrival) -> None:
        if not arrival.is_wanted():
            arrival.tell(False)
            return
        self._wished_for = [use for use in {*self._wished_for, *arrival.uses} if _is_wanted([use])]
        parks = self._run(self._rank.meet(arrival.step), arrival)
        arrival.tell(parks)
        if parks:
            arrival.tell(True, self._run(self._rank.agree(), arrival))
        if not self._rank.has_wished():
            self._wished_for = []

    def _run(self, actions: Actions, arrival: Arrival | None) -> bool:
        answer = None
        while True:
            try:
                action = actions.send(answer)
            except StopIteration as ended:
                return bool(ended.value)
            answer = self._answer(action, arrival)

    def _answer(self, action: Action, arrival: Arrival | None) -> Any:
        if isinstance(action, Look):
            if action.sleeps:
                # Not all at once.
                time.sleep(self._sleep * _random.uniform(0.5, 1.5))
                self._refuse_others()
            return Moment(time.monotonic(), arrival is not None and arrival.is_wanted())
        if isinstance(action, Asked):
            return -1 if arrival is None else arrival.asked()
        if isinstance(action, Read):
            # Who reads first writes it: what stands there is not written again, which would make a store's file longer each time.
            return self._compare_set("", str(State()))
        return self._compare_set(str(action.expected), str(action.desired))

    def _refuse_others(self) -> None:
        """Refuses further arrivals, one at a time: threads at safe points do not know each other's steps."""
        while not self._arrivals.empty():
            other = self._arrivals.get()
            if other is None:
                raise _Over
            other.tell(False)

    def _connect(self) -> None:
        """Opens a separate connection if torch allows it: on a shared one, its calls alternate with the group's."""
        try:
            self._own_store = self._store().clone()
        except (AttributeError, NotImplementedError, RuntimeError):
            pass
        self._asks_since = None

    def _store(self) -> Any:
        store = self._group_store() if self._own_store is None else self._own_store
        if store is None or self._are_over:
            raise _Over
        return store

    def _compare_set(self, expected: str, desired: str) -> State:
        self._asks_since = time.monotonic()
        found = State.of(bytes(self._store().compare_set(self._key, expected, desired)).decode())
        self._asks_since = None
        if self._are_over:
            raise _Over
        return found


def _is_wanted(uses: list[_gate.Use]) -> bool:
    """Whether a shrink waits for one of these uses, and the use can be parked."""
    return any(use.is_alone() and _library.api().use_wanted(use.number) for use in uses)


_lock = threading.Lock()
# The group's store, and its ranks.
_known: tuple[weakref.ref[Any], Ranks] | None = None


def is_one_of_several() -> bool:
    """Whether this process is one of several ranks; true for a launcher's rank even before it has met the others."""
    distributed = _distributed()
    if distributed is not None:
        return bool(distributed.get_world_size() > 1)
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def here() -> Ranks | None:
    """Returns the ranks of torch's default process group; None if there is none, it has no store, or it has ended."""
    global _known
    distributed = _distributed()
    if distributed is None:
        return None
    try:
        store = distributed.distributed_c10d._get_default_store()
        with _lock:
            if _known is None or _known[0]() is not store:
                _known = (weakref.ref(store), Ranks(store, int(distributed.get_world_size()), int(distributed.get_rank())))
            ranks = _known[1]
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return None if ranks.are_over() else ranks


def _distributed() -> Any:
    """Returns ``torch.distributed`` if a default group exists."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    return distributed if distributed is not None and distributed.is_available() and distributed.is_initialized() else None


def _forget() -> None:
    """Resets a forked child: it is no rank, and must not use its parent's connection."""
    global _known, _lock
    _known, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
