"""Which bytes of a KV cache count (pure): those of the blocks that a request uses, or that a later one can still hit.

A block has a number, and bytes in the tensor of each layer: ``part.offset + number * part.stride``, ``part.size`` of them. How a tensor is
laid out follows from its shape and strides: the dimension with as many entries as there are blocks, or a multiple.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


# Bytes that are always copied together.
_QUANTUM = 512


class Part(NamedTuple):
    """Where the blocks lie in a storage, in bytes: block ``n`` has ``size`` bytes from ``offset + n * stride``."""

    offset: int
    stride: int
    size: int


def parts(offset: int, shape: Sequence[int], strides: Sequence[int], item: int, blocks: int) -> list[Part] | None:
    """Returns where each of ``blocks`` blocks lies in a tensor, given in elements of ``item`` bytes; None if its layout has no such
    dimension.
    """
    dimension = next((index for index, size in enumerate(shape) if size >= blocks and size % blocks == 0), None)
    if dimension is None:
        return None
    # A block of the scheduler may be several of the kernel's.
    stride = strides[dimension] * (shape[dimension] // blocks)
    # Dimensions outside of the blocks, such as keys and values apart: each entry has its own part.
    outer = [index for index in range(len(shape)) if index != dimension and strides[index] >= stride and shape[index] > 1]
    inside = (strides[index] * (shape[index] - 1) for index in range(len(shape)) if index not in outer and index != dimension)
    size = strides[dimension] * (shape[dimension] // blocks - 1) + sum(inside) + 1
    starts = [offset]
    for index in outer:
        starts = [start + entry * strides[index] for start in starts for entry in range(shape[index])]
    return [Part(start * item, stride * item, size * item) for start in starts]


def joined(of: Iterable[Part]) -> list[Part]:
    """Returns the same bytes in as few parts as possible: parts with the same stride that touch become one, and a gap that is copied with
    its neighbours anyway is none.
    """
    found: list[Part] = []
    for part in sorted(set(of), key=lambda part: (part.stride, part.offset)):
        last = found[-1] if found else None
        if last is not None and last.stride == part.stride and last.offset <= part.offset <= last.offset + last.size:
            size = max(last.size, part.offset + part.size - last.offset)
            if size <= part.stride:
                found[-1] = last._replace(size=size)
                continue
        found.append(part)
    return [part._replace(size=part.stride) if part.stride - _QUANTUM < part.size < part.stride else part for part in found]


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Returns ascending numbers as half-open runs."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found


def ranges(of: Iterable[Part], blocks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the bytes of runs of blocks in a storage, sorted, and joined where they touch."""
    pieces = []
    blocks = list(blocks)
    for part in of:
        for first, end in blocks:
            if part.size >= part.stride:
                pieces.append((part.offset + first * part.stride, part.offset + (end - 1) * part.stride + part.size))
            else:
                starts = (part.offset + number * part.stride for number in range(first, end))
                pieces.extend((start, start + part.size) for start in starts)
    found: list[tuple[int, int]] = []
    for first, end in sorted(pieces):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return found
