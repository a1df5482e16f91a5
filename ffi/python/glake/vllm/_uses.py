"""The use of GPU memory of one engine: begins with its first running request, ends with the last, and may be parked before each step."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import glake

from . import logger

_RETRY_SECONDS, _TOLD_SECONDS = 1.0, 30.0


class Uses:
    """The uses of a worker process. While it starts there are none: the node agent takes nothing from a worker before its first one."""

    def __init__(self) -> None:
        self.is_started = False
        # Regions that are awake while others sleep; None: all are.
        self.awake: list[str] | None = None
        self._use: glake.active | None = None
        # The step before had nothing to compute.
        self._is_dry = False

    def step(self, is_empty: bool) -> None:
        """Comes before each step: begins the use, or lets a shrink in that waits for it. An empty step after another needs no memory."""
        if not self.is_started or (is_empty and self._is_dry):
            return
        self._is_dry = is_empty
        if self._use is None:
            self._use = _begun()
        else:
            glake.safepoint()

    def end(self) -> None:
        """Ends the use, if there is one."""
        use, self._use = self._use, None
        if use is not None:
            use.__exit__(None, None, None)

    def within(self, worker: Any, name: str) -> Callable[..., Any]:
        """Returns a method of a worker that runs with all memory on the GPU that is not asleep. It holds no reference to the worker."""
        method, of = getattr(type(worker), name), weakref.ref(worker)

        @functools.wraps(method)
        def inside(*args: Any, **kwargs: Any) -> Any:
            function = functools.partial(method.__get__(of()), *args, **kwargs)
            if not self.is_started:
                return function()
            with glake.active(*(self.awake or ())):
                return function()

        return inside


def _begun() -> glake.active:
    """Begins the use of a step. Without room for evicted memory it waits until there is some: an error here would end the engine."""
    use, told = glake.active(), float("-inf")
    while True:
        try:
            return use.__enter__()
        except glake.OutOfMemoryError as error:
            if time.monotonic() - told > _TOLD_SECONDS:
                told = time.monotonic()
                logger.warning("The engine waits for its GPU memory: %s", error)
            time.sleep(_RETRY_SECONDS)
