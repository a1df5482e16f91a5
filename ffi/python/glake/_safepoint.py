"""Safe points: between two steps of a program, a use of memory may wait while its memory is evicted and refilled at the same addresses.

::

    step ─ safepoint ─ step ─ safepoint ─ step        nobody waits: one load of the library's
              │ a shrink waits for this use
              ▼
           arrive ─► all threads and tasks of the use have ─► parked ─ its memory leaves ─ comes back ─► go on

A safe point is skipped if enqueued work may need the thread itself: under a capture, in a backward pass, on a thread with an event loop.
Ranks of one process group park together, at the same step: all count the safe points inside of their uses (``_agreement``).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from . import _gate, _library, _ranks, _regions
from .errors import Error

# How often a task looks whether it can go on.
_POLL_SECONDS = 0.002
# The same where the other ranks are asked, whose hosts all stand still meanwhile.
_MEET_POLL_SECONDS = 0.001
# How often the memory is asked for again that somebody wants back.
_ASK_SECONDS = 1.0

# Counts the safe points inside of uses, of all threads: where one thread comes to them, as all ranks' do.
_steps = itertools.count()

_logger = logging.getLogger("glake")
# Whether it was logged that a place could not be judged.
_has_told = False


def safepoint() -> bool:
    """Says that this thread needs none of its GPU memory now, and that what it has enqueued ends without it: between two steps of
    generation, between two batches. Where ``glake.shrink`` waits for the use (``glake.active``) that it is inside of, the thread waits here
    until all of that memory is back. Where nobody waits it takes less than a microsecond.

    Does nothing outside of a use, under a capture, in a backward pass, and on a thread with a running event loop (there:
    ``await glake.safepoint_async()``). Ranks of one ``torch.distributed`` process group wait together or not at all: each must pass the same
    safe points and call shrink, and they wait once all are at the same one. A rank that has no process group yet does not wait.

    Raises no error of its own: if torch or the library cannot answer (a GPU's context that has failed) it does nothing, and logs that once.
    An exception raised by a signal handler during the wait, Ctrl-C included, requests the memory back, and is raised once it is.

    Returns:
        True if it waited.
    """
    step = _step()
    if step is None or asyncio._get_running_loop() is not None:
        return False
    try:
        # It sleeps on this thread: it is over at once.
        _wait(step, _sleep).send(None)
    except StopIteration as ended:
        return bool(ended.value)
    raise AssertionError("a thread is no task")


async def safepoint_async() -> bool:
    """Marks a safe point of a task: other tasks run while it waits. A task that is cancelled meanwhile requests its memory back, and
    ends once it is.

    Returns:
        Whether it waited.
    """
    step = _step()
    return step is not None and await _wait(step, asyncio.sleep)


async def _wait(step: int, sleep: Callable[[float], Coroutine[Any, Any, None]]) -> bool:
    """Waits at a safe point, together with other ranks if any. Returns whether it waited."""
    try:
        if not _is_safe():
            return False
        is_rank = _ranks.is_one_of_several()
        arrival = _arrival(step) if is_rank else None
    except Exception as error:
        # Only what is asked before it waits: what is raised while it does is a signal's.
        _pass_over(error)
        return False
    if not is_rank:
        return await _park(None, sleep)
    if arrival is None:
        return False
    try:
        arrival.come()
        seconds = _MEET_POLL_SECONDS / 16
        while (parks := arrival.parks()) is None:
            await sleep(seconds)
            seconds = min(2 * seconds, _MEET_POLL_SECONDS)
        return parks and await _park(arrival, sleep)
    finally:
        arrival.leave()


async def _park(arrival: _ranks.Arrival | None, sleep: Callable[[float], Coroutine[Any, Any, None]]) -> bool:
    """Parks while a shrink waits for this thread, if the other ranks agree."""
    meanwhile = _Meanwhile()
    raised: BaseException | None = None
    parked = _library.api().Parked([use.number for use in _gate.own_uses()], meanwhile, arrival is not None)
    with parked as waits:
        if arrival is not None:
            has_voted = False
            while not has_voted:
                try:
                    while (moves := arrival.moves(parked.asked(0))) is None:
                        await sleep(_MEET_POLL_SECONDS)
                    waits, has_voted = parked.vote(moves) and moves, True
                except BaseException as error:
                    # The others may have decided already: it hears that first.
                    raised = error
                    arrival.leave()
        # A thread waits in the library, at the end of this block.
        while sleep is not _sleep and not parked.have_gone_on():
            try:
                meanwhile(raised is not None)
                await sleep(_POLL_SECONDS)
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised
    return bool(waits)


def _arrival(step: int) -> _ranks.Arrival | None:
    """Returns the message to the other ranks if they can be reached and a shrink here waits for this thread's uses."""
    ranks, uses = _ranks.here(), _gate.own_uses()
    if ranks is None or not all(use.is_alone() for use in uses):
        return None
    wanted = [use for use in uses if _library.api().use_wanted(use.number)]
    if wanted and len(wanted) < len(uses):
        # A shrink waits for one that runs for its quantum first.
        closings = _gate.gate()["closing"]
        if any(use.is_touched(closing) for use in uses if use not in wanted for closing in closings):
            return None
    return _ranks.Arrival(ranks, step, wanted) if wanted else None


async def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _step() -> int | None:
    """Counts this safe point; None if there is nothing to do: outside of a use, and while no shrink waits."""
    if not _gate.is_inside():
        return None
    step = next(_steps)
    return step if _library.api().safepoint_wanted() else None


def _pass_over(error: Exception) -> None:
    global _has_told
    if not _has_told:
        _has_told = True
        _logger.warning("a safe point does nothing where it cannot be told whether it is safe (%s: %s)", type(error).__name__, error)


class _Meanwhile:
    """Callback of a waiting thread or task: requests the memory back if it is asked to, or if the program is ending."""

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
    """Whether the work enqueued by this thread completes without it, as far as known."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return True
    task = getattr(getattr(torch, "_C", None), "_current_graph_task_id", None)
    if task is not None and task() != -1:
        return False
    if getattr(torch.cuda, "is_initialized", bool)() and torch.cuda.is_current_stream_capturing():
        return False
    return True
