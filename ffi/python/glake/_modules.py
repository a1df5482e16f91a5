"""A torch module whose parts wait for their regions, and whose first pass says in which order these come back."""

from __future__ import annotations

import sys
from typing import Any

from . import _regions
from ._safepoint import safepoint


class Following:
    """What ``follow`` put on a module; ``remove`` takes it off."""

    def __init__(self, module: Any, safepoints: bool) -> None:
        self._tags: dict[int, tuple[str, ...]] = {}
        self._seen: list[str] | None = []
        # What is compiled runs as one: it waits for all that its parts have.
        self._whole = hasattr(module, "_orig_mod")
        parts = [module] if self._whole else module.modules()
        self._handles = [part.register_forward_pre_hook(self._before, prepend=True) for part in parts]
        self._handles.append(module.register_forward_hook(self._after))
        if safepoints:
            self._handles.append(module.register_forward_pre_hook(_between_passes, prepend=True))

    def remove(self) -> None:
        """Takes the hooks off. The order stays. A second time does nothing."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _before(self, part: Any, _inputs: Any) -> None:
        tags = self._tags.get(id(part))
        if tags is None:
            tags = self._tags[id(part)] = _tags_of(part, self._whole)
        for tag in tags:
            if self._seen is not None and tag not in self._seen:
                self._seen.append(tag)
            _regions.wait(tag)

    def _after(self, _module: Any, _inputs: Any, _output: Any) -> None:
        if self._seen:
            _regions.order(self._seen)
        self._seen = None


def follow(module: Any, *, safepoints: bool = False) -> Following:
    """Lets each part of a torch module wait for the regions of its own parameters and buffers before its forward, and takes the order of
    the first pass as that of refills: after ``glake.refill(wait=False)`` the first layers compute while later ones come back.

    A pass runs inside ``glake.active`` only where it shall wait for the whole.

    Args:
        module: the whole model; of one that is compiled, what ``torch.compile`` returned, which waits for all its regions at once.
        safepoints: before each of its passes there is a ``glake.safepoint``; while it is compiled or computed again there is none.

    Returns:
        What takes the hooks off again.
    """
    return Following(module, safepoints)


def _between_passes(_module: Any, _inputs: Any) -> None:
    # Compiled code has no safe point inside: the compiler takes this for a constant, and traces nothing behind it.
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    if compiler is not None and compiler.is_compiling():
        return
    safepoint()


def _tags_of(part: Any, recurse: bool) -> tuple[str, ...]:
    own = [*part.parameters(recurse=recurse), *part.buffers(recurse=recurse)]
    tags = (_regions.region_of(tensor) for tensor in own if tensor.is_cuda)
    return tuple(dict.fromkeys(tag for tag in tags if tag is not None))
