"""Waits of asyncio tasks at the gate.

::

    task ─ future ─┐
    task ─ future ─┼─► Line of these tags: one thread waits for all ─► open: each task enters by itself
    task ─ future ─┘                                                └► what the refill met: each is told

A task that waits is a future and no thread: however many requests are held, those that bring the memory back find threads. One line is there
for each set of tags and each way to wait, and its thread ends with the last who waits, with their loops, or with the program.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any, Literal

from . import _library
from .errors import ClosedError, Error, TimedOutError

WhenClosed = Literal["refill", "hold", "refuse"]

WHEN_CLOSED = {"refill": 0, "hold": 1, "refuse": 2}
REFUSE = WHEN_CLOSED["refuse"]
# Time that a thread waits for another caller's refill before it checks whether any task still waits. Its own refill ends by itself.
_HOLD_MS = 100

_lock = threading.Lock()
_lines: dict[tuple[tuple[str, ...], WhenClosed], _Line] = {}


class _Line:
    """Tasks that wait for the same regions, with the thread that waits for them."""

    def __init__(self, tags: tuple[str, ...], when_closed: WhenClosed) -> None:
        self._key = (tags, when_closed)
        self._tags, self._when = tags, WHEN_CLOSED[when_closed]
        self._slice_ms = _HOLD_MS if when_closed == "hold" else -1
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def start(self) -> None:
        """Starts the thread, with the lock held."""
        threading.Thread(target=self._run, name="glake-gate").start()

    def join(self, loop: asyncio.AbstractEventLoop, opened: asyncio.Future[None]) -> None:
        """Adds a task, with the lock held."""
        self._waiting.append((loop, opened))

    def leave(self, opened: asyncio.Future[None]) -> None:
        """Removes a task, with the lock held."""
        self._waiting = [waiting for waiting in self._waiting if waiting[1] is not opened]

    def _run(self) -> None:
        while self._has_any():
            try:
                _library.api().gate_wait(list(self._tags), self._when, self._slice_ms)
            except Error as error:
                if self._slice_ms > 0 and isinstance(error, ClosedError):
                    continue
                self._tell(lambda opened, error=error: opened.set_exception(type(error)(*error.args)))  # type: ignore[misc]
            else:
                # If a shrink begins before they have entered, they continue to wait.
                self._tell(lambda opened: opened.set_result(None))

    def _has_any(self) -> bool:
        """Whether any task waits; ends the line if none does."""
        with _lock:
            if not threading.main_thread().is_alive():
                self._waiting.clear()
            self._waiting = [waiting for waiting in self._waiting if not waiting[0].is_closed()]
            if not self._waiting:
                del _lines[self._key]
            return bool(self._waiting)

    def _tell(self, how: Callable[[asyncio.Future[None]], None]) -> None:
        with _lock:
            told, self._waiting = self._waiting, []
        for loop, opened in told:
            try:
                loop.call_soon_threadsafe(_settle, opened, how)
            except RuntimeError:
                # Its loop was closed meanwhile.
                continue


def _forget() -> None:
    """Resets a forked child, in which the threads do not exist."""
    global _lock
    _lock = threading.Lock()
    _lines.clear()


os.register_at_fork(after_in_child=_forget)


def _settle(opened: asyncio.Future[None], how: Callable[[asyncio.Future[None]], None]) -> None:
    if not opened.done():
        how(opened)


def enter(tags: tuple[str, ...], when_closed: int, timeout_ms: int) -> int:
    """Begins a use, waiting on this thread; a timeout of -1 is none.

    Raises:
        As ``glake.active``.
    """
    use: int = _library.api().use_begin(list(tags), when_closed, timeout_ms)
    return use


async def wait(tags: tuple[str, ...], when_closed: WhenClosed, timeout: float | None) -> int:
    """Begins a use as soon as the gate allows it.

    Raises:
        As ``glake.active``.
    """
    loop = asyncio.get_running_loop()
    end = None if timeout is None else loop.time() + timeout
    while True:
        opened: asyncio.Future[None] = loop.create_future()
        with _lock:
            line = _lines.get((tags, when_closed))
            if line is None:
                line = _Line(tags, when_closed)
                line.start()
                _lines[tags, when_closed] = line
            line.join(loop, opened)
        try:
            await asyncio.wait_for(opened, None if end is None else end - loop.time())
        except asyncio.TimeoutError:
            try:
                return enter(tags, REFUSE, -1)
            except ClosedError as error:
                raise TimedOutError(f"{error}; it was held for {timeout:g} s: refill it, or allow more time") from None
        finally:
            with _lock:
                line.leave(opened)
        try:
            return enter(tags, REFUSE, -1)
        except ClosedError:
            # A shrink was faster.
            continue
