"""Statistics of the pool, whether or not GLake is torch's allocator."""

from __future__ import annotations

import json
from typing import Any

from . import _arguments, _layer, _library, compiled
from ._arguments import Device
from ._disabled import is_disabled, torch_for

_LINES = (
    ("requested_bytes", "Requested memory"),
    ("allocated_bytes", "Allocated memory"),
    ("active_bytes", "Active memory"),
    ("reserved_bytes", "GPU reserved memory"),
    ("inactive_split_bytes", "Non-releasable memory"),
)


def memory_stats(device: Device = None) -> dict[str, int | float]:
    """Returns the statistics of one device under torch's keys ("active_bytes.all.peak"), and GLake's own under "glake."
    ("glake.stitches").

    Amounts are bytes. A device whose pool has not started has zeros. "glake.foreign_reserved_bytes" and similar keys describe pools with
    their own allocator (``torch.cuda.MemPool(allocator)``), which torch's own statistics include and all other figures here do not.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for torch's current device (0 where CUDA has not started).

    Raises:
        InvalidError: no such device.
        UnavailableError: the library cannot start.
    """
    number = _arguments.device(device)
    if is_disabled():
        return dict(torch_for("memory_stats").cuda.memory_stats(number))
    stats: dict[str, int | float] = json.loads(_library.api().stats_json(number))
    stats.update((f"glake.foreign_{name}", figure) for name, figure in compiled.foreign(number).items())
    return stats


def memory_summary(device: Device = None) -> str:
    """Returns a readable table: bytes requested, allocated, active and reserved now and at the peak, and the effect of stitching.

    Raises:
        InvalidError: no such device.
        UnavailableError: the library cannot start.
    """
    number = _arguments.device(device)
    if is_disabled():
        return str(torch_for("memory_summary").cuda.memory_summary(number))
    stats = memory_stats(number)
    own = [key for key in sorted(stats) if key.startswith("glake.")]
    wide = max(24, *map(len, own))
    lines = [f"GLake memory of device {number}", f"{'':{wide}}{'now':>12}{'peak':>12}"]
    for key, label in _LINES:
        now, peak = (_size(stats[f"{key}.all.{when}"]) for when in ("current", "peak"))
        lines.append(f"{label:<{wide}}{now:>12}{peak:>12}")
    lines.append(f"{'Out of memory':<{wide}}{stats['num_ooms']:>12}")
    lines.append(f"{'Retries':<{wide}}{stats['num_alloc_retries']:>12}")
    for key in own:
        shown = _size(stats[key]) if key.endswith("_bytes") or key.startswith("glake.waste_") else f"{stats[key]:,}"
        lines.append(f"{key:<{wide}}{shown:>12}")
    return "\n".join(lines) + "\n"


def snapshot() -> dict[str, Any]:
    """Returns every segment and block of the pool, and the history if it is recorded, in the format of
    ``torch.cuda.memory._snapshot()``: pickled to a file it opens in torch's visualiser.

    Raises:
        UnavailableError: the library cannot start.
    """
    if is_disabled():
        return dict(torch_for("snapshot").cuda.memory._snapshot())
    return _layer.snapshot(_library.api())


def trim(keep: int = 0, device: Device = None) -> int:
    """Releases free memory to the driver. Waits for pending frees first, but only for work already on the GPU.

    Args:
        keep: bytes that may stay reserved, for each device.
        device: one device, or None for all.

    Returns:
        The bytes released.

    Raises:
        InvalidError: no such device, or ``keep`` is negative.
        DriverError: the driver refused.
    """
    if is_disabled():
        torch_for("trim").cuda.empty_cache()
    return int(_library.api().trim(-1 if device is None else _arguments.device(device), _arguments.amount(keep, "keep")))


def _size(amount: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"
