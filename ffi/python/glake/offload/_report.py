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
    others: int = 0


counts = Counts()


def report() -> dict[str, int]:
    """What is offloaded now, and was since the process began.

    Returns:
        ``entries`` and ``host_bytes``: ranges that are offloaded now, and the host memory that they take; ``bytes_out`` and ``bytes_in``: what
        was copied from GPUs, and to them; ``merged``: saves that needed no copy, because another had made it; ``stayed``: tensors that
        were to leave and did not, for want of host memory or because they are not GLake's; ``others``: forwards
        of modules, in a site's first passes, that ran under saved-tensor hooks of others, which keep what they pack; and what
        docs/METRICS.md has of the rest.
    """
    return {**json.loads(_library.api().offload_stats_json()), **dataclasses.asdict(counts)}
