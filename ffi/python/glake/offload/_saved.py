"""What stands in autograd's graph in place of saved tensors, and how they are packed and unpacked."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

from .. import _library
from ..errors import Error
from . import _report
from ._memory import Memory
from ._unsharded import Unsharded

# Of the memory that torch hands out.
ALIGNMENT = 512
# How often it is looked anew whose storages a module has.
_LOOK_AGAIN = 128

_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: [{kind} {shape}] is at version "
    "{found}; expected version {saved} instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
    "with torch.autograd.set_detect_anomaly(True)."
)


def _modified(alias: Any, saved: int, shape: Any) -> RuntimeError:
    return RuntimeError(_MODIFIED.format(kind=alias.type(), shape=list(shape), found=alias._version, saved=saved))


class Kept:
    """A tensor that stays. Detached: an operation's own output would hold itself for ever."""

    __slots__ = ("_saved", "_tensor")

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor.detach()
        self._saved = self._tensor._version

    def read(self) -> Any:
        # Hooks turn autograd's own check off.
        if self._tensor._version != self._saved:
            raise _modified(self._tensor, self._saved, self._tensor.shape)
        return self._tensor


class Entry:
    """A range of bytes of a storage, as it was at one time: one item of the pass, for all that saved it."""

    def __init__(self, site: Any, item: int, memory: Memory, start: int, size: int) -> None:
        self._site, self.item, self._memory = site, item, memory
        self.start, self.size = start, size
        self.is_dropped = False
        # It comes back with the alignment that it had: kernels are chosen by that.
        self._pad = start % ALIGNMENT
        # What it is read from where it stays; else what was offloaded, and a tensor of its kind.
        self.kept: Any = None
        self.packed: Any = None
        self.like: Any = None
        # Held weakly, so that its number is no other storage's.
        self.storage: Any = None
        self.saves, self._reads = 0, 0
        # What it came back to, and on which stream that was taken.
        self._loaded: Any = None
        self._stream = 0

    def __del__(self) -> None:
        # Another thread may find it as long as it is not gone.
        self.is_dropped = True
        self._site.dropped(self.item)

    def begin(self) -> None:
        """Begins to bring it back to memory of the current stream, where it is away."""
        if self.packed is None or self._loaded is not None:
            return
        storage, address = self._memory.take(self.like, self._pad + self.size)
        self._stream = self._memory.stream(self.like)
        self.packed.begin(self._stream, address + self._pad)
        self._loaded = storage

    def read(self) -> tuple[Any, int]:
        """A storage that has its bytes, for the current stream, and where they begin there. It stays until all that saved them have read it."""
        if self.packed is None:
            return self.kept, self.start
        self.begin()
        stream = self._memory.stream(self.like)
        self.packed.wait(stream)
        storage, self._reads = self._loaded, self._reads + 1
        if stream != self._stream:
            self._memory.use(self.like, storage)
        if self._reads >= self.saves:
            # Read once more, as of a graph that is retained, it comes back again.
            self._loaded, self._reads = None, 0
            self._site.freed(self.item)
        return storage, self._pad


class Away:
    """A tensor whose bytes are offloaded."""

    __slots__ = ("_alias", "_dtype", "_offset", "_saved", "_size", "_stride", "entry")

    def __init__(self, tensor: Any, alias: Any, entry: Entry, offset: int) -> None:
        entry.saves += 1
        self.entry, self._dtype = entry, tensor.dtype
        # Of its first element, from where the entry begins, in bytes.
        self._offset, self._size, self._stride = offset, tensor.size(), tensor.stride()
        self._alias, self._saved = alias, alias._version

    def read(self) -> Any:
        import torch

        # It counts the changes of what was saved, whatever bytes it has.
        if self._alias._version != self._saved:
            raise _modified(self._alias, self._saved, self._size)
        storage, start = self.entry.read()
        view = torch.empty(0, dtype=self._dtype, device=storage.device)
        return view.set_(storage, (start + self._offset) // view.element_size(), self._size, self._stride)


class Packer:
    """The hooks of one site."""

    def __init__(self, least: int, memory: Memory) -> None:
        import torch
        from torch.multiprocessing.reductions import StorageWeakRef

        self.least, self.memory = least, memory
        self._tensor, self._parameter, self._weak = torch.Tensor, torch.nn.Parameter, StorageWeakRef
        self._lock = threading.RLock()
        self._site = _library.api().Site()
        # Of the pass that is under way, by item; and by storage, range and version.
        self._items: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()
        self._known: weakref.WeakValueDictionary[tuple[int, int, int, int], Entry] = weakref.WeakValueDictionary()
        self._empty: dict[Any, Any] = {}
        self._stays: frozenset[int] = frozenset()
        self.unsharded = Unsharded()
        self._looks = 0

    def enter(self, module: Any = None) -> None:
        """A forward begins. Between two forwards bytes may have changed in ways that no version counts, and a module's parameters may be in
        other storages."""
        with self._lock:
            self._known.clear()
            if module is not None:
                if self._looks < 2 or self._looks % _LOOK_AGAIN == 0:
                    held = itertools.chain(module.parameters(), module.buffers())
                    self._stays = frozenset(tensor.untyped_storage()._cdata for tensor in held if _has_bytes(tensor))
                    self.unsharded.look(module)
                self._looks += 1

    def pack(self, tensor: Any) -> Kept | Away:
        # The cheapest questions first: most of what is saved is small.
        if type(tensor) is not self._tensor or tensor.is_nested or tensor.is_sparse or tensor.nbytes < self.least:
            return Kept(tensor)
        if tensor.numel() == 0 or not self._may_leave(tensor):
            return Kept(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata in self._stays or storage._cdata in self.unsharded.storages:
            return Kept(tensor)
        each = tensor.element_size()
        first = tensor.storage_offset() * each
        start, size, whole = first, tensor.nbytes, storage.nbytes()
        if not _is_dense(tensor):
            size = (sum((count - 1) * stride for count, stride in zip(tensor.size(), tensor.stride())) + 1) * each
            if 4 * tensor.nbytes >= whole:
                # Its neighbours are often saved too, as parts of one projection are.
                start, size = 0, whole
        with self._lock:
            entry = self._find(storage, 0, whole, tensor._version) or self._find(storage, start, size, tensor._version)
            if entry is None:
                entry = self._add(tensor, storage, start, size)
            else:
                _report.counts.merged += 1
            return Away(tensor, self._alias(tensor), entry, first - entry.start)

    def unpack(self, saved: Kept | Away) -> Any:
        if type(saved) is Kept:
            return saved.read()
        with self._lock:
            self._begin(self._site.unpacked(saved.entry.item))
            return saved.read()

    def _may_leave(self, tensor: Any) -> bool:
        """Whether what is saved of a tensor is bytes of its own that can be copied and laid under the same tensor again."""
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or not self.memory.owns(tensor):
            return False
        source = tensor._base if tensor._is_view() else tensor
        if isinstance(source, self._parameter):
            return False
        # A cast of a parameter that autocast made: it is kept for the pass anyway.
        function = source.grad_fn
        if function is None or function.name() != "ToCopyBackward0":
            return True
        before = function.next_functions
        return not before or not isinstance(getattr(before[0][0], "variable", None), self._parameter)

    def _find(self, storage: Any, start: int, size: int, version: int) -> Entry | None:
        entry = self._known.get((storage._cdata, start, size, version))
        return None if entry is None or entry.is_dropped else entry

    def _add(self, tensor: Any, storage: Any, start: int, size: int) -> Entry:
        """The next item of the pass."""
        item, is_offloaded, begins = self._site.packed(size)
        entry = self._items[item] = Entry(self._site, item, self.memory, start, size)
        self._begin(begins)
        if is_offloaded:
            address = self.memory.address(storage)
            entry.packed = _library.api().offload_begin(self.memory.stream(tensor), address + start, size)
            _report.counts.stayed += entry.packed is None
        if entry.packed is None:
            entry.kept = storage
        else:
            entry.storage, entry.like = self._weak(storage), self._alias(tensor)
        self._known[storage._cdata, start, size, tensor._version] = entry
        return entry

    def _begin(self, items: list[int]) -> None:
        """Reloads that the plan has begin now. One that cannot comes back when it is read."""
        import torch

        for item in items:
            entry = self._items.get(item)
            if entry is not None and not entry.is_dropped:
                try:
                    entry.begin()
                except (torch.OutOfMemoryError, Error):
                    return

    def _alias(self, tensor: Any) -> Any:
        """A tensor without bytes that counts the same changes."""
        alias = tensor.detach()
        kind = (tensor.dtype, tensor.device)
        empty = self._empty.get(kind)
        if empty is None:
            empty = self._empty[kind] = alias.new_empty(0)
        alias.data = empty
        return alias


def _is_dense(tensor: Any) -> bool:
    """Whether its elements fill one range of bytes, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, count in sorted(zip(tensor.stride(), tensor.size())):
        if count != 1:
            if stride != expected:
                return False
            expected *= count
    return True


def _has_bytes(tensor: Any) -> bool:
    """Whether a parameter or buffer has a storage."""
    from torch.nn.parameter import is_lazy

    plain = not is_lazy(tensor) and tensor.device.type != "meta" and not tensor.is_nested
    return plain and not tensor.is_sparse and not tensor.is_quantized
