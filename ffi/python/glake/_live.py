"""Live ranges: which bytes of a tensor count when its memory leaves the GPU. The rest is neither copied nor promised."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from . import _library
from ._memory import range_of
from ._regions import _end_with_python
from .errors import InvalidError

Ranges = Iterable[tuple[int, int]]


def live(tensor: Any, ranges: Ranges | Callable[[], Ranges] | None) -> None:
    """Says which bytes of a tensor count: at a shrink only they are copied (rounded out to 512 bytes), and the others have any value after
    the refill::

        glake.live(cache, [(0, used)])
        glake.live(cache, lambda: [(block * size, (block + 1) * size) for block in scheduler.live_blocks()])

    Everything that a later request may still read counts: of a cache with prefix hashing the free blocks that are hashed too, or reset that
    cache first.

    Args:
        tensor: a tensor or array of GLake's memory. Bytes of its block that lie outside of it count. What was said of the block before
            is replaced, by way of another tensor too, and ends when its memory is freed.
        ranges: half-open ranges of bytes from the start of the tensor; or a function that answers them, which is called at each shrink
            that takes the memory, once nothing runs on it any more, on a thread of its own. Where it raises, takes longer than hooks may,
            or leaves the tensor, all bytes count, and the report has a warning. It must not hold the tensor, which would never be
            freed then. None: all bytes count again.

    Raises:
        InvalidError: it is no memory of GLake's, or a range leaves it.
        TypeError: it has no bytes that can be reached.
    """
    api = _library.api()
    part = range_of(tensor, "tensor")
    try:
        found = api.find(part.address)
        if found is None:
            raise InvalidError("tensor is no memory of GLake's, or it was freed")
        base, block = int(found[0]), int(found[1])
        start, size = part.address - base, part.size
    finally:
        part.release()
    if ranges is None:
        api.live_ranges(base, None)
        return
    if not callable(ranges):
        api.live_ranges(base, _of_block(ranges, start, size, block))
        return
    told = ranges
    _end_with_python()
    api.live_callback(base, lambda: _of_block(told(), start, size, block))


def _of_block(ranges: Ranges, start: int, size: int, block: int) -> list[tuple[int, int]]:
    """Ranges of a tensor as those of its block, with what lies around it."""
    found = [(int(first), int(end)) for first, end in ranges]
    for first, end in found:
        if not 0 <= first <= end <= size:
            raise InvalidError(f"bytes {first} to {end} do not lie in the tensor: it has {size}")
    around = [(0, start), (start + size, block)] if start + size <= block - 512 else [(0, start)]
    return [(start + first, start + end) for first, end in found] + [part for part in around if part[0] < part[1]]
