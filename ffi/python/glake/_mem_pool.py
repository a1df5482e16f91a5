"""A ``torch.cuda.MemPool`` over GLake's pool, for programs that want only some of their tensors in it."""

from __future__ import annotations

import importlib
from typing import Any

from glake_switch import is_disabled

from . import _library, pluggable
from ._enable import enabled
from .errors import TorchError


def mem_pool() -> Any:
    """Returns a ``torch.cuda.MemPool`` whose memory comes from GLake::

        pool = glake.mem_pool()
        with torch.cuda.use_mem_pool(pool):
            weights = torch.empty(1 << 30, device="cuda")

    After ``enable()`` with the compiled backend it is a private pool of torch's allocator, which is GLake. Without ``enable()``
    torch's own allocator stays, and takes the pool's segments from GLake: torch's counters remain in use, and GLake counts segments only.

    Raises:
        TorchError: torch is missing or has no MemPool (2.5 and later do), or the plain-ABI backend is in use.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise TorchError(f"glake.mem_pool() needs torch with CUDA, and import torch failed: {error}") from error
    if is_disabled():
        return torch.cuda.MemPool()
    if not hasattr(torch.cuda, "MemPool"):
        raise TorchError(f"torch {torch.__version__} has no torch.cuda.MemPool: 2.5 and later have it")
    if enabled() is not None:
        return torch.cuda.MemPool()
    _library.api()
    allocator = pluggable.allocator(torch, _library.path())
    pool = torch.cuda.MemPool(allocator.allocator())
    # torch follows a pointer to the allocator for as long as the pool has memory.
    _allocators.append(allocator)
    return pool


_allocators: list[Any] = []
