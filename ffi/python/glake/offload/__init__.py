"""Offload of activations: saved tensors of a training pass are evicted from the GPU, and reloaded before the backward pass reads them.

::

    forward:  save ─► pack ─► copy out on a queue of its own     the stream may reuse the block behind the copy
    backward: unpack ◄─ memory of the compute stream ◄─ copy in, begun a window of bytes before

Values are bit-identical: saved tensors are copied, and views are rebuilt over the copy.

The package itself is callable: ``glake.offload(model, budget="60GiB")``, see :func:`glake.offload.offload`.
"""

from __future__ import annotations

import sys
import types

from ._activations import LEAST, Activations, activations
from ._budget import Offloaded, offload
from ._drop_in import NoOpManager, OffloadActivations
from ._report import Report, report
from ._trl import PatchedTrl, patch_trl
from ._uses import uses

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
    "uses",
]


class _Callable(types.ModuleType):
    __call__ = staticmethod(offload)


sys.modules[__name__].__class__ = _Callable
