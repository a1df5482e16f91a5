"""Placement of a model under a budget of GPU memory: what fits is moved to the GPU, the rest streams from pinned host memory."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from .. import _library
from ..errors import Error, InvalidError, OutOfMemoryError, UnsupportedError
from . import _report
from ._layout import Layout, Owner, beside, layout, refusals, size_of, streamed_blocks
from ._memory import Cuda, Memory
from ._moves import keep_in_place
from ._parts import parts
from ._place import Place, ordinary
from ._weights import Weights

_logger = logging.getLogger("glake")

# Memory of a context and its libraries beside the pool.
_CONTEXT = 1 << 30
# Part of the budget for what a step needs beside the weights, before that is known.
_STEP = 4

Load = Callable[[str, Any], object]


@ordinary
def place(
    model: Any,
    site: Any,
    memory: Memory,
    index: int,
    budget: int,
    least: int,
    moves: bool,
    step: int | None = None,
    load: Load | None = None,
    before: Weights | None = None,
) -> Weights | None:
    """Places a model on a GPU: streams as many blocks as the budget demands. Returns the weights that stream; None if none has to.

    Args:
        model: on the host, on the GPU, or on ``meta`` with ``load``.
        site: the site of its passes.
        index: the GPU.
        budget: the most memory of the process on it, in bytes.
        least: parameters of fewer bytes stay on the GPU.
        moves: whether a model on the host that fits is moved to the GPU.
        step: what a step needs beside the weights, in bytes. None: a quarter of the budget.
        load: fills a parameter or buffer by its name.
        before: the weights that stream now.

    Raises:
        InvalidError: the budget is too small; the text names one that is enough.
        glake.OutOfMemoryError: there is too little host memory. Nothing has moved.
        UnsupportedError: something else moves the model's weights.
    """
    import torch

    found = layout(model, least)
    context = _CONTEXT if isinstance(memory, Cuda) else 0
    chosen = streamed_blocks(found, budget - (budget // _STEP if step is None else step) - context - found.fixed)
    is_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if is_meta and load is None:
        raise InvalidError("the model is on the meta device: give load=, a function that fills a parameter by its name")
    device = memory.device(index)
    moves = moves and bool(found.blocks) and any(parameter.device != device for parameter in model.parameters())
    is_resident = step is None and not any(parameter.device != device for parameter in model.parameters())
    if before is None and is_resident and context + found.fixed + found.nbytes <= budget:
        # It fits so far: passes that need more make weights stream.
        return None
    if not chosen and before is None and load is None and not moves:
        return None
    for reason in refusals(model):
        if chosen or load is not None:
            raise UnsupportedError(f"weights cannot stream with {reason}")
    if budget < (least_budget := context + found.fixed + beside(found, chosen)):
        raise InvalidError(
            f"a budget of {_report._size(budget)} was asked for, and {_report._size(least_budget)} of the GPU is needed before a step begins, "
            f'although all blocks stream: give budget="{least_budget * _STEP // (_STEP - 1) / (1 << 30):.1f}GiB" or more'
        )
    streamed = [(number, owner) for number in sorted(chosen) for owner in found.blocks[number].owners]
    there = {id(owner.module) for _, owner in streamed if before is not None and _streams(before, owner)}
    new = [(number, owner) for number, owner in streamed if id(owner.module) not in there]
    if before is not None and step is not None and not new and len(streamed) == before.count():
        # Looked at again, with the same result.
        return before
    missing = sum(owner.nbytes for _, owner in new)
    _check_room(model, missing, index, is_meta)
    _tell(found, chosen, missing, index)
    if chosen and isinstance(memory, Cuda):
        _check_allocator(index)
    if before is not None:
        before.stay(lambda module: id(module) not in there)
    weights = before or Weights(site, memory, torch.empty(0, dtype=torch.uint8, device=device))
    filled = _Filled(model, weights.like.device, load)
    made: list[tuple[Owner, Place]] = []
    is_there = {id(parameter) for parameter in model.parameters() if parameter.is_cuda}
    try:
        pinned = -1
        for number, owner in new:
            if number != pinned and isinstance(memory, Cuda):
                pinned = number
                _library.api().offload_prepare(index, sum(each.nbytes for block, each in new if block == number))
            new_place = Place(memory, weights.copies, weights.like, index, number, _parameters(owner))
            new_place.reserve()
            made.append((owner, new_place))
            _fill(new_place, owner, filled)
        for owner, each in made:
            weights.add(owner.module, each)
        filled.rest(weights)
    except BaseException:
        # Everything goes back to where it was.
        for owner, each in made:
            if any(id(parameter) in is_there for *_, parameter in owner.parameters):
                each.stay()
            else:
                each.go()
        filled.back()
        if before is not None:
            # Those that stream already have new numbers.
            before.begin(model, found.above)
            keep_in_place(model, before)
        raise
    if not weights.places and before is None:
        return None
    weights.kept_blocks, weights.kept_bytes = len(found.blocks) - len(chosen), sum(block.nbytes for block in found.blocks)
    weights.kept_bytes -= sum(found.blocks[number].nbytes for number in chosen)
    weights.begin(model, found.above)
    keep_in_place(model, weights)
    return weights


def _parameters(owner: Owner) -> list[tuple[Any, str, Any]]:
    return [(holder, own, parameter) for holder, own, _, parameter in owner.parameters]


def _fill(place: Place, owner: Owner, filled: _Filled) -> None:
    """Moves an owner's parameters to a place."""
    for part, (_, _, name, parameter) in zip(place.parts, owner.parameters):
        filled.into(name, parameter, part.home)
        place.settle(part, filled.parameter(name, parameter, part.home))


def _streams(weights: Weights, owner: Owner) -> bool:
    """Whether exactly these parameters of the owner stream."""
    return weights.streamed_of(owner.module) == {(id(holder), own) for holder, own, *_ in owner.parameters}


def _check_room(model: Any, missing: int, index: int, is_loaded: bool) -> None:
    """Checks that the host has the memory, of which the model's own is freed as it goes."""
    own = 0 if is_loaded else sum(size_of(parameter) for parameter in model.parameters() if parameter.device.type == "cpu")
    try:
        _library.api().offload_room(index, missing, own)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"{_report._size(missing)} of pinned host memory is needed for the weights that do not fit the budget: {error}; give a larger "
            f"budget, of which each GiB needs one less, or {_report._size(max(missing - own, 0))} of free host memory beside the model's own"
        ) from None


def _check_allocator(index: int) -> None:
    import torch

    probe = torch.empty(1, device=torch.device("cuda", index))
    try:
        _library.api().generation(probe.data_ptr())
    except Error:
        raise UnsupportedError("weights stream into GLake's memory: call glake.enable() before the first use of CUDA") from None


def _tell(found: Layout, chosen: set[int], missing: int, index: int) -> None:
    """Says what will be done, before it is."""
    kept = found.nbytes - sum(found.blocks[number].nbytes for number in chosen)
    streamed = found.nbytes - kept
    _logger.warning(
        "%d of %d blocks (%s) stay on GPU %d, and %d (%s) stream: %s of host memory will be pinned",
        len(found.blocks) - len(chosen), len(found.blocks), _report._size(kept), index, len(chosen), _report._size(streamed), _report._size(missing),
    )  # fmt: skip
    if found.staying:
        said = ", ".join(f"{count} {kind}" for kind, count in sorted(found.staying.items()))
        _logger.warning("frozen parameters of blocks that stay on the GPU, as they cannot stream: %s", said)


class _Filled:
    """A model whose parameters are filled one by one."""

    def __init__(self, model: Any, device: Any, load: Load | None) -> None:
        self._model, self._device, self._load = model, device, load
        self._total = sum(size_of(tensor) for tensor in (*model.parameters(), *model.buffers()))
        self._done = 0
        # Parameters that were moved from the host.
        self._moved: list[Any] = []
        self._is_shown = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        # Modules and names of each parameter.
        self._held: dict[int, list[tuple[Any, str]]] = {}
        for part in parts(model):
            for own, parameter in part._parameters.items():
                if parameter is not None:
                    self._held.setdefault(id(parameter), []).append((part, own))

    def into(self, name: str, tensor: Any, out: Any) -> None:
        """Writes the values of a parameter or buffer to a tensor."""
        import torch

        if tensor.is_meta and self._load is not None:
            self._load(name, out)
        else:
            with torch.no_grad():
                out.copy_(tensor.detach())
        self._progress(size_of(tensor))

    def parameter(self, name: str, parameter: Any, data: Any) -> Any:
        """Returns the parameter itself; of one on ``meta`` another, with the data, which takes its place."""
        import torch

        if not parameter.is_meta:
            return parameter
        made = torch.nn.Parameter(data, requires_grad=parameter.requires_grad)
        vars(made).update(vars(parameter))
        for module, own in self._held.get(id(parameter), []):
            module._parameters[own] = made
        return made

    def rest(self, weights: Weights) -> None:
        """Moves everything that does not stream to the GPU."""
        import torch

        streamed = weights.streamed_in(self._model)
        for name, parameter in list(self._model.named_parameters()):
            if id(parameter) in streamed:
                continue
            if parameter.is_meta:
                out = torch.empty(parameter.size(), dtype=parameter.dtype, device="cpu")
                self.into(name, parameter, out)
                self.parameter(name, parameter, out.to(self._device))
                continue
            if parameter.device != self._device:
                if parameter.device.type == "cpu":
                    self._moved.append(parameter)
                parameter.data = parameter.data.to(self._device)
                if parameter.grad is not None:
                    parameter.grad.data = parameter.grad.data.to(self._device)
            self._progress(size_of(parameter))
        for part, name, own, buffer in _buffers(self._model):
            if buffer.is_meta:
                out = torch.empty(buffer.size(), dtype=buffer.dtype, device="cpu")
                self.into(name, buffer, out)
                part._buffers[own] = out.to(self._device)
            elif buffer.device != self._device:
                part._buffers[own] = buffer.to(self._device)
        if self._is_shown:
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)

    def back(self) -> None:
        """Moves parameters back to the host."""
        for parameter in self._moved:
            parameter.data = parameter.data.to("cpu")
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data.to("cpu")

    def _progress(self, size: int) -> None:
        before, self._done = self._done, self._done + size
        if self._is_shown and self._total and before * 100 // self._total != self._done * 100 // self._total:
            text = f"glake: {_report._size(self._done)} of {_report._size(self._total)} placed"
            print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)


def _buffers(model: Any) -> list[tuple[Any, str, str, Any]]:
    found, seen = [], set()
    for name, part in model.named_modules(remove_duplicate=True):
        for own, buffer in part._buffers.items():
            if buffer is not None and (id(part), own) not in seen:
                seen.add((id(part), own))
                found.append((part, f"{name}.{own}" if name else own, own, buffer))
    return found

