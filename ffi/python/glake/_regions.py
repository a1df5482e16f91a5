"""Regions: parts of a program's GPU memory that are evicted while not needed, and refilled at the same addresses.

Memory that a thread allocates inside ``with glake.region(tag)`` belongs to the region of that tag. ``shrink`` evicts regions, ``refill``
restores them; a program declares its uses of their memory with ``glake.active``, so that no memory is evicted under running work.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

from . import _arguments, _gate, _library
from ._copies import Stream, handle_of
from ._memory import range_of
from .errors import Error, InvalidError, StateError
from .reports import HookEvent, MemoryUsage, RefillReport, RegionState, ShrinkReport

logger = logging.getLogger("glake")

Policy = Literal["keep", "sealed", "discard"]
HostCopy = Literal["drop", "retain", "prepare"]
Hook = Callable[[HookEvent], object]
Function = TypeVar("Function", bound=Callable[..., Any])

_POLICIES = {"keep": 0, "sealed": 1, "discard": 2}
_HOST_COPIES = {"drop": 0, "retain": 1, "prepare": 2}
_CLEAN = 16

_threads = threading.local()


def _stack(name: str) -> list[Any]:
    """Returns the blocks of one kind that the thread is inside: the regions, or for each plain block the library that was told, None if it
    could not be opened.
    """
    entered: list[Any] | None = getattr(_threads, name, None)
    if entered is None:
        entered = []
        setattr(_threads, name, entered)
    return entered


class Region:
    """A region, identified by its tag. Inside ``with``, the calling thread allocates from it; threads that it starts, including
    autograd's, do not. Also usable as a decorator.
    """

    __slots__ = ("clean", "host_copy", "policy", "tag")

    def __init__(self, tag: str, policy: Policy, host_copy: HostCopy, clean: bool = False) -> None:
        self.tag, self.policy, self.host_copy, self.clean = tag, policy, host_copy, clean

    def __del__(self) -> None:
        # The interpreter may be at its end.
        with contextlib.suppress(Exception):
            _library.api().region_release(self.tag)

    # The definition belongs to this object: a copy would release it once more.
    def __copy__(self) -> Region:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return region, (self.tag, self.policy, self.host_copy, self.clean)

    def __enter__(self) -> Region:
        _library.api().region_push(self.tag)
        _stack("regions").append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        entered = _stack("regions")
        if self not in entered:
            raise StateError(f"this thread is not inside {self!r}: it left as often as it entered, or entered on another thread")
        entered.remove(self)
        # The library leaves the innermost region, whichever that is.
        _library.api().region_pop()
        if kind is None and self.host_copy == "prepare":
            prepare(self.tag)

    def __call__(self, function: Function) -> Function:
        return _inside(self, function, "region")

    def __repr__(self) -> str:
        clean = ", clean=True" if self.clean else ""
        return f"glake.region({self.tag!r}, policy={self.policy!r}, host_copy={self.host_copy!r}{clean})"


def region(tag: str, policy: Policy = "keep", host_copy: HostCopy = "drop", clean: bool = False) -> Region:
    """Returns the region of a tag, created on first use. Once more than 256 regions have no such object left, those of them without memory
    are forgotten, and their tags are unknown::

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


class Plain:
    """Plain memory: inside ``with``, memory that the calling thread allocates comes from the driver's own allocator. Also usable as a
    decorator.
    """

    __slots__ = ()

    def __enter__(self) -> Plain:
        library = _library_if_there()
        if library is not None:
            library.plain_push()
        _stack("plain").append(library)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        entered = _stack("plain")
        if not entered:
            raise StateError("this thread is in no glake.plain() block: it left as often as it entered, or entered on another thread")
        library = entered.pop()
        if library is not None:
            library.plain_pop()

    def __call__(self, function: Function) -> Function:
        return _inside(self, function, "plain")

    def __repr__(self) -> str:
        return "glake.plain()"


def _library_if_there() -> Any:
    """Returns the library, not started; None if it is missing, so that all memory is torch's."""
    try:
        return _library.api()
    except Error:
        return None


def _inside(block: Region | Plain, function: Function, name: str) -> Function:
    """Decorates a function with a block of a thread."""
    _arguments.function(function, "the decorated object", f"glake.{name}() decorates functions")
    waits = inspect.iscoroutinefunction(function)
    if waits or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        does = "awaits" if waits else "yields"
        raise TypeError(
            f"{function.__qualname__} {does}, and the thread runs other code meanwhile: put `with glake.{name}(...)` around the allocations in it"
        )

    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with block:
            return function(*args, **kwargs)

    return inside  # type: ignore[return-value]


def plain() -> Plain:
    """Returns a context in which the calling thread allocates plain memory, as ``cudaMalloc`` returns it, for libraries that demand it::

        with glake.plain():
            buffer = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")  # cudaIpcGetMemHandle and cuMemGetAddressRange work

    Plain memory never leaves its GPU, and is not stitched, offloaded or sent by ``torch.multiprocessing``. It counts in all statistics and
    under the limit and the lease, is reused by later plain allocations, and is given back by ``empty_cache`` and under memory pressure.
    Inside a captured graph or a ``torch.cuda.MemPool`` it belongs to that pool. A ``glake.region`` entered inside takes precedence.

    It does not start the library. A block that encloses the start takes effect on the thread that starts it. Memory of torch's own allocator is
    plain in any case, unless ``expandable_segments`` is set.

    Raises:
        UnavailableError: the process was forked from one that uses the GPU.
        TypeError: a decorated function is a coroutine function or a generator function.
    """
    return Plain()


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
        verify: take digests of the bytes, which a refill compares; None: as configured (``tiers.verify``, on).
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
    if any(row["freed"] and row["tag"].startswith("graph ") for row in report["regions"]) and _nccl_registers_graphs():
        logger.warning(_REGISTERED)
        report["warnings"].append(_REGISTERED)
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
        verify: compare digests, and fill bytes that were not copied with 0xab; None: as configured (``tiers.verify``, on), without the fill.
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
    """Makes later work of a stream wait for a region that is being refilled. With ``tiers.verify`` (the default) it returns once the bytes
    have arrived and were compared; else as soon as the copies are enqueued, and the stream waits for them. Evicted memory is refilled first.

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


def fix(memory: Any) -> None:
    """Keeps memory on its GPU in every shrink, because a library that cannot follow knows it (NCCL's user buffers, RDMA, a graph whose
    collectives were captured). The report of a shrink lists it::

        pool = torch.cuda.graph_pool_handle()
        glake.fix(pool)  # before the capture: all memory of the graph stays
        with torch.cuda.graph(graph, pool=pool):
            ...

    Args:
        memory: a tensor or array, until it is freed or unfixed; or a pool with all of its memory, free memory too: a
            ``torch.cuda.MemPool``, a ``torch.cuda.graph_pool_handle()``, or a captured ``torch.cuda.CUDAGraph``.

    Raises:
        InvalidError: the memory is not GLake's, or some of it is evicted.
        TypeError: the object gives no access to its bytes.
    """
    _fixed(memory, True)


def unfix(memory: Any) -> None:
    """Ends the effect of one ``fix``.

    Raises:
        As ``fix``; InvalidError also if the memory is not fixed.
    """
    _fixed(memory, False)


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


def _fixed(memory: Any, fixed: bool) -> None:
    pool = _pool_of(memory)
    if pool is not None:
        _library.api().pool_fix(pool, fixed)
        return
    part = range_of(memory, "memory")
    try:
        _library.api().region_fix(part.address, fixed)
    except InvalidError:
        part.refuse_host("memory")
        raise
    finally:
        part.release()


def _pool_of(memory: Any) -> tuple[int, int] | None:
    """Returns the number of a pool of torch's; None for anything else."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    pools: Any = getattr(cuda, "MemPool", ())
    graphs: Any = getattr(cuda, "CUDAGraph", ())
    pool: Any = memory.id if isinstance(memory, pools) else memory.pool() if isinstance(memory, graphs) else memory
    if not (isinstance(pool, tuple) and len(pool) == 2 and all(isinstance(part, int) for part in pool)):
        return None
    first, second = (_arguments.number(part, "a number of the pool", "torch.cuda.graph_pool_handle() returns two") for part in pool)
    return first, second


_REGISTERED = (
    "memory of CUDA graphs has left the GPU in a process of several ranks. NCCL registers the buffers of captured collectives by their physical "
    "memory (NCCL_GRAPH_REGISTER=1, its default), so that such a graph replays wrongly from now on. Call glake.fix on the graph's pool before "
    "the capture and on the tensors that its collectives use, or set NCCL_GRAPH_REGISTER=0 before the process group is made"
)


def _nccl_registers_graphs() -> bool:
    """Returns whether NCCL may have registered buffers of graphs that this process captured."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or os.environ.get("NCCL_GRAPH_REGISTER") == "0" or not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1 and "nccl" in str(distributed.get_backend())
