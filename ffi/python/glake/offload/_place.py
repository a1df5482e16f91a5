"""A place: the frozen parameters of one module, with their bytes in reserved host memory while they are away from the GPU."""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

from .. import _library
from ..errors import Error
from ._memory import Memory
from ._saved import ALIGNMENT, Saved

_logger = logging.getLogger("glake")


class Part:
    """A parameter of a place."""

    __slots__ = ("__weakref__", "dtype", "given", "home", "module", "name", "nbytes", "offset", "packed", "parameter", "size", "stride", "version")

    def __init__(self, module: Any, name: str, parameter: Any, offset: int) -> None:
        self.module, self.name, self.parameter = weakref.ref(module), name, weakref.ref(parameter)
        self.offset, self.dtype, self.nbytes = offset, parameter.dtype, parameter.numel() * parameter.element_size()
        self.size, self.stride = parameter.size(), parameter.stride()
        # The parameter that its module was given last.
        self.given = self.parameter
        # Reserved memory, a host tensor over it, and the parameter's version when its bytes there and on the GPU were last the same.
        self.packed: Any = None
        self.home: Any = None
        self.version = 0

    def now(self) -> Any:
        """Returns the parameter of the module. Another that is only there for a call, as of ``torch.func.functional_call``, is no part's."""
        module, given = self.module(), self.given()
        is_there = module is not None and given is not None and module._parameters.get(self.name) is given
        return given if is_there else self.parameter()

    def reserve(self, index: int) -> None:
        """Reserves host memory. That of before stays with the tensors over it, which may live longer than the place."""
        import torch

        packed = _library.api().offload_reserve(index, self.nbytes)
        # A storage each: what is saved of one is not saved of all.
        buffer: Any = (ctypes.c_ubyte * self.nbytes).from_address(packed.host())
        buffer.packed = packed
        storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
        self.home = torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, 0, self.size, self.stride)
        self.packed = packed

    def view(self, storage: Any, kind: Any) -> Any:
        """Returns the parameter's bytes in a storage of a place, as a tensor like an empty one of the device."""
        return kind.new_empty(0, dtype=self.dtype).set_(storage, self.offset // self.dtype.itemsize, self.size, self.stride)


class Place:
    """Parameters that come to the GPU together, and leave together. While they are away, each is a host tensor over reserved memory.

    ::

        home ──begin──► home, with a copy ──show──► on the GPU ──hide──► home, with a copy ──free──► home
    """

    def __init__(
        self, memory: Memory, copies: MutableMapping[int, Place], like: Any, index: int, block: int, owned: list[tuple[Any, str, Any]]
    ) -> None:
        # Its number in the site's order of uses, once it has one there.
        self.number: int | None = None
        self.block, self.parts, self.nbytes = block, [], 0
        for module, name, parameter in owned:
            part = Part(module, name, parameter, self.nbytes)
            self.parts.append(part)
            self.nbytes = _aligned(part.offset + part.nbytes)
        self._memory, self._like, self._index = memory, like, index
        # Places by the storage of their copy: of those alone, as another may have the number of one that is freed.
        self._copies = copies
        # Whether it streams.
        self.is_away = False
        # Storage of the copy on the GPU, the stream of its memory, and the streams that waited for it.
        self.copy: Any = None
        self._address, self._stream = 0, 0
        self._waited: set[int] = set()
        self.is_shown = False
        # Number of blocks of code that rely on it.
        self.pins = 0
        # Bytes that went back to the host.
        self.stored = 0
        # Whether the copy is written without a version, by code that says so.
        self.is_written = False

    def reserve(self) -> None:
        """Reserves the host memory.

        Raises:
            glake.OutOfMemoryError: there is none.
        """
        for part in self.parts:
            part.reserve(self._index)
        self.is_away = True

    def settle(self, part: Part, parameter: Any) -> None:
        """Makes a host tensor of reserved memory of a parameter, whose bytes are there."""
        part.parameter, part.version = weakref.ref(parameter), _version(parameter)
        parameter.data = part.home

    def begin(self) -> None:
        """Begins the copy to memory of the current stream, unless there is one."""
        if self.copy is not None:
            return
        copy, address = self._memory.take(self._like, self.nbytes)
        self._stream = self._memory.stream(self._like)
        for part in self.parts:
            parameter = part.parameter()
            part.version = 0 if parameter is None else _version(parameter)
            part.packed.begin(self._stream, address + part.offset)
        self.copy, self._address = copy, address
        self._copies[copy._cdata] = self
        self._waited.clear()

    def show(self) -> None:
        """Sets the parameters to the copy, for the current stream."""
        self.adopt()
        if not self.is_shown and self.copy is not None and any(self._is_written(part) for part in self.parts):
            # Written by the host since.
            self.free()
        self.begin()
        stream = self._memory.stream(self._like)
        if stream not in self._waited:
            for part in self.parts:
                self._memory.wait(part.packed, stream)
            if stream != self._stream:
                self._memory.use(self._like, self.copy)
            self._waited.add(stream)
        if self.is_shown:
            return
        self.is_shown = True
        for part in self.parts:
            parameter = part.parameter()
            if parameter is not None and parameter.data_ptr() == part.home.data_ptr():
                parameter.data = part.view(self.copy, self._like)

    def hide(self) -> None:
        """Sets the parameters to their host tensors. A copy that was written is stored before: the call waits for it then.

        Raises:
            glake.Error: the store failed. The parameters stay on the GPU.
        """
        if not self.is_shown:
            return
        self.adopt()
        if self.is_shown:
            self._store()
            self.is_shown = False

    def free(self) -> None:
        """Frees the copy of hidden parameters."""
        if not self.is_shown and self.copy is not None:
            self._copies.pop(self.copy._cdata, None)
            self.copy = None

    def stay(self) -> None:
        """Leaves the parameters on the GPU for good, and releases the host memory."""
        self.show()
        self._copies.pop(self.copy._cdata, None)
        # The parameters hold it.
        self.copy, self.is_away = None, False
        for part in self.parts:
            parameter, part.home, part.packed = part.parameter(), None, None
            if parameter is not None and parameter.device.type == "cpu" and parameter.device != self._like.device:
                parameter.data = parameter.data.to(self._like.device)

    def go(self) -> None:
        """Turns hidden parameters into ordinary host tensors, and releases the reserved memory once nothing refers to it."""
        self.free()
        for part in self.parts:
            # Copies in may still read it, and the program may write.
            part.packed.host()
            parameter = part.parameter()
            if parameter is not None and parameter.data_ptr() == part.home.data_ptr():
                parameter.data = part.home.clone()
            part.home = part.packed = None
        self.is_away = False

    def forget(self) -> None:
        """Leaves the parameters without elements, in a process that does not have their memory."""
        for part in self.parts if self.is_away else ():
            parameter = part.parameter()
            if parameter is not None:
                parameter.data = part.home.new_empty(0)

    def storage(self, part: Part, parameter: Any) -> Any:
        """Returns a storage on the GPU with the bytes of a parameter that streams no more, at its offset."""
        copy, _ = self._memory.take(self._like, self.nbytes)
        part.view(copy, self._like).copy_(parameter.detach())
        return copy

    def part_at(self, offset: int) -> Part:
        """Returns the part with the byte at an offset."""
        return next(part for part in reversed(self.parts) if part.offset <= offset)

    def is_foreign(self) -> bool:
        """Whether the program has given a parameter of a shown place another type, size or stride."""
        known = ((part, part.parameter()) for part in self.parts)
        return any(parameter is not None and parameter.data_ptr() != self._address + part.offset for part, parameter in known)

    def is_trained(self) -> bool:
        """Whether one of the parameters was unfrozen."""
        return any(parameter is not None and parameter.requires_grad for parameter in (part.parameter() for part in self.parts))

    def _is_written(self, part: Part) -> bool:
        parameter = part.parameter()
        return parameter is not None and _version(parameter) != part.version

    def adopt(self) -> None:
        """Moves the bytes of parameters that the program has given other memory, or replaced, to memory of their own. Those of before stay
        where tensors of the program may read them, as of a ``state_dict()``.
        """
        for part in self.parts:
            parameter, before = part.now(), part.parameter()
            if parameter is None or (parameter is before and self._is_in_place(part, parameter)):
                continue
            may = _may_replace(parameter, part)
            if parameter is before and not may:
                continue
            if self.is_shown:
                self._store()
                self.is_shown = False
            # The copy is of what it had before.
            self.free()
            part.packed.host()
            part.parameter = weakref.ref(parameter)
            if may and not self._is_in_place(part, parameter):
                try:
                    part.reserve(self._index)
                except Error as error:
                    _logger.warning("a weight of block %d that was replaced stays on the GPU: %s", self.block, error)
                    continue
                part.home.copy_(parameter.detach())
                self.settle(part, parameter)

    def _is_in_place(self, part: Part, parameter: Any) -> bool:
        return bool(parameter.data_ptr() == (self._address + part.offset if self.is_shown else part.home.data_ptr()))

    def _store(self) -> None:
        """Sets shown parameters to their host tensors, with the bytes that they have."""
        known = [(part, part.parameter()) for part in self.parts]
        shown = [(part, parameter) for part, parameter in known if parameter is not None and self._is_in_place(part, parameter)]
        written = [part for part, _ in shown if self.is_written or self._is_written(part)]
        for part in written:
            part.packed.store(self._memory.stream(self._like), self._address + part.offset)
        for part in written:
            part.packed.host()
            self.stored += part.nbytes
        self.is_written = False
        for part, parameter in shown:
            self.settle(part, parameter)


def _version(parameter: Any) -> int:
    return 0 if parameter.is_inference() else int(parameter._version)


def _may_replace(parameter: Any, part: Part) -> bool:
    """Whether a parameter's values can take a part's place."""
    import torch

    is_plain = type(parameter) is torch.nn.Parameter and parameter.layout is torch.strided and parameter.device.type != "meta"
    if not is_plain or parameter.is_inference():
        return False
    return bool(parameter.dtype == part.dtype and parameter.size() == part.size and parameter.stride() == part.stride)


def _aligned(size: int) -> int:
    return math.ceil(size / ALIGNMENT) * ALIGNMENT


def ordinary(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function that gives parameters tensors: one of inference mode would make the parameter such a tensor for good."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        import torch

        if not torch.is_inference_mode_enabled():
            return function(*args, **named)
        with torch.inference_mode(False):
            return function(*args, **named)

    return call


class Streamed(Saved):
    """A saved tensor in a place: the parameter or a view of it. Nothing is copied; it comes back with its place, which lives as long as it."""

    __slots__ = ("_dtype", "_offset", "_parameter", "_part", "_place", "_reach", "_size", "_stride")

    def __init__(self, tensor: Any, place: Place, part: Part, parameter: Any, reach: Any, like: Any) -> None:
        alias = tensor.detach()
        alias.data = like.new_empty(0, dtype=tensor.dtype)
        Saved.__init__(self, tensor, alias, tensor.grad_fn)
        # Function that makes the place come, and returns its storage; None if it has not the parameter's bytes.
        self._place, self._reach = place, reach
        # The model may end before the graph.
        self._part, self._parameter = part, parameter
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._size, self._stride = tensor.size(), tensor.stride()

    def read(self) -> Any:
        if not self.is_intact():
            raise self._modified(list(self._size))
        storage = self._reach(self._place, self._part, self._parameter)
        if storage is None:
            storage = self._place.storage(self._part, self._parameter)
        found = self._alias.detach()
        found.data = found.new_empty(0).set_(storage, self._offset, self._size, self._stride)
        return found
