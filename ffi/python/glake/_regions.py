"""Regions: parts of a program's GPU memory that are evicted while not needed, and refilled at the same addresses.

Memory that a thread allocates inside ``with glake.region(tag)`` belongs to the region of that tag. ``shrink`` evicts regions, ``refill``
restores them; a program declares its uses of their memory with ``glake.active``, so that no memory is evicted under running work.
"""

from __future__ import annotations

import atexit
import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

from . import _arguments, _gate, _library
from ._copies import Stream, handle_of
from ._memory import range_of
from .errors import InvalidError
from .reports import HookEvent, MemoryUsage, RefillReport, RegionState, ShrinkReport

Policy = Literal["keep", "sealed", "discard"]
HostCopy = Literal["drop", "retain", "prepare"]
Hook = Callable[[HookEvent], object]
Function = TypeVar("Function", bound=Callable[..., Any])

_POLICIES = {"keep": 0, "sealed": 1, "discard": 2}
_HOST_COPIES = {"drop": 0, "retain": 1, "prepare": 2}
_CLEAN = 16


class Region:
    """A region, identified by its tag. Inside ``with``, the calling thread allocates from it; threads that it starts, including
    autograd's, do not. Also usable as a decorator.
    """

    __slots__ = ("clean", "host_copy", "policy", "tag")

    def __init__(self, tag: str, policy: Policy, host_copy: HostCopy, clean: bool = False) -> None:
        self.tag, self.policy, self.host_copy, self.clean = tag, policy, host_copy, clean

    def __enter__(self) -> Region:
        _library.api().region_push(self.tag)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _library.api().region_pop()
        if kind is None and self.host_copy == "prepare":
            prepare(self.tag)

    def __call__(self, function: Function) -> Function:
        _arguments.function(function, "the decorated object", "glake.region() decorates functions")

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]

    def __repr__(self) -> str:
        clean = ", clean=True" if self.clean else ""
        return f"glake.region({self.tag!r}, policy={self.policy!r}, host_copy={self.host_copy!r}{clean})"


def region(tag: str, policy: Policy = "keep", host_copy: HostCopy = "drop", clean: bool = False) -> Region:
    """Returns the region of a tag, created on first use::

        with glake.region("weights", policy="sealed", host_copy="retain"):
            model = load().cuda()

    Args:
        tag: its name. "default" is all memory outside of regions.
        policy: "keep": a refill restores its bytes; "sealed": the same, and it can be sealed; "discard": a refill restores only its
            addresses (a KV cache, scratch memory).
        host_copy: "drop": the host copy is released after the refill; "retain": it stays while the region is sealed, and the next shrink
            copies nothing; "prepare": host memory for the whole region is pinned when the ``with`` block ends, and in the background once
            no use runs, so that the first shrink is as fast as later ones.
        clean: copy its bytes to the host in the background while no use runs, and keep them on the GPU: a shrink then copies only
            bytes that have changed since, which it finds by a digest. For programs whose work runs inside ``glake.active``: work outside
            of it changes copied bytes, which are then copied again. If host memory is short, these copies are released first.

    Raises:
        InvalidError: the tag is reserved or empty, or its region was defined with another policy.
        InvalidError: no such policy.
    """
    kept, copied = _arguments.choice(policy, "policy", _POLICIES), _arguments.choice(host_copy, "host_copy", _HOST_COPIES)
    is_clean = _arguments.flag(clean, "clean")
    _library.api().region_define(_arguments.tag(tag), kept, copied | (_CLEAN if is_clean else 0))
    return Region(tag, policy, host_copy, is_clean)


def seal(tag: str, strict: bool = False) -> None:
    """Promises not to write to the region until ``unseal``: a retained copy then stays valid, and the region serves no allocations.

    Args:
        tag: a region with the policy "sealed".
        strict: map it read-only: a kernel that writes to it fails. Call it while no such kernel runs.

    Raises:
        InvalidError: no such region, or its policy is not "sealed".
    """
    _library.api().region_seal(_arguments.tag(tag), _arguments.flag(strict, "strict"))


def unseal(tag: str) -> None:
    """Ends the promise of ``seal``; retained copies are dropped.

    Raises:
        InvalidError: no such region.
    """
    _library.api().region_unseal(_arguments.tag(tag))


def prepare(tag: str) -> None:
    """Pins host memory for the current bytes of the region.

    Raises:
        InvalidError: no such region.
        OutOfMemoryError: the budget or the host's memory is exhausted.
    """
    _library.api().region_prepare(_arguments.tag(tag))


def shrink(
    tags: str | Iterable[str] | None = None,
    tier: str = "host",
    *,
    bytes: int | None = None,
    verify: bool | None = None,
    timeout: float | None = None,
) -> ShrinkReport:
    """Evicts regions from the GPU. Their addresses stay reserved, and the memory is available to others until ``refill``.

    The call waits for open ``glake.active`` blocks, and new ones wait for the refill. If no part of the program uses ``active``, the caller
    promises that no work touches the regions until they are refilled: a kernel that does faults.

    Args:
        tags: one region, several, or None for all memory, that outside of regions and of captured graphs too.
        tier: "host" (pinned memory), "peer" or "peer:N" (another GPU's memory), "file" (where ``tiers.files`` names a folder).
        bytes: evict at least this many bytes, if available; the cheapest first.
        verify: compare digests after the copy and after the refill; None: as configured.
        timeout: seconds to wait for open ``active`` blocks; None: as configured (``tiers.drain_timeout_ms``, 30 seconds).

    Returns:
        The report: ``glake.reports.ShrinkReport`` documents its keys.

    Raises:
        InvalidError: no such region or tier.
        TimedOutError: open ``active`` blocks or a hook did not end in time; none of the memory that they use was moved.
        ClosedError: a hook or another rank refused; likewise.
        StateError: called from inside ``glake.active``.
        OutOfMemoryError: the tier is full. The part evicted by then stays evicted, and the text says how much; no bytes are lost, and
            ``shrink`` or ``refill`` continue from there.
        DriverError: the driver or the disk refused; otherwise like OutOfMemoryError.
    """
    _gate.refuse_inside("shrink")
    report: ShrinkReport = _asked("shrink", tags, bytes, timeout, tier=_arguments.text(tier, "tier", "a place"), verify=verify)
    return report


def refill(
    tags: str | Iterable[str] | None = None,
    *,
    bytes: int | None = None,
    wait: bool = True,
    verify: bool | None = None,
    timeout: float | None = None,
) -> RefillReport:
    """Refills regions at their addresses, in the order given by ``order`` or ``follow``, else in the order of allocation.

    Args:
        tags: one region, several, or None for all evicted memory.
        bytes: refill at least this many bytes.
        wait: return once the refill is complete. Otherwise return at once: ``glake.wait`` or ``glake.active`` then wait for a region.
        verify: compare digests; None: as configured.
        timeout: seconds to wait; None: no timeout. After it, the refill continues in the background.

    Returns:
        The report: ``glake.reports.RefillReport`` documents its keys. With ``wait=False`` it has zeros.

    Raises:
        InvalidError: no such region.
        TimedOutError: the timeout has expired; the refill continues.
        OutOfMemoryError: the GPU's memory is in use by others. The part refilled by then stays; free some memory, and call again.
        DriverError: the driver or the disk refused, or a digest does not match; otherwise like OutOfMemoryError.
    """
    report: RefillReport = _asked("refill", tags, bytes, timeout, wait=wait, verify=verify)
    return report


def wait(tag: str, stream: Stream = None) -> None:
    """Makes later work of a stream wait for a region that is being refilled: returns as soon as its copies are enqueued, and the stream
    waits for them. Evicted memory is refilled first.

    Args:
        tag: the region.
        stream: as for ``glake.copy_``; None: torch's current stream.

    Raises:
        InvalidError: no such region.
        OutOfMemoryError: the GPU's memory is in use by others.
    """
    torch = sys.modules.get("torch")
    device = _arguments.device(getattr(stream, "device_index", None))
    if stream is None and torch is not None and torch.cuda.is_initialized():
        stream = torch.cuda.current_stream(device)
    _library.api().region_wait(_arguments.tag(tag), device, 0 if stream is None else handle_of(stream))


def order(tags: Sequence[str]) -> None:
    """Sets the order in which regions are refilled; regions not named follow in the order of allocation.

    Raises:
        InvalidError: no such region.
    """
    _library.api().region_order(_arguments.tags(tags))


def fix(array: Any) -> None:
    """Keeps the memory of a tensor or array on its GPU during every shrink, because it is registered with a library that cannot follow
    (NCCL's user buffers, RDMA). The report of a shrink lists it.

    Raises:
        InvalidError: the memory is not GLake's.
        TypeError: the object gives no access to its bytes.
    """
    _fixed(array, True)


def unfix(array: Any) -> None:
    """Ends the effect of ``fix``.

    Raises:
        As ``fix``.
    """
    _fixed(array, False)


def regions() -> list[RegionState]:
    """Returns the state of every region on each GPU: ``glake.reports.RegionState`` documents the keys.

    Raises:
        UnavailableError: the library cannot start.
    """
    found: list[RegionState] = json.loads(_library.api().regions_json())
    return found


def memory_usage() -> list[MemoryUsage]:
    """Returns the memory usage of each GPU by holder: ``{"device": 0, "holder": "…", "bytes": …}``; the device is None for host memory.

    Raises:
        UnavailableError: the library cannot start.
    """
    found: list[MemoryUsage] = json.loads(_library.api().memory_usage_json())
    return found


def region_of(array: Any) -> str | None:
    """Returns the tag of the region of a tensor or array; None if it is in no region.

    Raises:
        TypeError: the object gives no access to its bytes.
    """
    part = range_of(array, "array")
    try:
        tag: str | None = _library.api().region_of(part.address)
        return tag
    finally:
        part.release()


def hooks(before: Hook | None = None, after: Hook | None = None, timeout: float = 30.0) -> None:
    """Sets functions that are called with an event (``glake.reports.HookEvent``) before and after each shrink and refill, on a thread of
    their own and with no lock held. A ``before`` that raises, or takes longer than the timeout, stops the move before anything is moved.
    Refills of memory that is touched are reported too (``"touched": True``), without a wait for the hooks: the thread that touches it may
    hold Python's lock. None removes a hook. The end of the program waits for hooks that run, as for threads, and calls none after that.
    """
    for name, hook in (("before", before), ("after", after)):
        _arguments.optional_function(hook, name, "a function of one argument")
    within = _arguments.milliseconds(timeout)
    if before is not None or after is not None:
        _end_with_python()
    _library.api().hooks_set(_hook(before), _hook(after), within)


@functools.cache
def _end_with_python() -> None:
    atexit.register(_library.api().hooks_end)


def _hook(hook: Hook | None) -> Callable[[str], None] | None:
    if hook is None:
        return None

    def told(event: str) -> None:
        hook(json.loads(event))

    return told


def _asked(move: str, tags: str | Iterable[str] | None, bytes: int | str | None, timeout: float | None, **more: Any) -> Any:
    """Calls ``shrink`` or ``refill`` of the library."""
    wanted: dict[str, Any] = {}
    for name, value in more.items():
        if value is not None:
            wanted[name] = value if name == "tier" else _arguments.flag(value, name)
    if tags is not None:
        wanted["tags"] = _arguments.tags(tags)
    if bytes is not None:
        wanted["bytes"] = _arguments.text(bytes, "bytes", "a size") if isinstance(bytes, str) else _arguments.amount(bytes, "bytes")
    if timeout is not None:
        wanted["timeout_ms"] = _arguments.milliseconds(timeout)
    return json.loads(getattr(_library.api(), move)(json.dumps(wanted)))


def _fixed(array: Any, fixed: bool) -> None:
    part = range_of(array, "array")
    try:
        _library.api().region_fix(part.address, fixed)
    except InvalidError:
        part.refuse_host("array")
        raise
    finally:
        part.release()
