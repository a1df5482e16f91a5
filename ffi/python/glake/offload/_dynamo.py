"""Visibility of the hooks to torch's compiler and tracers."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any


def compiles() -> bool:
    """Whether the program has compiled or may have compiled something."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and bool(getattr(frames, "cached_backends", True))


def exports() -> bool:
    """Whether the program's model is being exported: nothing is computed, and torch calls no hook registered as always called."""
    import torch

    # Not ``torch.compiler.is_exporting()``, which answers that it is wherever something is compiled.
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def traces() -> bool:
    """Whether operations are recorded, or run on tensors without values, instead of being computed."""
    import torch

    modes = torch._C._TorchDispatchModeKey
    if any(torch._C._get_dispatch_mode(mode) is not None for mode in (modes.PROXY, modes.FAKE)):
        return True
    return torch._C._get_tracing_state() is not None


@functools.cache
def opaque(function: Any) -> Any:
    """Returns a function that compiled code calls as it is, at a cost of some microseconds. Only for functions that live as long as
    the program.
    """
    from torch._compile import _disable_dynamo

    return _disable_dynamo(function)


# What is called as it is, each with its opaque form once there is one.
_called: list[tuple[Any, list[Any]]] = []


def as_is(function: Any) -> Any:
    """Decorates a function of a module's hook. If the program compiles, it is ``opaque``: compiled code depends on no value that it
    reads.
    """
    made: list[Any] = []
    _called.append((function, made))

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        import torch

        # The first is known where this is compiled, the second is not.
        if torch.compiler.is_dynamo_compiling() or compiles():
            return made[0](*args)
        return function(*args)

    return call


def ready(*hooks: Any) -> None:
    """Prepares ``as_is`` functions; call it before any of them, once torch is imported. Hook methods are never compiled by
    themselves if torch can be told so: all models would share their compilation limit.
    """
    for function, made in _called:
        if not made:
            made.append(opaque(function))
    import torch

    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if not hasattr(frames, "set_code_exec_strategy"):
        return
    actions = frames._FrameAction
    for hook in hooks:
        # What it calls is as ever.
        frames.set_code_exec_strategy(hook.__code__, frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT))


# Between a hook and who calls it.
_OWN = os.path.dirname(__file__) + os.sep
_WRAPPERS = (os.path.join("torch", "_dynamo", "eval_frame.py"), os.path.join("torch", "_compile.py"))


def caller() -> Any:
    """Returns the frame that calls a module's hook, from within one of its ``as_is`` functions."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename.startswith(_OWN) or frame.f_code.co_filename.endswith(_WRAPPERS)):
        frame = frame.f_back
    return frame
