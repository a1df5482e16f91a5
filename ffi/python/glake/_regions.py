"""Regions: parts of a program's GPU memory that leave the GPU while they are not needed, and come back to the same addresses.

What a thread allocates inside ``with glake.region(tag)`` belongs to the region of that tag. ``shrink`` moves regions out, ``refill`` brings
them back; who uses their memory says so with ``glake.active``, so that nothing leaves under running work.
"""

from __future__ import annotations

import atexit
import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

from . import _gate, _library
from ._copies import Stream, handle_of
from ._memory import range_of
from ._statistics import index
from ._waiting import milliseconds

Policy = Literal["keep", "sealed", "discard"]
HostCopy = Literal["drop", "retain", "prepare"]
Report = dict[str, Any]
Hook = Callable[[Report], object]
Function = TypeVar("Function", bound=Callable[..., Any])

_POLICIES = {"keep": 0, "sealed": 1, "discard": 2}
_HOST_COPIES = {"drop": 0, "retain": 1, "prepare": 2}
_CLEAN = 16


class Region:
    """A region by its tag. Inside ``with`` the calling thread's allocations are its own; threads that this one starts, autograd's among
    them, are not inside. It also decorates functions."""

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
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]

    def __repr__(self) -> str:
        clean = ", clean=True" if self.clean else ""
        return f"glake.region({self.tag!r}, policy={self.policy!r}, host_copy={self.host_copy!r}{clean})"


def region(tag: str, policy: Policy = "keep", host_copy: HostCopy = "drop", clean: bool = False) -> Region:
    """The region of a tag, made if there is none::

        with glake.region("weights", policy="sealed", host_copy="retain"):
            model = load().cuda()

    Args:
        tag: its name. "default" is all memory outside of regions.
        policy: "keep": its bytes come back; "sealed": the same, and it can be sealed; "discard": only its addresses come back (a KV
            cache, scratch memory).
        host_copy: "drop": host memory of a shrink is given back after the refill; "retain": while the region is sealed it stays, and the
            next shrink copies nothing; "prepare": host memory for all of it is pinned when the ``with`` block ends, and in the
            background once no use runs, so that the first shrink is as fast as later ones.
        clean: copy its bytes to the host in the background while nobody uses it, and keep them on the GPU: a shrink then copies only
            what has changed since, which it finds by a digest. For programs whose work runs inside ``glake.active``: others change
            what was copied, and it is copied again. Its host memory goes first where host memory is short.

    Raises:
        InvalidError: the tag is reserved or empty, or its region was made with another policy.
        ValueError: there is no such policy.
    """
    if policy not in _POLICIES:
        raise ValueError(f"policy is {policy!r}: 'keep', 'sealed' and 'discard' are there")
    if host_copy not in _HOST_COPIES:
        raise ValueError(f"host_copy is {host_copy!r}: 'drop', 'retain' and 'prepare' are there")
    _library.api().region_define(tag, _POLICIES[policy], _HOST_COPIES[host_copy] | (_CLEAN if clean else 0))
    return Region(tag, policy, host_copy, clean)


def seal(tag: str, strict: bool = False) -> None:
    """Promises that nobody writes to the region until ``unseal``: a retained copy then stays good, and nothing new is allocated there.

    Args:
        tag: a region with the policy "sealed".
        strict: map it read-only: a kernel that writes to it fails. Call it while nothing runs that writes.

    Raises:
        InvalidError: there is no such region, or its policy is another.
    """
    _library.api().region_seal(tag, strict)


def unseal(tag: str) -> None:
    """Takes the promise back; copies that were retained are dropped.

    Raises:
        InvalidError: there is no such region.
    """
    _library.api().region_unseal(tag)


def prepare(tag: str) -> None:
    """Pins host memory for the bytes that the region has now.

    Raises:
        InvalidError: there is no such region.
        OutOfMemoryError: the budget or the host's memory does not have it.
    """
    _library.api().region_prepare(tag)


def shrink(
    tags: str | Iterable[str] | None = None,
    tier: str = "host",
    *,
    bytes: int | None = None,
    verify: bool | None = None,
    timeout: float | None = None,
) -> Report:
    """Moves regions out of the GPU. Their addresses stay theirs, and the memory is others' until ``refill``.

    Those who are inside ``glake.active`` are waited for, and nobody new gets in. Where no part of the program uses ``active``, the caller
    promises that nothing touches the regions until they are back: a kernel that does faults.

    Args:
        tags: one region, several, or None for all memory, that outside of regions and of captured graphs too.
        tier: "host" (pinned memory), "peer" or "peer:N" (another GPU's memory), "file" (where ``tiers.files`` names a folder).
        bytes: at least so much of them, where there is so much; what is cheapest goes first.
        verify: compare digests after the copy and after the refill; None: as configured.
        timeout: seconds to wait for those who are active; None: as configured (``tiers.drain_timeout_ms``, 30 seconds).

    Returns:
        What was freed, what was copied and what is resident still, by region; what had to stay and why (imported memory too, under "skipped", where everything
        was to leave); what is on each GPU and who holds it; and how many seconds a refill is predicted to take.

    Raises:
        InvalidError: there is no such region or tier.
        ClosedError: those who are active did not end in time; nothing of what they use was moved.
        StateError: called from inside ``glake.active``.
        OutOfMemoryError: the tier has no room. What was moved by then is out, and the text says how much; nothing is lost, and ``shrink``
            or ``refill`` go on from there.
        DriverError: as that, where the driver or the disk refused.
    """
    _gate.refuse_inside("shrink")
    return _asked(_library.api().shrink, tags, tier=tier, bytes=bytes, verify=verify, timeout_ms=None if timeout is None else milliseconds(timeout))


def refill(
    tags: str | Iterable[str] | None = None,
    *,
    bytes: int | None = None,
    wait: bool = True,
    verify: bool | None = None,
    timeout: float | None = None,
) -> Report:
    """Brings regions back to the addresses that they had, in the order that ``order`` or ``follow`` gave, else that of allocation.

    Args:
        tags: one region, several, or None for all that is out.
        bytes: at least so much of them.
        wait: return when all is there. Else at once: ``glake.wait`` or ``glake.active`` then wait for a region.
        verify: compare digests; None: as configured.
        timeout: seconds to wait for it; None: until all is there. What is not there by then comes in the background.

    Raises:
        InvalidError: there is no such region.
        ClosedError: the time is over; the refill goes on.
        OutOfMemoryError: others have the GPU's memory. What came back by then is there; free some, and call it again.
        DriverError: as that, where the driver or the disk refused, or a digest does not match.
    """
    return _asked(_library.api().refill, tags, bytes=bytes, wait=wait, verify=verify, timeout_ms=None if timeout is None else milliseconds(timeout))


def wait(tag: str, stream: Stream = None) -> None:
    """Lets a stream's later work use a region that is coming back: returns as soon as its copies are enqueued, and the stream waits for
    them. What is evicted comes back first, before it returns.

    Args:
        tag: which region.
        stream: as for ``glake.copy_``; None: torch's current stream.

    Raises:
        InvalidError: there is no such region.
        OutOfMemoryError: others took the memory that it comes back to.
    """
    torch = sys.modules.get("torch")
    device = index(getattr(stream, "device_index", None))
    if stream is None and torch is not None and torch.cuda.is_initialized():
        stream = torch.cuda.current_stream(device)
    _library.api().region_wait(tag, device, 0 if stream is None else handle_of(stream))


def order(tags: Sequence[str]) -> None:
    """Says in which order regions come back; those that are not named come after, in the order of their allocation.

    Raises:
        InvalidError: there is no such region.
    """
    _library.api().region_order(list(tags))


def fix(array: Any) -> None:
    """Keeps the memory of a tensor or array on its GPU whatever is shrunk: it is registered with somebody who would not follow (NCCL's
    user buffers, RDMA). The report of a shrink lists it.

    Raises:
        InvalidError: it is no memory of GLake's.
        TypeError: it has no bytes that can be reached.
    """
    _fixed(array, True)


def unfix(array: Any) -> None:
    """Ends ``fix``.

    Raises:
        As ``fix``.
    """
    _fixed(array, False)


def regions() -> list[dict[str, Any]]:
    """Every region: tag, device, policy, bytes that are live, resident and evicted, and where the copies are: "places" has the bytes of each,
    "place" is where most are. Of a region that was made with ``clean``, "clean" has bytes: "now" are clean; in all "copied" in the
    background, "voided" by uses, allocations and copies, "released" without a copy, "refused" because they had changed though nobody
    told, "reclaimed" because host memory was short.

    Raises:
        UnavailableError: the library cannot start.
    """
    found: list[dict[str, Any]] = json.loads(_library.api().regions_json())
    return found


def memory_usage() -> list[dict[str, Any]]:
    """What is on each GPU, and who holds it: ``{"device": 0, "holder": "…", "bytes": …}``; the device is None for host memory.

    Raises:
        UnavailableError: the library cannot start.
    """
    found: list[dict[str, Any]] = json.loads(_library.api().memory_usage_json())
    return found


def region_of(array: Any) -> str | None:
    """The tag of the region that a tensor's or array's memory lies in; None where it lies in none.

    Raises:
        TypeError: it has no bytes that can be reached.
    """
    part = range_of(array, "array")
    try:
        tag: str | None = _library.api().region_of(part.address)
        return tag
    finally:
        part.release()


def hooks(before: Hook | None = None, after: Hook | None = None, timeout: float = 30.0) -> None:
    """Functions that are called with what happens (``{"event": "shrink", "when": "before", "tags": […], …}``) before and after each shrink and
    refill, on a thread of their own and with no lock held. A ``before`` that raises, or takes longer than the timeout, stops it before
    anything is moved. Of memory that comes back because it is touched they are told too (``"touched": True``), and nothing waits for them:
    the thread that touches it may hold Python's lock. None removes one. The end of the program waits for hooks that run, as for threads,
    and calls none after that.
    """
    for name, hook in (("before", before), ("after", after)):
        if hook is not None and not callable(hook):
            raise TypeError(f"{name} is {hook!r}: a function of one argument, or None")
    within = milliseconds(timeout)
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


def _asked(call: Callable[[str], str], tags: str | Iterable[str] | None, **more: Any) -> Report:
    wanted = {name: value for name, value in more.items() if value is not None}
    if tags is not None:
        wanted["tags"] = [tags] if isinstance(tags, str) else list(tags)
    report: Report = json.loads(call(json.dumps(wanted)))
    return report


def _fixed(array: Any, fixed: bool) -> None:
    part = range_of(array, "array")
    try:
        _library.api().region_fix(part.address, fixed)
    finally:
        part.release()
