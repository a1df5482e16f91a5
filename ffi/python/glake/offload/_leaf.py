"""What is a leaf: functions and modules that read a few tensors, write one, and do nothing else."""

from __future__ import annotations

from typing import Any


class Call:
    """One call of a leaf: how it is computed, which tensors it reads, and what else it depends on."""

    __slots__ = ("_args", "_function", "_kwargs", "draws", "inputs", "lowered", "rest")

    def __init__(self, function: Any, args: Any, kwargs: Any, inputs: list[Any], rest: tuple[Any, ...]) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self.inputs, self.rest = inputs, rest
        # Whether it draws random numbers, and the type that autocast has it compute in.
        self.draws, self.lowered = False, None

    def run(self) -> Any:
        return self._function(*self._args, **self._kwargs)


class Function:
    """A function of torch."""

    def __init__(self, name: str) -> None:
        import torch

        self.name = name
        self._torch = torch
        self._lowers: dict[tuple[str, Any], bool] = {}

    def is_cheap(self, args: Any, least_inner: int) -> bool:
        """Whether to compute it again takes less than to store what it gave."""
        return False

    def call(self, function: Any, args: Any, kwargs: Any) -> Call | str:
        """A call of it; or why it cannot be replayed."""
        if "out" in kwargs:
            return "out"
        inputs, rest = _split((*args, *kwargs.values()))
        if not inputs or not all(is_plain(tensor) for tensor in inputs):
            return "tensors"
        lowered, kind = None, inputs[0].device.type
        if self._torch.is_autocast_enabled(kind):
            lowered = self._torch.get_autocast_dtype(kind)
            if self._is_lowered(function, kind, lowered):
                args = tuple(self._cast(value, kind, lowered) for value in args)
                kwargs = {name: self._cast(value, kind, lowered) for name, value in kwargs.items()}
                inputs, _ = _split((*args, *kwargs.values()))
        call = Call(function, args, kwargs, inputs, (*rest, *kwargs))
        call.lowered = lowered
        return call

    def probe(self, function: Any, zeros: Any) -> Any:
        raise NotImplementedError

    def _is_lowered(self, function: Any, kind: str, lowered: Any) -> bool:
        """Whether autocast has this function compute in its lower type."""
        known = self._lowers.get((kind, lowered))
        if known is None:
            with self._torch.no_grad():
                zeros = lambda *sizes: self._torch.zeros(*sizes, dtype=self._torch.float32, device=kind)
                known = self._lowers[kind, lowered] = self.probe(function, zeros).dtype == lowered
        return known

    def _cast(self, value: Any, kind: str, lowered: Any) -> Any:
        """As autocast is about to do it, and outside of the leaf: what is saved of it is a view of what the leaf reads. What autocast keeps, it
        casts itself."""
        torch = self._torch
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float32, torch.float16, torch.bfloat16) or value.dtype == lowered:
            return value
        if value.device.type != kind or is_kept_by_autocast(value):
            return value
        return value.to(lowered)


class Product(Function):
    """A product with a weight: ``linear``, ``addmm``."""

    def __init__(self, name: str, activation: int, weight: int) -> None:
        super().__init__(name)
        self._activation, self._weight = activation, weight

    def is_cheap(self, args: Any, least_inner: int) -> bool:
        # A result takes as many operations as its inner dimension is long.
        return len(args) <= self._weight or args[self._activation].size(-1) < least_inner

    def probe(self, function: Any, zeros: Any) -> Any:
        return function(*[zeros(1, 1) for _ in range(self._weight + 1)])


class Attention(Function):
    """``scaled_dot_product_attention``."""

    def __init__(self) -> None:
        super().__init__("attention")

    def call(self, function: Any, args: Any, kwargs: Any) -> Call | str:
        call = super().call(function, args, kwargs)
        if not isinstance(call, str):
            call.draws = bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
            if call.draws and call.inputs[0].device.type not in ("cpu", "cuda"):
                return "generator"
        return call

    def probe(self, function: Any, zeros: Any) -> Any:
        return function(*[zeros(1, 1, 1, 8) for _ in range(3)])


class Adapted:
    """peft's linear layer with LoRA, where what it saves beside its input and weights is small."""

    name = "lora"

    def __init__(self, kind: type) -> None:
        import torch

        self._kind, self._torch = kind, torch

    def is_cheap(self, args: Any, least_inner: int) -> bool:
        return bool(args[1].size(-1) < least_inner)

    def is_whole(self, module: Any, x: Any, args: Any, kwargs: Any) -> bool:
        """Else its parts are leaves: of what a dropout gave nothing is stored, and casts are made again."""
        torch = self._torch
        if type(module) is not self._kind or args or any(value is not None for value in kwargs.values()) or not is_plain(x):
            return False
        if module.disable_adapters or module.merged or torch.is_autocast_enabled(x.device.type) or not _is_bare(module.base_layer):
            return False
        rank = 0
        for name in self._active(module):
            product = module.lora_A[name]
            if name in module.lora_variant or product.weight.dtype != x.dtype or not isinstance(module.scaling[name], (int, float)):
                return False
            if not _is_bare(product) or not _is_bare(module.lora_B[name]) or not _is_idle(module.lora_dropout[name]):
                return False
            rank += product.out_features
        return 4 * rank <= module.base_layer.out_features

    def call(self, function: Any, args: Any, kwargs: Any) -> Call | str:
        module, x = args
        names = self._active(module)
        layers = [module.base_layer]
        for name in names:
            layers += (module.lora_A[name], module.lora_B[name])
        inputs = [x]
        for layer in layers:
            inputs.append(layer.weight)
            if layer.bias is not None:
                inputs.append(layer.bias)
        if not all(is_plain(tensor) for tensor in inputs):
            return "tensors"
        return Call(function, args, kwargs, inputs, (*names, *[module.scaling[name] for name in names]))

    def _active(self, module: Any) -> list[str]:
        adapters = module.lora_A._modules
        return [name for name in module.active_adapters if name in adapters]


def is_plain(tensor: Any) -> bool:
    """Whether it is bytes of its own in the usual layout, of a usual type."""
    import torch

    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return False
    return tensor.dtype in _types() and tensor.layout is torch.strided and not tensor.is_neg()


def is_kept_by_autocast(tensor: Any) -> bool:
    """Whether autocast keeps its cast of such a tensor until it ends, for all that reads it."""
    import torch

    return bool(tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view())


def _split(values: Any) -> tuple[list[Any], tuple[Any, ...]]:
    import torch

    inputs, rest = [], []
    for value in values:
        if isinstance(value, torch.Tensor):
            inputs.append(value)
        else:
            rest.append(value)
    return inputs, tuple(rest)


def _types() -> frozenset[Any]:
    global _known_types
    if not _known_types:
        import torch

        _known_types = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool))
    return _known_types


_known_types: frozenset[Any] = frozenset()


def _is_bare(layer: Any) -> bool:
    """Whether it is a linear layer, and nothing else happens when it is called."""
    import torch

    if type(layer) is not torch.nn.Linear or "forward" in layer.__dict__ or layer._compiled_call_impl is not None:
        return False
    return not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def _is_idle(dropout: Any) -> bool:
    import torch

    if type(dropout) is torch.nn.Identity:
        return True
    return type(dropout) is torch.nn.Dropout and (dropout.p == 0 or not dropout.training)
