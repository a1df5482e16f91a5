"""Leases: how much memory of each GPU an agent lets this process hold, beside ``pool.limit``::

    def told(event, device, bytes):      # "want", "grow" or "returned"
        agent.send(event, device, bytes)

    glake.lease.watch(told)
    glake.lease.set(0, 0)                # nothing is made until more is granted
    glake.lease.grant(0, 16 << 30)

A lease bounds what is made, and changes neither the sizes of extents nor what is stitched. Without one nothing here costs anything.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Literal

from . import _library
from ._statistics import amount

__all__ = ["Event", "Watcher", "grant", "set", "take", "watch"]

Event = Literal["want", "grow", "returned"]
Watcher = Callable[[Event, int, int], object]


def set(device: int, bytes: int | None) -> None:
    """Sets a GPU's lease, whole; None: there is none. Where more is made already nothing new is until it fits again.

    Raises:
        InvalidError: there is no such GPU, or ``bytes`` is negative.
    """
    _library.api().lease_set(device, None if bytes is None else amount(bytes, "bytes"))


def grant(device: int, bytes: int) -> None:
    """Adds to a GPU's lease; 0 says that there is none to give: whoever waits for a grant gives up.

    Raises:
        InvalidError: it has no lease, or ``bytes`` is negative.
    """
    _library.api().lease_grant(device, amount(bytes, "bytes"))


def take(device: int, bytes: int) -> int:
    """Lowers a GPU's lease by what is not made of it, and by free memory, which goes back to the driver for it: by ``bytes`` at most.

    Returns:
        By how much.

    Raises:
        InvalidError: there is no such GPU, or ``bytes`` is negative.
    """
    taken: int = _library.api().lease_take(device, amount(bytes, "bytes"))
    return taken


def watch(callback: Watcher | None) -> None:
    """Who is told of what is wanted and given back; replaces who was told before, None: nobody. While nobody is, nothing is waited for.

    ``callback(event, device, bytes)``: "want": memory is to come back, and so much more has to be granted for it and for
    ``lease.growth``; "grow": an allocation (or a commit, or a refill of whose grants others took) is so much above the lease and waits,
    ``lease.grow_timeout_ms`` at most where it is no refill; "returned": a shrink gave so much back, and the lease is lower by it. It is
    called on the thread at hand. It may change leases; it must neither move regions nor wait. What it raises is reported and goes no
    further.
    """
    if callback is not None and not callable(callback):
        raise TypeError(f"callback is {callback!r}: a function of three arguments, or None")
    _library.api().lease_watch(callback)
    if callback is not None:
        atexit.unregister(_library.api().hooks_end)
        atexit.register(_library.api().hooks_end)
