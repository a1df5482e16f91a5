"""vLLM's sleep mode over regions: ``/sleep`` is a shrink, ``/wake_up`` a refill to the same addresses.

Level 1 keeps weights and everything else an engine holds. Level 2 gives the weights' bytes up, with their host copy. vLLM itself empties its
prefix cache before both, so nothing of the KV cache counts then.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import glake

from ._engine import Engine, whole

# Regions by vLLM's tags of memory. What has another tag, or none, is in no region, and leaves like these.
_REGIONS: dict[str, dict[str, Any]] = {
    # Clean: a write that nobody announced (a LoRA adapter, new weights of a trainer) is found by its digest and copied again.
    "weights": {"policy": "sealed", "host_copy": "retain", "clean": True},
    "kv_cache": {},
    "workspace": {"policy": "discard"},
}
_DEFERRABLE = ("weights", "kv_cache")


def region(tag: str) -> AbstractContextManager[Any]:
    """Returns the region for memory with a tag of vLLM's."""
    if tag == "weights":
        # Of an earlier engine of the process.
        _unseal()
    return glake.region(tag, **_REGIONS[tag]) if tag in _REGIONS else nullcontext()


def seal() -> None:
    """Says that nobody is expected to write weights, so that their copy on the host is kept."""
    if "weights" in _tags():
        glake.seal("weights")


def suspend(engine: Engine, level: int) -> None:
    """Evicts everything. From level 2 on the bytes of all parameters are lost."""
    # Requests that are kept go on after the wake, in a use of their own.
    engine.uses.end()
    if level >= 2:
        _unseal()
        _declare(engine.model, [])
    else:
        seal()
    glake.shrink()


def awake(tags: list[str] | None) -> list[str]:
    """Returns the regions that a wake of these tags of vLLM's brings back; none: all. Only weights and cache can stay asleep."""
    return [] if tags is None else [tag for tag in _tags() if tag not in _DEFERRABLE or tag in tags]


def resume(engine: Engine, tags: list[str] | None) -> None:
    """Completes a wake, inside of a use that has brought the memory back."""
    if tags is None or "weights" in tags:
        _declare(engine.model, None)


def discard(tags: Iterable[str]) -> None:
    """Evicts regions whose bytes are not needed again."""
    glake.shrink([tag for tag in tags if tag in _REGIONS])


def _tags() -> list[str]:
    return [one["tag"] for one in glake.regions()]


def _unseal() -> None:
    if "weights" in _tags():
        glake.unseal("weights")


def _declare(model: Any, ranges: list[tuple[int, int]] | None) -> None:
    """Declares which bytes of the parameters on the GPU count."""
    storages = {parameter.untyped_storage().data_ptr(): parameter for parameter in model.parameters() if parameter.is_cuda}
    for parameter in storages.values():
        glake.live(whole(parameter), ranges)
