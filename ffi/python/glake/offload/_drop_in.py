"""Drop-in classes with the names of torchtune and TRL, so that a recipe changes one import."""

from __future__ import annotations

import weakref
from typing import Any

from ..errors import InvalidError
from ._activations import Activations, is_number
from ._saved import kept, read


class OffloadActivations(Activations):
    """A context manager around a forward pass and its loss, compatible with ``torchtune.training.OffloadActivations`` and
    ``trl.models.activation_offloading.OffloadActivations``.

    Args:
        use_pin_memory: ignored; host memory is always pinned.
        use_streams: ignored; copies always have a queue of their own.
        others: must be empty. The next two are keyword arguments, because torchtune and TRL order them differently.
        min_offload_size: tensors of fewer bytes stay.
        max_fwd_stash_size: ignored; tensors are not held back for their copies: a stream may reuse a block behind its copy.

    Raises:
        TypeError: one of those two was passed by position, or an argument is unknown.
        InvalidError: ``min_offload_size`` is below 0, or ``max_fwd_stash_size`` below 1.
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
            raise InvalidError(f"min_offload_size is {min_offload_size!r} and max_fwd_stash_size {max_fwd_stash_size!r}: numbers, at least 0 and 1")
        super().__init__(None, min_offload_size)

    def __deepcopy__(self, _memo: Any) -> OffloadActivations:
        return _made(self._packer.least)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self._packer.least,)

    def update_model_params(self, model: Any) -> None:
        """Sets the model of its forward passes: its parameters and buffers stay, and so do tensors that FSDP2 gathers of them."""
        self._model = weakref.ref(model)


def _made(least: int) -> OffloadActivations:
    """Returns a new instance without passes, for copies and pickles."""
    return OffloadActivations(min_offload_size=least)


class NoOpManager:
    """A block of code without offload, within one that offloads: hooks that keep saved tensors. Reentrant, and usable by several
    threads.
    """

    def __enter__(self) -> None:
        # Not itself: recipes call this as a module's forward pre-hook, whose answer takes the place of the module's inputs.
        import torch

        torch.autograd.graph.saved_tensors_hooks(kept, read).__enter__()

    def __exit__(self, *error: object) -> None:
        import torch

        # The innermost hooks are removed.
        torch.autograd.graph.saved_tensors_hooks(kept, read).__exit__(*error)
