"""Tensors whose memory comes and goes while their addresses stay: caches that grow and shrink within one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _library
from ._memory import range_of


def decommit(tensor: Any) -> int:
    """Gives the GPU memory of a tensor, or of a slice of one, back while its addresses stay::

        with glake.region("cache"):
            cache = torch.empty(64 << 30, dtype=torch.uint8, device="cuda")
        glake.decommit(cache[8 << 30 :])        # others may have this memory
        ...
        glake.commit(cache[: 16 << 30])         # there again, with any values

    Memory goes in whole extents, those that lie wholly in the tensor: of up to four times ``tiers.extent`` in a region, ``pool.extent``
    outside. The values are lost, and until ``commit`` nothing may touch them: a kernel that does faults, and
    ``glake.copy_`` raises. Waits for the work of all GPUs; none that uses the tensor may be enqueued meanwhile.

    Args:
        tensor: a tensor or array of GLake's memory whose bytes lie side by side.

    Returns:
        How many bytes of memory went. What is fixed, or shared with other processes, stays.

    Raises:
        InvalidError: it is no memory of GLake's, its region is sealed, or it is of a captured graph's pool.
        TypeError: it has no bytes that can be reached.
        ValueError: its bytes do not lie side by side.
    """
    return _asked(_library.api().decommit, tensor, "decommit changes its values")


def commit(tensor: Any) -> int:
    """Makes memory again for what was decommitted of a tensor, at its addresses. Its values there are any.

    Returns:
        How many bytes of memory were made.

    Raises:
        InvalidError: it is no memory of GLake's, or its region is sealed.
        OutOfMemoryError: there is no memory; what was made by then stays, and the same call goes on.
        TypeError: it has no bytes that can be reached.
        ValueError: its bytes do not lie side by side.
    """
    return _asked(_library.api().commit, tensor, "commit changes its values")


def _asked(call: Callable[[int, int], int], tensor: Any, written: str) -> int:
    part = range_of(tensor, "tensor", written=written)
    try:
        return call(part.address, part.size) if part.size else 0
    finally:
        part.release()
