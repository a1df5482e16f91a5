"""The gate: a program declares its uses of regions, and memory in use is never evicted.

::

    active ── enter ─► gate open: in at once        shrink ─► gate shut ─► waits for those inside ─► moves
                 └──► gate shut: refill | hold | refuse

A block that begins inside another one with its tags is part of the same use. Nesting follows contexts: a task inherits the blocks that it
was created inside of, and may outlive them. So each block records whether it is open, and a use lasts until the last of its blocks has
ended, in whatever context.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from . import _arguments, _library, _waiting
from ._waiting import REFUSE, WHEN_CLOSED, WhenClosed
from .errors import ClosedError, StateError
from .reports import GateState

Function = TypeVar("Function", bound=Callable[..., Any])

# Guards what blocks and uses know of each other. It is held for a moment, and is nobody's in a forked child. Garbage collection may end a
# block (of a generator that was given up) while its thread has the lock.
_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


# The objects themselves: a number is used again when its thread or task is gone.
_Member: TypeAlias = "threading.Thread | asyncio.Task[Any]"


def _here() -> _Member:
    """Returns the running task, else the thread."""
    task = asyncio.current_task() if asyncio._get_running_loop() is not None else None
    return task or threading.current_thread()


class Use:
    """A use of the gate, with the number of its open blocks by thread and task."""

    __slots__ = ("members", "number", "tags")

    def __init__(self, number: int, tags: tuple[str, ...]) -> None:
        self.number, self.tags, self.members = number, tags, {_here(): 1}

    def is_alone(self) -> bool:
        """Whether exactly one thread or task is inside."""
        return len(self.members) == 1

    def is_touched(self, closing: list[str] | None) -> bool:
        """Whether a shrink of these regions (None: of all) waits for the use. Memory outside of regions is part of every use."""
        if closing is None or not self.tags:
            return True
        return any(tag in self.tags or tag == "default" or tag.startswith("graph ") for tag in closing)

    def join(self, member: _Member) -> bool:
        """Adds a block, with the lock held. Returns False if the use is parked: the block then begins its own use."""
        is_new = member not in self.members
        # First: the others may end within the call.
        self.members[member] = self.members.get(member, 0) + 1
        if is_new:
            try:
                _library.api().use_join(self.number)
            except BaseException as error:
                del self.members[member]
                if isinstance(error, ClosedError):
                    return False
                raise
        return True

    def leave(self, member: _Member) -> bool:
        """Removes a block, with the lock held; returns whether it was the last."""
        self.members[member] -= 1
        if self.members[member]:
            return False
        del self.members[member]
        if self.members:
            # Another block of it may end within this call, as the last.
            _library.api().use_leave(self.number)
            return False
        return True


class _Block:
    """One run of a block: its tags (None: all), the ``active`` object, and its use while it is open."""

    __slots__ = ("member", "of", "tags", "use")

    def __init__(self, of: active, tags: frozenset[str] | None, use: Use) -> None:
        self.of, self.tags, self.member = of, tags, _here()
        self.use: Use | None = use

    def is_open(self) -> bool:
        return self.use is not None

    def has(self, tags: tuple[str, ...]) -> bool:
        """Whether a block with these tags may be part of it."""
        return self.tags is None or (bool(tags) and self.tags.issuperset(tags))


# Blocks around the task or thread, or around its creation; closed blocks are ignored.
_inside: contextvars.ContextVar[tuple[_Block, ...]] = contextvars.ContextVar("glake_inside", default=())


# Records that a block began, for `glake.asgi.Gate(grain="step")`, which requires one.
steps_begun: contextvars.ContextVar[list[bool] | None] = contextvars.ContextVar("glake_steps_begun", default=None)


class active:
    """Keeps regions on the GPU for a ``with`` or ``async with`` block, or for the calls of a function that it decorates::

        with glake.active():
            output = model(batch)

        @glake.active("weights")
        async def answer(request): ...

    Args:
        tags: the regions in use; none: all memory.
        when_closed: behaviour if they are evicted or being evicted. "refill": they are refilled, and the block begins then; "hold":
            the block begins once another caller has refilled them; "refuse": ``ClosedError``.
        timeout: seconds to wait; None: no timeout. A refill in progress then continues in the background.

    A block inside another of the same task or thread, or of one that was given its context (``asyncio.to_thread``, a task that begins inside),
    is part of that one if the outer block has its tags and is still open. Memory stays until the last of them has ended. A block may end in
    another context than it began in (asynchronous generators), and many tasks and threads may use one object.

    Raises:
        ClosedError: refused.
        TimedOutError: not open in time.
        InvalidError: no such region; the text lists the existing ones.
        OutOfMemoryError: a refill found the GPU's memory in use by others.
    """

    def __init__(self, *tags: str, when_closed: WhenClosed = "refill", timeout: float | None = None) -> None:
        _arguments.choice(when_closed, "when_closed", WHEN_CLOSED)
        self._tags = tuple(_arguments.tags(tags))
        self._when_closed: WhenClosed = when_closed
        self._timeout = timeout
        self._timeout_ms = -1 if timeout is None else _arguments.milliseconds(timeout)
        self._open: list[_Block] = []

    def __enter__(self) -> active:
        if not self._join():
            self._note(Use(self._enter(WHEN_CLOSED[self._when_closed]), self._tags))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with _lock:
            inside = _inside.get()
            use = None
            # Another one may be ended in between, on this thread.
            while use is None:
                # In another context than it began in, it is any of them: their tags are the same.
                block = next((block for block in reversed(inside) if block.of is self and block.is_open()), None) or self._open[-1]
                use, block.use = block.use, None
            self._open.remove(block)
            last = use.leave(block.member)
        _inside.set(tuple(block for block in inside if block.is_open()))
        if last:
            _library.api().use_end(use.number)

    async def __aenter__(self) -> active:
        if not self._join():
            try:
                number = self._enter(REFUSE)
            except ClosedError:
                if self._when_closed == "refuse":
                    raise
                number = await _waiting.wait(self._tags, self._when_closed, self._timeout)
            self._note(Use(number, self._tags))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: Function) -> Function:
        _arguments.function(function, "the decorated object", "glake.active() decorates functions")

        def fresh() -> active:
            return active(*self._tags, when_closed=self._when_closed, timeout=self._timeout)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def later(*args: Any, **kwargs: Any) -> Any:
                async with fresh():
                    return await function(*args, **kwargs)

            return later  # type: ignore[return-value]

        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{function.__qualname__} yields: put `with glake.active()` around what runs between two yields")

        @functools.wraps(function)
        def now(*args: Any, **kwargs: Any) -> Any:
            with fresh():
                return function(*args, **kwargs)

        return now  # type: ignore[return-value]

    def _join(self) -> bool:
        """Joins an existing use, if any."""
        for outer in _inside.get():
            if outer.is_open() and outer.has(self._tags):
                if outer.tags is None and self._tags:
                    self._check()
                with _lock:
                    use = outer.use
                    if use is None or not use.join(_here()):
                        # The use has ended in between, or is parked.
                        continue
                self._note(use)
                return True
        return False

    def _check(self) -> None:
        """Checks that the regions exist; a use of all memory names none."""
        try:
            _library.api().gate_wait(list(self._tags), REFUSE, -1)
        except ClosedError:
            pass

    def _enter(self, when_closed: int) -> int:
        return _waiting.enter(self._tags, when_closed, self._timeout_ms)

    def _note(self, use: Use) -> None:
        block = _Block(self, frozenset(self._tags) or None, use)
        with _lock:
            self._open.append(block)
        _inside.set((*(block for block in _inside.get() if block.is_open()), block))
        begun = steps_begun.get()
        if begun is not None and not begun:
            begun.append(True)


def own_uses() -> list[Use]:
    """Returns the uses with blocks of the calling thread or task."""
    member = _here()
    uses = [block.use for block in _inside.get()]
    return list(dict.fromkeys(use for use in uses if use is not None and member in use.members))


def is_wanted(block: active) -> bool:
    """Whether a shrink waits for a use that the block is part of."""
    with _lock:
        uses = {run.use.number for run in block._open if run.use is not None}
    return any(_library.api().use_wanted(number) for number in uses)


def is_inside() -> bool:
    """Whether the caller may be inside a use; if so, the library is open."""
    return bool(_inside.get())


def refuse_inside(what: str) -> None:
    """Raises if the caller is inside a use, for calls that wait for all uses to end.

    Raises:
        StateError: the caller is inside a use.
    """
    if any(block.is_open() for block in _inside.get()):
        raise StateError(f"glake.{what}() was called inside glake.active(), which it would wait for: call it outside of the block")


def gate() -> GateState:
    """Returns the state of the gate, with the number of open uses and the evicted regions: ``{"open": False, "uses": 2, "parked": 1,
    "closing": [], "closed": ["weights"]}``. ``glake.reports.GateState`` documents the keys.

    Raises:
        UnavailableError: the library cannot start.
    """
    found: GateState = json.loads(_library.api().gate_json())
    return found
