"""Allocation without torch: blocks of GPU memory by address, for CuPy, RMM and programs that use neither."""

from __future__ import annotations

from . import _arguments, _library
from ._arguments import Device
from ._copies import Stream, handle_of
from ._disabled import is_disabled, torch_for


def allocate(size: int, *, device: Device = None, stream: Stream = None) -> int:
    """Returns the address of a new block of GPU memory, with undefined contents::

        cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(
            lambda size, device: glake.allocate(size, device=device, stream=cupy.cuda.get_current_stream()),
            lambda address, _: glake.free(address)).malloc)

    The block belongs to the region that the calling thread is inside, if any. It may be used on its stream at once; other streams
    have to be ordered behind it, as with ``cudaMallocAsync``.

    Args:
        size: bytes. 0 returns 0, which ``free`` accepts.
        device: an index, "cuda:1", a ``torch.device``, or None for torch's current device (0 where CUDA has not started).
        stream: the stream that uses the block: an object with ``cuda_stream``, ``ptr`` or ``__cuda_stream__``, or a handle. None: the
            default stream.

    Raises:
        OutOfMemoryError: not enough memory; the text names the holders.
        InvalidError: no such device, or ``size`` is negative.
        TypeError: ``size`` is no whole number, or ``stream`` no stream.
        UnavailableError: the library cannot start.
    """
    size, number = _arguments.amount(size, "size"), _arguments.device(device)
    handle = 0 if stream is None else handle_of(stream)
    if is_disabled():
        return int(torch_for("allocate").cuda.caching_allocator_alloc(size, number, handle)) if size else 0
    return int(_library.api().alloc(number, size, handle))


def free(address: int) -> None:
    """Frees a block. Its memory is reused in the order of its stream, and on other streams once its work is complete.

    Raises:
        InvalidError: no block begins at the address.
        TypeError: ``address`` is no whole number.
    """
    address = _arguments.number(address, "address", "the address of a block")
    if not address:
        return
    if is_disabled():
        torch_for("free").cuda.caching_allocator_delete(address)
        return
    _library.api().free(address)
