"""Replaces functions of torch, and restores them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class Patches:
    """Replaced functions of ``torch._C``, with the originals.

    A module that took a function by name (``from torch._C import f``) holds it in its own namespace: those are replaced too.
    """

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._replaced: list[tuple[Any, str, Any]] = []

    def binding(self, name: str, function: Callable[..., Any]) -> bool:
        """Replaces ``torch._C.<name>`` everywhere. Returns False if this torch lacks it."""
        original = getattr(self._torch._C, name, None)
        if original is None:
            return False
        function.__name__ = name
        self.attribute(self._torch._C, name, function)
        for module_name, module in list(sys.modules.items()):
            if module_name.partition(".")[0] != "torch" or module is self._torch._C or module is None:
                continue
            if vars(module).get(name) is original:
                self.attribute(module, name, function)
        return True

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Replaces one attribute of a module or class. ``undo`` deletes an attribute that was inherited."""
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restores everything, the latest first."""
        while self._replaced:
            owner, name, value = self._replaced.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


_ABSENT = object()
