"""TRL's option ``activation_offloading=True`` with this package's hooks."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from types import ModuleType

from glake_switch import is_disabled

from .. import errors
from .._patch import Patches
from ._drop_in import NoOpManager, OffloadActivations

_WHERE = "trl.models.activation_offloading"
_MADE_BY = "get_act_offloading_ctx_manager"
_OURS = {"OffloadActivations": OffloadActivations, "NoOpManager": NoOpManager}
_INSTEAD = "make `site = glake.offload.OffloadActivations()` once, and use `with site:` around each forward pass and its loss"
# Methods that TRL calls on the first of them.
_CALLED = ("update_model_params", "__enter__", "__exit__")


class PatchedTrl:
    """Replacements made by ``patch_trl``; ``remove`` restores the originals. Also a context manager."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches

    def remove(self) -> None:
        """Restores TRL's own offload for trainers created from then on. Repeated calls do nothing."""
        global _patched
        with _guard:
            if _patched is self:
                _patched = None
            self._patches.undo()

    def __enter__(self) -> PatchedTrl:
        return self

    def __exit__(self, *_error: object) -> None:
        self.remove()


_patched: PatchedTrl | None = None
_guard = threading.Lock()


def patch_trl() -> PatchedTrl:
    """Makes ``activation_offloading=True`` in TRL's SFTConfig, DPOConfig, KTOConfig and RewardConfig offload with this package from now
    on::

        glake.offload.patch_trl()
        trainer = trl.SFTTrainer(model, args=trl.SFTConfig(activation_offloading=True), ...)

    TRL may be imported before or after. Existing trainers are unchanged. As with TRL's own offload, saves of the model's head stay.

    Returns:
        The handle that restores TRL's own (``.remove()``); the same handle while the patch is active.

    Raises:
        TorchError: TRL is not installed, cannot be imported, or has an unknown layout.
    """
    global _patched
    with _guard:
        if _patched is None and is_disabled():
            import torch

            # TRL's own offload stays.
            return PatchedTrl(Patches(torch))
        if _patched is None:
            module = _module()
            _check(module)
            import torch

            patches = Patches(torch)
            for name, ours in _OURS.items():
                theirs = getattr(module, name)
                # TRL's own modules may have taken it by name.
                for where, other in list(sys.modules.items()):
                    if other is not None and where.partition(".")[0] == "trl" and vars(other).get(name) is theirs:
                        patches.attribute(other, name, ours)
            _patched = PatchedTrl(patches)
        return _patched


def _module() -> ModuleType:
    try:
        return importlib.import_module(_WHERE)
    except ImportError as error:
        if error.name == "trl" or sys.modules.get("trl") is None:
            raise errors.TorchError("glake.offload.patch_trl: TRL is not installed: pip install trl") from error
        raise errors.TorchError(
            f"glake.offload.patch_trl looked for {_WHERE}, which {_version()} cannot import ({error}): {_INSTEAD}"
        ) from error


def _check(module: ModuleType) -> None:
    """Checks that TRL has the layout that this module was written for."""
    missing = [name for name in (*_OURS, _MADE_BY) if not callable(getattr(module, name, None))]
    if not missing:
        maker, theirs = getattr(module, _MADE_BY), module.OffloadActivations
        known = inspect.signature(OffloadActivations).parameters
        named = getattr(getattr(inspect.unwrap(maker), "__code__", None), "co_names", ())
        missing = [f"a {_MADE_BY} that makes {name}" for name in _OURS if name not in named]
        missing += [f"an OffloadActivations without {name}" for name in inspect.signature(theirs).parameters if name not in known]
        missing += [f"OffloadActivations.{name}" for name in _CALLED if not hasattr(theirs, name)]
    if missing:
        raise errors.TorchError(
            f"glake.offload.patch_trl looked in {_WHERE} of {_version()} for {', '.join(missing)}, and did not find that: versions like "
            f"1.16 are known; {_INSTEAD}"
        )


def _version() -> str:
    return f"TRL {getattr(sys.modules.get('trl'), '__version__', 'of an unknown version')}"
