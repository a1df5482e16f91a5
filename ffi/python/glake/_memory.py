"""Memory arguments of copies: torch's tensors, ``__cuda_array_interface__``, and the buffer protocol, all as ranges of bytes.

A range keeps what it is a range of. A buffer's export is kept too, so that a ``bytearray`` cannot be resized under a copy; it
is given back by ``release``.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from . import _library
from .errors import InvalidError


class Range:
    """A range of bytes on a GPU or the host.

    Attributes:
        address: where they begin.
        size: how many they are.
        device: the GPU that they are on, as torch or the driver says; None for the host, and for memory that moves.
        stream: the stream that they were last written on, where their owner says so.
        of_torch: whether they are a tensor's, which is used on torch's current stream.
    """

    __slots__ = ("address", "device", "of_torch", "size", "stream", "_export", "_owner")

    def __init__(
        self,
        owner: object,
        address: int,
        size: int,
        *,
        device: int | None = None,
        stream: int | None = None,
        of_torch: bool = False,
        export: _Buffer | None = None,
    ) -> None:
        self._owner = owner
        self.of_torch = of_torch
        self._export = export
        self.address = address
        self.size = size
        self.device = device
        self.stream = stream

    def refuse_host(self, name: str) -> None:
        """Raises if the bytes lie in host memory, for calls to which the address meant nothing.

        Raises:
            InvalidError: they do.
        """
        if self._export is not None or (self.of_torch and self.device is None):
            raise InvalidError(f"{name} lies in host memory: give a tensor or an array in GPU memory of GLake's")

    def release(self) -> None:
        """Releases the memory to its owner. Repeated calls do nothing."""
        export, self._export, self._owner = self._export, None, None
        if export is not None:
            _release(ctypes.byref(export))

    def __del__(self) -> None:
        # At the end of the interpreter there is nobody to give it back to.
        if _release is not None:
            self.release()


def range_of(thing: Any, name: str, *, written: str | None = None) -> Range:
    """Returns the bytes of ``thing``, which errors call ``name``. ``written``: the verb for errors if the bytes are changed; None: they
    are read.

    Raises:
        TypeError: it has none that can be reached.
        InvalidError: they do not lie side by side, or may not be written.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.Tensor):
        return _of_tensor(torch, thing, name)
    interface = getattr(thing, "__cuda_array_interface__", None)
    if interface is not None:
        return _of_interface(thing, interface, name, written)
    return _of_buffer(thing, name, written)


def _of_tensor(torch: ModuleType, tensor: Any, name: str) -> Range:
    kind = tensor.device.type
    if kind not in ("cpu", "cuda"):
        raise TypeError(f"{name} is a tensor on {tensor.device}: a copy is between the host and CUDA devices")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is a tensor of layout {tensor.layout}: copy its parts, which are strided")
    if not tensor.is_contiguous():
        raise InvalidError(f"{name} is a tensor whose elements do not lie side by side: copy {name}.contiguous(), or copy_list of its rows")
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidError(f"{name} is a view that conjugates or negates: its bytes are another tensor's; copy {name}.resolve_conj().resolve_neg()")
    size = tensor.numel() * tensor.element_size()
    return Range(tensor, tensor.data_ptr(), size, device=tensor.device.index if kind == "cuda" else None, of_torch=True)


def _of_interface(thing: Any, interface: Mapping[str, Any], name: str, written: str | None) -> Range:
    try:
        address, read_only = interface["data"]
        shape, typestr = interface["shape"], str(interface["typestr"])
        item, is_of_objects = int(typestr[2:]), typestr[1] == "O" or "O" in _typestrs(interface.get("descr"))
    except (KeyError, TypeError, ValueError) as error:
        raise TypeError(f"{name} has a __cuda_array_interface__ without data, shape or typestr: {error!r}") from error
    if is_of_objects:
        raise TypeError(f"{name} is an array of Python objects, which are no bytes to copy: give one of numbers")
    if interface.get("mask") is not None:
        raise InvalidError(f"{name} is an array with a mask, which a copy would not heed: copy its data, or fill it in first")
    if written is not None and read_only:
        raise InvalidError(f"{name} may only be read: its __cuda_array_interface__ says so")
    size = item
    for length in shape:
        size *= int(length)
    strides = interface.get("strides")
    if strides is not None and size > 0 and not _side_by_side(shape, strides, item):
        raise InvalidError(f"{name} is an array whose elements do not lie side by side: make it contiguous first")
    stream = interface.get("stream")
    # The protocol names no GPU, and default streams have one handle on all of them: whose memory it is decides.
    device = _library.api().device_of(int(address)) if address else None
    return Range(thing, int(address or 0), size, device=device, stream=None if stream is None else int(stream))


def _typestrs(descr: Any) -> Iterator[str]:
    """Returns the kinds of all fields of a ``descr``, as one letter each."""
    for field in descr or ():
        if isinstance(field[1], str):
            yield field[1][1]
        else:
            yield from _typestrs(field[1])


def _side_by_side(shape: Any, strides: Any, item: int) -> bool:
    step = item
    for length, stride in zip(reversed(shape), reversed(strides)):
        if length > 1 and stride != step:
            return False
        step *= int(length)
    return True


class _Buffer(ctypes.Structure):
    """The C structure ``Py_buffer``."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


# Objects, typed and function pointers, and strings of C (ctypes' "z", and "Z" where it is no complex number's). Untyped pointers ("P") may be
# addresses of a GPU.
_REFERENCE = re.compile(r"[O&Xz]|Z(?![fdg])")


def _is_of_references(format: str) -> bool:
    """Whether elements of a buffer, or their fields, refer to other memory. Field names stand between colons."""
    return _REFERENCE.search(re.sub(r":[^:]*:", "", format)) is not None


_SIMPLE, _WRITABLE = 0, 1
_get = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)(("PyObject_GetBuffer", ctypes.pythonapi))
_release = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("PyBuffer_Release", ctypes.pythonapi))


def _of_buffer(thing: Any, name: str, written: str | None) -> Range:
    try:
        view = memoryview(thing)
    except TypeError:
        raise TypeError(
            f"{name} is a {type(thing).__name__}: give a torch tensor, or something with __cuda_array_interface__ or the buffer protocol"
        ) from None
    if _is_of_references(view.format):
        raise TypeError(
            f"{name} is a buffer of Python objects or of pointers to host memory (format {view.format!r}), which are no bytes to copy: "
            "give one of numbers"
        )
    if not view.c_contiguous:
        raise InvalidError(f"{name} is a buffer whose elements do not lie side by side: make it contiguous first (numpy.ascontiguousarray)")
    if written is not None and view.readonly:
        raise InvalidError(f"{name} may only be read: {written}")
    export = _Buffer()
    # A view of the view: its address is asked for by the plainest request, which every contiguous buffer answers.
    _get(view.cast("B") if view.ndim and view.nbytes else view, ctypes.byref(export), _SIMPLE if written is None else _WRITABLE)
    return Range(thing, export.buf or 0, export.len, export=export)
