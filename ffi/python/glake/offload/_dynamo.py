"""What torch's compiler is to see of the hooks, and what not."""

from __future__ import annotations

import functools
import sys
from typing import Any


def compiles() -> bool:
    """Whether the program has compiled something, or may have."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and bool(getattr(frames, "cached_backends", True))


def is_within() -> bool:
    """Whether an ``opaque`` function that asks this was called from what is compiled."""
    frame, wrappers = sys._getframe(1), 0
    while frame is not None:
        wrappers += frame.f_code.co_filename.endswith("_dynamo/eval_frame.py")
        frame = frame.f_back  # type: ignore[assignment]
    # One is its own.
    return wrappers > 1


def exports() -> bool:
    """Whether the program's model is traced to be exported: nothing is computed, and torch calls no hook that is to be called always."""
    import torch

    # Not ``torch.compiler.is_exporting()``, which answers that it is wherever something is compiled.
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


@functools.cache
def opaque(function: Any) -> Any:
    """A function that is called as it is from what is compiled, at the cost of some microseconds. Of what lives as long as the program: it is
    kept."""
    from torch._compile import _disable_dynamo

    return _disable_dynamo(function)


# Functions that have no opaque form yet, and where it is to be.
_unready: list[tuple[Any, list[Any]]] = []


def as_is(function: Any) -> Any:
    """A function of a module's hook. Where the program compiles something it is ``opaque``: what is compiled depends on nothing that it looks at."""
    made: list[Any] = []
    _unready.append((function, made))

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        import torch

        # The first is known where this is compiled, the second is not.
        if torch.compiler.is_dynamo_compiling() or compiles():
            return made[0](*args)
        return function(*args)

    return call


def ready() -> None:
    """To be called before any ``as_is`` function is, once there is torch."""
    while _unready:
        function, made = _unready.pop()
        made.append(opaque(function))


def caller() -> Any:
    """The frame of the module's call that calls a hook, from within an ``as_is`` function."""
    frame = first = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.endswith("nn/modules/module.py"):
        frame = frame.f_back  # type: ignore[assignment]
    return frame or first
