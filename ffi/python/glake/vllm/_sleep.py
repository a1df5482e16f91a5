"""vLLM's sleep mode over regions: ``/sleep`` is a shrink, ``/wake_up`` a refill to the same addresses.

Level 1 keeps weights and everything else an engine holds. Level 2 gives the weights' bytes up, with their host copy. vLLM itself empties its
prefix cache before both, so nothing of the KV cache counts then.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
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


def suspend(engine: Engine, level: int, preserved: Iterable[str] = ()) -> None:
    """Evicts everything. From level 2 on the bytes of parameters are lost, except of those with a name like one of ``preserved``."""
    # Requests that are kept go on after the wake, in a use of their own.
    engine.uses.end()
    try:
        if level >= 2:
            _unseal()
            _declare(engine.model, [], list(preserved))
        else:
            seal()
        glake.shrink()
    except BaseException:
        # It is not asleep: the next eviction keeps the weights.
        _declare(engine.model, None)
        raise
    engine.uses.awake = []


def awake(engine: Engine, tags: list[str] | None) -> list[str]:
    """Returns the regions that are awake after a wake of these tags of vLLM's; none: all. Only weights and cache can stay asleep."""
    if tags is None:
        return []
    before = engine.uses.awake
    asleep = {tag for tag in _DEFERRABLE if tag not in tags and before is not None and tag not in before}
    return [tag for tag in _tags() if tag not in asleep] if asleep else []


def resume(engine: Engine, tags: list[str] | None) -> None:
    """Completes a wake, inside of a use that has brought the memory back."""
    engine.uses.awake = awake(engine, tags) or None
    if tags is None or "weights" in tags:
        _declare(engine.model, None)


def discard(engine: Engine, tags: Iterable[str]) -> None:
    """Evicts regions whose bytes are not needed again."""
    engine.uses.end()
    left = [tag for tag in tags if tag in _REGIONS]
    glake.shrink(left)
    engine.uses.awake = [tag for tag in engine.uses.awake or _tags() if tag not in left]


def _tags() -> list[str]:
    return [one["tag"] for one in glake.regions()]


def _unseal() -> None:
    if "weights" in _tags():
        glake.unseal("weights")


def _declare(model: Any, ranges: list[tuple[int, int]] | None, kept: Sequence[str] = ()) -> None:
    """Declares which bytes of the parameters on the GPU count, except of storages that have one with a name like those of ``kept``."""
    storages, stay = {}, set()
    for name, parameter in model.named_parameters():
        if parameter.is_cuda and parameter.numel():
            key = parameter.untyped_storage().data_ptr()
            storages[key] = parameter
            if any(fnmatch.fnmatch(name, pattern) for pattern in kept):
                stay.add(key)
    for key, parameter in storages.items():
        if key not in stay:
            # Some look like GPU memory and are the host's.
            with suppress(glake.InvalidError):
                glake.live(whole(parameter), ranges)
