"""Safe points: between two steps of a program a use of memory waits while its memory is evicted, and goes on at the same addresses.

::

    step ─ safepoint ─ step ─ safepoint ─ step        nobody waits: one load of the library's
              │ a shrink waits for this use
              ▼
           arrive ─► all threads and tasks of the use have ─► parked ─ its memory leaves ─ comes back ─► go on

A place is passed over where its work may need the thread itself: under a capture, in a backward pass, on a thread that runs an event loop.
Ranks of one process group are parked together, at the same step: all count the safe points inside of their uses (``_agreement``).
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections.abc import Generator
from typing import Any

from . import _gate, _library, _ranks, _regions
from .errors import Error

# How often a task looks whether it can go on.
_POLL_SECONDS = 0.002
# How often the memory is asked for again that somebody wants back.
_ASK_SECONDS = 1.0

# Counts the safe points inside of uses, of all threads: where one thread comes to them, as all ranks' do.
_steps = itertools.count()


def safepoint() -> bool:
    """Says that this thread needs none of its GPU memory now, and that what it has enqueued ends without it: between two steps of
    generation, between two batches. Where ``glake.shrink`` waits for the use (``glake.active``) that it is inside of, the thread waits here
    until all of that memory is back. Where nobody waits it takes less than a microsecond.

    Does nothing outside of a use, under a capture, in a backward pass, and on a thread with a running event loop (there:
    ``await glake.safepoint_async()``). Ranks of one ``torch.distributed`` process group wait together or not at all: each comes to the same
    safe points, each shrinks, and they wait once all stand at the same one. A rank that has no process group yet does not wait. Raises
    nothing; what a signal's handler raises, Ctrl-C's too, asks for the memory and comes when it is back.

    Returns:
        Whether it waited.
    """
    step = _step()
    if step is None or asyncio._get_running_loop() is not None or not _is_safe():
        return False
    if not _ranks.is_one_of_several():
        with _library.api().Parked(_gate.own_uses(), _Meanwhile()) as waits:
            pass
        return bool(waits)
    ranks = _take_part()
    if ranks is None:
        return False
    try:
        if not _slept(ranks.meet(step)):
            return False
        parked = _library.api().Parked(_gate.own_uses(), _Meanwhile(), True)
        with parked as waits:
            try:
                waits = _slept(ranks.agree(parked, waits))
            except BaseException:
                ranks.give_up(parked)
                raise
        return bool(waits)
    except _ranks.Gone:
        return False
    except BaseException:
        ranks.give_up()
        raise
    finally:
        ranks.turn.release()


async def safepoint_async() -> bool:
    """As ``glake.safepoint``, for a task: others go on while it waits. A task that is cancelled meanwhile asks for its memory, and ends when it
    is back.

    Returns:
        Whether it waited.
    """
    step = _step()
    if step is None or not _is_safe():
        return False
    if not _ranks.is_one_of_several():
        return await _wait_async(None)
    ranks = _take_part()
    if ranks is None:
        return False
    try:
        return await _slept_async(ranks.meet(step)) and await _wait_async(ranks)
    except _ranks.Gone:
        return False
    except BaseException:
        ranks.give_up()
        raise
    finally:
        ranks.turn.release()


async def _wait_async(ranks: _ranks.Ranks | None) -> bool:
    """At a safe point, with the others where there are any."""
    meanwhile = _Meanwhile()
    raised: BaseException | None = None
    parked = _library.api().Parked(_gate.own_uses(), meanwhile, ranks is not None)
    with parked as waits:
        if ranks is not None:
            try:
                waits = await _slept_async(ranks.agree(parked, waits))
            except BaseException as error:
                raised = error
                ranks.give_up(parked)
        while not parked.have_gone_on():
            try:
                meanwhile(raised is not None)
                await asyncio.sleep(_POLL_SECONDS)
            except BaseException as error:
                raised = error
    if raised is not None:
        raise raised
    return bool(waits)


def _step() -> int | None:
    """Counts this safe point; None where there is nothing to do: outside of a use, and while nobody waits."""
    if not _gate.is_inside():
        return None
    step = next(_steps)
    if _library.api().safepoint_wanted():
        return step
    _ranks.withdraw()
    return None


def _take_part() -> _ranks.Ranks | None:
    """The other ranks, where they can be asked and a shrink here waits for this thread's use: with the turn, which the caller ends."""
    ranks = _ranks.here()
    if ranks is None or not ranks.turn.acquire(blocking=False):
        return None
    if _gate.is_alone() and any(map(_library.api().use_wanted, _gate.own_uses())):
        return ranks
    ranks.turn.release()
    _ranks.withdraw()
    return None


def _slept(waits: Generator[float, None, bool]) -> bool:
    """Runs it to its end on this thread."""
    while True:
        try:
            seconds = next(waits)
        except StopIteration as ended:
            return bool(ended.value)
        time.sleep(seconds)


async def _slept_async(waits: Generator[float, None, bool]) -> bool:
    while True:
        try:
            seconds = next(waits)
        except StopIteration as ended:
            return bool(ended.value)
        await asyncio.sleep(seconds)


class _Meanwhile:
    """What a thread or task does that waits: asks for the memory where somebody wants it to go on, or the program ends and waits for it."""

    def __init__(self) -> None:
        self._asked = float("-inf")

    def __call__(self, asks: bool) -> None:
        asks = asks or not threading.main_thread().is_alive()
        if asks and time.monotonic() - self._asked > _ASK_SECONDS:
            self._asked = time.monotonic()
            try:
                _regions.refill(wait=False)
            except Error:
                # Whoever took the memory has it still: it is asked for again.
                pass


def _is_safe() -> bool:
    """Whether what this thread has enqueued ends without it, as far as can be told."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return True
    task = getattr(getattr(torch, "_C", None), "_current_graph_task_id", None)
    if task is not None and task() != -1:
        return False
    if getattr(torch.cuda, "is_initialized", bool)() and torch.cuda.is_current_stream_capturing():
        return False
    return True
