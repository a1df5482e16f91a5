"""Packing and unpacking of saved tensors: the hooks of one site."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import warnings
from typing import Any
from weakref import WeakSet, ref

from .. import _library
from ..errors import Error
from . import _report
from ._memory import Memory, is_shortage
from ._narrow import Form, form_of
from ._parts import buffers, parameters
from ._proofs import Proofs
from ._place import Streamed
from ._saved import Away, Entry, Kept, KeptSubclass, Stored
from ._unsharded import Unsharded

# Verdicts of a site about an item: keep, offload, or recompute.
KEEP, OFFLOAD, RECOMPUTE = range(3)
# Role of an item in a leaf: none, its output, or saved beside an output that was packed just before.
NO_LEAF, OUTPUT, BESIDE = range(3)
# States of a save: to be checked; its bytes changed.
_DUE, _CHANGED = 0, 2
# Autograd's names for the operation of a cast.
_CAST = "ToCopyBackward0"
# Period of the search for a module's storages, in forwards.
_LOOK_AGAIN = 128


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


# Whether it was told in this process.
_is_foreign_told = False


def _tell_foreign(address: int) -> None:
    """Warns once if a tensor stayed because its memory is not GLake's, and not for lack of host memory."""
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


_packers: WeakSet[Packer] = WeakSet()
# Whether this is a forked child, whose parent may have the GPU.
_is_child = False


def _renew_locks() -> None:
    """Replaces the locks in a forked child, whose other threads do not exist."""
    global _is_child
    _is_child = True
    for packer in list(_packers):
        packer._lock, packer._is_parents = threading.RLock(), True


os.register_at_fork(after_in_child=_renew_locks)


class Packer:
    """The hooks of one site."""

    def __init__(self, least: int, memory: Memory) -> None:
        import torch

        self.least, self.memory = least, memory
        self._tensor, self._parameter, self._new = torch.Tensor, torch.nn.Parameter, torch.empty
        self._is_inference, self._inference_mode = torch.is_inference_mode_enabled, torch.inference_mode
        self._strided, self._lower = torch.strided, (torch.bfloat16, torch.float16)
        self._lock = threading.RLock()
        # Whether its parent has the GPU.
        self._is_parents = False
        _packers.add(self)
        if not _is_child:
            # Problems of this machine are reported now, except in a forked child, which may only need a copy of a model.
            _ = self.site
        self._copy_out, self._is_private = _library.api().offload_begin, _library.api().is_private
        # Of the pass that is under way, by item; and by storage, range, version and form. What is gone is not taken out before the next
        # pass: that would cost each pack more.
        self._items: dict[int, ref[Entry]] = {}
        self._known: dict[tuple[Any, ...], ref[Entry]] = {}
        self._proofs = Proofs()
        self._is_told = self._is_failure_told = False
        self._empty: dict[Any, Any] = {}
        self._stays: frozenset[int] = frozenset()
        # Sizes and strides of parameters that autocast would cast, where a module is known.
        self._cast: frozenset[tuple[Any, Any]] | None = None
        self.unsharded = Unsharded()
        self._looks = 0
        # Number of items reported to the site.
        self.added = 0
        # Weights of the model that stream.
        self.weights: Any = None

    @functools.cached_property
    def site(self) -> Any:
        """Returns the library's site of its passes."""
        return _library.api().Site()

    def enter(self, module: Any = None) -> None:
        """Begins a forward. Between two forwards, bytes may change without a version counter, and a module's parameters may move
        to other storages.
        """
        with self._lock:
            self._known.clear()
            if module is not None:
                if self._looks < 2 or self._looks % _LOOK_AGAIN == 0:
                    self._look(module)
                self._looks += 1

    def _look(self, module: Any) -> None:
        import torch

        # Subclasses are not asked what the program does not ask them.
        with torch._C.DisableTorchFunctionSubclass():
            held = [tensor for tensor in itertools.chain(parameters(module), buffers(module)) if _has_bytes(tensor)]
            self._stays = frozenset(tensor.untyped_storage()._cdata for tensor in held)
            wide = (tensor for tensor in held if tensor.dtype == torch.float32 and isinstance(tensor, self._parameter))
            self._cast = frozenset((tensor.size(), tensor.stride()) for tensor in wide)
        self.unsharded.look(module)

    def pack(self, tensor: Any) -> Kept | Away | Streamed:
        # Items outside of leaves are never recomputed.
        return self._pack(tensor, -1, NO_LEAF)  # type: ignore[return-value]

    def store(self, tensor: Any, scope: int, part: int) -> Stored | None:
        """Stores a part of a leaf of a checkpoint, given by its number in the pass. None: it is not stored, the leaf has to be
        recomputed.
        """
        saved = self._pack(tensor, scope, part)
        return None if saved is None else Stored(self, saved)

    def untimed(self, like: Any) -> None:
        """Marks this pass as untimed: it computes more of a tensor than later passes."""
        if self.memory.owns(like):
            self.site.untimed()

    def leaf_begins(self, like: Any) -> None:
        """Begins the computation of a leaf from a tensor."""
        # A part of a model may be elsewhere.
        if self.memory.owns(like):
            self.site.leaf_begins()

    def replays(self, scope: int, device: Any, begins: bool) -> None:
        """Marks the beginning or the end of a checkpoint's recomputation."""
        like = None if device is None or self._is_parents else self._like(None, device)
        if like is not None and self.memory.owns(like):
            self.site.replays(scope, begins)

    def _pack(self, tensor: Any, scope: int, part: int) -> Kept | Away | Streamed | None:
        streamed: Streamed | None = None if self.weights is None else self.weights.saved(tensor)
        if streamed is not None:
            return streamed
        # The cheapest questions first: most of what is saved is small.
        kind = type(tensor)
        if kind is not self._tensor:
            return Kept(tensor) if kind is self._parameter else KeptSubclass(tensor)
        if tensor.layout is not self._strided or tensor.nbytes < self.least or tensor.is_nested:
            return Kept(tensor)
        base = tensor._base
        source = tensor if base is None else base
        made_by = source.grad_fn
        # Same as its name(), which creates a new string each time.
        maker = type(made_by).__name__
        if tensor.numel() == 0 or not self._may_leave(tensor, source) or self._is_of_parameter(tensor, source, made_by, maker):
            return Kept(tensor)
        storage = tensor.untyped_storage()
        cdata = storage._cdata
        if cdata in self._stays or cdata in self.unsharded.storages:
            return Kept(tensor)
        if self._is_private(tensor.data_ptr()):
            # A graph's memory, or a MemPool's: its owner knows which of its blocks are live. A checkpoint drops them itself.
            return Kept(tensor) if scope < 0 else None
        each, whole, version = tensor.element_size(), storage.nbytes(), tensor._version
        first = tensor.storage_offset() * each
        start, size, is_shared = first, tensor.nbytes, False
        if not _is_dense(tensor):
            size = (sum((count - 1) * stride for count, stride in zip(tensor.size(), tensor.stride())) + 1) * each
            if 4 * tensor.nbytes >= whole and base is not None:
                # Its neighbours are often saved too, as parts of one projection are.
                start, size, is_shared = 0, whole, True
        like = self._like(tensor.dtype, tensor.device)
        with self._lock:
            # Tensors may share a storage and count its changes each by themselves, as parts of an unsafe_chunk do: what was changed has its copy
            # with its own views alone.
            owner = None if version == 0 else source
            entry = self._find(owner, cdata, 0, whole, version)
            if entry is None and owner is None:
                # Views of it have already caused the copy.
                entry = self._find(source, cdata, 0, whole, version)
            if entry is None and size != whole:
                entry = self._find(owner, cdata, start, size, version)
            form = None if entry is not None or is_shared else form_of(tensor, start, size)
            if form is not None and form.key is not None:
                entry = self._find(owner, cdata, start, size, version, form.key)
            is_new = entry is None
            if entry is None:
                entry = self._add(tensor, base if is_shared else owner, storage, like, start, size, form, maker, scope, part)
                if entry is None:
                    return None
            # It counts the same changes: without bytes where they are offloaded. Else it holds the storage as a tensor does, for those who count
            # tensors alone, as graph trees do.
            alias = tensor.detach()
            if entry.packed is not None:
                alias.data = like
            if is_new:
                entry.alias = alias
            else:
                _report.counts.merged += 1
            return Away(tensor, alias, made_by if base is None else tensor.grad_fn, entry, first - entry.start)

    def unpack(self, saved: Kept | Away | Streamed) -> Any:
        if self._is_inference():
            # As without hooks, the result is not a tensor of that mode.
            with self._inference_mode(False):
                return self.unpack(saved)
        if isinstance(saved, (Kept, Streamed)):
            return saved.read()
        with self._lock:
            site = saved.entry.site
            begins = site.unpacked(saved.entry.item)
            # Of an earlier site's items nothing is known any more: they come when they are read.
            if site is self.site:
                self._begin(begins)
            return saved.read()

    def _may_leave(self, tensor: Any, source: Any) -> bool:
        """Whether the saved bytes of a tensor are its own, and can be copied and restored under the same tensor."""
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor() or not self.memory.owns(tensor):
            return False
        return type(source) is self._tensor or not isinstance(source, self._parameter)

    def _is_of_parameter(self, tensor: Any, source: Any, made_by: Any, maker: str) -> bool:
        """Whether autocast produced the tensor from a parameter."""
        if maker == _CAST:
            before = made_by.next_functions
            return bool(before) and isinstance(getattr(before[0][0], "variable", None), self._parameter)
        # Of a cast without gradients, as one of a frozen parameter is, nothing is recorded. What else has neither a gradient nor other sizes and
        # strides than a parameter is seldom, and stays with them.
        if source.requires_grad or source.dtype not in self._lower:
            return False
        if self._cast is not None:
            return (source.size(), source.stride()) in self._cast
        # Without a known module: the layout of linear layers.
        return source is not tensor and tensor.dim() == 2 and tensor.stride() == (1, tensor.size(0)) and tensor.numel() == source.numel()

    def _find(self, owner: Any, cdata: int, start: int, size: int, version: int, form: Any = None) -> Entry | None:
        known = self._known.get((cdata, start, size, version, form, id(owner)))
        entry = None if known is None else known()
        if entry is None or entry.is_dropped or (owner is not None and (entry.owner is None or entry.owner() is not owner)):
            return None
        # The first save's version counter may not apply to this save, as with .data.
        return None if entry.alias is None or entry.alias._version != version else entry

    def _add(
        self, tensor: Any, owner: Any, storage: Any, like: Any, start: int, size: int, form: Form | None, maker: str, scope: int, part: int
    ) -> Entry | None:
        """Creates the next item of the pass, made by an operation, for all saves of it, or for one tensor and its views. None:
        it belongs to a leaf to be recomputed.
        """
        stream = self.memory.stream(tensor)
        item, verdict, begins = self.site.packed(size, None if form is None else form.size, scope, part, stream)
        # At once: whatever is raised from here on, the site is told that nobody has the item.
        entry = None if verdict == RECOMPUTE else Entry(self.site, item, self.memory, start, size)
        self.added += 1
        if item == 0:
            self._items.clear()
            self._known.clear()
            self._proofs.settle()
        if begins:
            self._begin(begins)
        if entry is None:
            return None
        self._items[item] = known = ref(entry)
        if verdict == OFFLOAD:
            # The same in each pass of sizes like these (of one eighth of an octave), and seldom another's: for others there may be other kernels.
            # The proof of one form does not apply to another.
            octave, kind = size.bit_length(), None if form is None else form.kind
            save = hash((item, tensor.dtype, tensor.dim(), maker, octave, size >> max(octave - 4, 0), kind)) & (1 << 64) - 1
            self._offload(entry, tensor, storage, stream, form, save)
        if entry.packed is None:
            entry.kept = storage
        else:
            entry.left(storage, like)
        if owner is not None:
            entry.owner = ref(owner)
        key = None if entry.form is None else entry.form.key
        self._known[storage._cdata, start, size, tensor._version, key, id(owner)] = known
        return entry

    def _offload(self, entry: Entry, tensor: Any, storage: Any, stream: int, form: Form | None, save: int) -> None:
        """Offloads the bytes of an item, unless the plan keeps it."""
        try:
            state = self.site.check(save)
            if state == _CHANGED:
                self._tell(tensor, entry.item)
                return
            if state == _DUE:
                entry.packed = self.site.offload_checked(stream, self.memory.address(storage) + entry.start, entry.size, save)
                if form is not None:
                    self._proofs.look(save, form, storage, entry.start)
            else:
                if form is not None and self._proofs.hold(save):
                    self._narrow(entry, storage, stream, form)
                if entry.packed is None:
                    entry.packed = self._copy_out(stream, self.memory.address(storage) + entry.start, entry.size)
            if entry.packed is None:
                _tell_foreign(self.memory.address(storage))
        except Error as error:
            # The program did nothing that could fail: without hooks it has the tensor.
            self._tell_failed(error)
        if entry.packed is None:
            _report.counts.stayed += 1

    def _narrow(self, entry: Entry, storage: Any, stream: int, form: Form) -> None:
        """Offloads the bytes of an item in a narrow form, if there is memory for it."""
        try:
            narrow = form.pack(storage, entry.start).untyped_storage()
        except RuntimeError as error:
            if not is_shortage(error):
                raise
            return
        entry.packed = self._copy_out(stream, self.memory.address(narrow), form.size)
        if entry.packed is not None:
            entry.form = form
            _report.counts.narrowed += entry.size - form.size

    def _tell(self, tensor: Any, item: int) -> None:
        if not self._is_told:
            self._is_told = True
            _warn(
                f"a saved tensor's bytes changed before it was freed, and its version did not: {tensor.dtype} {list(tensor.shape)}, "
                f"item {item} of the pass. A kernel writes in place without telling autograd. What was offloaded of it was copied again; "
                "such tensors stay on the GPU from now on (glake.offload.report() counts them in 'changed')"
            )

    def _tell_failed(self, error: Error) -> None:
        if not self._is_failure_told:
            self._is_failure_told = True
            _warn(f"a saved tensor could not be copied, and stays on the GPU as others may (glake.offload.report() counts them in 'stayed'): {error}")

    def _begin(self, items: list[int]) -> None:
        """Begins the reloads that the plan starts now. One that fails is reloaded when it is read."""
        for item in items:
            known = self._items.get(item)
            entry = None if known is None else known()
            if entry is not None and not entry.is_dropped:
                try:
                    entry.begin()
                except RuntimeError as error:
                    if not is_shortage(error) and not isinstance(error, Error):
                        raise
                    return

    def _like(self, kind: Any, device: Any) -> Any:
        """Returns a tensor of the same kind without bytes."""
        empty = self._empty.get((kind, device))
        if empty is None:
            empty = self._empty[kind, device] = self._new(0, dtype=kind, device=device)
        return empty


def _is_dense(tensor: Any) -> bool:
    """Whether the elements fill one range of bytes, in any order."""
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
    import torch
    from torch.nn.parameter import is_lazy

    plain = not is_lazy(tensor) and tensor.device.type != "meta" and not tensor.is_nested
    return plain and tensor.layout is torch.strided and not tensor.is_quantized
