"""Replacements for functions of ``torch._C`` with the plain-ABI backend: torch's own types, with the library's values."""

from __future__ import annotations

import json
import sys
import threading
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .errors import Error

Function = Callable[..., Any]
Observer = Callable[[int, int, int, int], object]


def functions(torch: ModuleType, api: ModuleType) -> dict[str, Function]:
    """Returns the replacements by their names in ``torch._C``. The caller skips names that its version of torch lacks."""
    return {**_statistics(api), **_history(api), **_limits(api), **settings(torch, pinned_only=True), **_accelerator(torch)}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """``{"active.all.peak": 1}`` as ``{"active": {"all": {"peak": 1}}}``, which is how torch's C++ gives statistics."""
    result: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        place = result
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return result


def snapshot(api: ModuleType) -> dict[str, Any]:
    """Converts the library's snapshot to torch's types: the id of a pool is a tuple."""
    taken: dict[str, Any] = json.loads(api.snapshot_json())
    for segment in taken["segments"]:
        segment["segment_pool_id"] = tuple(segment["segment_pool_id"])
    return taken


def lacks_peer_access(api: ModuleType) -> bool:
    """Whether the pool holds memory on several devices, each mapped for its own device only."""
    try:
        taken = snapshot(api)
    except Error:
        return False
    peers = taken["allocator_settings"]["glake"].get("peer_access", False)
    return not peers and len({segment["device"] for segment in taken["segments"]}) > 1


_SETTERS = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")  # the second before torch 2.9


def settings(torch: ModuleType, *, pinned_only: bool) -> dict[str, Function]:
    """Returns replacements for the functions that set torch's own allocator at run time: they warn of what has no effect.

    ``pinned_only``: torch's own allocator serves pinned host memory alone; otherwise pools with an allocator of their own, too.
    """

    def telling(original: Function) -> Function:
        def set_settings(text: str) -> None:
            ignored = without_effect(text)
            if ignored:
                warnings.warn(
                    f"torch's allocator settings {', '.join(ignored)} have no effect: glake is torch's allocator (glake.enable(config) sets it)",
                    RuntimeWarning,
                    stacklevel=3,
                )
            kept = ",".join(part for part in parts(text) if part not in ignored) if pinned_only else text
            if kept:
                original(kept)

        return set_settings

    return {name: telling(getattr(torch._C, name)) for name in _SETTERS if hasattr(torch._C, name)}


def without_effect(text: str) -> list[str]:
    """Returns the parts of an allocator setting that do not concern pinned host memory, which stays torch's."""
    return [part for part in parts(text) if not part.startswith("pinned_")]


def parts(text: str) -> list[str]:
    """Splits an allocator setting: ``a:1,b:[256:1,>:2]`` as ``["a:1", "b:[256:1,>:2]"]``."""
    found, depth, current = [], 0, ""
    for character in text + ",":
        depth += (character == "[") - (character == "]")
        if character == "," and depth <= 0:
            found.append(current.strip())
            current = ""
        else:
            current += character
    return [part for part in found if part]


def _statistics(api: ModuleType) -> dict[str, Function]:
    def stats(device: int) -> dict[str, Any]:
        return nested(json.loads(api.stats_json(device)))

    def reset_peaks(device: int) -> None:
        api.reset_peaks(device)

    def reset_totals(device: int) -> None:
        api.reset_totals(device)

    def pool_snapshot(pool: tuple[Any, ...] | None = None) -> dict[str, Any]:
        # None and the id (0, 0) are every pool; a third member says whether the traces are wanted.
        taken = snapshot(api)
        if pool is not None and tuple(pool[:2]) != (0, 0):
            taken["segments"] = [part for part in taken["segments"] if part["segment_pool_id"] == tuple(pool[:2])]
        if pool is not None and len(pool) > 2 and not pool[2]:
            taken["device_traces"] = [[] for _ in taken["device_traces"]]
        return taken

    return {
        "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": reset_peaks,
        "_cuda_resetAccumulatedMemoryStats": reset_totals,
        "_cuda_memorySnapshot": pool_snapshot,
        "_accelerator_getDeviceStats": lambda device: stats(device),
        "_accelerator_resetPeakStats": lambda device: reset_peaks(device),
        "_accelerator_resetAccumulatedStats": lambda device: reset_totals(device),
    }


def _history(api: ModuleType) -> dict[str, Function]:
    def record(
        enabled: str | None = "all",
        _context: str | None = "all",
        _stacks: str = "all",
        max_entries: int = sys.maxsize,
        clear_history: bool = False,
        *_later: Any,
    ) -> None:
        # "state" keeps what is live only: torch then has a ring of one entry.
        api.record_history(enabled is not None, max_entries if enabled == "all" else 1, bool(clear_history))

    def record_legacy(
        enabled: bool,
        _record_context: bool = True,
        max_entries: int = 1,
        _trace_context: bool = False,
        _cpp_context: bool = False,
        clear_history: bool = False,
        *_later: Any,
    ) -> None:
        api.record_history(bool(enabled), max_entries, bool(clear_history))

    def record_first(
        enabled: bool, _record_context: bool, _cpp_context: bool, max_entries: int, _trace_context: bool = False
    ) -> None:
        api.record_history(bool(enabled), max_entries, False)

    observers: list[Observer] = []
    guard = threading.Lock()

    def dispatch(device: int, requested: int, total: int, free: int) -> None:
        for observer in tuple(observers):
            observer(device, requested, total, free)

    def attach(observer: Observer) -> None:
        # The library has one observer, torch any number.
        with guard:
            if not observers:
                api.on_out_of_memory(dispatch)
            observers.append(observer)

    return {
        "_cuda_record_memory_history": record,
        "_cuda_record_memory_history_legacy": record_legacy,
        "_cuda_recordMemoryHistory": record_first,  # torch 2.0
        "_cuda_isHistoryEnabled": lambda: api.history_enabled(),
        "_cuda_attach_out_of_memory_observer": attach,
    }


def _limits(api: ModuleType) -> dict[str, Function]:
    def set_fraction(fraction: float, device: int) -> None:
        api.set_fraction(device, fraction)

    def fraction(device: int) -> float:
        return float(api.fraction(device))

    return {
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_getMemoryFraction": fraction,
        "_cuda_getAllocatorBackend": lambda: "glake",
    }


def _accelerator(torch: ModuleType) -> dict[str, Function]:
    # torch.accelerator asks the allocator that torch was built with, whichever is in force.
    def empty_cache() -> None:
        torch._C._cuda_emptyCache()

    return {
        "_accelerator_isAllocatorInitialized": lambda: bool(torch.cuda.is_initialized()),
        "_accelerator_emptyCache": empty_cache,
        "_accelerator_getMemoryInfo": lambda device: tuple(torch.cuda.mem_get_info(device)),
    }
