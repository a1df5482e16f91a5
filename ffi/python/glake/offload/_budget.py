"""A module whose passes are kept within a budget of GPU memory."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import re
import threading
import time
import weakref
from collections import UserDict
from collections.abc import Callable, Collection
from typing import Any

from glake_switch import is_disabled

from .. import _library
from .._arguments import flag
from ..errors import Error, InvalidError, OutOfMemoryError, UnavailableError, UnsupportedError
from . import _report
from ._activations import LEAST, Activations, is_number, may_hook
from ._memory import Cuda, Memory, is_shortage
from ._parts import parameters

PRESETS = ("fit", "memory", "hybrid")

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
# A first pass pins 1/32 of the bytes offloaded so far ahead, which is wasted if no more follow.
_AHEAD = 32
_LEAST_AHEAD, _MOST_AHEAD = 64 << 20, 1 << 30
# Polling interval of that, in seconds.
_EVERY = 0.005
# Depth to which the arguments of a forward are searched for sizes.
_DEPTH = 8
# Forwards before which weights that stream are looked at again.
_LOOKS = (8, 32, 128)

_logger = logging.getLogger("glake")


def parsed(budget: int | float | str | None, name: str = "budget") -> int | None:
    """A number of bytes.

    Raises:
        InvalidError: the value is no number of bytes.
    """
    if budget is None:
        return None
    if isinstance(budget, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", budget)
        unit = _UNITS.get(found[2].lower()) if found else None
        if found and unit is None and found[2].lower() in ("k", "m", "g", "t"):
            raise InvalidError(f'{name} is {budget!r}: write "{found[1]}{found[2].upper()}iB"')
        if found is None or unit is None:
            raise InvalidError(f'{name} is {budget!r}: a number of bytes, or a text like "60GiB"')
        budget = float(found[1]) * unit
    if not is_number(budget) or not 1 <= budget < 1 << 63:
        raise InvalidError(f'{name} is {budget!r}: a number of bytes above 0, or a text like "60GiB"')
    return int(budget)


class Offloaded(Activations):
    """Result of ``glake.offload(model, ...)``: ``remove()`` removes its hooks, ``report()`` describes its passes."""

    def __init__(self, module: Any, budget: int | float | str | None, preset: str, least: int, memory: Memory | None = None) -> None:
        if isinstance(preset, str) and preset == "hidden":
            raise InvalidError("preset 'hidden' was removed: use 'fit' with a budget")
        if not isinstance(preset, str) or preset not in PRESETS:
            raise InvalidError(f"preset is {preset!r}: one of {', '.join(PRESETS)}")
        self._bytes, self._preset = parsed(budget), preset
        # The GPU that the budget is of, from when it was asked for until it is taken off.
        self._device: int | None = None
        self._first: _FirstPass | None = None
        # Whether weights may stream, and what a step needs beside them, as far as it is known.
        self._may_stream, self._step, self._forwards = False, 0, 0
        super().__init__(module, least, memory, replay=preset == "hybrid")
        if module is not None:
            try:
                self._ask(_device_of(module, self._default()))
            except BaseException:
                super().remove()
                raise

    def __deepcopy__(self, _memo: Any) -> Activations:
        # Its first forward says on which GPU it is.
        return Offloaded(None, self._bytes, self._preset, self._packer.least, self._packer.memory)

    def __reduce__(self) -> tuple[Any, ...]:
        return Offloaded, (None, self._bytes, self._preset, self._packer.least)

    def _ask(self, device: int) -> None:
        bytes_of = self._bytes
        if bytes_of is None and self._preset != "memory" and isinstance(self._packer.memory, Cuda):
            bytes_of = _all_of(device)
        self._packer.site.ask(device, bytes_of, self._preset)
        self._device = device

    def place(self, module: Any, load: Any = None, before: Any = None, step: int | None = None) -> None:
        """Places the module's weights under the budget; ``before``: those that stream already, ``step``: what a step needs beside them."""
        import torch

        from ._placement import place

        memory, budget = self._packer.memory, self._bytes
        if isinstance(memory, Cuda) and not torch.cuda.is_available():
            if load is not None:
                raise UnavailableError("load= places a model on a GPU, and torch sees none")
            return
        assert self._device is not None
        if is_disabled():
            # Nothing streams: with load= the model is placed all the same.
            budget = None if load is None else 1 << 62
        elif budget is None:
            budget = _all_of(self._device)
        if budget is not None:
            moves, least = self._bytes is not None, self._packer.least
            self._packer.weights = place(module, self._packer.site, memory, self._device, budget, least, moves, step, load, before)
            self._may_stream, self._step = True, budget // 4 if step is None else step

    def _stream_more(self, module: Any) -> bool:
        """Makes more weights stream, as passes need more than the budget. Returns whether there were any."""
        weights = self._packer.weights
        before = 0 if weights is None else weights.told()["streamed_bytes"]
        if not self._may_stream or self._device is None:
            return False
        budget = self._bytes or _all_of(self._device) or 0
        try:
            self.place(module, before=weights, step=min(self._step + budget // 8, budget))
        except (InvalidError, OutOfMemoryError, UnsupportedError) as error:
            _logger.warning("passes need more than the budget, and weights that could stream stay: %s", error)
            return False
        if self._packer.weights is None or self._packer.weights.told()["streamed_bytes"] <= before:
            return False
        # What was learned of passes is of another placement.
        self._packer.site = _library.api().Site()
        self._ask(self._device)
        return True

    def _stream_less(self, module: Any) -> None:
        """Brings weights back for which passes leave room."""
        told, weights = super().told(), self._packer.weights
        plan = told["plan"]
        if plan is None or told["unplanned"] or plan["offloaded"]["items"] or plan["recomputed"]["items"] or told["budget"] is None:
            return
        room = told["budget"] - plan["peak_bytes"] - told["budget"] // 16
        if weights.told()["streamed_blocks"] and room >= weights.told()["streamed_bytes"] // weights.told()["streamed_blocks"]:
            try:
                self.place(module, before=weights, step=max(self._step - room, 0))
            except RuntimeError as error:
                if not is_shortage(error) and not isinstance(error, Error):
                    raise
                _logger.warning("weights for which passes leave room stream on: %s", error)

    def told(self, course: bool = False) -> dict[str, Any]:
        told = super().told(course)
        told["weights"] = None if self._packer.weights is None else self._packer.weights.told()
        return told

    def remove(self) -> None:
        """Removes the hooks from the module, and the budget from its GPU. Weights that stream become ordinary tensors of the host. Repeated
        calls do nothing.
        """
        device, self._device = self._device, None
        weights, self._packer.weights = self._packer.weights, None
        if weights is not None:
            with contextlib.suppress(UnavailableError):
                weights.remove()
        if self._first is not None:
            self._first.is_over = True
        super().remove()
        if device is not None:
            # In a forked child there is no budget to take off.
            with contextlib.suppress(UnavailableError):
                self._packer.site.ask(device, None, "memory")

    def report(self, plot: str | os.PathLike[str] | None = None) -> _report.Report:
        """Returns ``glake.offload.report`` for this module alone."""
        return _report.of([self], plot)

    def enter_call(self, module: Any, inputs: Any, named: Any) -> None:
        if self._is_removed:
            self._skip()
            return
        # Only where hooks are to be pushed at all is anything asked.
        is_outer = not self._is_in_module() and may_hook()
        if is_outer and not self._needs(module, inputs, named):
            self._keep()
            return
        if is_outer and self._first is None and self._device is not None:
            self._first = first = _FirstPass(self._device, self._packer.site)
            weakref.finalize(self, setattr, first, "is_over", True)
            threading.Thread(target=_pin_ahead, args=(first,), name="glake-offload-pin", daemon=True).start()
        super().enter_call(module, inputs, named)

    def _needs(self, module: Any, inputs: Any, named: Any) -> bool:
        """Whether a forward that is about to begin has to report its saves."""
        # Once passes have begun its first parameter tells.
        device = _device_of(module, self._default() if self._device is None else self._device, None if self._first is None else 1)
        try:
            if device != self._device:
                # The module was moved to its GPU since.
                self._ask(device)
            if self._may_stream and self._packer.weights is not None:
                self._forwards += 1
                if self._forwards in _LOOKS:
                    self._stream_less(module)
            shape = _shape(module, inputs, named)
            try:
                return bool(self._packer.site.needs(shape))
            except InvalidError:
                if not self._stream_more(module):
                    raise
            return bool(self._packer.site.needs(shape))
        except UnavailableError:
            # In a forked child nothing is on a GPU.
            return False

    def _default(self) -> int:
        """Returns the GPU of a module that is on none yet: the one that a trainer of several ranks has chosen for this process."""
        import torch

        is_chosen = isinstance(self._packer.memory, Cuda) and torch.cuda.is_available()
        return int(torch.cuda.current_device()) if is_chosen else 0

    def leave_call(self) -> None:
        super().leave_call()
        if self._first is not None and not self._stack():
            self._first.has_ended = True


class _FirstPass:
    """State of a thread beside a first pass. It never refers to the module's hooks, so that they are released when the program
    releases them.
    """

    def __init__(self, device: int, site: Any) -> None:
        self.device, self.site = device, site
        # Whether its forward has ended, and whether it is none any more.
        self.has_ended = self.is_over = False


def _pin_ahead(first: _FirstPass) -> None:
    """Pins host memory beside a first pass, whose needs were unknown, and not within it."""
    api = _library.api()
    try:
        while not first.is_over and json.loads(first.site.told_json())["passes"] == 0:
            has_ended = first.has_ended
            offloaded = json.loads(api.offload_stats_json())["host_bytes"]
            if has_ended and offloaded == 0:
                # No memory was offloaded: the module is on no GPU, for example, and none of its passes will end.
                return
            if offloaded > 0:
                api.offload_prepare(first.device, max(_LEAST_AHEAD, min(offloaded // _AHEAD, _MOST_AHEAD)))
            time.sleep(_EVERY)
    except Error:
        # The error is reported to the pass that needs the memory.
        return


def _device_of(module: Any, default: int, most: int | None = None) -> int:
    """Returns the GPU of the first parameter that is on one, among a bounded number."""
    import torch

    # Subclasses are not asked what the program does not ask them.
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in itertools.islice(parameters(module), most):
            if tensor.device.type == "cuda":
                return int(tensor.device.index)
    return default


def _all_of(device: int) -> int | None:
    import torch

    return int(torch.cuda.mem_get_info(device)[1]) if torch.cuda.is_available() else None


def _shape(module: Any, inputs: Any, named: Any) -> int:
    """Returns a number for the sizes of a forward's arguments."""
    import torch

    found: list[Any] = [module.training]
    # The nearest first; what is within several is looked at once.
    seen: set[int] = set()
    level: list[Any] = [inputs, named]
    for _ in range(_DEPTH + 1):
        within: list[Any] = []
        for value in level:
            if isinstance(value, torch.Tensor):
                with torch._C.DisableTorchFunctionSubclass():
                    found.append(value.numel() if value.is_nested else tuple(value.shape))
            elif id(value) not in seen and (values := _values(value)):
                seen.add(id(value))
                within += values
        level = within
    return hash(tuple(found)) & 0xFFFF_FFFF_FFFF_FFFF


def _values(value: Any) -> Collection[Any]:
    """Returns the contained values of plain containers only: other objects may load or compute their attributes."""
    if isinstance(value, UserDict):
        value = value.data
    if isinstance(value, dict):
        return dict.values(value)
    if isinstance(value, (list, tuple)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # With slots it has no dictionary.
        return vars(value).values() if type(value).__dictoffset__ else ()
    return ()


def _take_off(module: Any, keeps: Offloaded) -> None:
    """Removes other offloads of a module's passes with their hooks, including those copied with the module."""
    kinds = (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
    )
    for hooks, *how in kinds:
        for key, hook in list(hooks.items()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, Activations) and owner is not keeps:
                owner.remove()
                for each in (hooks, *how):
                    each.pop(key, None)


def _streaming(module: Any) -> Offloaded | None:
    """Returns the handle of the module whose weights stream, if there is one."""
    owners = (getattr(hook, "__self__", None) for hook in getattr(module, "_forward_pre_hooks", {}).values())
    return next((owner for owner in owners if isinstance(owner, Offloaded) and owner._packer.weights is not None), None)


def offload(
    module: Any,
    budget: int | float | str | None = None,
    preset: str = "fit",
    *,
    least: int = LEAST,
    host_memory: int | float | str | None = None,
    weights: bool = True,
    load: Callable[[str, Any], object] | None = None,
) -> Offloaded:
    """Keeps the saved tensors of a module's passes within a budget of GPU memory::

        glake.offload(model, budget="60GiB")      # each forward pass, until .remove() of the result
        print(glake.offload.report())

    The first pass fills half of the available memory with saves, and offloads the rest; layers that the program checkpoints are recomputed.
    The next passes copy offloaded bytes twice, to check them, and three passes with almost no second copies are timed. From then on, passes
    like an earlier one keep, offload or recompute by a plan, which is renewed when shapes, other memory, or the rates of the links change.
    If the plan keeps everything, the only hook left is one check before each forward.

    Args:
        module: the outer module. Calling again with the same module sets the new budget; ``activations`` of it end.
        budget: the most memory that ``nvidia-smi`` may show for the process on the module's GPU, contexts included: bytes, or a text like
            ``"60GiB"``. None: all of the GPU, and no budget with the preset ``"memory"``.
        preset: ``"fit"``, the least time under the budget; ``"memory"``, offload everything that frees memory; ``"hybrid"``, like ``"fit"``,
            but leaves of layers that checkpoints with ``use_reentrant=False`` recompute may be stored one by one.
        least: tensors of fewer bytes stay on the GPU.
        host_memory: pinned host memory to have free for offloaded bytes when the call returns, in bytes or as a text: the report of an earlier
            run says how much it took (``host_pinned_bytes``). None: passes pin what they need, so that the first takes longer.
        weights: whether frozen parameters of repeated blocks (elements of a ``ModuleList``) stream from pinned host memory if the budget
            cannot be met otherwise. With a budget, a model on the host is moved to the GPU, as far as it fits; the rest comes for each use.
            While they are away, they are tensors of the host.
        load: for a model on the ``meta`` device: ``load(name, out)`` fills the parameter or buffer of a name, a tensor of the host.

    Returns:
        A handle: ``remove()`` removes the hooks; ``report()`` describes the module's passes.

    Raises:
        InvalidError: an argument is invalid. A forward whose passes need more than the budget raises it too, with a sufficient budget.
        glake.OutOfMemoryError: less host memory is available than requested, or than streamed weights need. The module is unchanged.
        glake.UnsupportedError: weights have to stream, and FSDP, DeepSpeed, ``device_map`` or a compiled model forbids it.
    """
    if module is None:
        raise InvalidError("module is None: give the outer module (glake.offload.activations() is a block of code's)")
    pinned = parsed(host_memory, "host_memory")
    weights = flag(weights, "weights")
    if load is not None and not callable(load):
        raise InvalidError(f"load is {load!r}: a function of a parameter's name and the tensor to fill")
    if load is not None and not weights:
        raise InvalidError("load is given and weights is False: a model is filled where its weights may stream")
    handle = Offloaded(module, budget, preset, least)
    streaming = _streaming(module)
    try:
        if pinned is not None:
            _library.api().offload_prepare(handle._device, pinned)
        if weights:
            handle.place(module, load, None if streaming is None else streaming._packer.weights)
        elif streaming is not None:
            streaming._packer.weights.stay(lambda _: True)
    except BaseException:
        handle.remove()
        raise
    if streaming is not None and weights:
        streaming._packer.weights = None
    _take_off(module, handle)
    return handle
