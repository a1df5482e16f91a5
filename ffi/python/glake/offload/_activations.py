"""Offload of activations in a module's forward passes, or in a block of code."""

from __future__ import annotations

import functools
import itertools
import json
import numbers
import sys
import threading
import weakref
from types import TracebackType
from typing import Any

from .._arguments import flag
from ..errors import InvalidError
from . import _dynamo, _report
from ._memory import Cuda, Memory
from ._others import Others
from ._packer import Packer
from ._saved import kept, read

LEAST = 256 << 10
_numbers = itertools.count()


class Activations:
    """Result of ``glake.offload.activations``: a context manager, and the handle to remove the hooks of a module."""

    def __init__(self, module: Any, least: int, memory: Memory | None = None, replay: bool = False) -> None:
        if not is_number(least) or not least >= 0:
            raise InvalidError(f"least is {least!r}: a number of bytes, and not below 0")
        import torch

        _dynamo.ready(Activations._looks, Activations._before, Activations._after)
        self._packer = Packer(least, memory or Cuda())
        self._replay = _replayer(self._packer) if replay else None
        # In the order in which they were made.
        self.number = next(_numbers)
        _report.sites.add(self)
        # Stack of each thread, the innermost last: caller, hooks, and the call of the module.
        self._entered = threading.local()
        self._handles: list[Any] = []
        # A copy of a module has hooks that no handle of this takes off: they do nothing from then on.
        self._is_removed = False
        self._others = Others(_ours)
        # The module whose forward passes are in the blocks that this is entered for, where it is known: weakly.
        self._model: weakref.ref[Any] | None = None
        if module is not None:
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"module is a {type(module).__name__}: give the torch.nn.Module, or nothing to activations() and use `with`")
            self._model = weakref.ref(module)
            self._handles = [
                module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
                module.register_forward_hook(self._after, always_call=True),
            ]
            # Before the first of them.
            self._handles.append(module.register_forward_pre_hook(self._looks, prepend=True))

    def __deepcopy__(self, _memo: Any) -> Activations:
        # A copy of the module has hooks of its own, which learn anew.
        return Activations(None, self._packer.least, self._packer.memory, self._replay is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Activations, (None, self._packer.least, None, self._replay is not None)

    def __enter__(self) -> Activations:
        if not self._stack():
            model = None if self._model is None else self._model()
            self._packer.enter(model)
            if model is not None:
                self._others.look(model)
        self._push("with")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Entries left behind by a forward that a signal ended.
        while self._is_in_module():
            self._pop()
        if self._stack():
            self._pop()
        if not self._stack():
            self._others.end()

    def remove(self) -> None:
        """Removes the hooks from the module. Offloaded tensors are reloaded as they are read. Repeated calls do nothing."""
        self._is_removed = True
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._others.undo()
        self._packer.unsharded.remove()
        while self._is_in_module():
            self._pop()
        if self._replay is not None:
            self._replay.remove()

    def __del__(self) -> None:
        # A forward that a signal ended left its hooks on, and nobody calls the module again.
        while "_entered" in vars(self) and self._stack() and not sys.is_finalizing():
            self._pop()

    def _stack(self) -> list[tuple[str, Any, _Call | None]]:
        if not hasattr(self._entered, "hooks"):
            self._entered.hooks, self._entered.call = [], None
        stack: list[tuple[str, Any, _Call | None]] = self._entered.hooks
        return stack

    def _is_in_module(self) -> bool:
        stack = self._stack()
        return bool(stack) and stack[-1][0] == "module"

    def _leave_ended(self, caller: Any) -> None:
        """Leaves calls of the module that a signal ended: torch calls no hook after those."""
        import torch

        running = None
        while self._is_in_module():
            _, hooks, call = self._stack()[-1]
            top = torch._C._autograd._top_saved_tensors_default_hooks(False)
            if hooks in _pushed and (top is None or top[0] is not hooks.pack_hook):
                # Others' hooks lie over them.
                return
            running = _running(caller.f_back) if running is None else running
            if call in running:
                return
            self._pop()

    def _skip(self) -> None:
        """Enters a call of the module without hooks."""
        self._stack().append(("module", None, self._entered.call))

    def _keep(self) -> None:
        """Enters a call of the module in which all saved tensors stay, despite surrounding offloads."""
        import torch

        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if top is None or top[0] not in _ours:
            self._skip()
            return
        hooks = torch.autograd.graph.saved_tensors_hooks(*_staying(_dynamo.compiles()))
        # Replay of leaves, if any, is paused too.
        interception = sys.modules.get(f"{__package__}._interception")
        if interception is not None:
            interception.pause()
        _pushed.push(hooks, None if interception is None else interception.go_on, self._entered.call)
        self._stack().append(("module", hooks, self._entered.call))

    def _push(self, whom: str, module: Any = None) -> None:
        import torch

        # The hooks must not keep the module alive.
        wrapped = _dynamo.opaque if _dynamo.compiles() else _plain
        pack = functools.partial(wrapped(_pack), torch._C._current_graph_task_id, self._packer)
        unpack = functools.partial(wrapped(_unpack), self._packer)
        _ours.add(pack)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        end = None if self._replay is None else functools.partial(wrapped(_end), self._replay)
        _pushed.push(hooks, end, self._entered.call if whom == "module" else None)
        self._stack().append((whom, hooks, self._entered.call))
        if self._replay is not None:
            wrapped(_begin)(self._replay, module)

    def _pop(self) -> None:
        _, hooks, _ = self._stack().pop()
        if hooks is not None:
            _pushed.pop(hooks)

    def told(self, course: bool = False) -> dict[str, Any]:
        """Returns the site's goal, its latest plan and its passes: an element of ``sites`` in ``glake.offload.report``."""
        told: dict[str, Any] = json.loads(self._packer.site.told_json(course))
        return told

    # Compiled code sees only this part of the module's hooks.

    def _looks(self, module: Any, _inputs: Any) -> None:
        if not _dynamo.exports():
            _look(self, module)

    def _before(self, module: Any, inputs: Any, named: Any = None) -> None:
        if not _dynamo.exports():
            _enter(self, module, inputs, named)

    def _after(self, _module: Any, _inputs: Any, _output: Any) -> None:
        if not _dynamo.exports():
            _leave(self)

    def enter_call(self, module: Any, _inputs: Any, _named: Any) -> None:
        """Enters a call of the module."""
        import torch

        if self._is_removed:
            self._skip()
            return
        # In another's backward pass a checkpoint computes again what it dropped: its saves live for a moment. Under other hooks, as that
        # checkpoint's are in the forward pass, these have what is saved, both times.
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        is_others = top is not None and top[0] not in _ours
        if is_others or not may_hook():
            if is_others and torch.is_grad_enabled() and not self._others.is_harmless(top):
                self._others.told(top[0], module)
            self._skip()
            return
        if not self._stack():
            self._packer.enter(module)
        self._push("module", module)

    def leave_call(self) -> None:
        """Leaves a call of the module."""
        # Told without its begin where an earlier hook raised.
        if self._is_in_module():
            self._pop()
        if not self._stack():
            self._others.end()

    def look(self, module: Any, caller: Any) -> None:
        """Enters a call under the hooks of a frame. Other offloads in the module are found whether this call offloads or not."""
        import torch

        if self._stack():
            self._leave_ended(caller)
        self._entered.call = _call_of(caller)
        if not self._is_removed and not self._stack() and may_hook():
            if self._others.is_harmless(torch._C._autograd._top_saved_tensors_default_hooks(False)):
                self._others.look(module)


@_dynamo.as_is
def _look(handle: Activations, module: Any) -> None:
    handle.look(module, _dynamo.caller())


@_dynamo.as_is
def _enter(handle: Activations, module: Any, inputs: Any, named: Any) -> None:
    handle.enter_call(module, inputs, named)


@_dynamo.as_is
def _leave(handle: Activations) -> None:
    handle.leave_call()


def _pack(graph_task: Any, packer: Packer, tensor: Any) -> Any:
    # In a backward pass a checkpoint computes again what it dropped: its saves live for a moment.
    return packer.pack(tensor) if graph_task() == -1 else kept(tensor)


def _unpack(packer: Packer, saved: Any) -> Any:
    return packer.unpack(saved)


def _begin(replayer: Any, module: Any) -> None:
    replayer.begin(module)


def _end(replayer: Any) -> None:
    replayer.end()


def _plain(function: Any) -> Any:
    return function


# A call that runs, by its frame and the one below.
_Call = tuple[int, int]


def _call_of(frame: Any) -> _Call:
    return id(frame), id(frame.f_back)


def _running(frame: Any) -> set[_Call]:
    """Returns the calls from one on that run on this thread."""
    running = set()
    while frame is not None:
        running.add(_call_of(frame))
        frame = frame.f_back
    return running


def may_hook() -> bool:
    """Whether saved tensors may be given hooks now: not without gradients, within a backward pass, while tracing, in a transform of
    ``torch.func``, or if the program has turned hooks off.
    """
    import torch

    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1 or _dynamo.traces():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None and torch._C._autograd._saved_tensors_hooks_is_enabled()


def _replayer(packer: Packer) -> Any:
    from ._replay import Replay

    return Replay(packer)


def is_number(value: Any) -> bool:
    """Whether a value is a number, numpy's included, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


class _Pushed(threading.local):
    """A thread's stack of our hooks, the innermost last, each with its end callback and the module call that it belongs to. Hooks
    left behind by a forward that a signal ended are removed with the hooks around them, whatever their owner.
    """

    def __init__(self) -> None:
        self._all: list[tuple[Any, Any, _Call | None]] = []

    def push(self, hooks: Any, end: Any, call: _Call | None) -> None:
        hooks.__enter__()
        self._all.append((hooks, end, call))

    def pop(self, hooks: Any) -> None:
        """Removes hooks if they are on."""
        import torch

        running = None
        while hooks in self:
            last, _, call = self._all[-1]
            if last is hooks:
                break
            running = _running(sys._getframe()) if running is None else running
            top = torch._C._autograd._top_saved_tensors_default_hooks(False)
            if call is None or call in running or top is None or top[0] is not last.pack_hook:
                # Entered and left in another order: as torch does, the innermost are taken off.
                break
            self._end(len(self._all) - 1)
        place = next((place for place, (other, _, _) in enumerate(self._all) if other is hooks), None)
        if place is not None:
            self._end(place)

    def _end(self, place: int) -> None:
        hooks, end, _ = self._all.pop(place)
        if end is not None:
            end()
        hooks.__exit__()

    def __contains__(self, hooks: Any) -> bool:
        return any(other is hooks for other, _, _ in self._all)


_pushed = _Pushed()
# The hooks that pack, of all that offload here.
_ours: weakref.WeakSet[Any] = weakref.WeakSet()


@functools.cache
def _staying(is_opaque: bool) -> tuple[Any, Any]:
    """Returns our hooks under which saved tensors stay."""
    import torch

    pack: Any = lambda tensor: kept(tensor)
    unpack: Any = lambda saved: read(saved)
    if is_opaque:
        pack, unpack = torch._disable_dynamo(pack), torch._disable_dynamo(unpack)
    _ours.add(pack)
    return pack, unpack


def activations(module: Any = None, *, least: int = LEAST, replay: bool = False) -> Activations:
    """Offloads the tensors that autograd saves in a module's forward passes, or in a block of code::

        glake.offload.activations(model)              # in each of its forward passes, until .remove()
        site = glake.offload.activations()            # once: each new one learns from the beginning
        with site:                                    # in each step; includes a loss outside of the module
            loss = criterion(model(batch), target)
        loss.backward()

    The first pass reloads each tensor when it is read; passes that begin like an earlier one begin their reloads ahead, in the order of that
    pass. Tensors that a plan would reload at once, such as the last saves of the forward, stay.

    Each range of bytes is copied once, however many operations save it. Parameters, their views and a module's buffers stay. So does memory
    of private pools, which their owners manage: those of CUDA graphs, of ``torch.compile(mode="reduce-overhead")``, and MemPools. Memory
    that is not GLake's (call ``glake.enable()`` first), tensors saved while a stream is captured, tensors of other classes than
    ``torch.Tensor``, and tensors for which there is no host memory stay too: ``glake.offload.report()`` counts them in ``stayed``.

    Args:
        module: the outer module; None: only inside ``with`` blocks of the result.
        least: tensors of fewer bytes stay on the GPU.
        replay: also offload the outputs of linear layers and attention within checkpoints with ``use_reentrant=False``, and replay them in
            the recomputation instead of computing them.

    Returns:
        A context manager; the hooks of ``module``, if given, are already active.

    Raises:
        InvalidError: ``least`` is below 0.
        TypeError: ``module`` is not a module.
    """
    return Activations(module, least, replay=flag(replay, "replay"))
