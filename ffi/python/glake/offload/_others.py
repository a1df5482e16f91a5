"""Other offloads in a program: Hugging Face's own option, which is replaced, and saved-tensor hooks of others, which keep their tensors."""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from typing import Any

from . import _dynamo, _report
from ._parts import has, parts

# How often it is looked anew which layers there are.
LOOK_AGAIN = 128
# Hooks that are a part of how a program recomputes, or say that nothing leaves: they offload nothing.
_HARMLESS = ("torch.utils.checkpoint", "trl.models.activation_offloading", "torchtune.training._activation_offloading")


class Others:
    """Other offloads that a site found in its module."""

    def __init__(self, ours: weakref.WeakSet[Any]) -> None:
        self._ours = ours
        # Each layer that may be recomputed, and the function for it that was looked at; weakly, as a model may hold this.
        self._layers: list[tuple[weakref.ref[Any], Any]] = []
        # Of each layer that was changed: what stands there, and what stood there.
        self._replaced: list[tuple[weakref.ref[Any], Any, Any]] = []
        self._looks = 0
        self._watch: Any = None

    def look(self, module: Any) -> None:
        """Begins a forward of the module. Trainers may turn their options on long after the module was passed to us."""
        if self._looks < 2 or self._looks % LOOK_AGAIN == 0:
            self._layers = [(weakref.ref(part), None) for part in parts(module) if has(part, "gradient_checkpointing")]
            self._watches(module)
        self._looks += 1
        for place, (layer, seen) in enumerate(self._layers):
            function = _function(layer())
            if function is not seen:
                self._layers[place] = (layer, self._replace(layer, function))

    def end(self) -> None:
        """Ends the forward."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch()

    def undo(self) -> None:
        """Restores replaced functions, unless another party has replaced them since."""
        self.end()
        replaced, self._replaced = self._replaced, []
        for reference, ours, before in replaced:
            layer = reference()
            if layer is not None and _function(layer) is ours:
                layer._gradient_checkpointing_func = before
        self._layers, self._looks = [], 0

    def told(self, hook: Any, whom: Any) -> None:
        """Warns that saved tensors are packed by another party's hook."""
        _report.counts.others += 1
        name = f"{getattr(hook, '__module__', None)}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"
        if name not in _told:
            _told.add(name)
            warnings.warn(
                f"saved-tensor hooks of others are on in a {type(whom).__name__}: {name} packs what is saved there, and glake.offload leaves "
                "that alone; turn the other one off to have it offloaded by glake (glake.offload.report() counts it in 'others')",
                stacklevel=2,
            )

    def is_harmless(self, top: Any) -> bool:
        """Whether the innermost hooks, as torch names them, are none, ours or a checkpoint's."""
        return top is None or top[0] in self._ours or (getattr(top[0], "__module__", None) or "").startswith((*_HARMLESS, __package__ or "glake"))

    def _replace(self, layer: weakref.ref[Any], function: Any) -> Any:
        """Replaces the current function of a layer."""
        part, plain = layer(), _without_offload(function)
        if part is None or plain is None:
            return function
        if not self._replaced:
            warnings.warn(
                "gradient_checkpointing_kwargs={'offload': True} has transformers copy the inputs of recomputed layers to the host on the "
                "compute stream (save_on_cpu); glake.offload takes its place: layers are recomputed as before, and their inputs are "
                "offloaded by glake",
                stacklevel=2,
            )
        # One for all layers that had one, as before.
        for _, ours, before in self._replaced:
            if before is function:
                plain = ours
        part._gradient_checkpointing_func = plain
        self._replaced.append((layer, plain, function))
        return plain

    def _watches(self, module: Any) -> None:
        """Checks the active hooks whenever a part of the module begins, until the end of this forward."""
        import torch

        self.end()
        # What is compiled would be compiled in parts around them, and anew without them.
        if any(vars(part).get("_compiled_call_impl") is not None or has(part, "_orig_mod") for part in parts(module)):
            return
        if _dynamo.compiles():
            return
        watch = torch.nn.modules.module.register_module_forward_pre_hook(_Watch(weakref.ref(self)))
        # Also where a signal ended that forward.
        self._watch = weakref.finalize(self, watch.remove)


class _Watch:
    """Hook called before each module's forward, also on other threads, whose forwards are not under our hooks."""

    def __init__(self, others: weakref.ref[Others]) -> None:
        self._others, self._thread = others, threading.get_ident()

    def __call__(self, part: Any, _inputs: Any) -> None:
        import torch

        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        others, top = self._others(), torch._C._autograd._top_saved_tensors_default_hooks(False)
        if others is not None and not others.is_harmless(top) and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            others.told(top[0], part)


def _function(part: Any) -> Any:
    return vars(part).get("_gradient_checkpointing_func") if part is not None else None


def _without_offload(function: Any) -> Any:
    """Returns transformers' function for a recomputed layer without its ``save_on_cpu``; None if it is another function."""
    inner: Any = getattr(function, "func", None)
    code = getattr(inner, "__code__", None)
    if code is None or inner.__module__ != "transformers.modeling_utils" or "save_on_cpu" not in code.co_names:
        return None
    plain = inner.__globals__.get("checkpoint")
    return None if plain is None else functools.partial(plain, *function.args, **function.keywords)


# Of whom it was told in this process.
_told: set[str] = set()
