"""Exceptions of GLake. Every class is a RuntimeError, so that code written for torch's errors catches it too, and also the class that
Python or torch has for such a failure.
"""

from __future__ import annotations

import sys
from typing import Any


class Error(RuntimeError):
    """A request to GLake failed. The text says what was requested, what was found, and what to do."""


class OutOfMemoryError(Error, MemoryError):
    """The device or the host has no room for a request, after everything reclaimable was reclaimed.

    Also a ``torch.OutOfMemoryError`` if torch is loaded.
    """

    def __new__(cls, *args: Any) -> OutOfMemoryError:
        return super().__new__(_beside_torch(cls), *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return OutOfMemoryError, self.args


class InvalidError(Error, ValueError):
    """An argument is wrong: an address where no block begins, an unknown pool, a number out of range."""


class DriverError(Error):
    """The driver refused a call. The pool is unchanged, or reports from then on why it cannot continue."""


class UnavailableError(Error):
    """The library could not start: no driver, a second copy of it in the process, a forked child, or the end of the process."""


class UnsupportedError(Error, NotImplementedError):
    """The device, the driver or the library lacks a required feature."""


class ClosedError(Error):
    """Memory is evicted or being evicted, or the program refused a shrink. Nothing was moved."""


class TimedOutError(ClosedError, TimeoutError):
    """A timeout expired: uses did not end in time for a shrink, which moved nothing, or memory was not refilled in time. A refill continues in
    the background.
    """


class ConfigError(Error, ValueError):
    """A configuration does not parse. The text names the key or variable, its value, and what is allowed."""


class TorchError(Error):
    """torch is missing, too old, without CUDA, or lacks a required feature."""


class StateError(Error):
    """The call comes at the wrong time: CUDA runs already, another configuration is in force, the process was forked."""


# Exceptions by status of the C interface (GLAKE_... in gmlake.h).
BY_STATUS: dict[int, type[Error]] = {
    1: OutOfMemoryError,
    2: InvalidError,
    3: DriverError,
    4: UnavailableError,
    5: UnsupportedError,
    6: ClosedError,
    7: TimedOutError,
}


def of_status(status: int, text: str) -> Error:
    """Returns the exception of a failed call of the library."""
    kind = BY_STATUS.get(status)
    return Error(f"status {status}: {text}") if kind is None else kind(text)


def _beside_torch(kind: type[OutOfMemoryError]) -> type[OutOfMemoryError]:
    """Returns the class that is also torch's, if torch is loaded."""
    torch_kind: Any = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    if torch_kind is None or issubclass(kind, torch_kind):
        return kind
    both = (kind, torch_kind)
    return _both.setdefault(both, type(kind.__name__, both, {"__module__": kind.__module__, "__doc__": kind.__doc__}))


_both: dict[tuple[Any, Any], type[OutOfMemoryError]] = {}
