"""Activations of a training pass leave the GPU after they were saved, and are back before the backward pass reads them.

::

    forward:  save ─► pack ─► copy out on a queue of its own     the block is its stream's again behind the copy
    backward: unpack ◄─ memory of the compute stream ◄─ copy in, begun a window of bytes before

Values are the same to the bit: what is saved is copied, and views are built again over the copy.
"""

from __future__ import annotations

from ._activations import Activations, activations
from ._drop_in import NoOpManager, OffloadActivations
from ._report import report
from ._trl import PatchedTrl, patch_trl

__all__ = ["Activations", "NoOpManager", "OffloadActivations", "PatchedTrl", "activations", "patch_trl", "report"]
