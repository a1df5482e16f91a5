"""Leaves: functions and modules that read a few tensors, write one, and have no other effect."""

from __future__ import annotations

from typing import Any

import torch

_TYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool))
_CASTS = frozenset((torch.float16, torch.bfloat16, torch.float32))


class Call:
    """One call of a leaf: its function, the tensors that it reads, and its other inputs."""

    __slots__ = ("args", "draws", "drops", "function", "inputs", "kwargs", "lowered", "signature", "uncast", "weight")

    def __init__(self, function: Any, args: Any, kwargs: Any, rest: Any, weight: Any, lowered: Any = None) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        # The parameter that it is known by from one pass to the next, if there is one.
        self.weight = weight if type(weight) is torch.nn.Parameter else None
        # The type that autocast has it compute in, whether it is to draw random numbers, and whether it may.
        self.lowered, self.drops, self.draws = lowered, False, False
        # Calls of one signature save tensors of the same kinds.
        self.inputs: list[Any] = []
        # What these were before autocast cast them.
        self.uncast: Any = self.inputs
        self.signature: list[Any] = [lowered, torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
        for value in rest:
            if isinstance(value, torch.Tensor):
                self.inputs.append(value)
                value = _signature(value)
            self.signature.append(value)

    def run(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def is_plain(self) -> bool:
        """Whether all inputs have the usual layout and types."""
        return all(is_plain(tensor) for tensor in self.inputs)


class Function:
    """A function of torch as a leaf."""

    # Whether calls of one signature save nothing but views of what they read and gave, once one did.
    is_steady = False
    # Whether it is torch's own. What others put in its place may save anything, refuse what it is tried with, and draw random numbers.
    is_own = True
    # Of the output's bytes, what may be stored beside it.
    most_beside = 0.25

    def __init__(self, name: str) -> None:
        self.name = name
        self._lowers: dict[tuple[str, Any], bool] = {}

    def is_cheap(self, args: Any, least_inner: int) -> bool:
        """Whether recomputing its output is faster than storing it."""
        return False

    def call(self, function: Any, args: Any, kwargs: Any) -> Call | None:
        """Returns a call of it. None: its inputs or output are unusual."""
        if "out" in kwargs or any(_is_others(value) for value in (*args, *kwargs.values())):
            return None
        lowered, uncast = None, (*args, *kwargs.values())
        if torch._C._is_any_autocast_enabled():
            args, kwargs, lowered = self._as_autocast(function, args, kwargs)
        values = (*args, *kwargs, *kwargs.values()) if kwargs else args
        call = Call(function, args, kwargs, values, self.weight(args), lowered)
        call.draws = not self.is_own
        if lowered is not None:
            call.uncast = uncast
        return call

    def weight(self, args: Any) -> Any:
        return None

    def sets(self, saved: Any, call: Call) -> bool:
        """Whether it computes the other saved bytes of a call by itself."""
        return True

    def probe(self, function: Any, zeros: Any) -> Any:
        raise NotImplementedError

    def _as_autocast(self, function: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Returns the arguments cast as by autocast, and the type of the computation. The cast is outside of the leaf: its
        result is an input that the leaf reads.
        """
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        device = inputs[0].device.type if inputs else "cpu"
        if not torch.is_autocast_enabled(device):
            return args, kwargs, None
        lowered = torch.get_autocast_dtype(device)
        known = self._lowers.get((device, lowered)) if self.is_own else False
        if known is None:
            # Not every function is of those that autocast has compute in its lower type.
            with torch.no_grad():
                zeros = lambda *sizes: torch.zeros(*sizes, dtype=torch.float32, device=device)
                known = self._lowers[device, lowered] = self.probe(function, zeros).dtype == lowered
        if known:
            args = tuple(_cast(value, device, lowered) for value in args)
            kwargs = {name: _cast(value, device, lowered) for name, value in kwargs.items()}
        return args, kwargs, lowered


class Product(Function):
    """A product with a weight: ``linear``, ``addmm``."""

    is_steady = True

    def __init__(self, name: str, activation: int, weight: int) -> None:
        super().__init__(name)
        self._activation, self._weight = activation, weight

    def is_cheap(self, args: Any, least_inner: int) -> bool:
        if len(args) <= self._weight:
            return True
        # A result takes as many operations as its inner dimension is long.
        activation = args[self._activation]
        if not _is_usual(activation):
            return False
        return bool(activation.is_nested or activation.dim() == 0 or activation.size(-1) < least_inner)

    def weight(self, args: Any) -> Any:
        return args[self._weight]

    def probe(self, function: Any, zeros: Any) -> Any:
        return function(*[zeros(1, 1) for _ in range(self._weight + 1)])


class Attention(Function):
    """``scaled_dot_product_attention``."""

    # A mask, which it makes of what it was given.
    most_beside = 1.0

    def call(self, function: Any, args: Any, kwargs: Any) -> Call | None:
        call = super().call(function, args, kwargs)
        if call is not None and (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)):
            call.draws = call.drops = True
            if not call.inputs or call.inputs[0].device.type not in ("cpu", "cuda"):
                return None
        return call

    def sets(self, saved: Any, call: Call) -> bool:
        # Seed and offset of a generator that it does not draw from are whatever memory had.
        return call.drops or saved.dtype in _TYPES

    def probe(self, function: Any, zeros: Any) -> Any:
        return function(*[zeros(1, 1, 1, 8) for _ in range(3)])


class Adapted:
    """peft's linear layer with LoRA, if it saves little beside its input and weights."""

    name = "lora"
    is_steady = False
    most_beside = 0.25

    def __init__(self, kind: type, is_own: bool = True) -> None:
        # Whether its products are torch's own.
        self._kind, self.is_own = kind, is_own

    def sets(self, saved: Any, call: Call) -> bool:
        return True

    def is_cheap(self, args: Any, least_inner: int) -> bool:
        return bool(args[1].size(-1) < least_inner)

    def _is_of(self, module: Any) -> bool:
        return type(module) is self._kind

    def is_whole(self, module: Any, x: Any, args: Any, kwargs: Any) -> bool:
        """Whether the layer can be one leaf. Otherwise its parts are leaves: dropout outputs are not stored, and casts are
        repeated.
        """
        if not self._is_of(module) or args or any(value is not None for value in kwargs.values()):
            return False
        if not isinstance(x, torch.Tensor) or torch.is_autocast_enabled(x.device.type) or module.disable_adapters or module.merged:
            return False
        parts = module._modules
        base, rank = parts["base_layer"], 0
        if not _is_bare(base):
            return False
        for name in self._active(module):
            product, dropout = parts["lora_A"]._modules[name], parts["lora_dropout"]._modules[name]
            if not _is_bare(product) or not _is_bare(parts["lora_B"]._modules[name]) or _part(product, "weight").dtype != x.dtype:
                return False
            if type(dropout) is not torch.nn.Identity and (type(dropout) is not torch.nn.Dropout or (dropout.training and dropout.p != 0)):
                return False
            if name in module.lora_variant or not isinstance(module.scaling[name], (int, float)):
                return False
            rank += product.out_features
        return bool(4 * rank <= base.out_features)

    def call(self, function: Any, args: Any, kwargs: Any) -> Call | None:
        module, x = args
        parts, scaling = module._modules, module.scaling
        base = parts["base_layer"]
        weight = _part(base, "weight")
        rest = [x, weight, _part(base, "bias")]
        for name in self._active(module):
            for layer in (parts["lora_A"]._modules[name], parts["lora_B"]._modules[name]):
                rest += (_part(layer, "weight"), _part(layer, "bias"))
            rest += (name, scaling[name])
        call = Call(function, args, kwargs, rest, weight)
        call.draws = not self.is_own
        return call

    def _active(self, module: Any) -> list[str]:
        adapters = module._modules["lora_A"]._modules
        return [name for name in module.active_adapters if name in adapters]


def is_plain(tensor: Any) -> bool:
    if not _is_usual(tensor) or tensor.is_inference():
        return False
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type == "meta":
        return False
    return tensor.dtype in _TYPES and not tensor.is_neg()


def _is_usual(value: Any) -> bool:
    return type(value) is torch.Tensor or type(value) is torch.nn.Parameter


def _is_others(value: Any) -> bool:
    """Whether its class overrides functions of torch: any access to it may call one of them."""
    return not _is_usual(value) and hasattr(type(value), "__torch_function__")


def _part(layer: Any, name: str) -> Any:
    """Returns a weight or bias; FSDP puts plain tensors in place of parameters."""
    found = layer._parameters.get(name)
    return getattr(layer, name) if found is None else found


def is_kept_by_autocast(tensor: Any) -> bool:
    """Whether autocast caches its cast of such a tensor until it ends, for all readers."""
    return bool(tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view())


def _signature(tensor: Any) -> tuple[Any, ...]:
    kind = type(tensor)
    if kind is torch.nn.Parameter:
        # Of weights of the same sizes it says which it is: it is the same object when it is computed again.
        return id(tensor), tensor.dtype, tensor.requires_grad, tensor.size(), tensor.stride()
    if tensor.layout is not torch.strided or tensor.is_nested:
        return (kind, None)
    return kind, tensor.dtype, tensor.requires_grad, tensor.size(), tensor.stride(), tensor.device, tensor.is_neg()


def _cast(value: Any, device: str, lowered: Any) -> Any:
    """Casts a value as autocast is about to do. Values in autocast's cache are left to it."""
    if not isinstance(value, torch.Tensor) or value.dtype == lowered or value.dtype not in _CASTS:
        return value
    if value.device.type != device or is_kept_by_autocast(value):
        return value
    return value.to(lowered)


def _is_bare(layer: Any) -> bool:
    """Whether a module is a plain linear layer without hooks."""
    if type(layer) is not torch.nn.Linear or "forward" in layer.__dict__ or layer._compiled_call_impl is not None:
        return False
    return not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
