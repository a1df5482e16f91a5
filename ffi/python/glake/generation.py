"""Safe points for transformers' ``generate``::

    with glake.active():
        model.generate(**inputs, stopping_criteria=[glake.generation.SafePoint()])
"""

from __future__ import annotations

from typing import Any

from ._safepoint import safepoint

__all__ = ["SafePoint"]


class SafePoint:
    """A stopping criterion that never stops: ``glake.safepoint`` after each token."""

    def __call__(self, input_ids: Any, scores: Any, **_more: Any) -> Any:
        safepoint()
        return input_ids.new_zeros(input_ids.shape[0], dtype=bool) if hasattr(input_ids, "new_zeros") else False
