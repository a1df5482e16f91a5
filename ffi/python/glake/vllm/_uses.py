"""The use of GPU memory of one engine: begins with its first running request, ends with the last, and may be parked before each step."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import glake

from . import logger

_RETRY_SECONDS, _TOLD_SECONDS = 1.0, 30.0


class Uses:
    """The uses of a worker process. While it starts there are none: the node agent takes nothing from a worker before its first one."""

    def __init__(self) -> None:
        self.is_started = False
        self._use: glake.active | None = None

    def step(self) -> None:
        """Comes before each step: begins the use, or lets a shrink in that waits for it."""
        if not self.is_started:
            return
        if self._use is None:
            self._use = _begun()
        else:
            glake.safepoint()

    def end(self) -> None:
        """Ends the use, if there is one."""
        use, self._use = self._use, None
        if use is not None:
            use.__exit__(None, None, None)

    def within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that runs with all memory on the GPU."""

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            if not self.is_started:
                return function(*args, **kwargs)
            use = _begun()
            try:
                return function(*args, **kwargs)
            finally:
                use.__exit__(None, None, None)

        return inside


def _begun() -> glake.active:
    """Begins a use. Without room for evicted memory it waits until there is some: an error here would end the engine."""
    use, told = glake.active(), float("-inf")
    while True:
        try:
            return use.__enter__()
        except glake.OutOfMemoryError as error:
            if time.monotonic() - told > _TOLD_SECONDS:
                told = time.monotonic()
                logger.warning("The engine waits for its GPU memory: %s", error)
            time.sleep(_RETRY_SECONDS)
