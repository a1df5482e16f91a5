"""What a module is made of, as torch keeps it: nothing is asked that a program may have given a meaning of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any


def parts(module: Any) -> Iterator[Any]:
    """It and what is within it, each once, in the order of ``modules()``."""
    seen: set[int] = set()
    left = [module]
    while left:
        part = left.pop()
        if part is not None and id(part) not in seen:
            seen.add(id(part))
            yield part
            left += reversed(list(part._modules.values()))


def parameters(module: Any) -> Iterator[Any]:
    """Those of all its parts. One that several have comes as often."""
    return _held(module, "_parameters")


def buffers(module: Any) -> Iterator[Any]:
    """As ``parameters``."""
    return _held(module, "_buffers")


def has(part: Any, name: str) -> bool:
    """Whether a part itself, or its class, has such an attribute: what it may answer beyond is not asked."""
    return name in vars(part) or name in part._modules or any(name in vars(kind) for kind in type(part).__mro__)


def _held(module: Any, kind: str) -> Iterator[Any]:
    held = itertools.chain.from_iterable(getattr(part, kind).values() for part in parts(module))
    return (tensor for tensor in held if tensor is not None)
