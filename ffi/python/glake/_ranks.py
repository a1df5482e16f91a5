"""This process as one of several ranks: asks the store of torch's process group, the gate and the clock what ``_agreement`` wants to know.

The store is asked by a thread of its own, on a connection of its own where torch makes one: one whose server is gone may never answer, and
others of this process may wait in it. A store that failed once, or took too long, is not asked again.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from . import _agreement, _gate, _library
from ._agreement import Action, Actions, Add, Asked, Erase, Look, Moment, Swap, Vote

_logger = logging.getLogger("glake")

# How long the store may take for an answer.
_ANSWER_SECONDS = 5.0
# How often who waits looks, with few ranks: all ask one store.
_POLL_SECONDS = 0.001
_RANKS_A_POLL = 16


class Gone(Exception):
    """The store does not answer."""


class _Client:
    """A store that is asked with an end."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._asks: queue.SimpleQueue[tuple[Callable[[Any], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._works = True
        threading.Thread(target=self._serve, name="glake-ranks", daemon=True).start()

    def _serve(self) -> None:
        while True:
            ask, answer = self._asks.get()
            try:
                answer.put(ask(self._store))
            except Exception as error:
                answer.put(error)

    def ask(self, ask: Callable[[Any], Any]) -> Any:
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if not self._works:
            raise Gone
        self._asks.put((ask, answer))
        try:
            found = answer.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            found = TimeoutError(f"no answer in {_ANSWER_SECONDS:g} s")
        if isinstance(found, Exception):
            self._works = False
            _logger.warning("the store of the process group failed (%s): this rank is not parked at safe points any more", found)
            raise Gone from found
        return found


class Ranks:
    """The ranks of the default process group, as this one meets them."""

    def __init__(self, store: Any, ranks: int, own: int) -> None:
        self._rank = _agreement.Rank(ranks)
        self._own = own
        self._sleep = _POLL_SECONDS * max(1.0, ranks / _RANKS_A_POLL)
        self._client = _Client(store)
        self._is_known = False
        # One thread at a time: of several that come to safe points none knows the others' steps.
        self.turn = threading.Lock()

    def has_wished(self) -> bool:
        return self._rank.has_wished()

    def meet(self, step: int) -> Generator[float, None, bool]:
        """Whether all ranks are to be parked at this step. Yields how long to sleep, as ``agree``."""
        if not self._is_known:
            # What an earlier group wrote is of other rounds, which never end.
            if self._client.ask(lambda store: int(store.add(f"member/{self._own}", 1))) != 1:
                self._client.ask(_refuse)
            self._is_known = True
        return (yield from self._run(self._rank.meet(step), None))

    def agree(self, parked: Any, waits: bool) -> Generator[float, None, bool]:
        """Whether the memory of all moves, for a rank that is at the safe point, where it ``waits`` as ``parked``: it votes."""
        return (yield from self._run(self._rank.agree(waits), parked))

    def give_up(self, parked: Any = None) -> None:
        """Tells the others, and votes accordingly. Raises nothing."""
        try:
            for seconds in self._run(self._rank.give_up(), parked):
                time.sleep(seconds)
        except Gone:
            if parked is not None:
                parked.vote(False)

    def _run(self, actions: Actions, parked: Any) -> Generator[float, None, bool]:
        answer = None
        while True:
            try:
                action = actions.send(answer)
            except StopIteration as ended:
                return bool(ended.value)
            if isinstance(action, Look) and action.sleeps:
                yield self._sleep
            answer = self._answer(action, parked)

    def _answer(self, action: Action, parked: Any) -> Any:
        if isinstance(action, Look):
            wanted = _library.api().safepoint_wanted() and threading.main_thread().is_alive()
            return Moment(time.monotonic(), wanted)
        if isinstance(action, Asked):
            return parked.asked(0)
        if isinstance(action, Vote):
            return parked is not None and parked.vote(action.yes)
        return self._client.ask(lambda store: _ask(store, action))


def _refuse(_store: Any) -> None:
    raise ValueError("an earlier group of these ranks used it too: give each group a store or a prefix of its own")


def _ask(store: Any, action: Action) -> Any:
    if isinstance(action, Add):
        return int(store.add(action.key, action.amount))
    if isinstance(action, Swap):
        return bytes(store.compare_set(action.key, action.expected, action.desired)).decode()
    if isinstance(action, Erase):
        for key in action.keys:
            try:
                store.delete_key(key)
            except (NotImplementedError, RuntimeError):
                # Not every store can: a few bytes stay.
                break
    return None


_lock = threading.Lock()
# The group's store, and its ranks.
_known: tuple[Any, Ranks] | None = None


def is_one_of_several() -> bool:
    """A launcher's rank is one too before it has met the others."""
    distributed = _distributed()
    if distributed is not None:
        return bool(distributed.get_world_size() > 1)
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def here() -> Ranks | None:
    """The ranks of torch's default process group; None where there is none, or it has no store."""
    global _known
    distributed = _distributed()
    if distributed is None:
        return None
    try:
        store = distributed.distributed_c10d._get_default_store()
        with _lock:
            if _known is None or _known[0] is not store:
                _known = (store, Ranks(_own_part(distributed, store), int(distributed.get_world_size()), int(distributed.get_rank())))
            return _known[1]
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


def withdraw() -> None:
    """The others are not to wait for this rank: no shrink waits for it any more, or its use is over. Does nothing where they do not, or
    while a thread stands at a safe point."""
    ranks = None if _known is None else _known[1]
    if ranks is not None and ranks.has_wished() and ranks.turn.acquire(blocking=False):
        try:
            ranks.give_up()
        finally:
            ranks.turn.release()


def _own_part(distributed: Any, store: Any) -> Any:
    try:
        store = store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        # Its calls take turns with the group's own.
        pass
    return distributed.PrefixStore("glake/park", store)


def _distributed() -> Any:
    """``torch.distributed``, where a default group is there."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    return distributed if distributed is not None and distributed.is_available() and distributed.is_initialized() else None


def _forget() -> None:
    """A forked child is no rank, and does not speak on its parent's connection."""
    global _known, _lock
    _known, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
_gate.on_use_end(withdraw)
