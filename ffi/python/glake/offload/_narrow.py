"""Lossless narrow forms of saved bytes, which restore exactly the same bytes.

What a form is for is told by where a tensor comes from, never by its values: a cast's output is wide, and its values are the narrow ones.
Whether that holds is looked at all the same, in the passes in which a save is checked (`_proofs`): a kernel may have written to it since.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

# What is smaller goes as it is: the kernels would take longer than the bytes.
LEAST = 1 << 20
# How many elements are looked at in one go, where that takes memory.
_PART = 1 << 22
# Bit k of byte 7 of a product is byte k of the factor, where each byte is 0 or 1.
_GATHER = 0x0102040810204080
# A tensor whose elements lie so much further apart than they are large goes without what is between.
_SPREAD = 2


class Form(Protocol):
    """Form in which a range of bytes of a storage is transferred."""

    # Which bytes of the range go, where these are not all.
    key: Any
    # What it is tried for.
    kind: Any
    # How many bytes go.
    size: int

    def pack(self, storage: Any, start: int) -> Any:
        """Packs the bytes into a tensor on the current stream."""

    def unpack(self, narrow: Any, into: Any, start: int) -> None:
        """Unpacks the range into a storage on the current stream; ``narrow`` is a storage with the packed bytes."""

    def differs(self, storage: Any, start: int) -> Any | None:
        """Returns a bool tensor: whether a round trip changes any byte. None if the check is not possible."""


class Halved:
    """fp32 values that a cast produced from a narrower type."""

    def __init__(self, narrow: Any, count: int) -> None:
        self._narrow, self._count = narrow, count
        self.key, self.kind, self.size = None, narrow, 2 * count

    def pack(self, storage: Any, start: int) -> Any:
        import torch

        wide = _flat(storage, start, torch.float32, self._count)
        if self._narrow is torch.bfloat16:
            # A cast would give a NaN another payload; its upper half has it.
            return wide.view(torch.int16)[1::2].clone()
        if _casts_keep_payloads(wide.device):
            return wide.to(self._narrow)
        narrow = torch.empty(self._count, dtype=self._narrow, device=wide.device)
        for part, into in zip(wide.split(_PART), narrow.split(_PART)):
            into.copy_(_half_with_payload(part))
        return narrow

    def unpack(self, narrow: Any, into: Any, start: int) -> None:
        import torch

        # The same cast again.
        _flat(into, start, torch.float32, self._count).copy_(_flat(narrow, 0, self._narrow, self._count))

    def differs(self, storage: Any, start: int) -> Any:
        import torch

        wide = _flat(storage, start, torch.float32, self._count)
        if self._narrow is torch.bfloat16:
            return wide.view(torch.int16)[0::2].any()
        to_half = _half if _casts_keep_payloads(wide.device) else _half_with_payload
        return torch.stack([(to_half(part).float().view(torch.int32) != part.view(torch.int32)).any() for part in wide.split(_PART)]).any()


class Bits:
    """Bools, eight to a byte. A rest at the end is transferred as it is."""

    def __init__(self, count: int) -> None:
        self._whole, self._rest = count // 8, count % 8
        self.key, self.kind, self.size = None, "bits", self._whole + self._rest

    def pack(self, storage: Any, start: int) -> Any:
        import torch

        words = _flat(storage, start, torch.int64, self._whole)
        narrow = torch.empty(self.size, dtype=torch.uint8, device=storage.device)
        narrow[: self._whole] = (words * _GATHER).bitwise_right_shift_(56)
        narrow[self._whole :] = _flat(storage, start + 8 * self._whole, torch.uint8, self._rest)
        return narrow

    def unpack(self, narrow: Any, into: Any, start: int) -> None:
        import torch

        found = _flat(narrow, 0, torch.uint8, self.size)
        body = _flat(into, start, torch.uint8, 8 * self._whole).view(-1, 8)
        torch.bitwise_right_shift(found[: self._whole, None], torch.arange(8, dtype=torch.uint8, device=into.device), out=body)
        body.bitwise_and_(1)
        _flat(into, start + 8 * self._whole, torch.uint8, self._rest).copy_(found[self._whole :])

    def differs(self, storage: Any, start: int) -> Any:
        import torch

        return _flat(storage, start, torch.uint8, 8 * self._whole + self._rest).amax() > 1


class Gathered:
    """Elements that lie far apart, gathered side by side: one row of each matrix, say."""

    def __init__(self, tensor: Any) -> None:
        self._dtype, self._sizes, self._strides = tensor.dtype, tuple(tensor.size()), tuple(tensor.stride())
        self.key, self.kind, self.size = (self._dtype, self._sizes, self._strides), "gathered", tensor.nbytes

    def pack(self, storage: Any, start: int) -> Any:
        import torch

        return self._spread(storage, start).clone(memory_format=torch.contiguous_format)

    def unpack(self, narrow: Any, into: Any, start: int) -> None:
        count = functools.reduce(lambda product, size: product * size, self._sizes, 1)
        self._spread(into, start).copy_(_flat(narrow, 0, self._dtype, count).view(self._sizes))

    def differs(self, storage: Any, start: int) -> None:
        return None

    def _spread(self, storage: Any, start: int) -> Any:
        import torch

        view = torch.empty(0, dtype=self._dtype, device=storage.device)
        return view.set_(storage, start // view.element_size(), self._sizes, self._strides)


def form_of(tensor: Any, start: int, size: int) -> Form | None:
    """Returns the best form of a tensor's bytes, which fill a range of its storage or are all that is used of it. None: as they are."""
    count = tensor.nbytes
    # The cheapest question first: a whole range of types of two bytes, as most are, goes as it is.
    if count < LEAST or (size == count and tensor.dtype.itemsize == 2):
        return None
    import torch

    if size != count:
        return Gathered(tensor) if size >= _SPREAD * tensor.nbytes and _is_disjoint(tensor) else None
    source = tensor._base if tensor._is_view() else tensor
    if source.dtype is not tensor.dtype:
        return None
    if tensor.dtype is torch.bool:
        return Bits(tensor.numel()) if start % 8 == 0 else None
    if tensor.dtype is not torch.float32 or tensor._version != 0:
        return None
    narrow = _cast_from(source)
    return Halved(narrow, tensor.numel()) if narrow is not None and _comes_back(narrow, tensor.device) else None


def _cast_from(source: Any) -> Any:
    """Returns the source type if a cast on its own device produced the tensor."""
    import torch

    function = source.grad_fn
    if function is None or function.name() != "ToCopyBackward0":
        return None
    before = function.next_functions
    if not before or before[0][0] is None:
        return None
    found = before[0][0]._input_metadata[before[0][1]]
    return found.dtype if found.dtype in (torch.bfloat16, torch.float16) and found.device == source.device else None


def _half(wide: Any) -> Any:
    import torch

    return wide.to(torch.float16)


def _half_with_payload(wide: Any) -> Any:
    """Converts to half precision like a cast, except that a NaN keeps the upper bits of its payload."""
    import torch

    bits = wide.view(torch.int32)
    payload = (bits >> 13 & 0x3FF | 0x7C00 | bits >> 16 & 0x8000).to(torch.int16)
    return torch.where(wide.isnan(), payload, _half(wide).view(torch.int16)).view(torch.float16)


@functools.cache
def _casts_keep_payloads(device: Any) -> bool:
    """Whether a device's cast to fp16 and back preserves every value that came from fp16, NaNs included. Waits for the device, once."""
    import torch

    with torch.no_grad():
        wide = torch.arange(1 << 16, dtype=torch.int32, device=device).to(torch.int16).view(torch.float16).float()
        return bool(torch.equal(_half(wide).float().view(torch.int32), wide.view(torch.int32)))


@functools.cache
def _comes_back(narrow: Any, device: Any) -> bool:
    """Whether a device's casts preserve every value of a type, payloads of NaNs included. Waits for the device, once."""
    import torch

    with torch.no_grad():
        every = torch.arange(1 << 16, dtype=torch.int32, device=device).to(torch.int16).view(narrow)
        wide = every.float().untyped_storage()
        return not Halved(narrow, 1 << 16).differs(wide, 0).item()


def _flat(storage: Any, start: int, dtype: Any, count: int) -> Any:
    """Returns elements side by side, starting at a byte."""
    import torch

    view = torch.empty(0, dtype=dtype, device=storage.device)
    return view.set_(storage, start // view.element_size(), (count,), (1,))


def _is_disjoint(tensor: Any) -> bool:
    """Whether the strides rule out shared bytes of two elements."""
    needed = 1
    for stride, count in sorted(zip(tensor.stride(), tensor.size())):
        if count > 1:
            if stride < needed:
                return False
            needed = stride * (count - 1) + needed
    return True
