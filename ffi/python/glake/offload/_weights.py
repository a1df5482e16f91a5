"""Frozen weights that stream: they come to the GPU before a module that owns them runs, and leave behind it.

::

    module's pre-hook ─► use ─► the site's order of uses ─► copies of other blocks are freed, the next ones begin
    backward, or a checkpoint's recomputation ─► unpack, or the same pre-hook ─► use

Hooks are on modules that own parameters, not on layers: a checkpoint may compute a layer's ``forward`` past the layer's own hooks.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ..errors import Error, UnsupportedError
from . import _dynamo
from ._memory import Memory, is_shortage
from ._parts import parameters, parts
from ._place import Part, Place, Streamed, ordinary
from ._saved import kept, read

_logger = logging.getLogger("glake")

# Phases of the library: a forward without gradients, a forward, a backward.
_EVALUATION, _FORWARD, _BACKWARD = range(3)
_DEVICES = "Expected all tensors to be on the same device"


class Weights:
    """The streamed weights of a model."""

    def __init__(self, site: Any, memory: Memory, like: Any) -> None:
        self._site, self._memory, self.like = site, memory, like
        self._lock = threading.RLock()
        # Places by their numbers, weakly: a place lives as long as its module, or a graph that has saved it.
        self._numbered: list[weakref.ref[Place]] = []
        # Places of modules, which own their parameters or read those of their parts.
        self._owned: weakref.WeakKeyDictionary[Any, list[Place]] = weakref.WeakKeyDictionary()
        # Places by the storage of their copy.
        self.copies: weakref.WeakValueDictionary[int, Place] = weakref.WeakValueDictionary()
        self._handles: list[Any] = []
        self._entered = threading.local()
        # Of each thread, the block that it uses, and the backward that does, if one does.
        self._current: dict[int, tuple[int, int]] = {}
        self._tasks: set[int] = set()
        self._is_first, self._kind = True, _FORWARD
        # The model, and the number of parameters that modules had been given when it was looked at.
        self._model: Any = None
        self._registered = 0
        # Places by the modules and names of their parameters, which the program may replace.
        self._slots: weakref.WeakKeyDictionary[Any, dict[str, weakref.ref[Place]]] = weakref.WeakKeyDictionary()
        # Of the blocks that stay on the GPU.
        self.kept_blocks = self.kept_bytes = 0
        self.bytes_in = self.uses = self.demanded = 0
        _all.add(self)

    @property
    def places(self) -> list[Place]:
        """The places that are left."""
        return [place for place in (weak() for weak in self._numbered) if place is not None]

    def add(self, module: Any, place: Place) -> None:
        """Adds a place whose parameters are away, which a module's forward uses."""
        self._owned.setdefault(module, []).append(place)
        self._numbered.append(weakref.ref(place))
        for part in place.parts:
            self._slots.setdefault(part.module(), {})[part.name] = weakref.ref(place)
            known = [weak for weak in _parts_of.get(part.module(), ()) if weak() not in (None, part)]
            _parts_of[part.module()] = [*known, weakref.ref(part)]

    def begin(self, model: Any, above: list[Any]) -> None:
        """Begins to stream. ``above``: the modules whose forwards may use the places of several of their parts, the outermost first."""
        self._model, self._registered = weakref.ref(model), _watch()
        for handle in self._handles:
            handle.remove()
        self._handles, self._is_first = [], True
        places = self.places
        self._numbered = [weakref.ref(place) for place in places]
        for number, place in enumerate(places):
            place.number = number
        ranks = {block: rank for rank, block in enumerate(sorted({place.block for place in places}))}
        self._site.stream([(place.nbytes, ranks[place.block]) for place in places])
        _dynamo.ready(_Enter.__call__, _Leave.__call__)
        owners = list(self._owned)
        for module in [*above, *(owner for owner in owners if not any(owner is other for other in above))]:
            weak = weakref.ref(module)
            self._handles.append(module.register_forward_pre_hook(_Enter(self, weak, any(module is other for other in above))))
            # Before others, as its hooks are the innermost.
            self._handles.append(module.register_forward_hook(_Leave(self, weak), prepend=True, always_call=True))

    def keep(self, handle: Any) -> None:
        """Keeps an object whose ``remove()`` is called when streaming ends."""
        self._handles.append(handle)

    @ordinary
    def remove(self) -> None:
        """Turns streamed parameters into ordinary host tensors, and removes the hooks. Repeated calls do nothing."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        with self._lock:
            for place in self.places:
                if not place.is_away:
                    continue
                self._hide(place, frees=True)
                if place.is_shown:
                    # Its changed bytes could not be stored.
                    place.stay()
                else:
                    place.go()
            self._current.clear()

    @property
    def is_over(self) -> bool:
        return not self._handles

    def count(self) -> int:
        """Returns the number of places that stream."""
        return sum(place.is_away for place in self.places)

    def streamed_of(self, module: Any) -> set[tuple[int, str]]:
        """Returns the parameters that a module's forward brings, by the ids of the modules that have them, and their names there."""
        return {(id(part.module()), part.name) for place in self._owned.get(module, ()) if place.is_away for part in place.parts}

    def streamed_in(self, model: Any) -> set[int]:
        """Returns the ids of a model's parameters that stream."""
        held = ((part, name, parameter) for part in parts(model) for name, parameter in part._parameters.items())
        found = {id(parameter) for part, name, parameter in held if parameter is not None and self.is_streamed(part, name)}
        # Another module may have been given it, as by a parametrization.
        known = (part.parameter() for place in self.places if place.is_away for part in place.parts)
        return found | {id(parameter) for parameter in known if parameter is not None}

    def is_streamed(self, module: Any, name: str) -> bool:
        """Whether a module's parameter of a name streams."""
        known = self._slots.get(module, {}).get(name)
        place = None if known is None else known()
        return place is not None and place.is_away

    @ordinary
    def stay(self, which: Callable[[Any], bool]) -> None:
        """Moves the places of modules to the GPU for good."""
        with self._lock:
            owned = [(module, place) for module, places in list(self._owned.items()) for place in places]
            for module, place in owned:
                if place.is_away and which(module):
                    place.stay()
            self._owned.clear()
            self._slots.clear()
            for place in self.places:
                if place.copy is not None and place.is_away:
                    self._hide(place, frees=True)
                # Of a module that is gone, it has no number any more.
                place.number = None
            self._numbered = []
            for module, place in owned:
                if place.is_away:
                    self.add(module, place)

    def hide(self) -> None:
        """Sets all parameters to host tensors, except those that other threads use."""
        with self._lock:
            for place in self.places:
                if place.is_shown and not self._is_current(place):
                    self._hide(place, frees=False)

    # Uses.

    @ordinary
    def use(self, place: Place) -> Any:
        """Makes a place come for the current stream; returns its storage there, if it streams."""
        with self._lock:
            if not place.is_away:
                return None
            place.adopt()
            if place.is_trained():
                _logger.info("weights of block %d are trained now, and stay on the GPU", place.block)
                place.stay()
                return None
            task, thread = _task(), threading.get_ident()
            if task != -1 and task not in self._tasks:
                self._tasks.add(task)
                _engine().queue_callback(_Backward(self, task))
            self._current[thread] = place.block, task
            first, self._is_first = self._is_first and task == -1, self._is_first and task != -1
            leave, begin = self._ordered(place, self._kind if task == -1 else _BACKWARD, first)
            self.uses += 1
            self.demanded += place.copy is None
            for other in leave:
                if not self._is_current(other):
                    self._hide(other, frees=True)
            # The one that is needed now, and then those ahead.
            self._begin(place)
            self._show(place)
            if place.is_foreign():
                _logger.info("a weight of block %d has another type, size or stride now, and stays on the GPU", place.block)
                place.stay()
            for other in begin:
                if not self._begin_ahead(other):
                    break
            return place.copy

    def _ordered(self, place: Place, phase: int, is_first: bool) -> tuple[list[Place], list[Place]]:
        """Returns the places to free and the places to reload for a use."""
        if place.number is None:
            return [], []
        leave, begin = self._site.used(place.number, phase, is_first, len(self._numbered))
        return self._living(leave), self._living(begin)

    def _living(self, numbers: list[int]) -> list[Place]:
        return [place for place in (self._numbered[number]() for number in numbers) if place is not None]

    def saved(self, tensor: Any) -> Streamed | None:
        """Returns the placeholder of a saved tensor if its bytes are those of a copy."""
        import torch

        kind = type(tensor)
        if not self.copies or (kind is not torch.Tensor and kind is not torch.nn.Parameter):
            return None
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
            return None
        place = self.copies.get(tensor.untyped_storage()._cdata)
        if place is None:
            return None
        part = place.part_at(tensor.storage_offset() * tensor.element_size())
        parameter = part.parameter()
        return None if parameter is None else Streamed(tensor, place, part, parameter, self._reach, self.like)

    def _reach(self, place: Place, part: Part, parameter: Any) -> Any:
        with self._lock:
            if not place.is_away:
                return None
            place.adopt()
            # The program may have replaced it.
            return self.use(place) if part.parameter() is parameter else None

    def _begin(self, place: Place) -> None:
        if place.copy is None:
            place.begin()
            self.bytes_in += place.nbytes

    def _begin_ahead(self, place: Place) -> bool:
        try:
            if place.is_away:
                self._begin(place)
        except RuntimeError as error:
            if not is_shortage(error) and not isinstance(error, Error):
                raise
            # It comes when it is needed.
            return False
        return True

    def _show(self, place: Place) -> None:
        before = place.copy
        place.show()
        if place.copy is not before:
            # Its bytes had changed.
            self.bytes_in += place.nbytes

    @ordinary
    def _hide(self, place: Place, frees: bool) -> None:
        if not place.is_away or place.pins:
            return
        try:
            place.hide()
        except Error as error:
            _logger.warning("weights that were changed could not be stored, and stay on the GPU until they can be: %s", error)
            return
        if frees:
            place.free()

    def _is_current(self, place: Place) -> bool:
        return any(block == place.block for block, _ in self._current.values())

    # Forwards and backwards.

    def _stack(self) -> list[tuple[Any, Any, Any]]:
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        stack: list[tuple[Any, Any, Any]] = self._entered.stack
        return stack

    def enter(self, module: Any, inputs: Any, is_above: bool, call: Callable[[], tuple[Any, Any]]) -> None:
        """Enters a module's forward."""
        import torch

        stack = self._stack()
        if stack and is_above:
            self._leave_ended(stack, call()[1])
        if not stack and _task() == -1:
            self._begin_forward()
        stack.append((module, self.push(), call()[0] if is_above else None))
        if module in self._owned:
            given = next((value for value in inputs if isinstance(value, torch.Tensor)), None)
            if given is not None and given.device.type != self.like.device.type:
                # The program has moved the model to the host.
                return
            if given is not None and not self._memory.owns(given):
                raise UnsupportedError(
                    f"a CUDA graph is being captured of a {type(module).__name__} whose weights stream: weights of a graph have to stay on "
                    "the GPU; capture other modules, or raise the budget of glake.offload"
                )
            for place in self._owned[module]:
                self.use(place)

    def leave(self, module: Any) -> None:
        """Leaves a module's forward."""
        stack = self._stack()
        if not any(entered is module for entered, _, _ in stack):
            return
        while stack:
            entered, hooks, _ = stack.pop()
            if hooks is not None:
                hooks.__exit__()
            if entered is module:
                break
        if not stack:
            _tell_of_devices(sys.exc_info()[1])
            if _task() == -1:
                self._current.pop(threading.get_ident(), None)
                self.hide()

    def _begin_forward(self) -> None:
        import torch

        self._free_copies()
        self._is_first, self._kind = True, _FORWARD if torch.is_grad_enabled() else _EVALUATION
        if self._registered != _registrations[0]:
            self._take_in()

    def _free_copies(self) -> None:
        """Frees all copies that no other thread uses: the program may have changed parameters' bytes without a version."""
        with self._lock:
            self._current.pop(threading.get_ident(), None)
            for place in self.places:
                if place.copy is not None and not self._is_current(place):
                    # One that a signal has left there may have been written.
                    place.is_written |= place.is_shown and not place.pins
                    self._hide(place, frees=True)

    @ordinary
    def _take_in(self) -> None:
        """Moves parameters that are new in the model to the GPU: a new adapter is made where its layer's weight is, on the host."""
        self._registered, model = _registrations[0], self._model()
        streamed = set() if model is None else self.streamed_in(model)
        own = [] if model is None else [parameter for parameter in parameters(model) if id(parameter) not in streamed]
        # Not where the program has moved the model itself.
        if any(parameter.device == self.like.device for parameter in own):
            for parameter in own:
                if parameter.device.type == "cpu" and parameter.device != self.like.device:
                    parameter.data = parameter.data.to(self.like.device)

    def _leave_ended(self, stack: list[tuple[Any, Any, Any]], running: set[Any]) -> None:
        """Leaves forwards that a signal ended: torch calls no hook after those."""
        last = max((place for place, (_, _, call) in enumerate(stack) if call in running), default=-1)
        while len(stack) > last + 1:
            _, hooks, _ = stack.pop()
            if hooks is not None:
                hooks.__exit__()

    def push(self) -> Any:
        """Pushes hooks that pack what is saved of streamed weights, where no others are that do so, or that count what is saved."""
        import torch

        if not torch.is_grad_enabled() or not torch._C._autograd._saved_tensors_hooks_is_enabled():
            return None
        if _dynamo.traces() or torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if top is not None:
            function, arguments = (top[0].func, top[0].args) if isinstance(top[0], functools.partial) else (top[0], ())
            # Others count or copy what they pack.
            is_ours = (getattr(function, "__module__", None) or "").startswith(__package__ or "glake")
            if not is_ours or any(getattr(each, "weights", each) is self for each in arguments):
                return None
        wrapped = _dynamo.opaque if _dynamo.compiles() else _plain
        inner, back = top if top is not None else (kept, read)
        hooks = torch.autograd.graph.saved_tensors_hooks(
            functools.partial(wrapped(_pack), self, inner), functools.partial(wrapped(_unpack), back)
        )
        hooks.__enter__()
        return hooks

    def ended(self, task: int) -> None:
        """Ends a backward, if it has not."""
        with self._lock:
            if task not in self._tasks:
                return
            self._tasks.discard(task)
            self._current = {thread: (block, other) for thread, (block, other) in self._current.items() if other != task}
            self.hide()

    # Uses that hooks do not see.

    def pin(self, module: Any, writes: bool) -> list[Place]:
        """Makes all places of a module's parts come and stay until they are unpinned. Returns them."""
        from ._activations import _running

        pinned: list[Place] = []
        seen = {id(part) for part in parts(module)}
        with self._lock:
            stack, running = self._stack(), _running(sys._getframe())
            if any(call is not None for _, _, call in stack) and not any(call in running for _, _, call in stack):
                self._leave_ended(stack, running)
            if not stack and _task() == -1:
                self._free_copies()
            try:
                for place in self.places:
                    owners = (part.module() for part in place.parts)
                    if place.is_away and any(owner is not None and id(owner) in seen for owner in owners):
                        self.use(place)
                        place.pins += 1
                        place.is_written |= writes
                        pinned.append(place)
            except BaseException:
                self.unpin(pinned)
                raise
        return pinned

    def unpin(self, pinned: list[Place]) -> None:
        with self._lock:
            for place in pinned:
                place.pins -= 1
            self._current.pop(threading.get_ident(), None)
            if _task() == -1 and not self._stack():
                self.hide()

    def told(self) -> dict[str, Any]:
        """Returns what the report says of the weights."""
        streamed = [place for place in self.places if place.is_away]
        return {
            "kept_blocks": self.kept_blocks,
            "kept_bytes": self.kept_bytes,
            "streamed_blocks": len({place.block for place in streamed}),
            "streamed_bytes": sum(place.nbytes for place in streamed),
            "bytes_out": sum(place.stored for place in self.places),
            "here_bytes": sum(place.nbytes for place in streamed if place.copy is not None),
            "bytes_in": self.bytes_in,
            "uses": self.uses,
            "demanded": self.demanded,
        }


class _Enter:
    """Pre-hook of a module. A copy of the module has it too, and does nothing with it."""

    def __init__(self, weights: Weights, module: weakref.ref[Any], is_above: bool) -> None:
        self._weights, self._module, self._is_above = weights, module, is_above

    def __call__(self, module: Any, inputs: Any) -> None:
        if module is self._module() and not _dynamo.exports():
            _enter(self._weights, module, inputs, self._is_above)

    def __deepcopy__(self, _memo: Any) -> _Enter:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Nothing, ()


class _Leave:
    def __init__(self, weights: Weights, module: weakref.ref[Any]) -> None:
        self._weights, self._module = weights, module

    def __call__(self, module: Any, _inputs: Any, _output: Any) -> None:
        if module is self._module() and not _dynamo.exports():
            _leave(self._weights, module)

    def __deepcopy__(self, _memo: Any) -> _Leave:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Nothing, ()


class _Nothing:
    """Hook of a loaded model, whose weights do not stream."""

    def __call__(self, *_: Any) -> None:
        return None


@_dynamo.as_is
def _enter(weights: Weights, module: Any, inputs: Any, is_above: bool) -> None:
    weights.enter(module, inputs, is_above, functools.partial(_call, _dynamo.caller()))


@_dynamo.as_is
def _leave(weights: Weights, module: Any) -> None:
    weights.leave(module)


def _call(frame: Any) -> tuple[Any, set[Any]]:
    """Returns the call of a module, and the calls around it that run."""
    from ._activations import _call_of, _running

    return _call_of(frame), _running(frame.f_back)


def _pack(weights: Weights, inner: Any, tensor: Any) -> Any:
    saved = weights.saved(tensor)
    return inner(tensor) if saved is None else saved


def _unpack(inner: Any, saved: Any) -> Any:
    import torch

    if not isinstance(saved, Streamed):
        return inner(saved)
    with torch.inference_mode(False):
        return saved.read()


class _Backward:
    """A backward, which ends where its engine calls this, or drops it: none is called of a backward that raises."""

    def __init__(self, weights: Weights, task: int) -> None:
        self._weights, self._task = weakref.ref(weights), task

    def __call__(self) -> None:
        weights = self._weights()
        if weights is not None:
            weights.ended(self._task)

    def __del__(self) -> None:
        self()


def _tell_of_devices(error: BaseException | None) -> None:
    """Adds what to do to torch's error for a weight that was away."""
    if isinstance(error, RuntimeError) and len(error.args) == 1 and _DEVICES in str(error) and "glake.offload.uses" not in str(error):
        error.args = (
            f"{error}\nWeights of this model stream (glake.offload), and are host tensors while their module is not called: where a function "
            "reads module.weight by itself, put it into `with glake.offload.uses(module):`",
        )


def _task() -> int:
    import torch

    return int(torch._C._current_graph_task_id())


def _engine() -> Any:
    import torch

    return torch.autograd.Variable._execution_engine


def _plain(function: Any) -> Any:
    return function


def live() -> list[Weights]:
    """Returns the weights of all models that stream."""
    return [weights for weights in list(_all) if not weights.is_over]


def _watch() -> int:
    """Counts the parameters that modules are given from now on. Returns their number."""
    from torch.nn.modules.module import register_module_parameter_registration_hook

    if not _watching:
        _watching.append(register_module_parameter_registration_hook(_count))
    return _registrations[0]


def _count(module: Any, name: str, parameter: Any) -> None:
    _registrations[0] += 1
    for weak in _parts_of.get(module, ()):
        part = weak()
        if part is not None and part.name == name and parameter is not None:
            part.given = weakref.ref(parameter)


_registrations = [0]
_watching: list[Any] = []
# Parameters of modules that stream.
_parts_of: weakref.WeakKeyDictionary[Any, list[weakref.ref[Part]]] = weakref.WeakKeyDictionary()
_all: weakref.WeakSet[Weights] = weakref.WeakSet()


def _forget() -> None:
    """In a forked child weights that stream are without elements: pinned memory is the parent's alone, and a read would end the child."""
    for weights in list(_all):
        # Other threads, which may have held it, do not exist.
        weights._lock = threading.RLock()
        for place in weights.places:
            place.forget()


os.register_at_fork(after_in_child=_forget)
