"""Autocast's casts of frozen weights: what is saved of one takes no memory until it is read, and is cast again then.

Autograd records nothing of such a cast. Whose it is, is told by where it comes from, never by its values: by the linear layer that computes,
which casts its weight within the operation and saves nothing else without a gradient. That the same comes back is looked at all the same, in
a layer's first passes: a program may write to a weight before its backward in ways that no version counts.

Casts of trained parameters stay: others have them while autocast keeps them, and a step before the backward changes what they were made of."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from ._memory import is_shortage
from ._saved import Kept, Saved

# So many casts of a layer's weight are looked at.
OFTEN = 2
# So many answers are kept at a time; what is beyond is looked at another time.
_MOST = 4096
# Whose frames may lie between a layer's and what packs.
_OURS = ("glake.", "torch._dynamo.eval_frame", "torch._compile")


class _Place:
    """What a layer's casts were found to be."""

    __slots__ = ("differs", "same")

    def __init__(self) -> None:
        # How often the same came back, and whether anything else ever did.
        self.same, self.differs = 0, False


class Casts:
    """Of one site."""

    def __init__(self) -> None:
        self._places: weakref.WeakKeyDictionary[Any, _Place] = weakref.WeakKeyDictionary()
        # What is looked at: on the device; and on its way to the host, with what says that it is there.
        self._looked: list[tuple[_Place, Any]] = []
        self._coming: list[tuple[list[_Place], Any, Any]] = []

    def pack(self, tensor: Any, source: Any, like: Any, unsharded: Any) -> Kept | Cast:
        """What is saved of a tensor that has the sizes of a weight's cast, and may be a view of it; ``like`` is one of its kind without bytes.
        What is gathered into storages like those of ``unsharded`` has its bytes only for a while."""
        if self._looked or self._coming:
            self._settle()
        layer = _linear()
        weight = None if layer is None else _weight(layer, source)
        if weight is None or source.dtype is not tensor.dtype or weight.untyped_storage()._cdata in unsharded:
            return Kept(tensor)
        place = self._places.get(layer)
        if place is None:
            place = self._places[layer] = _Place()
        return Kept(tensor) if place.differs else Cast(self, place, layer, weight, tensor, like)

    def look(self, place: _Place, held: Any, again: Any) -> None:
        """Looks, on the device, whether a cast came back that was kept."""
        from . import _bits

        if len(self._looked) < _MOST:
            self._looked.append((place, _bits.are_same(held, again)))

    def _settle(self) -> None:
        """What was found is known once it is there. Nothing waits for it."""
        try:
            self._send()
        except RuntimeError as error:
            if not is_shortage(error):
                raise
        for places, found, is_there in self._coming:
            if is_there is None or is_there.query():
                for place, is_same in zip(places, found.tolist()):
                    place.same += is_same
                    place.differs |= not is_same
                places.clear()
        self._coming = [coming for coming in self._coming if coming[0]]

    def _send(self) -> None:
        """Has answers copied to the host."""
        import torch

        by_device: dict[Any, list[tuple[_Place, Any]]] = {}
        for place, answer in self._looked:
            by_device.setdefault(answer.device, []).append((place, answer))
        for device, looked in by_device.items():
            found, is_there = torch.stack([answer for _, answer in looked]), None
            if device.type != "cpu":
                event: Any = torch.cuda.Event
                found, is_there = torch.empty(found.size(), dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True), event()
                is_there.record(torch.cuda.current_stream(device))
            self._coming.append(([place for place, _ in looked], found, is_there))
            self._looked = [(place, answer) for place, answer in self._looked if answer.device != device]


class Cast(Saved):
    """What was saved of a cast: the cast itself as long as that is looked at, or nothing but how it is made again."""

    __slots__ = ("_casts", "_held", "_layer", "_place", "_then", "_view", "_weight")

    def __init__(self, casts: Casts, place: _Place, layer: Any, weight: Any, tensor: Any, like: Any) -> None:
        # Without bytes; it counts the same changes.
        alias = tensor.detach()
        alias.data = like
        Saved.__init__(self, tensor, alias, None)
        self._held: Any = tensor.detach() if place.same < OFTEN else None
        # Whom its look is told, and which layer's weight it is looked at by: once, whoever reads it.
        self._casts: Casts | None = None if self._held is None else casts
        self._layer: Any = None if self._held is None else weakref.ref(layer)
        # The weight's bytes, whatever becomes of the parameter; and its version.
        self._place, self._weight = place, weight.detach()
        self._then = _state(self._weight)
        self._view = tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    @property
    def is_away(self) -> bool:
        return self._held is None

    def read(self) -> Any:
        if not self.is_intact():
            raise self._modified(list(self._view[1]))
        held = self._held
        if held is None:
            held = self._again()
            if held is None:
                self._place.differs = True
                raise self._changed()
        else:
            casts, self._casts = self._casts, None
            if casts is not None:
                self._look(casts, held)
        # A backward that writes to it changes what all have that saved it.
        found = self._alias.detach()
        found.data = held
        return found

    def _look(self, casts: Casts, held: Any) -> None:
        import torch

        layer = None if self._layer is None else self._layer()
        weight = None if layer is None else layer._parameters.get("weight")
        if held.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        try:
            again = None if weight is None or weight.data_ptr() != self._weight.data_ptr() else self._again()
            if again is None:
                # Also where it has other bytes by now: these here would be kept for its cast.
                self._place.differs = True
            else:
                casts.look(self._place, held, again)
        except RuntimeError as error:
            if not is_shortage(error):
                raise

    def _again(self) -> Any:
        """The same cast of the same bytes. None: they were changed."""
        if _state(self._weight) != self._then:
            return None
        kind, size, stride, offset = self._view
        found = self._weight.to(kind).as_strided(size, stride, offset)
        # Another thread may have written to them meanwhile.
        return found if _state(self._weight) == self._then else None

    def _changed(self) -> RuntimeError:
        version, saved = self._weight._version, self._then[0]
        found = f"is at version {version}; expected version {saved}" if version != saved else "has no bytes any more"
        return RuntimeError(
            f"the cast to {self._view[0]} that autocast made of a frozen weight {list(self._weight.shape)} is needed for a gradient, glake.offload "
            f"makes it again then, and the weight was changed in place since: it {found}. Change frozen weights when the backward pass is over; run "
            "again, this layer's casts are kept from now on"
        )


def _state(weight: Any) -> tuple[int, int]:
    """What changes with a weight's bytes."""
    return weight._version, weight.untyped_storage().nbytes()


def _linear() -> Any:
    """The linear layer that computes on this thread now. None: another operation does."""
    import torch

    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        # It may be given another weight's cast.
        return None
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    if frame is None or frame.f_code is not getattr(torch.nn.Linear.forward, "__code__", None):
        return None
    layer = frame.f_locals.get("self")
    return layer if isinstance(layer, torch.nn.Linear) and frame.f_globals.get("__name__") == "torch.nn.modules.linear" else None


def _weight(layer: Any, source: Any) -> Any:
    """The frozen weight of a layer, if a tensor has the sizes and strides of its cast."""
    import torch

    kind: Any = type(layer)
    is_plain = kind.__getattr__ is torch.nn.Module.__getattr__ and kind.__getattribute__ is object.__getattribute__
    if not is_plain or hasattr(kind, "weight") or "weight" in layer.__dict__:
        # What it computes with may be something else.
        return None
    weight = layer._parameters.get("weight")
    if type(weight) is not torch.nn.Parameter or weight.requires_grad or weight.dtype is not torch.float32 or weight.device != source.device:
        return None
    if weight.is_inference() or source.is_inference() or source._version != 0:
        return None
    return weight if (weight.size(), weight.stride()) == (source.size(), source.stride()) else None
