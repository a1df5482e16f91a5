"""Hooks on a torch module: its parts wait for their regions, and its first pass sets the order of refills.

``torch.compile`` takes the hooks of a compiled module's parts into the graph, where they have no effect. The hooks of the whole module are
called outside of the graph, and wait for the parts too.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from . import _arguments, _regions
from ._safepoint import safepoint

_logger = logging.getLogger("glake")


class Following:
    """The hooks that ``follow`` put on a module; ``remove`` takes them off."""

    def __init__(self, module: Any, safepoints: bool) -> None:
        self._tags: dict[tuple[int, bool], tuple[str, ...]] = {}
        self._seen: list[str] | None = []
        # Compiled code runs as one unit: it waits for the regions of all its parts.
        self._whole = hasattr(module, "_orig_mod")
        parts = [module] if self._whole else module.modules()
        between = _between_passes if safepoints else _tell
        for hook in (self._before, self._after, between):
            _leave_outside(hook)
        self._handles = [_first(part, self._before) for part in parts]
        self._handles.append(_first(module, between))
        self._handles.append(module.register_forward_hook(self._after))

    def remove(self) -> None:
        """Removes the hooks. The order stays. Repeated calls do nothing."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _before(self, part: Any, _inputs: Any) -> None:
        if _is_in_graph():
            return
        # Its parts may be in graphs.
        _uncompiled(self._wait)(part, self._whole or _has_graphs())

    def _wait(self, part: Any, whole: bool) -> None:
        tags = self._tags.get((id(part), whole))
        if tags is None:
            tags = self._tags[id(part), whole] = _tags_of(part, whole)
        for tag in tags:
            if self._seen is not None and tag not in self._seen:
                self._seen.append(tag)
            _regions.wait(tag)

    def _after(self, _module: Any, _inputs: Any, _output: Any) -> None:
        if _is_in_graph():
            return
        if self._seen:
            _regions.order(self._seen)
        self._seen = None


def follow(module: Any, *, safepoints: bool = False) -> Following:
    """Makes each part of a torch module wait for the regions of its parameters and buffers before its forward, and uses the order of
    the first pass for refills: after ``glake.refill(wait=False)`` the first layers compute while later ones are refilled.

    Run a pass inside ``glake.active`` only if it should wait for the whole model.

    Args:
        module: the whole model. A compiled model waits for all its regions at once: follow the result of ``torch.compile``. A model followed
            before its compilation does the same, unless its own hooks are inside a graph, where they have no effect, which is logged: in
            the graph of a function that calls it, or of one of torch's own classes (``Sequential``).
        safepoints: call ``glake.safepoint`` before each of its passes; not in a graph, and not in a recomputation.

    Returns:
        The handle that removes the hooks.

    Raises:
        TypeError: it is no module.
    """
    if isinstance(module, type) or not hasattr(module, "register_forward_pre_hook"):
        raise TypeError(f"module is a {type(module).__name__}: give the torch.nn.Module")
    return Following(module, _arguments.flag(safepoints, "safepoints"))


def _first(part: Any, hook: Any) -> Any:
    """Registers a hook before all others, as torch's ``prepend`` does. Torch's compiler reads the order of another dictionary, and
    would take one hook for another.
    """
    handle, hooks = part.register_forward_pre_hook(hook), part._forward_pre_hooks
    for other in list(hooks)[:-1]:
        hooks[other] = hooks.pop(other)
    return handle


def _leave_outside(hook: Any) -> None:
    """Excludes a hook from compilation if it is called outside of a graph. Does nothing with a torch that lacks this option."""
    frames: Any = sys.modules["torch"]._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        as_it_is = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(hook.__code__, as_it_is)


def _between_passes(_module: Any, _inputs: Any) -> None:
    if _is_in_graph():
        _is_lost()
        return
    _uncompiled(safepoint)()


def _tell(_module: Any, _inputs: Any) -> None:
    if _is_in_graph():
        _is_lost()


def _is_lost() -> None:
    _logger.warning(
        "glake.follow: a module that is followed is compiled into a graph, in which it waits for no region and has no safe points: "
        "follow what torch.compile returned"
    )


# Like torch.compiler.assume_constant_result: the compiler calls it once.
_is_lost._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_in_graph() -> bool:
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and bool(compiler.is_compiling())


def _has_graphs() -> bool:
    """Whether a compiler may trace calls here."""
    frames: Any = sys.modules["torch"]._C._dynamo.eval_frame
    return hasattr(frames, "get_eval_frame_callback") and frames.get_eval_frame_callback() is not None


def _uncompiled(call: Any) -> Any:
    """Returns ``call``, excluded from compilation if a compiler may trace it."""
    return sys.modules["torch"].compiler.disable(call) if _has_graphs() else call


def _tags_of(part: Any, recurse: bool) -> tuple[str, ...]:
    own = [*part.parameters(recurse=recurse), *part.buffers(recurse=recurse)]
    tags = (_regions.region_of(tensor) for tensor in own if tensor.is_cuda)
    return tuple(dict.fromkeys(tag for tag in tags if tag is not None))
