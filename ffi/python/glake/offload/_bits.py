"""Comparisons on the GPU whose results are read later, without a wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._memory import is_shortage

# At a time: a comparison takes a byte an element.
_PART = 16 << 20


def are_same(one: Any, other: Callable[[], Any]) -> Any:
    """Compares the bits, sizes and strides of two tensors: returns False, or a tensor with the result. None: no memory for the
    comparison.
    """
    try:
        return _compared(one.detach(), other().detach())
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        return None


def _compared(one: Any, other: Any) -> Any:
    if one.dtype != other.dtype or one.size() != other.size() or one.stride() != other.stride() or one.device != other.device:
        return False
    if one.data_ptr() == other.data_ptr():
        return True
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    one, other = one.view(whole), other.view(whole)
    found = torch.ones((), dtype=torch.bool, device=one.device)
    if one.numel() == 0:
        return found
    if one.dim() == 0:
        return one == other
    longest = max(range(one.dim()), key=one.size)
    rows = max(1, _PART * one.size(longest) // one.numel())
    for part, another in zip(one.split(rows, longest), other.split(rows, longest)):
        found &= (part == another).all()
    return found


def read(found: list[Any]) -> list[bool | None]:
    """Reads the results of comparisons, all at once for a device. None: unknown."""
    answers = [None if isinstance(answer, torch.Tensor) else answer for answer in found]
    devices: dict[Any, list[int]] = {}
    for place, answer in enumerate(found):
        if isinstance(answer, torch.Tensor):
            devices.setdefault(answer.device, []).append(place)
    for places in devices.values():
        try:
            told = torch.stack([found[place] for place in places]).tolist()
        except RuntimeError as error:
            if not is_shortage(error):
                raise
            continue
        for place, answer in zip(places, told):
            answers[place] = answer
    return answers
