"""Leaf replay: a checkpointed layer is recomputed without its products and attention."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections import Counter
from typing import Any

import torch

from . import _bits, _interception, _report
from ._interception import current
from ._packer import Packer
from ._parts import parts
from ._scope import Leaf, Scope, is_eager

_logger = logging.getLogger("glake")

# A product whose inner dimension is shorter is computed again: that takes less than its result's way to memory and back.
LEAST_INNER = 128
# Of so many leaves it is known whether they are replayed.
_MOST_LEAVES = 1 << 17

REASONS = {
    "backward": "a backward pass runs within its checkpoint",
    "aliases": "it gives a part of what it read",
    "changed": "what it gave is changed in place afterwards",
    "context_fn": "its checkpoint has a context_fn of its own, or debug=True",
    "differs": "computed again it was not the same to the bit, or what it gave was written to without being counted as a change",
    "generator": "it draws from a generator that its checkpoint does not set back",
    "hooks": "nobody has what it saves",
    "large": "it saves too much beside its output",
    "nested": "its checkpoint is within another one",
    "none": "no checkpoint with use_reentrant=False ran in this forward pass",
    "other": "when its checkpoint was computed again it was another computation",
    "out": "it writes to a tensor that it was given",
    "planned": "its output is not stored",
    "quantised": "it is a module of bitsandbytes",
    "tensors": "it reads or gives tensors of a subclass, quantised ones, or such of other types",
    "unread": "it was not computed again in the passes before",
}
# Nothing is wrong with these.
_EXPECTED = frozenset(("planned", "nested", "large", "unread"))


_replays: weakref.WeakSet[Replay] = weakref.WeakSet()


def _renew_locks() -> None:
    """Replaces the locks in a forked child, whose other threads do not exist."""
    for replay in list(_replays):
        replay._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


class Replay:
    """Makes the checkpoints with ``use_reentrant=False`` in a model's forward passes store the outputs of their leaves, and replay them
    in the recomputation.

    What ``packer.store`` keeps or offloads is replayed; a leaf of which it stores nothing is computed again, and so is what is no leaf.
    """

    def __init__(self, packer: Packer, *, least_inner: int = LEAST_INNER) -> None:
        self.packer, self.least_inner = packer, least_inner
        self._lock = threading.Lock()
        _replays.add(self)
        self._leaves: dict[tuple[Any, ...], Leaf] = {}
        self._unsettled: list[Leaf] = []
        self._live: weakref.WeakSet[Scope] = weakref.WeakSet()
        self._numbers = 0
        # Whether there was a checkpoint, or it was told that there is none.
        self._has_seen = False
        # By leaf and reason, how often one was computed again.
        self._again: Counter[tuple[str, str]] = Counter()
        self._told: set[str] = set()
        self._uninstall: Any = None

    def remove(self) -> None:
        """Stops storing. Stored outputs serve the graphs that live. Repeated calls do nothing."""
        while current.replay is self:
            self.end()
        uninstall, self._uninstall = self._uninstall, None
        if uninstall is not None:
            uninstall()

    def report(self) -> dict[str, int]:
        """Returns the number of leaves that were recomputed despite the replay, by reason: ``"linear: what it gave is changed in
        place afterwards"``.
        """
        return {f"{name}: {REASONS[reason]}": count for (name, reason), count in sorted(self._again.items())}

    def begin(self, module: Any = None) -> None:
        """Begins a forward pass on this thread."""
        with self._lock:
            if self._uninstall is None:
                _interception.install()
                self._uninstall = weakref.finalize(self, _interception.remove)
                self._look_for_quantised(module)
            if is_eager():
                self._settle()
        _interception.look_again()
        current.before.append((current.replay, current.place, current.scope))
        if current.replay is not self:
            current.place = 0
        current.replay, current.scope = self, None

    def end(self) -> None:
        """Ends the forward pass, also after an exception."""
        if not current.before:
            return
        if not self._has_seen and current.replay is self:
            self._has_seen = True
            self.computes_again("checkpoint", "none")
        current.replay, current.place, current.scope = current.before.pop()

    # What the contexts of checkpoints ask and tell.

    def scope(self, sets_back: bool) -> Scope:
        """Returns the scope of the next checkpoint."""
        with self._lock:
            if not self._live:
                self._numbers = 0
            scope = Scope(self, self._numbers, current.place, sets_back)
            self._numbers += 1
            self._live.add(scope)
        current.place += 1
        self._has_seen = True
        return scope

    def leaves_alone(self, reason: str) -> None:
        """Leaves a checkpoint to its ordinary recomputation."""
        self._has_seen = True
        self.computes_again("checkpoint", reason)

    def leaf(self, key: tuple[Any, ...], kind: Any, weight: Any) -> Leaf:
        """Returns the state of a leaf."""
        leaf = self._leaves.get(key)
        if leaf is None or not leaf.is_of(kind, weight):
            with self._lock:
                if len(self._leaves) >= _MOST_LEAVES:
                    self._leaves.clear()
                    self._unsettled.clear()
                leaf = self._leaves[key] = Leaf(kind, weight)
                self._unsettled.append(leaf)
        return leaf

    def replayed(self) -> None:
        _report.counts.replayed += 1

    def computes_again(self, name: str, reason: str) -> None:
        """Counts a recomputed leaf or checkpoint, and logs each reason once."""
        _report.counts.recomputed += 1
        self._again[name, reason] += 1
        if reason not in self._told:
            self._told.add(reason)
            tell = _logger.debug if reason in _EXPECTED else _logger.warning
            tell("%s is computed again in the backward pass, not replayed: %s", name, REASONS[reason])

    def _settle(self) -> None:
        """Decides which of the leaves compared in an earlier pass are replayed from now on."""
        done = [leaf for leaf in self._unsettled if leaf.is_compared]
        if not done:
            return
        self._unsettled = [leaf for leaf in self._unsettled if not leaf.is_compared]
        # Another thread may compare one meanwhile.
        found = [leaf.take() for leaf in done]
        answers = iter(_bits.read([answer for each in found for answer in each]))
        for leaf, each in zip(done, found):
            agrees = [next(answers) for _ in each]
            if all(agrees):
                leaf.is_trusted = True
            elif False not in agrees:
                # There was no memory to compare something: another time.
                leaf.is_compared = False
                self._unsettled.append(leaf)
            elif leaf.reason is None:
                leaf.reason = "differs"

    def _look_for_quantised(self, module: Any) -> None:
        looked_at = parts(module) if module is not None and "bitsandbytes" in sys.modules else ()
        if any(type(part).__module__.startswith("bitsandbytes") for part in looked_at):
            self.computes_again("linear", "quantised")
