"""Types of the dictionaries that GLake returns: reports of moves, states of regions and of the gate, and events of hooks.

::

    report: glake.reports.ShrinkReport = glake.shrink()
    print(report["freed"], [region["tag"] for region in report["regions"]])

Sizes are bytes, times are seconds. Keys may be added by a later release.
"""

from __future__ import annotations

from typing import Literal, Optional, TypedDict, Union

__all__ = [
    "CleanCounts",
    "GateState",
    "HookEvent",
    "MemoryUsage",
    "RefilledRegion",
    "RefillReport",
    "RegionState",
    "ShrinkReport",
    "ShrunkRegion",
    "Skipped",
]


class Skipped(TypedDict):
    """Memory that a shrink could not evict.

    Attributes:
        device: its GPU.
        address: its first byte.
        size: its bytes.
        reason: "fixed" (``glake.fix``), "exported" (shared with another process), "withheld" (freed during the shrink while another stream
            used it) or "imported" (another process's).
    """

    device: int
    address: int
    size: int
    reason: Literal["fixed", "exported", "withheld", "imported"]


class MemoryUsage(TypedDict):
    """Memory of one holder on one GPU.

    Attributes:
        device: the GPU; None for host memory.
        holder: a text for people, such as "region 'weights'".
        bytes: the memory that it holds.
    """

    device: Optional[int]
    holder: str
    bytes: int


class _Moved(TypedDict):
    tag: str
    device: int
    copied: int
    resident: int
    evicted: int


class ShrunkRegion(_Moved):
    """Result of a shrink for one region on one GPU.

    Attributes:
        tag: the region.
        device: the GPU.
        freed: GPU memory that was released.
        copied: bytes that were copied.
        clean: bytes that were evicted without a copy, because a copy made while the region was idle was still valid.
        undefined: bytes of blocks that were not copied, because they are not live (``glake.live``).
        resident: bytes on the GPU afterwards.
        evicted: bytes that are evicted afterwards, by this shrink or earlier ones.
        place: destination of this shrink: "host", "peer:N" or "file".
        skipped: memory that had to stay.
    """

    freed: int
    clean: int
    undefined: int
    place: str
    skipped: list[Skipped]


class RefilledRegion(_Moved):
    """Result of a refill for one region on one GPU.

    Attributes:
        tag: the region.
        device: the GPU.
        mapped: GPU memory that was created.
        copied: bytes that were copied.
        resident: bytes on the GPU afterwards.
        evicted: bytes that are still evicted.
    """

    mapped: int


class ShrinkReport(TypedDict):
    """Report of ``glake.shrink``.

    Attributes:
        freed: GPU memory that was released to the driver.
        copied: bytes that were copied.
        clean: bytes that were evicted without a copy, because a copy made while the region was idle was still valid.
        undefined: bytes of blocks that were not copied, because they are not live (``glake.live``).
        resident: bytes of these regions that are still on GPUs.
        regions: the result for each region on each GPU.
        skipped: memory outside of regions that had to stay, if everything was to be evicted.
        warnings: texts about deviations from the request, such as a function of ``glake.live`` that raised.
        gpu: the memory in use afterwards, by holder, as ``glake.memory_usage`` returns it.
        seconds: the duration of the shrink.
        predicted_refill_seconds: the predicted duration of a refill of all evicted memory.
    """

    freed: int
    copied: int
    clean: int
    undefined: int
    resident: int
    regions: list[ShrunkRegion]
    skipped: list[Skipped]
    warnings: list[str]
    gpu: list[MemoryUsage]
    seconds: float
    predicted_refill_seconds: float


class RefillReport(TypedDict):
    """Report of ``glake.refill``; with ``wait=False`` zeros, and no regions.

    Attributes:
        mapped: GPU memory that was created.
        copied: bytes that were copied.
        evicted: bytes of these regions that are still evicted.
        regions: the result for each region on each GPU.
        seconds: the duration of the refill.
    """

    mapped: int
    copied: int
    evicted: int
    regions: list[RefilledRegion]
    seconds: float


class CleanCounts(TypedDict):
    """Bytes of a region that was made with ``clean=True``.

    Attributes:
        now: bytes that have a valid copy on the host.
        copied: bytes copied in the background so far.
        voided: copied bytes whose copies ended by uses, allocations and copies.
        released: bytes that left the GPU without a copy.
        refused: copied bytes that had changed without notice, and were copied again.
        reclaimed: copied bytes whose copies were released because host memory was short.
    """

    now: int
    copied: int
    voided: int
    released: int
    refused: int
    reclaimed: int


class RegionState(TypedDict):
    """State of a region on one GPU, as ``glake.regions`` returns it.

    Attributes:
        tag: the region.
        policy: its policy.
        host_copy: what happens to its host copy after a refill.
        sealed: whether it is sealed.
        clean: counts of its clean bytes; None unless it was made with ``clean=True``.
        device: the GPU; None if it has no memory yet.
        resident: bytes on the GPU.
        evicted: bytes that are evicted.
        decommitted: bytes of live blocks that were decommitted.
        live: bytes of live blocks, on the GPU or evicted.
        place: place of most of the evicted bytes: "host", "peer:N", "file" or "nowhere" (discarded); None if no bytes are evicted.
        places: the evicted bytes of each place.
        predicted_refill_seconds: the predicted duration of a refill of the region.
    """

    tag: str
    policy: Literal["keep", "sealed", "discard"]
    host_copy: Literal["drop", "retain", "prepare"]
    sealed: bool
    clean: Optional[CleanCounts]
    device: Optional[int]
    resident: int
    evicted: int
    decommitted: int
    live: int
    place: Optional[str]
    places: dict[str, int]
    predicted_refill_seconds: float


class GateState(TypedDict):
    """State of the gate, as ``glake.gate`` returns it.

    Attributes:
        open: whether no shrink waits or runs, and no memory is evicted.
        uses: number of uses that have begun and not ended.
        parked: number of those that wait at safe points.
        closing: the regions of each shrink that waits or runs; None stands for all.
        closed: the regions with evicted memory.
    """

    open: bool
    uses: int
    parked: int
    closing: list[Optional[list[str]]]
    closed: list[str]


class _Event(TypedDict):
    event: Literal["shrink", "refill"]
    when: Literal["before", "after"]
    tags: Optional[list[str]]
    bytes: Optional[int]


class HookEvent(_Event, total=False):
    """Event of ``glake.hooks``.

    Attributes:
        event: "shrink" or "refill".
        when: "before" or "after".
        tags: the regions; None: all.
        bytes: the requested amount; None: everything of these regions.
        tier: destination of a shrink.
        touched: True for a refill of memory that was touched while it was evicted. Absent otherwise.
        device: the GPU of such a refill.
        report: result of the move, after it. Absent if it failed.
        error: text of the error, if the move failed.
    """

    tier: str
    touched: bool
    device: int
    report: Union[ShrinkReport, RefillReport]
    error: str
