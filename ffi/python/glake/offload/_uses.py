"""Uses of streamed weights by functions that do not call their modules."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from .._arguments import flag
from ._place import Place
from ._weights import Weights, live


class uses:
    """Context manager for functions that read the weights of a module without calling it: ``module``'s frozen weights are on the GPU within
    the block, its parts' included::

        with glake.offload.uses(embedding):
            logits = torch.nn.functional.linear(hidden, embedding.weight)

    It does nothing for modules whose weights do not stream.

    Args:
        module: the module with the weights.
        writes: whether the block writes to them through ``.data``, which nothing counts: they are stored when it ends.

    Raises:
        TypeError: ``module`` is not a module.
    """

    def __init__(self, module: Any, *, writes: bool = False) -> None:
        import torch

        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module is a {type(module).__name__}: give the torch.nn.Module whose weights are read")
        self._module, self._writes = module, flag(writes, "writes")
        self._pinned: list[tuple[Weights, list[Place], Any]] = []

    def __enter__(self) -> uses:
        try:
            for weights in live():
                if places := weights.pin(self._module, self._writes):
                    self._pinned.append((weights, places, weights.push()))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pinned, self._pinned = self._pinned, []
        for weights, places, hooks in reversed(pinned):
            if hooks is not None:
                hooks.__exit__()
            weights.unpin(places)
