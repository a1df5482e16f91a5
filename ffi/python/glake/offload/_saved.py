"""What stands in autograd's graph in place of saved tensors, and how they are packed and unpacked."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from .. import _library
from . import _report
from ._memory import Memory

# Of the memory that torch hands out.
ALIGNMENT = 512

_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: [{kind} {shape}], which is output "
    "{place} of {function}, is at version {found}; expected version {saved} instead. Hint: enable anomaly detection to find the operation "
    "that failed to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
)


class Version:
    """What a tensor was when it was saved: hooks turn autograd's own check off."""

    __slots__ = ("_alias", "_function", "_output", "_saved")

    def __init__(self, tensor: Any, alias: Any) -> None:
        # It shares the counter of the tensor's changes, whatever bytes it has.
        self._alias, self._saved = alias, alias._version
        function = tensor.grad_fn
        self._function = None if function is None else function.name()
        self._output = tensor.output_nr

    def check(self, shape: Any) -> None:
        found = self._alias._version
        if found == self._saved:
            return
        kind = self._alias.type()
        function = self._function or "a leaf"
        raise RuntimeError(
            _MODIFIED.format(
                kind=kind, shape=list(shape), place=self._output, function=function, found=found, saved=self._saved
            )
        )


class Kept:
    """A tensor that stays. Detached: an operation's own output would hold itself for ever."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor.detach()
        self._version = Version(tensor, self._tensor)

    def read(self) -> Any:
        self._version.check(self._tensor.shape)
        return self._tensor


class Entry:
    """A range of bytes of a storage, as it was at one time: one item of the pass, for all that saved it."""

    def __init__(self, place: Any, item: int, memory: Memory, start: int, size: int) -> None:
        self._place, self.item, self._memory = place, item, memory
        self.start, self.size = start, size
        # It comes back with the alignment that it had: kernels are chosen by that.
        self._pad = start % ALIGNMENT
        # What it is read from, and what that is like: its own storage where it stays, else what was offloaded of it.
        self.kept: Any = None
        self.packed: Any = None
        self.like: Any = None
        # Held weakly, so that its number is no other storage's.
        self.storage: Any = None
        self.saves, self._reads = 0, 0
        self._loaded: Any = None

    def __del__(self) -> None:
        self._place.dropped(self.item)

    def begin(self) -> None:
        """Begins to bring it back to memory of the current stream, where it is away."""
        if self.packed is None or self._loaded is not None:
            return
        storage, address = self._memory.take(self.like, self._pad + self.size)
        self.packed.begin(self._memory.stream(self.like), address + self._pad)
        self._loaded = storage

    def read(self) -> tuple[Any, int]:
        """A storage that has its bytes, for the current stream, and where they begin there. It stays until all that saved them have read it."""
        if self.packed is None:
            return self.kept, self.start
        self.begin()
        self.packed.wait(self._memory.stream(self.like))
        storage, self._reads = self._loaded, self._reads + 1
        if self._reads >= self.saves:
            # Read once more, as of a graph that is retained, it comes back again.
            self._loaded, self._reads = None, 0
            self._place.freed(self.item)
        return storage, self._pad


class Away:
    """A tensor whose bytes are offloaded."""

    __slots__ = ("_dtype", "_entry", "_layout", "_version")

    def __init__(self, tensor: Any, alias: Any, entry: Entry) -> None:
        entry.saves += 1
        self._entry, self._dtype = entry, tensor.dtype
        self._layout = (tensor.size(), tensor.stride())
        self._version = Version(tensor, alias)

    def read(self) -> Any:
        import torch

        size, stride = self._layout
        self._version.check(size)
        storage, start = self._entry.read()
        view = torch.empty(0, dtype=self._dtype, device=storage.device)
        return view.set_(storage, start // view.element_size(), size, stride)

    @property
    def item(self) -> int:
        return self._entry.item


class Packer:
    """The hooks of one place that offloads."""

    def __init__(self, least: int, memory: Memory) -> None:
        self._least, self._memory = least, memory
        self._place = _library.api().Place()
        # Of the pass that is under way, by item; and by storage, range and version.
        self._items: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()
        self._known: weakref.WeakValueDictionary[tuple[int, int, int, int], Entry] = weakref.WeakValueDictionary()
        self._empty: dict[Any, Any] = {}
        self._stays: set[int] = set()

    def stay(self, module: Any) -> None:
        """What a module has now stays, whatever saves it: its parameters' storages are others after each gathering of FSDP."""
        held = itertools.chain(module.parameters(), module.buffers())
        self._stays = {tensor.untyped_storage()._cdata for tensor in held if _has_bytes(tensor)}

    def pack(self, tensor: Any) -> Kept | Away:
        where = self._where(tensor)
        if where is None:
            return Kept(tensor)
        start, size = where
        storage = tensor.untyped_storage()
        if storage._cdata in self._stays:
            return Kept(tensor)
        key = (storage._cdata, start, size, tensor._version)
        entry = self._known.get(key)
        if entry is None:
            entry = self._known[key] = self._add(tensor, storage, start, size)
        else:
            _report.counts.merged += 1
        return Away(tensor, self._alias(tensor), entry)

    def unpack(self, saved: Kept | Away) -> Any:
        if isinstance(saved, Away):
            self._begin(self._place.unpacked(saved.item))
        return saved.read()

    def _begin(self, items: list[int]) -> None:
        """Reloads that the plan has begin now. What there is no memory for comes back when it is read."""
        import torch

        for item in items:
            entry = self._items.get(item)
            if entry is not None:
                try:
                    entry.begin()
                except torch.OutOfMemoryError:
                    return

    def _where(self, tensor: Any) -> tuple[int, int] | None:
        """Where its bytes begin in its storage and how many they are; None: it stays."""
        import torch

        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.numel() == 0:
            return None
        each = tensor.element_size()
        size = (sum((count - 1) * stride for count, stride in zip(tensor.size(), tensor.stride())) + 1) * each
        if size < self._least or not self._memory.owns(tensor) or _is_parameter(tensor):
            return None
        return tensor.storage_offset() * each, size

    def _add(self, tensor: Any, storage: Any, start: int, size: int) -> Entry:
        """The next item of the pass."""
        from torch.multiprocessing.reductions import StorageWeakRef

        item, is_offloaded, begins = self._place.packed(size)
        self._begin(begins)
        entry = self._items[item] = Entry(self._place, item, self._memory, start, size)
        if is_offloaded:
            address = self._memory.address(storage)
            entry.packed = _library.api().offload_begin(self._memory.stream(tensor), address + start, size)
            _report.counts.refused += entry.packed is None
        if entry.packed is None:
            entry.kept = storage
        else:
            entry.storage, entry.like = StorageWeakRef(storage), self._alias(tensor)
        return entry

    def _alias(self, tensor: Any) -> Any:
        """A tensor without bytes that counts the same changes."""
        import torch

        alias = tensor.detach()
        kind = (tensor.dtype, tensor.device)
        empty = self._empty.get(kind)
        if empty is None:
            empty = self._empty[kind] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.data = empty
        return alias


def _has_bytes(tensor: Any) -> bool:
    import torch

    return tensor.layout is torch.strided and tensor.device.type != "meta"


def _is_parameter(tensor: Any) -> bool:
    """Whether it is a parameter's memory, or a cast of one that autocast made: both are there anyway."""
    import torch

    base = tensor._base if tensor._is_view() else None
    if isinstance(base, torch.nn.Parameter):
        return True
    function = tensor.grad_fn
    if function is None or function.name() != "ToCopyBackward0":
        return False
    before = function.next_functions
    return bool(before) and isinstance(getattr(before[0][0], "variable", None), torch.nn.Parameter)
