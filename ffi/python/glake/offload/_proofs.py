"""Proofs that narrow forms of saves restore exactly the same bytes."""

from __future__ import annotations

from typing import Any

from ._memory import is_shortage
from ._narrow import Form

# So many tensors of one truth are kept at a time; what is beyond is looked at another time.
MOST = 4096


class Proofs:
    """Proofs of one site. A save is compared whenever its bytes are checked; it is proven if no comparison found a difference."""

    def __init__(self) -> None:
        self._looked: list[tuple[int, Any]] = []
        self._proven: dict[int, bool] = {}

    def look(self, save: int, form: Form, storage: Any, start: int) -> None:
        """Compares the bytes being saved, on the device."""
        if len(self._looked) >= MOST:
            return
        try:
            differs = form.differs(storage, start)
        except RuntimeError as error:
            if not is_shortage(error):
                raise
            # It is looked at another time, or goes as it is.
            return
        if differs is None:
            self._proven[save] = True
        else:
            self._looked.append((save, differs))

    def settle(self) -> None:
        """Evaluates the comparisons of earlier passes at the begin of a pass. Waits for the device if there were any. Retries at
        the next pass if there is no memory.
        """
        import torch

        looked, self._looked = self._looked, []
        by_device: dict[Any, list[tuple[int, Any]]] = {}
        for save, differs in looked:
            by_device.setdefault(differs.device, []).append((save, differs))
        for found in by_device.values():
            try:
                truths = torch.stack([differs for _, differs in found]).tolist()
            except RuntimeError as error:
                if not is_shortage(error):
                    raise
                self._looked += found
                continue
            for (save, _), differs in zip(found, truths):
                self._proven[save] = self._proven.get(save, True) and not differs

    def hold(self, save: int) -> bool:
        return self._proven.get(save, False)
