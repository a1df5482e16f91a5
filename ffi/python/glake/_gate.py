"""The gate: who uses regions says so, and nothing leaves the GPU while somebody does.

::

    active ── enter ─► gate open: in at once        shrink ─► gate shut ─► waits for those inside ─► moves
                 └──► gate shut: refill | hold | refuse
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, TypeVar

from . import _library
from .errors import ClosedError, InvalidError, StateError

WhenClosed = Literal["refill", "hold", "refuse"]
Function = TypeVar("Function", bound=Callable[..., Any])

_WHEN_CLOSED = {"refill": 0, "hold": 1, "refuse": 2}
_REFUSE = 2

# What the task or thread is inside of: a set of tags each, None for all.
_inside: contextvars.ContextVar[tuple[frozenset[str] | None, ...]] = contextvars.ContextVar("glake_inside", default=())


class active:
    """Keeps regions on the GPU for a ``with`` or ``async with`` block, or for the calls of a function that it decorates::

        with glake.active():
            output = model(batch)

        @glake.active("weights")
        async def answer(request): ...

    Args:
        tags: the regions that are used; none: all memory.
        when_closed: what happens while they are out or leaving. "refill": they are brought back, and the block begins then; "hold":
            it begins when somebody else has brought them back; "refuse": ``ClosedError``.
        timeout: seconds to wait; None: as long as it takes. A refill that is not over by then goes on in the background.

    A block inside another of the same task or thread, or of a thread that it was handed to with its context (``asyncio.to_thread``), is
    part of that one where the outer has its tags.

    Raises:
        ClosedError: refused, or not open in time.
        InvalidError: there is no such region.
        OutOfMemoryError: a refill found the GPU's memory taken by others.
    """

    def __init__(self, *tags: str, when_closed: WhenClosed = "refill", timeout: float | None = None) -> None:
        if when_closed not in _WHEN_CLOSED:
            raise ValueError(f"when_closed is {when_closed!r}: 'refill', 'hold' and 'refuse' are there")
        if timeout is not None and timeout < 0:
            raise InvalidError(f"timeout is {timeout}: seconds, 0 or more, or None")
        self._tags = tags
        self._when_closed: WhenClosed = when_closed
        self._timeout = timeout
        self._entered: list[tuple[int, contextvars.Token[Any] | None]] = []

    def __enter__(self) -> active:
        use = 0 if self._is_part() else self._enter(_WHEN_CLOSED[self._when_closed])
        self._note(use)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        use, token = self._entered.pop()
        if token is not None:
            _inside.reset(token)
            _library.doors().gate_leave(use)

    async def __aenter__(self) -> active:
        use = 0
        if not self._is_part():
            try:
                use = self._enter(_REFUSE)
            except ClosedError:
                if self._when_closed == "refuse":
                    raise
                use = await self._wait()
        self._note(use)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: Function) -> Function:
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

    def _is_part(self) -> bool:
        return any(tags is None or (self._tags and tags.issuperset(self._tags)) for tags in _inside.get())

    def _enter(self, when_closed: int) -> int:
        timeout = -1 if self._timeout is None else int(self._timeout * 1000)
        use: int = _library.doors().gate_enter(list(self._tags), when_closed, timeout)
        return use

    def _note(self, use: int) -> None:
        if not use:
            self._entered.append((0, None))
            return
        tags = frozenset(self._tags) or None
        self._entered.append((use, _inside.set((*_inside.get(), tags))))

    async def _wait(self) -> int:
        """Waits on a thread. A task that is cancelled meanwhile gives back what the thread gets."""
        loop = asyncio.get_running_loop()
        entering = loop.run_in_executor(None, self._enter, _WHEN_CLOSED[self._when_closed])
        try:
            return await asyncio.shield(entering)
        except asyncio.CancelledError:
            entering.add_done_callback(_give_back)
            raise


def _give_back(entering: asyncio.Future[int]) -> None:
    if not entering.cancelled() and entering.exception() is None:
        _library.doors().gate_leave(entering.result())


def refuse_inside(what: str) -> None:
    """For what waits until nobody is active.

    Raises:
        StateError: the caller is.
    """
    if _inside.get():
        raise StateError(f"glake.{what}() was called inside glake.active(), which it would wait for: call it outside of the block")


def gate() -> dict[str, Any]:
    """How many are active, and what is shut: ``{"open": False, "uses": 2, "closing": [], "closed": ["weights"]}``.

    Raises:
        UnavailableError: the library cannot start.
    """
    found: dict[str, Any] = json.loads(_library.doors().gate_json())
    return found
