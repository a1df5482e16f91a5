"""Autocast's casts of parameters: what is saved of one takes no memory until it is read, and is cast again then.

Of which parameter a cast is, is told by where it comes from, never by its values: by the operation that made it, or, of a frozen weight, of
whose cast autograd records nothing, by the linear layer that computes. That the same comes back is looked at all the same, in the first
passes: a program may change its parameters before their casts are read, and goes on with the casts then."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

from ._memory import is_shortage
from ._saved import Kept, Saved

# What autograd calls the operation of a cast.
OPERATION = "ToCopyBackward0"
# So many casts of a parameter are looked at.
OFTEN = 2
# So many answers are kept at a time; what is beyond is looked at another time. Of so many parameters it is known what came back.
_MOST, _MOST_PLACES = 4096, 1 << 16
# Whose frames may lie between a layer's and what packs.
_OURS = ("glake.", "torch._dynamo.eval_frame", "torch._compile")


class _Place:
    """Casts of one parameter to one type."""

    __slots__ = ("differs", "parameter", "same")

    def __init__(self, parameter: Any) -> None:
        self.parameter: Any = weakref.ref(parameter)
        # How often the same came back, and whether anything else ever did.
        self.same, self.differs = 0, False


class Casts:
    """Of one site."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, Any], _Place] = {}
        self._looked: list[tuple[_Place, Any]] = []

    def pack(self, tensor: Any, source: Any, parameter: Any, like: Any) -> Kept | Cast:
        """What is saved of a parameter's cast, which may be a view; ``like`` is a tensor of its kind without bytes."""
        import torch

        number = id(parameter), source.dtype
        place = self._places.get(number)
        if place is None or place.parameter() is not parameter:
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            place = self._places[number] = _Place(parameter)
        if place.differs or type(parameter) is not torch.nn.Parameter or parameter.device != source.device:
            return Kept(tensor)
        if parameter.is_inference() or source.is_inference() or source._version != 0 or source.dtype is not tensor.dtype:
            return Kept(tensor)
        return Cast(self, place, tensor, source, parameter, like)

    def look(self, place: _Place, held: Any, again: Any) -> None:
        """Looks, on the device, whether a cast came back that was kept."""
        from . import _bits

        if len(self._looked) < _MOST:
            self._looked.append((place, _bits.are_same(held, again)))

    def settle(self) -> None:
        """A pass begins: what was looked at in those before is known from here on. Waits for the device where anything was."""
        looked, self._looked = self._looked, []
        if not looked:
            return
        from . import _bits

        try:
            answers = _bits.read([answer for _, answer in looked])
        except BaseException as error:
            self._looked += looked
            if isinstance(error, RuntimeError) and is_shortage(error):
                return
            raise
        for (place, _), is_same in zip(looked, answers):
            place.same += is_same
            place.differs |= not is_same


class Cast(Saved):
    """What was saved of a cast: the cast itself as long as that is looked at, or nothing but how it is made again."""

    __slots__ = ("__weakref__", "_casts", "_held", "_offset", "_place", "_size", "_stride", "_then", "_whole", "parameter")

    def __init__(self, casts: Casts, place: _Place, tensor: Any, source: Any, parameter: Any, like: Any) -> None:
        # Without bytes; it counts the same changes.
        alias = tensor.detach()
        alias.data = like
        self._casts: Casts | None = casts
        self._held = tensor.detach() if place.same < OFTEN else None
        Saved.__init__(self, tensor, alias, tensor.grad_fn)
        self._place, self.parameter, self._then = place, parameter, _state(parameter)
        self._whole = source.dtype, source.stride()
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        if self._held is None:
            _away.add(self)

    @property
    def is_away(self) -> bool:
        return self._held is None

    def read(self) -> Any:
        if not self.is_intact():
            raise self._modified(list(self._size))
        held = self._held
        if held is None:
            held = self._again()
            if held is None:
                self._place.differs = True
                raise self._changed()
        elif self._casts is not None:
            self._look(self._casts, held)
        # A backward that writes to it changes what all have that saved it.
        found = self._alias.detach()
        found.data = held
        return found

    def hold(self) -> None:
        """The parameter is about to change: it is cast now."""
        if self._held is None:
            self._casts, self._held = None, self._again()

    def _look(self, casts: Casts, held: Any) -> None:
        self._casts = None
        try:
            again = self._again()
            if again is None:
                self._place.differs = True
            else:
                casts.look(self._place, held, again)
        except RuntimeError as error:
            if not is_shortage(error):
                raise

    def _again(self) -> Any:
        """The same cast of what the parameter has now. None: it was changed, or has other bytes."""
        if _state(self.parameter) != self._then:
            return None
        kind, stride = self._whole
        whole = self.parameter.detach().to(kind)
        return whole.as_strided(self._size, self._stride, self._offset) if whole.stride() == stride else None

    def _changed(self) -> RuntimeError:
        version, saved = self.parameter._version, self._then[0]
        found = f"is at version {version}; expected version {saved}" if version != saved else "was given other bytes"
        return RuntimeError(
            f"autocast's cast to {self._whole[0]} of a parameter {list(self.parameter.shape)} is needed for a gradient, glake.offload casts parameters "
            f"again then, and this one was changed in place since and {found}. Change parameters by an optimizer's step(), or when the backward pass "
            "is over; run again, casts of this one are kept from now on"
        )


class _Away:
    """Casts that are away. Optimizers are watched as long as there are any: what changes a parameter else is seen only when its cast is read."""

    def __init__(self) -> None:
        # Garbage may be looked for while it is held.
        self._lock = threading.RLock()
        self._casts: set[weakref.ref[Cast]] = set()
        self._watch: Any = None

    def add(self, cast: Cast) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        with self._lock:
            self._casts.add(weakref.ref(cast, self._gone))
            if self._watch is None:
                self._watch = register_optimizer_step_pre_hook(self._before_step)

    def _gone(self, cast: weakref.ref[Cast]) -> None:
        with self._lock:
            self._casts.discard(cast)
            if not self._casts and self._watch is not None:
                self._watch.remove()
                self._watch = None

    def _before_step(self, optimizer: Any, _args: Any, _named: Any) -> None:
        steps = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        with self._lock:
            casts = [cast() for cast in self._casts]
        for cast in casts:
            if cast is not None and id(cast.parameter) in steps:
                cast.hold()


_away = _Away()


def _state(parameter: Any) -> tuple[Any, ...]:
    """What changes with a parameter's bytes."""
    return parameter._version, parameter.data_ptr(), parameter.untyped_storage().nbytes(), parameter.size(), parameter.stride()


def trained(made_by: Any) -> Any:
    """The parameter that an operation cast, if it is one."""
    import torch

    before = made_by.next_functions
    parameter = getattr(before[0][0], "variable", None) if before else None
    return parameter if isinstance(parameter, torch.nn.Parameter) else None


def frozen(source: Any) -> Any:
    """The weight that autocast made a tensor of for the linear layer that computes on this thread now, which saves nothing else without a
    gradient. None: it is not certain."""
    import torch

    layer = _linear()
    weight = None if layer is None else layer._parameters.get("weight")
    if type(weight) is not torch.nn.Parameter or weight.requires_grad or weight.dtype == source.dtype:
        return None
    return weight if (weight.size(), weight.stride()) == (source.size(), source.stride()) else None


def _linear() -> Any:
    """The linear layer that computes."""
    import torch

    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != "torch.nn.modules.linear" or frame.f_code.co_name != "forward":
        return None
    layer = frame.f_locals.get("self")
    return layer if isinstance(layer, torch.nn.Linear) else None
