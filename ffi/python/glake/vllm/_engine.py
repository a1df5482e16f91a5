"""What GLake knows of an engine in a worker process: its use of memory, and the blocks of its cache that count."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import glake

from . import _live, logger
from ._uses import Uses

# Its worker holds it: a program may drop an engine without a word.
_here: weakref.ref[Engine] | None = None


def here() -> Engine | None:
    """Returns the engine whose worker is in this process."""
    return None if _here is None else _here()


def of(instance: str) -> Engine | None:
    """Returns the engine with this instance id if its worker is in this process."""
    engine = here()
    return engine if engine is not None and engine.instance == instance else None


def counted(pool: Any) -> list[tuple[int, int]]:
    """Returns the runs of blocks in vLLM's block pool that a request uses, or that a later one can still hit; and the null block, which
    kernels may read.
    """
    # Blocks with parts that can be hit, in versions that have such.
    partly = getattr(pool, "cached_block_hashes_by_block", {})
    blocks = (block for block in pool.blocks if block.ref_cnt > 0 or block.block_hash is not None or block.is_null or block.block_id in partly)
    return _live.runs(block.block_id for block in blocks)


class Engine:
    """An engine whose worker is in this process. There is one at a time."""

    def __init__(self, instance: str) -> None:
        global _here
        self.instance = instance
        self.uses = Uses()
        # Set once it is started.
        self.model: Any = None
        # The scheduler's block pool, if it is in this process too. Else the numbers of all blocks that were ever handed out since the
        # engine last ran dry: more than count, so that nothing is lost.
        self.pool: Any = None
        self._taken: set[int] = {0}
        # Steps so far, and the blocks that counted at one of them: a shrink asks for each tensor.
        self._steps = 0
        self._found: tuple[int, list[tuple[int, int]]] = -1, []
        _here = weakref.ref(self)

    def end(self) -> None:
        """Ends with its worker."""
        global _here
        self.uses.end()
        if here() is self:
            _here = None

    def told(self, taken: Iterable[int], counted: list[tuple[int, int]] | None) -> None:
        """Records what the scheduler of another process told with a step."""
        if counted is not None:
            self._taken = {number for first, end in counted for number in range(first, end)} | {0}
        self._taken.update(taken)
        self._found = -1, []

    def step(self, is_empty: bool) -> None:
        """Comes before each step."""
        self._steps += 1
        self.uses.step(is_empty)

    def blocks(self) -> list[tuple[int, int]]:
        """Returns the runs of blocks that count now. Between two steps no block comes to count that did not: one that is handed out has no
        content yet.
        """
        steps, found = self._found
        if steps != self._steps:
            steps = self._steps
            found = _live.runs(sorted(self._taken)) if self.pool is None else counted(self.pool)
            self._found = steps, found
        return found

    def declare(self, caches: dict[str, Any], blocks: int) -> None:
        """Declares the live bytes of a cache's tensors, storage by storage. A storage with a layout that is not understood counts as a
        whole.
        """
        layouts: dict[int, list[_live.Part] | None] = {}
        storages: dict[int, Any] = {}
        for tensor in _tensors(caches.values()):
            storage = tensor.untyped_storage()
            found = _live.parts(tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.element_size(), blocks)
            key = storage.data_ptr()
            storages[key] = tensor
            before = layouts.get(key, [])
            layouts[key] = None if found is None or before is None else before + found
        for key, parts in layouts.items():
            if parts is None:
                logger.debug("the layout of a cache tensor of shape %s is unknown: all of it counts", tuple(storages[key].shape))
                continue
            self._declare(storages[key], _live.joined(parts))

    def _declare(self, tensor: Any, parts: list[_live.Part]) -> None:
        size = tensor.untyped_storage().nbytes()
        try:
            glake.live(whole(tensor), lambda: [(first, min(end, size)) for first, end in _live.ranges(parts, self.blocks())])
        except glake.InvalidError as error:
            # It has other memory, as on a CPU: nothing of it is ever evicted.
            logger.debug("no live ranges for a cache tensor: %s", error)


def whole(tensor: Any) -> Any:
    """Returns all bytes of a tensor's storage as a tensor."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _tensors(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        else:
            yield value
