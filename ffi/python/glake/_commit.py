"""Decommit and commit of tensors: their memory is released and created while their addresses stay, for caches that grow and shrink."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _library
from ._memory import range_of
from .errors import InvalidError


def decommit(tensor: Any) -> int:
    """Releases the GPU memory of a tensor, or of a slice of one, while its addresses stay::

        with glake.region("cache"):
            cache = torch.empty(64 << 30, dtype=torch.uint8, device="cuda")
        glake.decommit(cache[8 << 30 :])        # available to others
        ...
        glake.commit(cache[: 16 << 30])         # usable again, with undefined values

    Whole extents inside the tensor are released: of up to four times ``tiers.extent`` in a region, ``pool.extent`` outside. The values are
    lost, and must not be accessed until ``commit``: a kernel that does faults, and ``glake.copy_`` raises. Waits for the work of all GPUs;
    no work that uses the tensor may be enqueued meanwhile.

    Args:
        tensor: a contiguous tensor or array in GLake's memory.

    Returns:
        The number of bytes released. Memory that is fixed, or shared with other processes, stays.

    Raises:
        InvalidError: the memory is not GLake's, its region is sealed, or it belongs to a captured graph's pool.
        TypeError: the object gives no access to its bytes.
        InvalidError: the tensor is not contiguous.
    """
    return _asked(_library.api().decommit, tensor, "decommit changes its values")


def commit(tensor: Any) -> int:
    """Creates memory again for the decommitted parts of a tensor, at its addresses. Its values there are undefined.

    Returns:
        The number of bytes created.

    Raises:
        InvalidError: the memory is not GLake's, or its region is sealed.
        OutOfMemoryError: not enough memory; the part created by then stays, and a repeated call continues.
        TypeError: the object gives no access to its bytes.
        InvalidError: the tensor is not contiguous.
    """
    return _asked(_library.api().commit, tensor, "commit changes its values")


def _asked(call: Callable[[int, int], int], tensor: Any, written: str) -> int:
    part = range_of(tensor, "tensor", written=written)
    try:
        return call(part.address, part.size) if part.size else 0
    except InvalidError:
        part.refuse_host("tensor")
        raise
    finally:
        part.release()
