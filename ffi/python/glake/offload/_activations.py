"""Where activations are offloaded: in a module's forward passes, or in a block of code."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from ._memory import Cuda, Memory
from ._saved import Packer

LEAST = 256 << 10


class Activations:
    """What ``glake.offload.activations`` answers: a context manager, and what takes the hooks of a module off again."""

    def __init__(self, module: Any, least: int, memory: Memory | None = None) -> None:
        if least < 0:
            raise ValueError(f"least is {least}: a number of bytes, and not below 0")
        self._module = module
        self._packer = Packer(least, memory or Cuda())
        # One a thread that is inside, for a thread may enter again.
        self._entered = threading.local()
        self._handles: list[Any] = []
        if module is not None:
            self._handles = [
                module.register_forward_pre_hook(self._before, prepend=True),
                module.register_forward_hook(self._after, always_call=True),
            ]

    def __enter__(self) -> Activations:
        import torch

        hooks = torch.autograd.graph.saved_tensors_hooks(self._packer.pack, self._packer.unpack)
        hooks.__enter__()
        self._stack().append(hooks)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack().pop().__exit__(kind, error, trace)

    def remove(self) -> None:
        """Takes the hooks off the module. What is offloaded comes back as it is read. A second time does nothing."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _stack(self) -> list[Any]:
        if not hasattr(self._entered, "hooks"):
            self._entered.hooks = []
        return self._entered.hooks

    def _before(self, _module: Any, _inputs: Any) -> None:
        # A pass inside of another's backward computes what a checkpoint dropped: its saves live for a moment.
        import torch

        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._packer.stay(self._module)
            self.__enter__()
        else:
            self._stack().append(_Nothing())

    def _after(self, _module: Any, _inputs: Any, _output: Any) -> None:
        # Called without the hook before it where an earlier one raised.
        if self._stack():
            self.__exit__(None, None, None)


class _Nothing:
    def __exit__(self, *_: object) -> None:
        pass


def activations(module: Any = None, *, least: int = LEAST) -> Activations:
    """Offloads what autograd saves in a module's forward passes, or in a block of code::

        glake.offload.activations(model)              # in each forward pass of it, until .remove()
        with glake.offload.activations():             # a loss outside of the module too
            loss = criterion(model(batch), target)
        loss.backward()

    The first pass reloads each tensor when it is read; passes that begin like one that was seen have their reloads begun before, in the order
    of that one. All is offloaded whose memory a copy frees, but the last of it that leaves for nothing.

    Each range of bytes is copied once, however many operations save it. Parameters, their views and a module's buffers stay, and so does what is no memory of GLake's, what lies in a stream that is captured, and tensors of other kinds than ``torch.Tensor``.
    Where there is no host memory left a tensor stays on the GPU too.

    Args:
        module: the outer module; None: only where the answer is entered.
        least: what has fewer bytes stays on the GPU.

    Returns:
        A context manager; with a module its hooks are on it already.

    Raises:
        ValueError: ``least`` is below 0.
    """
    return Activations(module, least)
