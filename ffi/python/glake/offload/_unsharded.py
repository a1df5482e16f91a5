"""The memory into which FSDP2 gathers parameters: it is refilled for each pass, and never offloaded."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

from ._parts import parameters, parts


class Unsharded:
    """Storages of gathered parameters. They exist from a part's first forward on. Most stay the same: FSDP2 frees their bytes after
    each use, and keeps the storage objects; parameters that are split in another dimension are gathered anew.
    """

    def __init__(self) -> None:
        # By the number of a storage, which is no other's as long as it is held here, weakly.
        self.storages: dict[int, Any] = {}
        self._full = 64
        self._parts: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handles: list[Any] = []

    def look(self, module: Any) -> None:
        """Finds the sharded parts of a module: a trainer may shard them long after the module was passed to us."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        kind = getattr(fsdp, "FSDPModule", None)
        if kind is None:
            return
        for part in parts(module):
            if isinstance(part, kind) and part not in self._parts:
                self._parts.add(part)
                # Behind FSDP2's own, which gathers. The outermost module's forward has begun with the hooks that it had: its parts are
                # asked in its place.
                for asked in (part, *(_own(part, kind) if part is module else ())):
                    self._handles.append(asked.register_forward_pre_hook(_Gathered(weakref.ref(self))))

    def add(self, storage: Any) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        if storage._cdata in self.storages:
            return
        if len(self.storages) >= self._full:
            self.storages = {number: held for number, held in self.storages.items() if not held.expired()}
            self._full = max(64, 2 * len(self.storages))
        weak: Any = StorageWeakRef
        self.storages[storage._cdata] = weak(storage)

    def remove(self) -> None:
        """Removes the hooks. Repeated calls do nothing."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._parts.clear()


def _own(part: Any, kind: Any) -> Iterator[Any]:
    """Returns the parts of a sharded module that are sharded with it."""
    for child in part._modules.values():
        if child is not None and not isinstance(child, kind):
            yield child
            yield from _own(child, kind)


class _Gathered:
    def __init__(self, unsharded: weakref.ref[Unsharded]) -> None:
        self._unsharded = unsharded

    def __call__(self, part: Any, _inputs: Any) -> None:
        from torch.distributed.tensor import DTensor

        unsharded = self._unsharded()
        if unsharded is not None:
            for parameter in parameters(part):
                # What is still sharded belongs to a part of its own within this one.
                if not isinstance(parameter, DTensor) and parameter.device.type != "meta":
                    unsharded.add(parameter.untyped_storage())
