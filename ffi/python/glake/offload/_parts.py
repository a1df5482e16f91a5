"""Traversal of a module's parts through torch's own tables, without attributes that a program may have overridden."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any


def parts(module: Any) -> Iterator[Any]:
    """Yields the module and its submodules, each once, in the order of ``modules()``."""
    seen: set[int] = set()
    left = [module]
    while left:
        part = left.pop()
        if part is not None and id(part) not in seen:
            seen.add(id(part))
            yield part
            left += reversed(list(part._modules.values()))


def parameters(module: Any) -> Iterator[Any]:
    """Yields the parameters of all parts; shared ones repeatedly."""
    return _held(module, "_parameters")


def buffers(module: Any) -> Iterator[Any]:
    """Yields the buffers of all parts; shared ones repeatedly."""
    return _held(module, "_buffers")


def has(part: Any, name: str) -> bool:
    """Whether a part itself, or its class, has such an attribute, without calling ``__getattr__``."""
    return name in vars(part) or name in part._modules or any(name in vars(kind) for kind in type(part).__mro__)


def _held(module: Any, kind: str) -> Iterator[Any]:
    held = itertools.chain.from_iterable(getattr(part, kind).values() for part in parts(module))
    return (tensor for tensor in held if tensor is not None)
