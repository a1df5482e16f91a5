"""What stands in autograd's graph in place of saved tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._memory import Memory
from ._narrow import Form

if TYPE_CHECKING:
    from ._packer import Packer

# Of the memory that torch hands out.
ALIGNMENT = 512

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
        if not self.is_intact():
            raise _modified(self._tensor, self._saved, self._tensor.shape)
        return self._tensor

    def is_intact(self) -> bool:
        """Whether it was not changed since."""
        return bool(self._tensor._version == self._saved)


class Entry:
    """A range of bytes of a storage, as it was at one time: one item of the pass, for all that saved it."""

    # What it is until something is done with it: each is packed in a few microseconds.
    is_dropped = False
    # What it is read from where it stays; else what was offloaded, in which form, and a tensor of its kind.
    kept: Any = None
    packed: Any = None
    form: Form | None = None
    like: Any = None
    # Held weakly, so that its number is no other storage's; and where it lies.
    storage: Any = None
    place: tuple[int, int] = (0, 0)
    saves, _reads = 0, 0
    # What it comes back to, and on which stream that was taken; what it is read from, and where it begins there.
    _coming: Any = None
    _stream = 0
    _found: tuple[Any, int] | None = None

    def __init__(self, site: Any, item: int, memory: Memory, start: int, size: int) -> None:
        self._site, self.item, self._memory = site, item, memory
        self.start, self.size = start, size

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
        # It comes back with the alignment that it had: kernels are chosen by that.
        pad, size = (self.start % ALIGNMENT, self.size) if self.form is None else (0, self.form.size)
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
