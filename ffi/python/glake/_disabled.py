"""The library's place in a process with ``GLAKE_DISABLE=1``: torch works as it does without GLake, and nothing is opened or started.

Every function of the package checks its arguments as always, and then does nothing: regions are empty names, the gate is open, no
memory leaves the GPU. Where torch has a function with the same meaning (a copy, the statistics), that one runs.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from glake_switch import is_disabled

from .errors import InvalidError, TorchError

__all__ = ["Library", "copies", "is_disabled", "torch_for"]

_SHRINK: dict[str, Any] = {"clean": 0, "copied": 0, "freed": 0, "gpu": [], "predicted_refill_seconds": 0.0, "regions": [], "resident": 0}
_SHRINK |= {"seconds": 0.0, "skipped": [], "undefined": 0, "warnings": []}
_REFILL: dict[str, Any] = {"copied": 0, "evicted": 0, "mapped": 0, "regions": [], "seconds": 0.0}
_GATE: dict[str, Any] = {"closed": [], "closing": [], "open": True, "parked": 0, "uses": 0}
_COPIES: dict[str, Any] = {"break_even": 0, "calibrated": False, "lost_copies": 0, "multi_path": False, "native_bytes": 0, "native_copies": 0}
_COPIES |= {"paths": [], "ready": False, "relay_costs": [], "relays": [], "split_copies": 0}
_OFFLOADED: dict[str, int] = dict.fromkeys(
    "busy_us_in busy_us_out bytes_in bytes_out changed copies_in copies_out entries held_bytes hold_waits host_bytes host_pinned_bytes "
    "refused timed_bytes_in timed_bytes_out unchanged unchecked".split(),
    0,
)
_SITE: dict[str, Any] = dict.fromkeys("above_budget budget device plan real_exposed_us real_us reserved_bytes unplanned".split())
_SITE |= {"beside_bytes": 0, "diverged": 0, "host_room_bytes": 0, "in_gb_s": 0.0, "out_gb_s": 0.0, "passes": 0, "preset": "memory"}

_NAME = re.compile("[A-Za-z0-9._-]{1,64}")
_TIER = re.compile("host|file|peer(:[0-9]+)?")


class Library:
    """The functions of ``_glake.pyi``. Those that are not here return None."""

    def __init__(self) -> None:
        self.Site = Site

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_args, **_named: None

    @staticmethod
    def started() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 0

    @staticmethod
    def find(address: int) -> tuple[int, int, int, int]:
        # Of a range that is all that its caller has.
        return address, sys.maxsize, sys.maxsize, 0

    @staticmethod
    def region_define(tag: str, _policy: int, _host_copy: int) -> None:
        if tag in ("", "default") or tag.startswith("graph "):
            raise InvalidError(f"a region cannot be called {tag!r}: that is memory outside of regions; take another name, of one letter or more")

    @staticmethod
    def join(name: str | None, _agent: str | None) -> None:
        if name is not None and not _NAME.fullmatch(name):
            raise InvalidError(f'a worker cannot be called "{name}": a name has 1 to 64 of the characters A-Z a-z 0-9 . _ -')

    @staticmethod
    def shrink(request: str) -> str:
        tier = json.loads(request).get("tier", "host")
        if not _TIER.fullmatch(tier):
            raise InvalidError(f'the request to shrink is wrong: tier "{tier}": "host", "peer", "peer:1" and "file" are there')
        return json.dumps(_SHRINK)

    @staticmethod
    def refill(_request: str) -> str:
        return json.dumps(_REFILL)

    @staticmethod
    def gate_json() -> str:
        return json.dumps(_GATE)

    @staticmethod
    def regions_json() -> str:
        return "[]"

    memory_usage_json = regions_json

    @staticmethod
    def copy_stats_json() -> str:
        return json.dumps(_COPIES)

    @staticmethod
    def offload_stats_json() -> str:
        return json.dumps(_OFFLOADED)

    @staticmethod
    def use_begin(_tags: list[str], _when_closed: int, _timeout_ms: int) -> int:
        return next(_uses)

    @staticmethod
    def safepoint_wanted() -> bool:
        return False

    @staticmethod
    def read_evicted(_to: int, _from: int, _size: int) -> None:
        raise InvalidError("nothing is evicted with GLAKE_DISABLE=1: copy the memory")

    use_wanted = is_private = staticmethod(lambda _which: False)
    trim = decommit = commit = lease_take = generation = staticmethod(lambda *_arguments, **_named: 0)


_uses = itertools.count(1)


class Site:
    """An offload site whose plan keeps everything on the GPU."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_args, **_named: None

    @staticmethod
    def needs(_shape: int) -> bool:
        return False

    @staticmethod
    def told_json(_course: bool = False) -> str:
        return json.dumps(_SITE)

    @staticmethod
    def packed(*_arguments: Any, **_named: Any) -> tuple[int, int, list[int]]:
        return 0, 0, []

    @staticmethod
    def unpacked(_item: int) -> list[int]:
        return []


def torch_for(function: str) -> Any:
    """Returns torch, for a function that it has too.

    Raises:
        TorchError: torch is missing.
    """
    try:
        import torch
    except ImportError as error:
        raise TorchError(f"with GLAKE_DISABLE=1 glake.{function}() is torch's, and import torch failed: {error}") from error
    return torch


def copies(pairs: Iterable[tuple[Any, Any]], stream: Any) -> None:
    """Copies bytes as torch does, on a stream or on the current one, and waits for them."""
    for to, from_ in pairs:
        if not any(_is_of_gpu(end) for end in (to, from_)):
            _bytes(to)[:] = _bytes(from_)
        else:
            _copy_on_gpu(torch_for("copy_"), to, from_, stream)


def _is_of_gpu(thing: Any) -> bool:
    return bool(getattr(thing, "is_cuda", False)) or hasattr(thing, "__cuda_array_interface__")


def _bytes(thing: Any) -> memoryview:
    """Returns the bytes of a buffer or of a tensor in host memory."""
    if hasattr(thing, "data_ptr"):
        thing = thing.detach().reshape(-1).view(torch_for("copy_").uint8).numpy()
    return memoryview(thing).cast("B")


def _copy_on_gpu(torch: ModuleType, to: Any, from_: Any, stream: Any) -> None:
    def of_bytes(thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):
            thing = torch.as_tensor(thing, device="cuda") if _is_of_gpu(thing) else torch.frombuffer(thing, dtype=torch.uint8)
        return thing.reshape(-1).view(torch.uint8)

    if isinstance(stream, int):
        stream = torch.cuda.ExternalStream(stream) if stream else None
    with torch.no_grad(), torch.cuda.stream(stream):
        of_bytes(to).copy_(of_bytes(from_))
        torch.cuda.current_stream().synchronize()
