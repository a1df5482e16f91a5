"""What was offloaded."""

from __future__ import annotations

import dataclasses
import json

from .. import _library


@dataclasses.dataclass
class Counts:
    """What Python alone knows."""

    merged: int = 0
    stayed: int = 0
    replayed: int = 0
    recomputed: int = 0


counts = Counts()


def report() -> dict[str, int]:
    """What is offloaded now, and was since the process began.

    Returns:
        ``entries`` and ``host_bytes``: ranges that are offloaded now, and the host memory that they take; ``bytes_out`` and ``bytes_in``: what
        was copied from GPUs, and to them; ``merged``: saves that needed no copy, because another had made it; ``stayed``: tensors that
        were to leave and did not, for want of host memory or because they are not GLake's; ``replayed`` and ``recomputed``: leaves of checkpoints
        that were handed out, and that were computed again; and what docs/METRICS.md has of the rest.
    """
    return {**json.loads(_library.api().offload_stats_json()), **dataclasses.asdict(counts)}
