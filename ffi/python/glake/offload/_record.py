"""What one call of a leaf left, so that it need not be computed again."""

from __future__ import annotations

from typing import Any

from . import _bits
from ._leaf import Call, is_kept_by_autocast

# What a saved tensor is: of an input or of the output, a cast of an input that autocast made, or stored by itself.
_INPUT, _OUTPUT, _CAST, _STORED = range(4)
# Of the output's bytes, what may be stored beside it: more is not worth it.
MOST_BESIDE = {"linear": 0.25, "addmm": 0.25, "lora": 0.25, "attention": 1.0}


class Draws:
    """Where the generator that a leaf draws from stands."""

    __slots__ = ("_device", "_state")

    def __init__(self, device: Any) -> None:
        import torch

        self._device = device
        if device.type == "cpu":
            self._state: Any = torch.get_rng_state()
        else:
            generator = torch.cuda.default_generators[device.index]
            self._state = (generator.initial_seed(), generator.get_offset())

    def is_now(self) -> bool:
        import torch

        now = Draws(self._device)._state
        return bool(torch.equal(self._state, now)) if self._device.type == "cpu" else bool(self._state == now)

    def set(self) -> None:
        import torch

        if self._device.type == "cpu":
            torch.set_rng_state(self._state)
        else:
            torch.cuda.default_generators[self._device.index].set_offset(self._state[1])


class Record:
    """Describes what the operation saved, in its order, by what it is a view of; and has what was stored of it."""

    __slots__ = ("_after", "_before", "_is_grad", "_lowered", "_output", "_requires_grad", "_rest", "_saves", "_signature", "is_checked", "leaf", "kind")

    def __init__(self, kind: Any, leaf: Any, call: Call) -> None:
        import torch

        self.kind, self.leaf = kind, leaf
        self._signature, self._rest, self._lowered = [_signature(tensor) for tensor in call.inputs], call.rest, call.lowered
        self._is_grad = torch.is_grad_enabled()
        self._before = Draws(call.inputs[0].device) if call.draws else None
        self._after: Draws | None = None
        self._saves: list[tuple[int, Any, Any, Any, int]] = []
        self._output: Any = None
        self._requires_grad = False
        # Whether it is computed again this once, beside what is stored, and both are compared.
        self.is_checked = False

    def store(self, call: Call, output: Any, saved: list[Any], packer: Any, scope: int) -> str | None:
        """Stores what is needed of what the leaf gave and saved; or says why it does not."""
        import torch

        if type(output) is not torch.Tensor or output.layout is not torch.strided:
            return "tensors"
        whence = {tensor.untyped_storage()._cdata: place for place, tensor in enumerate(call.inputs)}
        storage = output.untyped_storage()._cdata
        if storage in whence:
            return "aliases"
        beside, size, reads_output = [], 0, False
        for tensor in saved:
            view = (tensor.size(), tensor.stride())
            source = tensor.untyped_storage()._cdata
            place = whence.get(source)
            if place is not None and _is_within(tensor, call.inputs[place]):
                self._saves.append((_INPUT, place, *view, tensor.storage_offset() - call.inputs[place].storage_offset()))
            elif source == storage and _is_within(tensor, output):
                self._saves.append((_OUTPUT, None, *view, tensor.storage_offset() - output.storage_offset()))
                reads_output = True
            elif call.lowered is not None and (place := _cast_of(tensor, call)) is not None:
                self._saves.append((_CAST, place, *view, tensor.storage_offset()))
            else:
                self._saves.append((_STORED, len(beside), *view, 0))
                beside.append(tensor)
                size += tensor.nbytes
        if size > MOST_BESIDE[self.kind.name] * output.nbytes and size > packer.least:
            return "large"
        self._requires_grad = output.requires_grad
        if call.draws:
            self._after = Draws(call.inputs[0].device)
        if self.leaf.is_read or reads_output:
            self._output = packer.store(output, scope, True)
            if self._output is None:
                return "planned"
        for place, (what, index, *view) in enumerate(self._saves):
            if what == _STORED:
                stored = packer.store(beside[index], scope, False)
                if stored is None:
                    return "planned"
                self._saves[place] = (_STORED, stored, *view)  # type: ignore[assignment]
        return None

    def misfit(self, kind: Any, call: Call) -> bool:
        """Whether this is not the call that it was made by."""
        import torch

        if kind is not self.kind or len(call.inputs) != len(self._signature) or call.rest != self._rest or call.lowered != self._lowered:
            return True
        if torch.is_grad_enabled() != self._is_grad:
            return True
        return any(_signature(tensor) != signature for tensor, signature in zip(call.inputs, self._signature))

    def hindrance(self) -> str | None:
        """Why it cannot stand for the computation now."""
        if self._output is not None and not self._output.is_intact():
            return "changed"
        if any(what == _STORED and not stored.is_intact() for what, stored, *_ in self._saves):
            return "changed"
        if self._before is not None and not self._before.is_now():
            return "generator"
        return None

    def replay(self, call: Call, pack: Any) -> Any:
        """Hands what the operation saved to the hook that is on, in its order, and answers what it gave."""
        import torch

        output = None
        for save in self._saves:
            if save[0] == _OUTPUT and output is None:
                output = self._output.read()
            # Raises where this was the last that was needed: the output is not read then.
            pack(self._saved(save, call, output))
        if output is None:
            if self._output is None:
                # It was not needed in the passes before.
                self.leaf.is_read = True
                with torch.no_grad():
                    output = call.run().detach()
            else:
                output = self._output.read()
        if self._after is not None:
            self._after.set()
        # Another tensor each time: what is kept stays as it is.
        return output.detach().requires_grad_(self._requires_grad)

    def compare(self, call: Call, saved: list[Any], output: Any) -> list[Any]:
        """Whether the operation, computed again, saved and gave what a replay would have. Without an output it was ended by what it saved
        last."""
        found: list[Any] = []
        if output is not None:
            found.append(len(saved) == len(self._saves))
            found.append(output.requires_grad == self._requires_grad)
            if self._output is not None:
                found.append(_bits.are_same(output, self._output.read()))
        for tensor, save in zip(saved, self._saves):
            if save[0] == _OUTPUT and output is None:
                found.append(_bits.are_same(tensor, self._saved(save, call, self._output.read())))
            else:
                expected = self._saved(save, call, output)
                is_view = save[0] in (_INPUT, _OUTPUT)
                found.append(tensor.data_ptr() == expected.data_ptr() if is_view else True)
                found.append(tensor.dtype == expected.dtype and tensor.size() == expected.size() and tensor.stride() == expected.stride())
                if not is_view:
                    found.append(_bits.are_same(tensor, expected))
        return found

    def _saved(self, save: tuple[int, Any, Any, Any, int], call: Call, output: Any) -> Any:
        what, source, size, stride, offset = save
        if what == _STORED:
            return source.read()
        if what == _CAST:
            tensor = call.inputs[source].detach().to(call.lowered)
        else:
            tensor = call.inputs[source] if what == _INPUT else output
            if offset == 0 and tensor.size() == size and tensor.stride() == stride:
                return tensor
            offset += tensor.storage_offset()
        return tensor.detach().as_strided(size, stride, offset)


def _signature(tensor: Any) -> tuple[Any, ...]:
    import torch

    # Which of two weights of the same sizes it is: a parameter is the same object when it is computed again.
    weight = id(tensor) if type(tensor) is torch.nn.Parameter else 0
    return tensor.dtype, tensor.requires_grad, tensor.size(), tensor.stride(), tensor.device, weight


def _is_within(view: Any, tensor: Any) -> bool:
    """Whether a view of the same storage has no other bytes than those of a tensor."""
    first = view.storage_offset() - tensor.storage_offset()
    return view.dtype == tensor.dtype and first >= 0 and first + _extent(view) <= _extent(tensor)


def _extent(tensor: Any) -> int:
    if tensor.is_contiguous():
        return int(tensor.numel())
    return 0 if tensor.numel() == 0 else sum((count - 1) * stride for count, stride in zip(tensor.size(), tensor.stride())) + 1


def _cast_of(saved: Any, call: Call) -> int | None:
    """Which weight it is that autocast made a saved tensor of, which is the weight's transpose."""
    if saved.dtype != call.lowered or saved.dim() != 2 or saved.storage_offset() != 0:
        return None
    for place, weight in enumerate(call.inputs):
        if weight.dim() == 2 and weight.dtype != call.lowered and is_kept_by_autocast(weight) and weight.is_contiguous():
            if saved.size() == weight.size()[::-1] and saved.stride() == weight.stride()[::-1]:
                return place
            if saved.size() == weight.size() and saved.stride() == weight.stride():
                return place
    return None
