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

    asks: Any = getattr(torch.compiler, "is_exporting", None)
    return asks is not None and bool(asks())


@functools.cache
def opaque(function: Any) -> Any:
    """A function that is called as it is from what is compiled, at the cost of some microseconds. Of what lives as long as the program: it is
    kept."""
    from torch._compile import _disable_dynamo

    return _disable_dynamo(function)
