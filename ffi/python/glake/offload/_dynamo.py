"""What torch's compiler and tracers are to see of the hooks, and what not."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any


def compiles() -> bool:
    """Whether the program has compiled something, or may have."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and bool(getattr(frames, "cached_backends", True))


def exports() -> bool:
    """Whether the program's model is traced to be exported: nothing is computed, and torch calls no hook that is to be called always."""
    import torch

    # Not ``torch.compiler.is_exporting()``, which answers that it is wherever something is compiled.
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def traces() -> bool:
    """Whether operations are recorded, or have tensors without values, in place of being computed."""
    import torch

    modes = torch._C._TorchDispatchModeKey
    if any(torch._C._get_dispatch_mode(mode) is not None for mode in (modes.PROXY, modes.FAKE)):
        return True
    return torch._C._get_tracing_state() is not None


@functools.cache
def opaque(function: Any) -> Any:
    """A function that is called as it is from what is compiled, at the cost of some microseconds. Of what lives as long as the program: it is
    kept."""
    from torch._compile import _disable_dynamo

    return _disable_dynamo(function)


# What is called as it is, each with its opaque form once there is one.
_called: list[tuple[Any, list[Any]]] = []


def as_is(function: Any) -> Any:
    """A function of a module's hook. Where the program compiles something it is ``opaque``: what is compiled depends on nothing that it looks at."""
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
    """To be called before any ``as_is`` function is, once there is torch. Methods that are hooks are never compiled by themselves, where torch
    has a way to say so: all models would share what may be compiled of them."""
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
    """The frame that calls a module's hook, from within one of its ``as_is`` functions."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename.startswith(_OWN) or frame.f_code.co_filename.endswith(_WRAPPERS)):
        frame = frame.f_back
    return frame
