"""Activations of a training pass leave the GPU after they were saved, and are back before the backward pass reads them.

::

    forward:  save ─► pack ─► copy out on a queue of its own     the block is its stream's again behind the copy
    backward: unpack ◄─ memory of the compute stream ◄─ copy in, begun a window of bytes before

Values are the same to the bit: what is saved is copied, and views are built again over the copy.

The package is called itself: ``glake.offload(model, budget="60GiB")``, see :func:`glake.offload.offload`.
"""

from __future__ import annotations

import sys
import types

from ._activations import LEAST, Activations, activations
from ._budget import Offloaded, offload
from ._drop_in import NoOpManager, OffloadActivations
from ._report import Report, report
from ._trl import PatchedTrl, patch_trl

__all__ = [
    "LEAST",
    "Activations",
    "NoOpManager",
    "OffloadActivations",
    "Offloaded",
    "PatchedTrl",
    "Report",
    "activations",
    "offload",
    "patch_trl",
    "report",
]


class _Callable(types.ModuleType):
    __call__ = staticmethod(offload)


sys.modules[__name__].__class__ = _Callable
