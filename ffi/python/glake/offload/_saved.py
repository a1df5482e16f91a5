"""Placeholders of saved tensors in autograd's graph."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from weakref import ref

from ._memory import Memory
from ._narrow import Form

if TYPE_CHECKING:
    from ._packer import Packer

# Alignment of torch's allocations.
ALIGNMENT = 512

_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: [{kind} {sizes}]{origin} is at version "
    "{found}; expected version {saved} instead.{hint}"
)


class Saved:
    """A tensor as autograd saved it. Hooks turn off autograd's own check for changes; this class repeats it."""

    __slots__ = ("_alias", "_number", "_output", "_tensor", "_version")

    def __init__(self, tensor: Any, alias: Any, made_by: Any) -> None:
        # Its version counts changes of the saved tensor, whatever bytes it has.
        self._alias, self._version = alias, alias._version
        # The rest is for what is said of a change. Nothing may hold the operation, which holds this.
        self._tensor, self._number = ref(tensor), -1
        if made_by is not None:
            self._number, self._output = made_by._sequence_nr(), tensor.output_nr

    def is_intact(self) -> bool:
        """Whether the tensor was not changed since."""
        return bool(self._alias._version == self._version)

    def _modified(self, sizes: Any) -> RuntimeError:
        kind, hint = _said(self._alias)
        said = {"kind": kind, "hint": hint, "sizes": sizes, "found": self._alias._version, "saved": self._version}
        operation, output = self._origin()
        origin = "" if operation is None else f", which is output {output} of {operation.name()},"
        return RuntimeError(_MODIFIED.format(origin=origin, **said))

    def _origin(self) -> tuple[Any, int]:
        """Returns the operation that the tensor comes from. For its own output, the current node; for an input, the last
        operation that changed it, or that created it if the input no longer exists.
        """
        import torch

        node, tensor = torch._C._current_autograd_node(), self._tensor()
        if node is not None and node._sequence_nr() == self._number:
            return node, self._output
        if tensor is not None:
            return tensor.grad_fn, tensor.output_nr
        before = () if node is None else node.next_functions
        return next((each for each in before if each[0] is not None and each[0]._sequence_nr() == self._number), (None, 0))


def _said(like: Any) -> tuple[str, str]:
    """Returns torch's name for the tensor in its error, and its hint, by the version and the settings of torch."""
    import torch

    said = _provoked(torch.float32, "cpu")
    hint = said.partition(" instead.")[2]
    if like.layout is torch.strided and not like.is_nested:
        said = _provoked(like.dtype, like.device)
        named = re.search(r"operation: \[(.*?) \[", said)
        if named is not None:
            return named[1], hint
    return like.type(), hint


def _provoked(kind: Any, device: Any) -> str:
    """Returns torch's error for a tensor of a kind that was changed in place."""
    import torch

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Any, saved: Any) -> Any:
            ctx.save_for_backward(saved)
            return given.clone()

    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            # Without elements, so that it takes no memory.
            changed = torch.empty(0, dtype=kind, device=device)
            found: Any = Saves.apply(torch.empty(0, device="cpu", requires_grad=True), changed)
            changed.zero_()
            found.grad_fn.saved_tensors
    except RuntimeError as error:
        return str(error)
    finally:
        for top in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(*top)
    return ""


class Kept(Saved):
    """A tensor that stays on the GPU."""

    __slots__ = ()

    def __init__(self, tensor: Any) -> None:
        # Detached: an operation's own output would hold itself for ever. What nothing made stays what it is, whatever bytes it is given.
        made_by = tensor.grad_fn
        Saved.__init__(self, tensor, tensor if made_by is None else tensor.detach(), made_by)

    def read(self) -> Any:
        if not self.is_intact():
            kept = self._alias
            raise self._modified(str(kept._nested_tensor_size()) if kept.is_nested else list(kept.shape))
        return self._alias


class KeptSubclass(Kept):
    """A kept tensor of a subclass; the subclass's functions are not called beyond what the program calls."""

    __slots__ = ()

    def __init__(self, tensor: Any) -> None:
        import torch

        with torch._C.DisableTorchFunctionSubclass():
            Kept.__init__(self, tensor)

    def read(self) -> Any:
        import torch

        with torch._C.DisableTorchFunctionSubclass():
            return Kept.read(self)


def kept(tensor: Any) -> Kept:
    """Returns the placeholder of a tensor of any class."""
    import torch

    kind = type(tensor)
    return Kept(tensor) if kind is torch.Tensor or kind is torch.nn.Parameter else KeptSubclass(tensor)


def read(saved: Kept) -> Any:
    return saved.read()


class Entry:
    """A range of bytes of a storage at one time: one item of the pass, for all its saves."""

    # Initial state, as class attributes: packing takes only a few microseconds.
    is_dropped = False
    # The storage if it stays; else the offloaded bytes, their form, and a tensor of the same kind.
    kept: Any = None
    packed: Any = None
    form: Form | None = None
    like: Any = None
    # Owner of the saves: a tensor with its views, weakly; None: all tensors in the storage. And the version counter of the first.
    owner: Any = None
    alias: Any = None
    # The storage that it left, held weakly, so that its number is no other's; how that ends, and how large it is.
    _weak: int | None = None
    _forget: Any = None
    _nbytes = 0
    saves, _reads = 0, 0
    # Reloaded storage with its stream; the storage to read from, and the offset in it.
    _coming: Any = None
    _stream = 0
    _found: tuple[Any, int] | None = None

    def __init__(self, site: Any, item: int, memory: Memory, start: int, size: int) -> None:
        self.site, self.item, self._memory = site, item, memory
        self.start, self.size = start, size

    def __del__(self) -> None:
        # Another thread may find it as long as it is not gone.
        self.is_dropped = True
        weak, self._weak = self._weak, None
        try:
            self.site.dropped(self.item)
        finally:
            if weak is not None:
                self._forget(weak)

    def left(self, storage: Any, like: Any) -> None:
        """Records the storage that the item was copied from, and a tensor like the saved ones."""
        self._weak, self._forget, self.like = storage._weak_ref(), storage._free_weak_ref, like
        self._nbytes = storage.nbytes()

    def begin(self) -> None:
        """Begins the reload into memory of the current stream, if the item is offloaded."""
        if self.packed is None or self._coming is not None or self._found is not None:
            return
        storage = self._still_there()
        if storage is not None:
            self._found = storage, self.start
            return
        # The original alignment is restored, because kernels are chosen by it.
        pad, size = (self.start % ALIGNMENT, self.size) if self.form is None else (0, self.form.size)
        coming, address = self._memory.take(self.like, pad + size)
        self._stream = self._memory.stream(self.like)
        self.packed.begin(self._stream, address + pad)
        self._coming = coming

    def read(self) -> tuple[Any, int]:
        """Returns a storage with the bytes, for the current stream, and their offset. The storage stays until all saves have
        read it.
        """
        if self.packed is None:
            return self.kept, self.start
        stream = self._memory.stream(self.like)
        if self.form is not None and self._coming is None and self._stream != stream:
            # A reload on another stream may not be complete: reload again.
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
            self.site.freed(self.item)
        return found

    def _arrive(self, stream: int) -> tuple[Any, int]:
        pad = self.start % ALIGNMENT
        self._memory.wait(self.packed, stream)
        if stream != self._stream:
            self._memory.use(self.like, self._coming)
        if self.form is None:
            # Each stream that reads it waits.
            return self._coming, pad
        storage, _ = self._memory.take(self.like, pad + self.size)
        self.form.unpack(self._coming, storage, pad)
        self._coming, self._stream = None, stream
        return storage, pad

    def _still_there(self) -> Any:
        """Returns the original storage if another owner has kept it: it has what autograd would have read, including later
        writes.
        """
        import torch

        # Found during its destruction: no owner can be queried.
        storage = None if self._weak is None else torch.UntypedStorage._new_with_weak_ptr(self._weak)
        return storage if storage is not None and storage.nbytes() == self._nbytes else None


class Away(Saved):
    """A tensor whose bytes are offloaded."""

    __slots__ = ("_dtype", "_offset", "_size", "_stride", "entry")

    def __init__(self, tensor: Any, alias: Any, made_by: Any, entry: Entry, offset: int) -> None:
        Saved.__init__(self, tensor, alias, made_by)
        entry.saves += 1
        self.entry, self._dtype = entry, tensor.dtype
        # Offset of its first element from the start of the entry, in bytes.
        self._offset, self._size, self._stride = offset, tensor.size(), tensor.stride()

    def read(self) -> Any:
        import torch

        if not self.is_intact():
            raise self._modified(list(self._size))
        storage, start = self.entry.read()
        view = torch.empty(0, dtype=self._dtype, device=storage.device)
        view.set_(storage, (start + self._offset) // view.element_size(), self._size, self._stride)
        # A backward that writes to it changes what all have that saved it.
        found = self._alias.detach()
        found.data = view
        return found


class Stored:
    """A stored output of a leaf, or a tensor saved beside it: an item outside of autograd's graph. It may be read repeatedly."""

    __slots__ = ("_packer", "_saved")

    def __init__(self, packer: Packer, saved: Any) -> None:
        self._packer, self._saved = packer, saved

    def is_intact(self) -> bool:
        """Whether the stored tensor was not changed since; otherwise its copy may be of any moment."""
        return bool(self._saved.is_intact())

    def read(self) -> Any:
        """Returns the tensor for the current stream. A kept tensor is the same object each time."""
        return self._packer.unpack(self._saved)
