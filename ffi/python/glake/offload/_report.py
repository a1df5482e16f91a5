"""What was offloaded."""

from __future__ import annotations

import dataclasses
import json

from .. import _library


@dataclasses.dataclass
class Counts:
    """What Python alone knows."""

    merged: int = 0
    refused: int = 0


counts = Counts()


def report() -> dict[str, int]:
    """What is offloaded now, and was since the process began.

    Returns:
        ``live`` and ``live_bytes``: ranges that are offloaded now, and their bytes of host memory; ``bytes_out`` and ``bytes_in``: what was
        copied from GPUs, and to them; ``merged``: saves that needed no copy, because another had made it; ``refused``: tensors that
        stayed on the GPU for want of host memory, or because they are not GLake's.
    """
    return {**json.loads(_library.api().offload_stats_json()), **dataclasses.asdict(counts)}
