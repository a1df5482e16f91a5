"""torchtune's and TRL's names for what they have, so that a recipe changes one import."""

from __future__ import annotations

import weakref
from typing import Any

from ._activations import Activations, is_number
from ._saved import kept, read


class OffloadActivations(Activations):
    """As ``torchtune.training.OffloadActivations`` and ``trl.models.activation_offloading.OffloadActivations``: a context manager around a
    forward pass and its loss.

    Args:
        use_pin_memory: it is always pinned.
        use_streams: copies always have a queue of their own.
        others: none. The two that follow are given by name, as theirs stand in different orders.
        min_offload_size: what is smaller stays, in bytes.
        max_fwd_stash_size: tensors are not held back for their copies: a block is its stream's again behind its copy.

    Raises:
        TypeError: one of those two was given by its place, or there is no such argument.
        ValueError: ``min_offload_size`` is below 0, or ``max_fwd_stash_size`` below 1.
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool | None = True,
        *others: Any,
        min_offload_size: int = 1024,
        max_fwd_stash_size: int = 5,
    ) -> None:
        if others:
            raise TypeError(
                "give min_offload_size=... and max_fwd_stash_size=... by name: torchtune has max_fwd_stash_size before min_offload_size, "
                "and TRL behind it"
            )
        sizes = (min_offload_size, max_fwd_stash_size)
        if not all(is_number(size) and size >= least for size, least in zip(sizes, (0, 1))):
            raise ValueError(f"min_offload_size is {min_offload_size!r} and max_fwd_stash_size {max_fwd_stash_size!r}: numbers, at least 0 and 1")
        super().__init__(None, min_offload_size)

    def __deepcopy__(self, _memo: Any) -> OffloadActivations:
        return _made(self._packer.least)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self._packer.least,)

    def update_model_params(self, model: Any) -> None:
        """The model whose forward passes it is entered for: its parameters and buffers stay, and so does what FSDP2 gathers of them."""
        self._model = weakref.ref(model)


def _made(least: int) -> OffloadActivations:
    """One that has seen no pass, as a copy or a pickle of one is."""
    return OffloadActivations(min_offload_size=least)


class NoOpManager:
    """A block of code in which nothing is offloaded, within one that offloads: a pair of hooks that keeps what is saved. One may be entered
    again within itself, and by several threads."""

    def __enter__(self) -> None:
        # Not itself: recipes call this as a module's forward pre-hook, whose answer takes the place of the module's inputs.
        import torch

        torch.autograd.graph.saved_tensors_hooks(kept, read).__enter__()

    def __exit__(self, *error: object) -> None:
        import torch

        # Whichever are innermost are taken off.
        torch.autograd.graph.saved_tensors_hooks(kept, read).__exit__(*error)
