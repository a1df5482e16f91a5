"""Copies between the host and GPUs, over every link of the server if ``multi_path`` is on.

A copy keeps its source and destination alive until it is complete: its handle does, or after the handle is dropped this module, up
to the next call that finds the copy complete.
"""

from __future__ import annotations

import collections
import contextlib
import json
import numbers
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Union, overload

from . import _arguments, _library
from ._disabled import copies, is_disabled
from ._memory import Range, range_of
from .errors import InvalidError

Priority = Literal["normal", "critical", "background"]
Stream = Union[None, int, Any]

_PRIORITIES = {"normal": 0, "critical": 1, "background": 2}
_NOW, _VERIFY, _DEVICE = 0x10, 0x20, 0x10000
_WRITTEN = "a copy writes to it"

# Copies whose handles were dropped before they were done, and what they keep.
# Without a lock: garbage collection may add to it in the middle of anything.
_dropped: collections.deque[tuple[int, list[Range]]] = collections.deque()


class Copy:
    """A copy in progress. It keeps both ends alive."""

    __slots__ = ("_handle", "_lock", "_ranges")

    def __init__(self, handle: int, ranges: list[Range]) -> None:
        self._handle = handle
        self._ranges = ranges
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Waits until the copy is complete, without the GIL. Returns at once if it was waited for before.

        Raises:
            DriverError: the bytes did not arrive, or may not have.
        """
        with self._lock:
            handle, self._handle = self._handle, 0
            if handle:
                try:
                    _library.api().copy_wait(handle)
                finally:
                    self._let_go()

    def done(self) -> bool:
        """Returns whether the copy is complete.

        Raises:
            DriverError: the bytes will never arrive, or may not.
        """
        # Another thread waits.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._handle and not _library.api().copy_done(self._handle):
                return False
        finally:
            self._lock.release()
        self.wait()
        return True

    def _let_go(self) -> None:
        ranges, self._ranges = self._ranges, []
        for part in ranges:
            part.release()

    def __del__(self) -> None:
        # A handle that was never made, or the end of the interpreter.
        if getattr(self, "_handle", 0) and _dropped is not None:
            _dropped.append((self._handle, self._ranges))

    def __repr__(self) -> str:
        size = sum(part.size for part in self._ranges[1::2])
        return f"<glake copy of {size} bytes under way>" if self._handle else "<glake copy that is done>"


@overload
def copy_(dst: Any, src: Any, stream: Stream = ..., priority: Priority = ..., *, wait: Literal[True], verify: bool = ...) -> None: ...
@overload
def copy_(dst: Any, src: Any, stream: Stream = ..., priority: Priority = ..., wait: Literal[False] = ..., verify: bool = ...) -> Copy: ...
@overload
def copy_(dst: Any, src: Any, stream: Stream = ..., priority: Priority = ..., wait: bool = ..., verify: bool = ...) -> Copy | None: ...


def copy_(
    dst: Any, src: Any, stream: Stream = None, priority: Priority = "normal", wait: bool = False, verify: bool = False
) -> Copy | None:
    """Copies the bytes of ``src`` to ``dst``, in the order of a stream.

    Both are torch tensors, arrays with ``__cuda_array_interface__``, or anything with the buffer protocol (``numpy``, ``bytearray``,
    ``memoryview``), contiguous and of the same size in bytes; the element types may differ. Do not change ``src`` or read ``dst``
    before the copy is complete. If the host memory is not pinned, the call may take as long as the copy.

    Args:
        dst: the destination.
        src: the source.
        stream: the stream in whose order the copy runs: a ``torch.cuda.Stream``, an object with ``__cuda_stream__``, or a handle.
            None: torch's current stream of the GPU, or the stream that an array names, or the default one.
        priority: "critical" goes first on the links, "background" makes way.
        wait: return once the copy is complete, and return None.
        verify: with ``wait``, read the bytes back and compare them.

    Returns:
        The copy, to ``wait`` for; None with ``wait``.

    Raises:
        TypeError: an object gives no access to its bytes.
        InvalidError: an argument is not contiguous or read-only, or the sizes differ.
        DriverError: the driver refused; or a GPU was lost that carried parts of earlier copies, and this one was not made.
    """
    to, from_ = _pair(dst, src, "dst", "src")
    flags = _flags(priority, wait, verify)
    if is_disabled():
        return _copied([(dst, src)], stream, wait)
    with _current([to, from_], stream) as (handle, of):
        return _made(_library.api().copy_async(to.address, from_.address, to.size, handle, flags | of), [to, from_], wait)


def copy_list(
    pairs: Iterable[tuple[Any, Any]], stream: Stream = None, priority: Priority = "normal", wait: bool = False, verify: bool = False
) -> Copy | None:
    """Copies many blocks, each a pair of destination and source, unordered among themselves; for small blocks faster than one ``copy_``
    for each.

    Raises:
        As ``copy_``.
    """
    ranges: list[Range] = []
    pairs = _arguments.several(pairs, "pairs", "pairs of a destination and a source")
    for number, pair in enumerate(pairs):
        try:
            dst, src = pair
        except (TypeError, ValueError):
            raise TypeError(f"pair {number} is {pair!r}: a destination and a source") from None
        ranges.extend(_pair(dst, src, f"dst of pair {number}", f"src of pair {number}"))
    flags = _flags(priority, wait, verify)
    if is_disabled():
        return _copied(pairs, stream, wait)
    blocks = [(to.address, from_.address, to.size) for to, from_ in zip(ranges[::2], ranges[1::2])]
    with _current(ranges, stream) as (handle, of):
        return _made(_library.api().copy_list(blocks, handle, flags | of), ranges, wait)


def copy_to_all(
    dsts: Sequence[Any], src: Any, stream: Stream = None, priority: Priority = "normal", wait: bool = False, verify: bool = False
) -> Copy | None:
    """Copies host memory to several GPUs. The host memory is read once, and passed on between them.

    The copy runs in the order of one stream: ``stream``, or the current one of the first range's GPU. The caller orders work on the other
    GPUs' streams that touches the memory before and after it.

    Raises:
        As ``copy_``.
    """
    from_ = range_of(src, "src")
    ranges: list[Range] = []
    for number, dst in enumerate(_arguments.several(dsts, "dsts", "destinations")):
        to = range_of(dst, f"dst {number}", written=_WRITTEN)
        _same_size(to, from_, f"dst {number}", "src")
        ranges.extend((to, from_))
    flags = _flags(priority, wait, verify)
    if is_disabled():
        return _copied([(dst, src) for dst in dsts], stream, wait)
    with _current(ranges, stream) as (handle, of):
        started = _library.api().copy_to_all([to.address for to in ranges[::2]], from_.address, from_.size, handle, flags | of)
        return _made(started, ranges, wait)


def copy_evicted(dst: Any, src: Any) -> None:
    """Copies the bytes of evicted memory to host memory, from their copy there: neither the GPU nor a refill is needed, so that a
    sleeping worker can save or compare its weights. Bytes that do not count (``glake.live``) are 0.

    Args:
        dst: a tensor or buffer in host memory, of the same size in bytes.
        src: a tensor or array in a region that a shrink moved to ``tier="host"``.

    Raises:
        InvalidError: some of the bytes are on a GPU or in a file, or the memory is not GLake's.
        TypeError, InvalidError: as ``copy_``; or ``dst`` is not in host memory.
    """
    to, from_ = _pair(dst, src, "dst", "src")
    try:
        if to.device is not None:
            raise InvalidError(f"dst is on GPU {to.device}: give a tensor or buffer in host memory")
        _library.api().read_evicted(to.address, from_.address, to.size)
    finally:
        to.release()
        from_.release()


def multi_path(on: bool = True) -> None:
    """Allows copies to use the links of the other visible GPUs, or ends that. The links are prepared in the background, at the cost of
    a context on each; copies use one link until then.

    Raises:
        InvalidError: the configuration has ``transfer.multi_path = "never"``, or several processes of the program run on this machine.
        UnavailableError: the library cannot start.
    """
    _library.api().multi_path(_arguments.flag(on, "on"))


def copy_stats() -> dict[str, Any]:
    """Returns the statistics of copies: relays that are ready and their cost, and for each path its bytes, slices, busy time and
    retries.

    Raises:
        UnavailableError: the library cannot start.
    """
    _sweep()
    stats: dict[str, Any] = json.loads(_library.api().copy_stats_json())
    return stats


def _copied(pairs: Iterable[tuple[Any, Any]], stream: Stream, wait: bool) -> Copy | None:
    copies(pairs, stream)
    return None if wait else Copy(0, [])


def _pair(dst: Any, src: Any, to_name: str, from_name: str) -> tuple[Range, Range]:
    to, from_ = range_of(dst, to_name, written=_WRITTEN), range_of(src, from_name)
    _same_size(to, from_, to_name, from_name)
    return to, from_


def _same_size(to: Range, from_: Range, to_name: str, from_name: str) -> None:
    if to.size != from_.size:
        raise InvalidError(f"{to_name} has {to.size} bytes and {from_name} {from_.size}: a copy is between ranges of one size")


def _flags(priority: str, wait: bool, verify: bool) -> int:
    level = _arguments.choice(priority, "priority", _PRIORITIES)
    wait, verify = _arguments.flag(wait, "wait"), _arguments.flag(verify, "verify")
    if verify and not wait:
        raise InvalidError("verify needs wait=True: bytes are compared once they are there")
    return level | (_NOW if wait else 0) | (_VERIFY if verify else 0)


@contextlib.contextmanager
def _current(ranges: list[Range], stream: Stream) -> Any:
    """Returns the handle of the current stream, and the flag for the device of a default stream."""
    _sweep()
    device = next((part.device for part in ranges if part.device is not None), None)
    # A default stream's handle is the same on every GPU: torch's stream says whose it is, else the memory.
    device = getattr(stream, "device_index", device)
    # Streams of one GPU; without a given GPU, of the first in the order of their handles.
    named = {(-1 if part.device is None else part.device, part.stream) for part in ranges if part.stream is not None}
    own = -1 if device is None else device
    # Arrays of others have nothing to do with torch's streams, whether it is imported or not.
    of_torch = hasattr(stream, "device_index") or any(part.of_torch and part.device is not None for part in ranges)
    torch = sys.modules.get("torch") if of_torch else None
    with torch.cuda.device(device) if torch is not None and device is not None else contextlib.nullcontext():
        if stream is not None:
            handle = handle_of(stream)
        elif torch is not None and device is not None:
            handle = int(torch.cuda.current_stream(device).cuda_stream)
        else:
            handle = min((handle for of, handle in named if of == own), default=0)
        # Without this, writes on other streams would not be ordered before the copy.
        for of, other in sorted(named - {(own, handle)}):
            _library.api().stream_synchronize(of, other)
        yield handle, 0 if device is None else _DEVICE * (device + 1)


def handle_of(stream: Any) -> int:
    """Returns the handle of a stream.

    Raises:
        TypeError: the object is no stream.
    """
    if isinstance(stream, numbers.Integral):
        return _arguments.handle(stream, "stream")
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        try:
            _version, handle = protocol() if callable(protocol) else protocol
        except (TypeError, ValueError) as error:
            raise TypeError(f"stream has a __cuda_stream__ that is no pair of a version and a handle: {error}") from error
        return _arguments.handle(handle, "the handle of stream")
    raise TypeError(f"stream is a {type(stream).__name__}: give a torch.cuda.Stream, an object with __cuda_stream__, or a handle")


def _made(handle: int, ranges: list[Range], wait: bool) -> Copy | None:
    copy = Copy(handle, ranges)
    if not handle:
        copy._let_go()
    return None if wait else copy


def _sweep() -> None:
    """Releases the memory that completed copies with dropped handles keep. Their outcome is ignored."""
    if not _dropped:
        return
    api = _library.api()
    # Handles dropped meanwhile are left to the next call.
    for _ in range(len(_dropped)):
        try:
            handle, ranges = _dropped.popleft()
        except IndexError:
            return
        try:
            if not api.copy_done(handle):
                _dropped.append((handle, ranges))
                continue
        except RuntimeError:
            # The error of a copy that nobody waits for is told to the next one, by the library.
            pass
        with contextlib.suppress(RuntimeError):
            api.copy_drop(handle)
        for part in ranges:
            part.release()
