"""Methods of modules whose weights stream: moves leave them where they are, and merged adapters write to them on the GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from typing import Any

from ._parts import parts
from ._uses import uses
from ._weights import Weights, live

# Names of a layer's methods that write to the weight of the layer that it wraps, as of peft's layers.
_WRITING = ("merge", "unmerge")
_IGNORED = "_ddp_params_and_buffers_to_ignore"


def keep_in_place(model: Any, weights: Weights) -> None:
    """Makes moves of a model, as by ``model.to("cuda")``, leave its streamed parameters, and DistributedDataParallel ignore them."""
    for module in {id(part.module()): part.module() for place in weights.places for part in place.parts}.values():
        if module is not None and "_apply" not in vars(module):
            weights.keep(_Attribute(module, "_apply", _Apply(module, "_apply")))
    for module in parts(model):
        if "base_layer" in module._modules:
            for name in _WRITING:
                if callable(getattr(type(module), name, None)) and name not in vars(module):
                    weights.keep(_Attribute(module, name, _Writes(module, name)))
    own = getattr(model, _IGNORED, ())
    weights.keep(_Attribute(model, _IGNORED, _Ignored(model, weights, own._own if isinstance(own, _Ignored) else own)))


class _Attribute:
    """An attribute of one module, until it is removed."""

    def __init__(self, module: Any, name: str, value: Any) -> None:
        # Weakly: the value has the module.
        self._module, self._name, self._value = weakref.ref(module), name, weakref.ref(value)
        self._before = vars(module).get(name, self)
        setattr(module, name, value)

    def remove(self) -> None:
        module = self._module()
        if module is None or vars(module).get(self._name, self) is not self._value():
            return
        if self._before is self:
            delattr(module, self._name)
        else:
            setattr(module, self._name, self._before)


class _Ignored(MutableSequence[str]):
    """Names of the parameters that stream and are frozen when they are asked for, behind the program's own. DistributedDataParallel refuses
    parameters of several kinds of devices; these are the same on each rank.
    """

    def __init__(self, model: Any, weights: Weights, own: Iterable[str]) -> None:
        self._model, self._weights, self._own = weakref.ref(model), weakref.ref(weights), own if isinstance(own, list) else list(own)

    def _names(self) -> list[str]:
        model, weights = self._model(), self._weights()
        if model is None or weights is None:
            return self._own
        streamed = weights.streamed_in(model)
        found = [name for name, each in model.named_parameters() if id(each) in streamed and not each.requires_grad]
        return self._own + [name for name in found if name not in self._own]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __getitem__(self, index: Any) -> Any:
        return self._names()[index]

    def __len__(self) -> int:
        return len(self._names())

    # The program may add its own, as to a list.
    def __setitem__(self, index: Any, name: Any) -> None:
        self._own[index] = name

    def __delitem__(self, index: Any) -> None:
        del self._own[index]

    def insert(self, index: int, value: str) -> None:
        self._own.insert(index, value)

    def __add__(self, others: list[str]) -> list[str]:
        return self._names() + others

    def __deepcopy__(self, _memo: Any) -> list[str]:
        return list(self._own)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self._own,)


class _Method:
    """A method of one module in place of its class's. A copy of the module has one of its own."""

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._name = module, name

    def plain(self, *args: Any, **named: Any) -> Any:
        return getattr(type(self._module), self._name)(self._module, *args, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)(memo[id(self._module)], self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module, self._name)


class _Writes(_Method):
    """A method that writes to weights of the module's parts, on the GPU."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        with uses(self._module, writes=True):
            return self.plain(*args, **named)


class _Apply(_Method):
    """The method ``_apply`` of a module whose parameters stream."""

    def __call__(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        own = self._module._parameters
        streamed = {name for name in own if any(weights.is_streamed(self._module, name) for weights in live())}
        left = {name: parameter for name, parameter in own.items() if name in streamed and parameter is not None and _stays(parameter, fn)}
        order = list(own)
        try:
            own.update(dict.fromkeys(left))
            return self.plain(fn, recurse)
        finally:
            own.update({name: left[name] for name in order if name in left})


def _stays(parameter: Any, fn: Callable[[Any], Any]) -> bool:
    """Whether a move of a parameter only names another device."""
    empty = parameter.detach().new_empty(0)
    moved = fn(empty)
    return bool(moved.dtype == empty.dtype and moved.device.type != "meta" and not moved.is_sparse)
