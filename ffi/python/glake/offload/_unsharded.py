"""The memory that FSDP2 gathers parameters into: it is filled anew for each pass, and never leaves."""

from __future__ import annotations

import sys
import weakref
from typing import Any


class Unsharded:
    """Storages of gathered parameters. They are there only from a part's first forward on, and are the same from then on: FSDP2 gives
    their bytes back after each use, and keeps the storage objects."""

    def __init__(self) -> None:
        self.storages: set[int] = set()
        self._parts: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handles: list[Any] = []

    def look(self, module: Any) -> None:
        """Which parts of a module are sharded: a trainer may shard them long after the module was given to us."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        kind = getattr(fsdp, "FSDPModule", None)
        if kind is None:
            return
        for part in module.modules():
            if isinstance(part, kind) and part not in self._parts:
                self._parts.add(part)
                # Behind FSDP2's own, which gathers.
                self._handles.append(part.register_forward_pre_hook(_Gathered(weakref.ref(self))))

    def remove(self) -> None:
        """Takes the hooks off. A second time does nothing."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._parts.clear()


class _Gathered:
    def __init__(self, unsharded: weakref.ref[Unsharded]) -> None:
        self._unsharded = unsharded

    def __call__(self, part: Any, _inputs: Any) -> None:
        from torch.distributed.tensor import DTensor

        unsharded = self._unsharded()
        if unsharded is not None:
            # What is still sharded belongs to a part of its own within this one.
            whole = [p for p in part.parameters() if not isinstance(p, DTensor) and p.device.type != "meta"]
            unsharded.storages.update(p.untyped_storage()._cdata for p in whole)
