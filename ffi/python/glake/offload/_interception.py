"""Replacements of functions of torch and peft, through which computations within a checkpoint pass.

They are replaced in their modules, which every caller looks up: a ``TorchFunctionMode`` would see the 70 functions of a layer, where eight are
of interest. Where nothing is replayed on the calling thread they do what they did.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import threading
import types
import weakref
from typing import Any

import torch
import torch.utils.checkpoint

from . import _leaf

_PEFT = "peft.tuners.lora.layer"


class _Current(threading.local):
    """Thread-local state: the replay of the current forward pass, its number of checkpoints, the one being computed, and the saved
    outer states.
    """

    def __init__(self) -> None:
        self.replay: Any = None
        self.place = 0
        self.scope: Any = None
        self.before: list[tuple[Any, int, Any]] = []


current = _Current()


def pause() -> None:
    """Pauses replay on this thread until ``go_on``."""
    current.before.append((current.replay, current.place, current.scope))
    current.replay = current.scope = None


def go_on() -> None:
    """Restores the state before ``pause``."""
    if current.before:
        current.replay, current.place, current.scope = current.before.pop()


# Garbage may be looked for while it is held, and ``remove`` be called by that.
_lock = threading.RLock()


def _renew_lock() -> None:
    """Replaces the lock in a forked child, whose other threads do not exist."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)

_installed = 0
# Of each that is replaced: where, its name, what it was, and what it is.
_replaced: list[tuple[Any, str, Any, Any]] = []


def install() -> None:
    """Installs the replacements; reference-counted with ``remove``."""
    global _installed
    with _lock:
        _installed += 1
        if _installed == 1:
            _replace_torch()
        _replace_peft()


def remove() -> None:
    global _installed
    with _lock:
        _installed -= 1
        if _installed:
            return
        while _replaced:
            owner, name, original, ours = _replaced.pop()
            # Where others have replaced it since, it stays under theirs and is idle.
            if getattr(owner, name) is ours:
                setattr(owner, name, original)


def look_again() -> None:
    """Installs the replacements in peft if it was imported since."""
    if _PEFT in sys.modules and not any(name == "forward" for _, name, _, _ in _replaced):
        with _lock:
            _replace_peft()


def _replace(owner: Any, name: str, original: Any, ours: Any) -> None:
    setattr(owner, name, ours)
    _replaced.append((owner, name, original, ours))


def _replace_torch() -> None:
    functional, checkpoint = torch.nn.functional, torch.utils.checkpoint
    kinds: tuple[tuple[Any, str, Any], ...] = (
        (functional, "linear", _leaf.Product("linear", 0, 1)),
        (torch, "addmm", _leaf.Product("addmm", 1, 2)),
        (functional, "scaled_dot_product_attention", _leaf.Attention("attention")),
    )
    for owner, name, kind in kinds:
        original = getattr(owner, name)
        # What others put in its place may save anything.
        kind.is_own = isinstance(original, types.BuiltinFunctionType)
        kind.is_steady = kind.is_steady and kind.is_own
        _replace(owner, name, original, _of_function(original, kind))
    _replace(
        checkpoint,
        "_checkpoint_without_reentrant_generator",
        checkpoint._checkpoint_without_reentrant_generator,
        _of_checkpoint(checkpoint._checkpoint_without_reentrant_generator, checkpoint.noop_context_fn),
    )


def _replace_peft() -> None:
    module = sys.modules.get(_PEFT)
    if not _replaced or module is None or any(name == "forward" for _, name, _, _ in _replaced):
        return
    products = next(original for owner, name, original, _ in _replaced if name == "linear")
    kind = _leaf.Adapted(module.Linear, isinstance(products, types.BuiltinFunctionType))
    original = module.Linear.forward

    @functools.wraps(original)
    def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, x, *args, **kwargs)
        scope = current.scope
        if scope is None or not kind.is_whole(self, x, args, kwargs):
            return original(self, x, *args, **kwargs)
        return scope.leaf(kind, original, (self, x), {})

    _replace(module.Linear, "forward", original, forward)


class _InPlaceOf:
    """Replacement of a function: it compares equal to it, is pickled as it, and does not become a method when it is a class
    attribute.
    """

    def __init__(self, original: Any, function: Any) -> None:
        functools.update_wrapper(self, original)
        self._original, self._function = original, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or bool(other == self._original)

    def __hash__(self) -> int:
        return hash(self._original)

    def __repr__(self) -> str:
        return repr(self._original)

    def __copy__(self) -> _InPlaceOf:
        return self

    def __deepcopy__(self, _memo: Any) -> _InPlaceOf:
        return self

    def __reduce__(self) -> Any:
        return copy.copy, (self._original,)


def _of_function(original: Any, kind: Any) -> Any:
    # What is being compiled folds it to a constant, and sees the function alone.
    is_compiling, found = torch.compiler.is_compiling, current

    def calls(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        scope = found.scope
        if scope is None:
            return original(*args, **kwargs)
        return scope.leaf(kind, original, args, kwargs)

    function = _InPlaceOf(original, calls)
    # TorchScript knows functions by their identity.
    operator = torch.jit._builtins._find_builtin(original)
    if operator is not None:
        torch.jit._builtins._register_builtin(function, operator)
        # Its number may be another object's later.
        weakref.finalize(function, torch.jit._builtins._get_builtin_table().pop, id(function), None)
    return function


def _of_checkpoint(original: Any, plain: Any) -> Any:
    @functools.wraps(original)
    def generator(fn: Any, preserve_rng_state: bool = True, context_fn: Any = plain, *rest: Any, **kwargs: Any) -> Any:
        replay = current.replay
        if replay is not None:
            # After it: how to check that both are the same, and whether to debug, which a setting for all goes before.
            is_debug = torch.utils.checkpoint._checkpoint_debug_enabled
            if is_debug is None:
                is_debug = len(rest) > 1 and bool(rest[1])
            context_fn = contexts(replay, context_fn, plain, bool(preserve_rng_state), is_debug)
        return original(fn, preserve_rng_state, context_fn, *rest, **kwargs)

    from ._scope import contexts

    return generator
