"""Leases: bounds, set by an agent, on the memory of each GPU that this process may hold, beside ``pool.limit``::

    def told(event, device, bytes):      # "want", "grow" or "returned"
        agent.send(event, device, bytes)

    glake.lease.watch(told)
    glake.lease.set(0, 0)                # no memory is created until more is granted
    glake.lease.grant(0, 16 << 30)

A lease bounds the memory created; it changes neither extent sizes nor stitching. Without a lease there is no cost.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Literal

from . import _library
from ._arguments import amount, device as index, optional_function

__all__ = ["Event", "Watcher", "grant", "set", "take", "watch"]

Event = Literal["want", "grow", "returned"]
Watcher = Callable[[Event, int, int], object]


def set(device: int, bytes: int | None) -> None:
    """Sets a GPU's lease to a total; None: no lease. If more memory is held already, none is created until it fits again.

    Raises:
        InvalidError: no such GPU, or ``bytes`` is negative.
    """
    _library.api().lease_set(index(device), None if bytes is None else amount(bytes, "bytes"))


def grant(device: int, bytes: int) -> None:
    """Adds to a GPU's lease; 0 denies pending requests: threads that wait for a grant give up.

    Raises:
        InvalidError: it has no lease, or ``bytes`` is negative.
    """
    _library.api().lease_grant(index(device), amount(bytes, "bytes"))


def take(device: int, bytes: int) -> int:
    """Lowers a GPU's lease by its unused part and by free memory, which is released for it: by at most ``bytes``.

    Returns:
        The number of bytes by which the lease was lowered.

    Raises:
        InvalidError: no such GPU, or ``bytes`` is negative.
    """
    taken: int = _library.api().lease_take(index(device), amount(bytes, "bytes"))
    return taken


def watch(callback: Watcher | None) -> None:
    """Sets the watcher of lease events, replacing an earlier one; None: no watcher. Without one, no call waits for grants.

    ``callback(event, device, bytes)``: "want": a refill is pending and needs ``bytes`` more, including ``lease.growth``; "grow": an
    allocation (or a commit, or a refill whose grants were used by others) exceeds the lease by ``bytes`` and waits, for up to
    ``lease.grow_timeout_ms`` unless it is a refill; "returned": a shrink returned ``bytes``, by which the lease is now lower. It is called
    on the thread that caused the event. It may change leases; it must neither move regions nor wait. Its exceptions are reported as
    unraisable.
    """
    optional_function(callback, "callback", "a function of three arguments")
    _library.api().lease_watch(callback)
    if callback is not None:
        atexit.unregister(_library.api().hooks_end)
        atexit.register(_library.api().hooks_end)
