"""Stored results of one call of a leaf, which replace its recomputation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import _bits
from ._leaf import Call, is_kept_by_autocast, is_plain
from ._packer import BESIDE, NO_LEAF, OUTPUT

# What a saved tensor is: of an input or of the output, a cast of an input that autocast made, or stored by itself.
_INPUT, _OUTPUT, _CAST, _STORED = range(4)


class Draws:
    """State of the random generator that a leaf draws from."""

    __slots__ = ("_device", "_state")

    def __init__(self, device: Any) -> None:
        self._device = device
        if device.type == "cpu":
            self._state: Any = torch.get_rng_state()
        else:
            generator = torch.cuda.default_generators[device.index]
            self._state = (generator.initial_seed(), generator.get_offset())

    def is_now(self) -> bool:
        now = Draws(self._device)._state
        return bool(torch.equal(self._state, now)) if self._device.type == "cpu" else bool(self._state == now)

    def set(self) -> None:
        if self._device.type == "cpu":
            torch.set_rng_state(self._state)
        else:
            torch.cuda.default_generators[self._device.index].set_offset(self._state[1])


class Sketch:
    """Saves of a leaf called with a signature, in their order, by the tensor that each is a view of."""

    __slots__ = ("_shared", "beside", "reads_output", "saves", "signature", "why")

    def __init__(self, kind: Any, call: Call, output: Any, saved: list[Any], least: int) -> None:
        self.signature = call.signature
        # What each is, of which input, and its sizes, strides and offset there.
        self.saves: list[tuple[int, int, Any, Any, int]] = []
        # Which of them are stored by themselves, and whether one is of the output.
        self.beside: list[int] = []
        self.reads_output = False
        # How inputs share storages, where it is not certain which of them was saved.
        self._shared: list[Any] | None = None
        # Why it cannot be replayed.
        self.why: str | None = None
        if not call.is_plain() or not is_plain(output):
            self.why = "tensors"
            return
        # Several may be parts of one: queries, keys and values of one projection.
        whence: dict[int, list[int]] = {}
        for place, tensor in enumerate(call.inputs):
            whence.setdefault(tensor.untyped_storage()._cdata, []).append(place)
        storage = output.untyped_storage()._cdata
        if storage in whence:
            self.why = "aliases"
            return
        size = 0
        for tensor in saved:
            source = tensor.untyped_storage()._cdata
            what, offset = _STORED, tensor.storage_offset()
            place = next((place for place in whence.get(source, ()) if _is_within(tensor, call.inputs[place])), -1)
            if place >= 0:
                what, offset = _INPUT, offset - call.inputs[place].storage_offset()
                if len(whence[source]) > 1:
                    self._shared = _shared(call.inputs)
            elif source == storage and _is_within(tensor, output):
                what, offset, self.reads_output = _OUTPUT, offset - output.storage_offset(), True
            else:
                place = _cast_of(tensor, call)
                if place >= 0:
                    what = _CAST
                else:
                    self.beside.append(len(self.saves))
                    size += tensor.nbytes
            self.saves.append((what, place, tensor.size(), tensor.stride(), offset))
        if size > kind.most_beside * output.nbytes and size > least:
            self.why = "large"

    def is_of(self, call: Call) -> bool:
        """Whether a call has the same signature."""
        return self.signature == call.signature and (self._shared is None or self._shared == _shared(call.inputs))

    def fits(self, saved: list[Any]) -> bool:
        """Whether another call had the same saves."""
        return len(saved) == len(self.saves) and all((tensor.size(), tensor.stride()) == save[2:4] for tensor, save in zip(saved, self.saves))


class Record:
    """Stored results of one call."""

    __slots__ = ("_after", "_before", "_beside", "_output", "_requires_grad", "_sketch", "_versions", "is_compared", "is_stored", "kind", "leaf")

    def __init__(self, kind: Any, leaf: Any, sketch: Sketch, before: Draws | None, after: Draws | None, call: Call | None = None) -> None:
        self.kind, self.leaf, self._sketch = kind, leaf, sketch
        self._before, self._after = before, after
        # Of its weights: an optimiser may step before it is computed again.
        self._versions = [] if call is None else _versions(call)
        self._output: Any = None
        self._beside: dict[int, Any] = {}
        self._requires_grad = False
        # Whether what is needed of what the leaf gave and saved is stored.
        self.is_stored = False
        # Whether it is computed again this once, beside what is stored, and both are compared.
        self.is_compared = False

    def store(self, output: Any, saved: list[Any], packer: Any, scope: int) -> None:
        """Stores the items that the site selects. The site is told of the same items whatever it selects, so that passes are
        comparable.
        """
        self._requires_grad, is_stored, part = output.requires_grad, True, NO_LEAF
        if self.leaf.is_read or self._sketch.reads_output:
            before = packer.added
            # Not itself where nothing made it: what changes it in place later may hold its checkpoint, and so this.
            self._output = packer.store(output if output.requires_grad else output.detach(), scope, OUTPUT)
            is_stored = self._output is not None
            part = NO_LEAF if packer.added == before else BESIDE
        for place in self._sketch.beside:
            stored = self._beside[place] = packer.store(saved[place], scope, part)
            is_stored = is_stored and stored is not None
        # Only now: one of them may have raised.
        self.is_stored = is_stored

    def is_of(self, kind: Any, call: Call) -> bool:
        """Whether the record belongs to this call."""
        return bool(kind is self.kind and call.signature == self._sketch.signature and _versions(call) == self._versions)

    def is_not_read(self) -> None:
        """Marks a record that was not read: its checkpoint had all its saves before the leaf's output was read."""
        self.leaf.is_read = self._sketch.reads_output

    def hindrance(self) -> str | None:
        """Returns the reason why it cannot replace the computation now."""
        if not self.is_stored:
            return "planned"
        if self._output is not None and not self._output.is_intact():
            return "changed"
        if self._beside and not all(stored.is_intact() for stored in self._beside.values()):
            return "changed"
        return None if self._before is None or self._before.is_now() else "generator"

    def replay(self, call: Call, pack: Any) -> Any:
        """Passes the operation's saves to the active hook, in their order, and returns its output."""
        output = self._output.read() if self._sketch.reads_output else None
        for place, save in enumerate(self._sketch.saves):
            # Raises where this was the last that was needed: the output is not read then.
            pack(self._saved(place, save, call, output))
        if output is None:
            if self._output is None:
                # It was not needed in the passes before.
                self.leaf.is_read = True
                # Not without gradients: autocast would keep casts of weights that have none.
                with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
                    # As it is: that it is not changed in place is known of what is stored alone.
                    return call.run()
            output = self._output.read()
        if self._after is not None:
            self._after.set()
        # Another tensor each time: what is kept stays as it is.
        return output.detach().requires_grad_(self._requires_grad)

    def compare(self, call: Call, saved: list[Any], output: Any) -> list[Any]:
        """Whether the recomputed operation had the same saves and output as a replay. Without an output, its last save ended it."""
        found: list[Any] = []
        # Read once, however many saves are of it.
        given = functools.cache(lambda: self._output.read() if output is None else output)
        if output is not None:
            found += [len(saved) == len(self._sketch.saves), output.requires_grad == self._requires_grad]
            if self._output is not None:
                found.append(_bits.are_same(output, self._output.read))
        for place, (tensor, save) in enumerate(zip(saved, self._sketch.saves)):
            if save[0] != _STORED or self.kind.sets(tensor, call):
                found.append(_bits.are_same(tensor, functools.partial(self._handed, place, save, call, given)))
        return found

    def _handed(self, place: int, save: tuple[int, int, Any, Any, int], call: Call, given: Callable[[], Any]) -> Any:
        return self._saved(place, save, call, given() if save[0] == _OUTPUT else None)

    def _saved(self, place: int, save: tuple[int, int, Any, Any, int], call: Call, output: Any) -> Any:
        what, source, size, stride, offset = save
        if what == _STORED:
            return self._beside[place].read()
        if what == _CAST:
            tensor = call.inputs[source].detach().to(call.lowered)
        else:
            tensor = call.inputs[source] if what == _INPUT else output
            if offset == 0 and tensor.size() == size and tensor.stride() == stride:
                return tensor
            offset += tensor.storage_offset()
        return tensor.detach().as_strided(size, stride, offset)


def _shared(inputs: list[Any]) -> list[Any]:
    """Returns for each input the first input in the same storage, and the offset between them."""
    first: dict[int, tuple[int, int]] = {}
    found = []
    for place, tensor in enumerate(inputs):
        begin = tensor.storage_offset()
        source, origin = first.setdefault(tensor.untyped_storage()._cdata, (place, begin))
        found.append((source, begin - origin))
    return found


def _versions(call: Call) -> list[int]:
    return [tensor._version for tensor in call.uncast if type(tensor) is torch.nn.Parameter]


def _is_within(view: Any, tensor: Any) -> bool:
    """Whether a view of the same storage has no bytes outside of a tensor."""
    first = view.storage_offset() - tensor.storage_offset()
    return bool(view.dtype == tensor.dtype and first >= 0 and first + _extent(view) <= _extent(tensor))


def _extent(tensor: Any) -> int:
    """Returns the range from the first to the last element."""
    if tensor.numel() == 0:
        return 0
    return int(sum((count - 1) * stride for count, stride in zip(tensor.size(), tensor.stride()))) + 1


def _cast_of(saved: Any, call: Call) -> int:
    """Returns the index of the weight that autocast cast to the saved tensor, possibly transposed; -1 if none."""
    if saved.dtype != call.lowered or saved.dim() != 2 or saved.storage_offset() != 0:
        return -1
    for place, weight in enumerate(call.inputs):
        if weight.dim() == 2 and weight.is_contiguous() and is_kept_by_autocast(weight):
            sizes = (saved.size(), saved.stride())
            if sizes in ((weight.size(), weight.stride()), (weight.size()[::-1], weight.stride()[::-1])):
                return place
    return -1
