"""What stands in autograd's graph in place of saved tensors, and how they are packed and unpacked."""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from typing import Any

from .. import _library
from ..errors import Error
from . import _report
from ._memory import Memory
from ._narrow import Form, form_of
from ._proofs import Proofs
from ._unsharded import Unsharded

# What a site says of an item: it stays, leaves, or is computed again.
KEEP, OFFLOAD, RECOMPUTE = range(3)
# Of the memory that torch hands out.
ALIGNMENT = 512
# What is known of a save: it is to be checked; its bytes changed.
_DUE, _CHANGED = 0, 2
# How often it is looked anew whose storages a module has.
_LOOK_AGAIN = 128

_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: [{kind} {shape}] is at version "
    "{found}; expected version {saved} instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
    "with torch.autograd.set_detect_anomaly(True)."
)


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


# Whether it was told in this process.
_is_foreign_told = False


def _tell_foreign(address: int) -> None:
    """Where a tensor stayed because its memory is not GLake's, and not for want of host memory, that is told once."""
    global _is_foreign_told
    if _is_foreign_told:
        return
    try:
        _library.api().generation(address)
    except Error:
        _is_foreign_told = True
        _warn(
            "a saved tensor's memory is not GLake's, and stays on the GPU: glake.enable() has to be called before the first use of CUDA "
            "(glake.offload.report() counts such tensors in 'stayed')"
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
        if not self.is_intact():
            raise _modified(self._tensor, self._saved, self._tensor.shape)
        return self._tensor

    def is_intact(self) -> bool:
        """Whether it was not changed since."""
        return bool(self._tensor._version == self._saved)


class Entry:
    """A range of bytes of a storage, as it was at one time: one item of the pass, for all that saved it."""

    def __init__(self, site: Any, item: int, memory: Memory, start: int, size: int) -> None:
        self._site, self.item, self._memory = site, item, memory
        self.start, self.size = start, size
        self.is_dropped = False
        # It comes back with the alignment that it had: kernels are chosen by that.
        self._pad = start % ALIGNMENT
        # What it is read from where it stays; else what was offloaded, in which form, and a tensor of its kind.
        self.kept: Any = None
        self.packed: Any = None
        self.form: Form | None = None
        self.like: Any = None
        # Held weakly, so that its number is no other storage's; and where it lies.
        self.storage: Any = None
        self.place: tuple[int, int] = (0, 0)
        self.saves, self._reads = 0, 0
        # What it comes back to, and on which stream that was taken; what it is read from, and where it begins there.
        self._coming: Any = None
        self._stream = 0
        self._found: tuple[Any, int] | None = None

    def __del__(self) -> None:
        # Another thread may find it as long as it is not gone.
        self.is_dropped = True
        self._site.dropped(self.item)

    def begin(self) -> None:
        """Begins to bring it back to memory of the current stream, where it is away."""
        if self.packed is None or self._coming is not None or self._found is not None:
            return
        storage = self._still_there()
        if storage is not None:
            self._found = storage, self.start
            return
        pad, size = (self._pad, self.size) if self.form is None else (0, self.form.size)
        coming, address = self._memory.take(self.like, pad + size)
        self._stream = self._memory.stream(self.like)
        self.packed.begin(self._stream, address + pad)
        self._coming = coming

    def read(self) -> tuple[Any, int]:
        """A storage that has its bytes, for the current stream, and where they begin there. It stays until all that saved them have read it."""
        if self.packed is None:
            return self.kept, self.start
        stream = self._memory.stream(self.like)
        if self.form is not None and self._coming is None and self._stream != stream:
            # What was unpacked on another stream may not be there yet: it comes once more.
            self._found = None
        self.begin()
        found = self._found
        if found is None or self._coming is not None:
            found = self._found = self._arrive(stream)
        self._reads += 1
        if self._reads >= self.saves:
            # Read once more, as of a graph that is retained, it comes back again.
            self._coming = self._found = None
            self._reads = 0
            self._site.freed(self.item)
        return found

    def _arrive(self, stream: int) -> tuple[Any, int]:
        self._memory.wait(self.packed, stream)
        if stream != self._stream:
            self._memory.use(self.like, self._coming)
        if self.form is None:
            # Each stream that reads it waits.
            return self._coming, self._pad
        storage, _ = self._memory.take(self.like, self._pad + self.size)
        self.form.unpack(self._coming, storage, self._pad)
        self._coming, self._stream = None, stream
        return storage, self._pad

    def _still_there(self) -> Any:
        """The storage itself, which somebody else has kept: it has what autograd would have read, whatever wrote to it."""
        import torch

        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return storage if storage is not None and (storage.data_ptr(), storage.nbytes()) == self.place else None


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

        if not self.is_intact():
            raise _modified(self._alias, self._saved, self._size)
        storage, start = self.entry.read()
        view = torch.empty(0, dtype=self._dtype, device=storage.device)
        return view.set_(storage, (start + self._offset) // view.element_size(), self._size, self._stride)

    def is_intact(self) -> bool:
        """Whether it was not changed since."""
        # It counts the changes of what was saved, whatever bytes it has.
        return bool(self._alias._version == self._saved)


class Stored:
    """What a leaf gave, or saved beside: an item outside of autograd's graph. It is read as often as needed."""

    __slots__ = ("_packer", "_saved")

    def __init__(self, packer: Packer, saved: Kept | Away) -> None:
        self._packer, self._saved = packer, saved

    def is_intact(self) -> bool:
        """Whether what was stored was not changed since: else its copy may be of any moment."""
        return self._saved.is_intact()

    def read(self) -> Any:
        """The tensor, for the current stream. What is kept is the same each time."""
        return self._packer.unpack(self._saved)


class Packer:
    """The hooks of one site."""

    def __init__(self, least: int, memory: Memory) -> None:
        import torch
        from torch.multiprocessing.reductions import StorageWeakRef

        self.least, self.memory = least, memory
        self._tensor, self._parameter, self._weak = torch.Tensor, torch.nn.Parameter, StorageWeakRef
        self._lock = threading.RLock()
        self.site = self._site = _library.api().Site()
        # Of the pass that is under way, by item; and by storage, range and version.
        self._items: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], Entry] = weakref.WeakValueDictionary()
        self._proofs = Proofs()
        self._is_told = False
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
        # What is no leaf is never computed again.
        return self._pack(tensor, -1, False)  # type: ignore[return-value]

    def store(self, tensor: Any, scope: int, is_leaf: bool) -> Stored | None:
        """Of a checkpoint, by its number in the pass, what one of its leaves gave; or what that saved beside, which is no leaf's item. None:
        nothing is stored, it is to be computed again."""
        saved = self._pack(tensor, scope, is_leaf)
        return None if saved is None else Stored(self, saved)

    def leaf_begins(self, like: Any) -> None:
        """A leaf is about to be computed, on the current stream of a tensor."""
        # A part of a model may be elsewhere.
        if self.memory.owns(like):
            self._site.leaf_begins(self.memory.stream(like))

    def replays(self, scope: int, device: Any, begins: bool) -> None:
        """A checkpoint is computed again from here, or until here."""
        like = None if device is None else self._like(None, device)
        if like is not None and self.memory.owns(like):
            self._site.replays(scope, self.memory.stream(like), begins)

    def _pack(self, tensor: Any, scope: int, is_leaf: bool) -> Kept | Away | None:
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
        start, size, whole, is_shared = first, tensor.nbytes, storage.nbytes(), False
        if not _is_dense(tensor):
            size = (sum((count - 1) * stride for count, stride in zip(tensor.size(), tensor.stride())) + 1) * each
            if 4 * tensor.nbytes >= whole:
                # Its neighbours are often saved too, as parts of one projection are.
                start, size, is_shared = 0, whole, True
        with self._lock:
            entry = self._find(storage, 0, whole, tensor._version) or self._find(storage, start, size, tensor._version)
            form = None if entry is not None or is_shared else form_of(tensor, start, size)
            if form is not None and form.key is not None:
                entry = self._find(storage, start, size, tensor._version, form.key)
            if entry is None:
                entry = self._add(tensor, storage, start, size, form, scope, is_leaf)
                if entry is None:
                    return None
            else:
                _report.counts.merged += 1
            return Away(tensor, self._alias(tensor), entry, first - entry.start)

    def unpack(self, saved: Kept | Away) -> Any:
        if isinstance(saved, Kept):
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

    def _find(self, storage: Any, start: int, size: int, version: int, form: Any = None) -> Entry | None:
        entry = self._known.get((storage._cdata, start, size, version, form))
        return None if entry is None or entry.is_dropped else entry

    def _add(self, tensor: Any, storage: Any, start: int, size: int, form: Form | None, scope: int, is_leaf: bool) -> Entry | None:
        """The next item of the pass. None: it is a leaf's, and to be computed again."""
        stream = self.memory.stream(tensor)
        item, verdict, begins = self._site.packed(size, None if form is None else form.size, scope, is_leaf, stream)
        entry = self._items[item] = Entry(self._site, item, self.memory, start, size)
        self._begin(begins)
        if item == 0:
            self._proofs.settle()
        if verdict == RECOMPUTE:
            return None
        if verdict == OFFLOAD:
            self._offload(entry, tensor, storage, form)
        if entry.packed is None:
            entry.kept = storage
        else:
            entry.storage, entry.like = self._weak(storage), self._alias(tensor)
            entry.place = storage.data_ptr(), storage.nbytes()
        key = None if entry.form is None else entry.form.key
        self._known[storage._cdata, start, size, tensor._version, key] = entry
        return entry

    def _offload(self, entry: Entry, tensor: Any, storage: Any, form: Form | None) -> None:
        """Copies what an item has, unless it is to stay."""
        import torch

        function = (tensor._base if tensor._is_view() else tensor).grad_fn
        # The same in each pass, and seldom another's.
        save = hash((entry.item, tensor.dtype, tensor.dim(), None if function is None else function.name())) & (1 << 64) - 1
        state = self._site.check(save)
        if state == _CHANGED:
            self._tell(tensor, entry.item)
            return
        stream = self.memory.stream(tensor)
        if state == _DUE:
            entry.packed = self._site.offload_checked(stream, self.memory.address(storage) + entry.start, entry.size, save)
            if form is not None:
                self._proofs.look(save, form, storage, entry.start)
        elif form is not None and self._proofs.hold(save):
            try:
                narrow = form.pack(storage, entry.start).untyped_storage()
            except torch.OutOfMemoryError:
                form = None
            else:
                entry.packed = _library.api().offload_begin(stream, self.memory.address(narrow), form.size)
                entry.form = None if entry.packed is None else form
                _report.counts.narrowed += 0 if entry.packed is None else entry.size - form.size
        if entry.packed is None and state != _DUE and entry.form is None:
            entry.packed = _library.api().offload_begin(stream, self.memory.address(storage) + entry.start, entry.size)
        if entry.packed is None:
            _report.counts.stayed += 1
            _tell_foreign(self.memory.address(storage))

    def _tell(self, tensor: Any, item: int) -> None:
        if not self._is_told:
            self._is_told = True
            _warn(
                f"a saved tensor's bytes changed before it was freed, and its version did not: {tensor.dtype} {list(tensor.shape)}, "
                f"item {item} of the pass. A kernel writes in place without telling autograd. What was offloaded of it was copied again; "
                "such tensors stay on the GPU from now on (glake.offload.report() counts them in 'changed')"
            )

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
        alias.data = self._like(tensor.dtype, tensor.device)
        return alias

    def _like(self, kind: Any, device: Any) -> Any:
        """A tensor without bytes."""
        import torch

        empty = self._empty.get((kind, device))
        if empty is None:
            empty = self._empty[kind, device] = torch.empty(0, dtype=kind, device=device)
        return empty


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
