"""Safe points: between two steps of a program a use of memory waits while its memory is evicted, and goes on at the same addresses.

::

    step ─ safepoint ─ step ─ safepoint ─ step        nobody waits: one load of the library's
              │ a shrink waits for this use
              ▼
           arrive ─► all threads and tasks of the use have ─► parked ─ its memory leaves ─ comes back ─► go on

A place is passed over where its work may need the thread itself: under a capture, in a backward pass, on a thread that runs an event loop,
and where several ranks work together.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from typing import Any

from . import _gate, _library, _regions
from .errors import Error

# How often a task looks whether it can go on.
_POLL_SECONDS = 0.002
# How often the memory is asked for again that somebody wants back.
_ASK_SECONDS = 1.0


def safepoint() -> bool:
    """Says that this thread needs none of its GPU memory now, and that what it has enqueued ends without it: between two steps of
    generation, between two batches. Where ``glake.shrink`` waits for the use (``glake.active``) that it is inside of, the thread waits here
    until all of that memory is back. Where nobody waits it takes less than a microsecond.

    Does nothing outside of a use, under a capture, in a backward pass, on a thread with a running event loop (there:
    ``await glake.safepoint_async()``), and in a rank of several. Raises nothing; what a signal's handler raises, Ctrl-C's too, asks for the
    memory and comes when it is back.

    Returns:
        Whether it waited.
    """
    if not _gate.is_inside() or not _library.api().safepoint_wanted():
        return False
    if asyncio._get_running_loop() is not None or not _is_safe():
        return False
    with _library.api().Parked(_gate.own_uses(), _Meanwhile()) as waits:
        pass
    return bool(waits)


async def safepoint_async() -> bool:
    """As ``glake.safepoint``, for a task: others go on while it waits. A task that is cancelled meanwhile asks for its memory, and ends when it
    is back.

    Returns:
        Whether it waited.
    """
    if not _gate.is_inside() or not _library.api().safepoint_wanted() or not _is_safe():
        return False
    meanwhile = _Meanwhile()
    raised: BaseException | None = None
    parked = _library.api().Parked(_gate.own_uses(), meanwhile)
    with parked as waits:
        while not parked.have_gone_on():
            try:
                meanwhile(raised is not None)
                await asyncio.sleep(_POLL_SECONDS)
            except BaseException as error:
                raised = error
    if raised is not None:
        raise raised
    return bool(waits)


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
    return not _is_rank_of_several(torch)


def _is_rank_of_several(torch: Any) -> bool:
    """A launcher's rank is one too before it has met the others."""
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_world_size() > 1)
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")

