"""Live ranges: the bytes of a tensor that an eviction has to keep. Other bytes are not copied, and undefined afterwards."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from . import _library
from ._memory import range_of
from ._regions import _end_with_python
from .errors import InvalidError

Ranges = Iterable[tuple[int, int]]


def live(tensor: Any, ranges: Ranges | Callable[[], Ranges] | None) -> None:
    """Declares the live bytes of a tensor: a shrink copies only these (rounded out to 512 bytes), and the others are undefined after
    the refill::

        glake.live(cache, [(0, used)])
        glake.live(cache, lambda: [(block * size, (block + 1) * size) for block in scheduler.live_blocks()])

    Declare every byte that a later request may read. For a cache with prefix hashing that includes free blocks that are hashed; or reset
    that cache first.

    Args:
        tensor: a tensor or array in GLake's memory. Bytes of its block outside of it are live. Replaces earlier ranges of the block, also
            those declared through another tensor. The ranges end when the memory is freed.
        ranges: half-open ranges of bytes from the start of the tensor; or a function that returns them, which is called on a thread of its
            own by each shrink that evicts the memory, once no work on it runs any more. If it raises, takes longer than hooks may, or
            exceeds the tensor, all bytes are live, and the report has a warning. It must not refer to the tensor, which would never be
            freed then. None: all bytes are live again.

    Raises:
        InvalidError: the memory is not GLake's, or a range exceeds the tensor.
        TypeError: the object gives no access to its bytes.
    """
    api = _library.api()
    part = range_of(tensor, "tensor")
    try:
        found = api.find(part.address)
        if found is None:
            part.refuse_host("tensor")
            raise InvalidError("tensor is no memory of GLake's, or it was freed")
        base, block = int(found[0]), int(found[1])
        start, size = part.address - base, part.size
    finally:
        part.release()
    if ranges is None:
        api.live_ranges(base, None)
        return
    if not callable(ranges):
        _check(ranges)
        api.live_ranges(base, _of_block(ranges, start, size, block))
        return
    told = ranges
    _end_with_python()
    api.live_callback(base, lambda: _of_block(told(), start, size, block))


def _check(ranges: Any) -> None:
    """Checks that these are ranges.

    Raises:
        TypeError: they are not.
    """
    if not isinstance(ranges, Iterable) or isinstance(ranges, (str, bytes)):
        raise TypeError(f"ranges is {ranges!r}: pairs of bytes, the first and the end, or a function that returns them, or None")


def _pair(pair: Any) -> tuple[int, int]:
    try:
        first, end = pair
        return operator.index(first), operator.index(end)
    except (TypeError, ValueError):
        raise TypeError(f"a range is {pair!r}: a pair of bytes, the first and the end") from None


def _of_block(ranges: Ranges, start: int, size: int, block: int) -> list[tuple[int, int]]:
    """Converts ranges of a tensor to ranges of its block, including the bytes around the tensor."""
    found = [_pair(pair) for pair in ranges]
    for first, end in found:
        if not 0 <= first <= end <= size:
            raise InvalidError(f"bytes {first} to {end} do not lie in the tensor: it has {size}")
    around = [(0, start), (start + size, block)] if start + size <= block - 512 else [(0, start)]
    return [(start + first, start + end) for first, end in found] + [part for part in around if part[0] < part[1]]
