"""``model.to(...)`` of a model whose weights stream: they stay where they are, unless their type changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._weights import Weights, streams


def keep_in_place(model: Any, weights: Weights) -> None:
    """Makes moves of a model, as by ``model.to("cuda")``, leave its streamed parameters, and DistributedDataParallel ignore them."""
    for module in {id(part.module()): part.module() for place in weights.places for part in place.parts}.values():
        if module is not None and not isinstance(vars(module).get("_apply"), _Apply):
            module._apply = _Apply(module)
    names = [name for name, parameter in model.named_parameters() if weights.is_streamed(parameter)]
    # DistributedDataParallel refuses parameters of several kinds of devices; these are frozen, and the same on each rank.
    ignored = [name for name in getattr(model, "_ddp_params_and_buffers_to_ignore", ()) if name not in names]
    model._ddp_params_and_buffers_to_ignore = ignored + names


class _Apply:
    """The method ``_apply`` of a module whose parameters stream."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        module, left = self._module, {}
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and _stays(parameter, fn):
                left[name] = parameter
        order = list(module._parameters)
        try:
            for name in left:
                module._parameters[name] = None
            return type(module)._apply(module, fn, recurse)
        finally:
            for name in order:
                if name in left:
                    module._parameters[name] = left[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _Apply(memo[id(self._module)])

    def __reduce__(self) -> tuple[Any, ...]:
        return _Apply, (self._module,)


def _stays(parameter: Any, fn: Callable[[Any], Any]) -> bool:
    """Whether a parameter streams, and a move only names another device."""
    if not streams(parameter):
        return False
    empty = parameter.detach().new_empty(0)
    moved = fn(empty)
    return bool(moved.dtype == empty.dtype and moved.device.type != "meta" and not moved.is_sparse)
