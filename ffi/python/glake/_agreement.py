"""How the ranks of a process group agree to be parked at the same step: what one rank does, as actions of others and their answers.

::

    rank 0   ─ 7 wish ──── 8 ─────── 9 stands ─────────────────────────┐           drained ─┐
    rank 1   ─ 7 ───────── 8 ─────── 9 ─ wish, stands ─ 10 ..          │ all at 10           │ all: "move"
    rank 0                              sees 10, goes on ─ 10 stands ──┴─ "park" ─ drained ──┴─ its memory moves

A rank wishes when a shrink of its own waits for it, and goes on. Only where all have wished it stands at a safe point: it says at which step
it is, and waits. Who sees a greater step goes on to that one, for all work up to there is enqueued or done where it was seen, and needs
nobody who waits; so the greatest step only grows until all take part. Who is at the greatest step waits for the others.

Two decisions are one value each in the store, and the first to write it wins: "park", by the rank that completes a step, and "move", by the
last rank whose GPU has ended its work. Whoever waits in vain writes the opposite into the same place, so that a timeout and the last arrival
cannot disagree. Nothing of any rank moves before "move".

A round is over with its decision, which each of its ranks reads before it wishes again: all count rounds alike, and no number comes twice.

Invariants: "park" only where all ranks stand at one step and none goes on from it. "move" only after "park", where all have ended their
work. Every wait has an end, whatever becomes of the others. A rank that cannot reach the store any more does not move.

Nothing here knows a clock, a store or a GPU: ``_ranks`` does.
"""

from __future__ import annotations

import enum
from collections.abc import Generator
from typing import Any, NamedTuple

# How long a rank waits for the others to come to its step, and, once all are there, for the work of their GPUs.
MEET_SECONDS = 10.0
DRAIN_SECONDS = 30.0
# How long ranks do not try again that were held up in vain. As long as the library parks none of them.
PAUSE_SECONDS = 5.0

PARK, MOVE = "park", "move"
# Against it: a rank gave up waiting, or one has no reason to be parked any more and nobody is to blame.
ABORT, WITHDRAWN = "abort", "withdrawn"


class Add(NamedTuple):
    """Adds to a number in the store, which begins with 0; answers it."""

    key: str
    amount: int = 1


class Swap(NamedTuple):
    """Writes a text into the store where ``expected`` stands, or nothing yet and that is ""; answers what stands there then."""

    key: str
    expected: str
    desired: str


class Erase(NamedTuple):
    """Nobody looks at these any more."""

    keys: tuple[str, ...]


class Moment(NamedTuple):
    """The time, and whether the shrink here still waits for this rank."""

    now: float
    wanted: bool


class Look(NamedTuple):
    """Answers a ``Moment``, after a short sleep or at once."""

    sleeps: bool


class Asked(NamedTuple):
    """Whether the work here has ended: 1; 0: not yet; -1: no shrink waits for it any more."""


class Vote(NamedTuple):
    """Says whether the memory here moves; answers whether that is heard."""

    yes: bool


Action = Add | Swap | Erase | Look | Asked | Vote
Actions = Generator[Action, Any, bool]


class Phase(enum.Enum):
    OUT = enum.auto()
    WISHED = enum.auto()
    DECIDED = enum.auto()


class Rank:
    """One of so many ranks. Each of its methods is run to its end before the next; one that is cut off is followed by ``give_up``."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._round = 0
        self._phase = Phase.OUT
        self._rests_until = float("-inf")

    def has_wished(self) -> bool:
        """Whether the others may wait for it."""
        return self._phase is not Phase.OUT

    def meet(self, step: int) -> Actions:
        """At a safe point that is the ``step``-th of this rank, where a shrink waits for it. Whether it is to be parked here, with all others;
        ``agree`` follows then."""
        now = (yield Look(sleeps=False)).now
        if self._phase is Phase.OUT:
            if now < self._rests_until:
                return False
            self._phase = Phase.WISHED
            wishes = yield Add(self._key("wishes"))
            if wishes == self._ranks and self._round > 0:
                # All have left the round before.
                yield Erase(tuple(f"{self._round - 1}/{name}" for name in ("wishes", "greatest", "first", "drained", "second")))
        else:
            first = yield self._read("first")
            if first:
                self._leave(first, now)
                return False
            wishes = yield Add(self._key("wishes"), 0)
        if wishes < self._ranks or (yield from self._raise(step)) > step:
            return False
        return (yield from self._stand(step, now + MEET_SECONDS))

    def agree(self, waits: bool) -> Actions:
        """All are to be parked, and this rank is where it ``waits``. Whether its memory moves, as that of all others."""
        end = (yield Look(sleeps=False)).now + DRAIN_SECONDS
        second, drained = "", False
        while not second:
            if not drained:
                asked = (yield Asked()) if waits else -1
                drained = asked > 0
                if asked < 0:
                    second = yield Swap(self._key("second"), "", ABORT)
                elif drained and (yield Add(self._key("drained"))) == self._ranks:
                    second = yield Swap(self._key("second"), "", MOVE)
            second = second or (yield self._read("second"))
            if not second and (yield Look(sleeps=True)).now >= end:
                second = yield Swap(self._key("second"), "", ABORT)
        return (yield from self._vote(second))

    def give_up(self) -> Actions:
        """Whatever it was about: the others are told. Whether its memory moves nonetheless: it was too late."""
        if self._phase is Phase.OUT:
            return False
        if self._phase is Phase.WISHED:
            first = yield Swap(self._key("first"), "", WITHDRAWN)
            if first != PARK:
                self._leave(first, (yield Look(sleeps=False)).now)
                return False
            self._phase = Phase.DECIDED
        second = yield Swap(self._key("second"), "", ABORT)
        return (yield from self._vote(second))

    def _stand(self, step: int, end: float) -> Actions:
        """At the greatest step, until all are here, one is further, or it is in vain."""
        place = self._key(f"at/{step}")
        met = yield Add(place)
        first = ""
        if met == self._ranks:
            first = yield Swap(self._key("first"), "", PARK)
        while not first:
            first = yield self._read("first")
            if first or int((yield self._read("greatest"))) > step:
                break
            moment = yield Look(sleeps=True)
            if moment.now >= end or not moment.wanted:
                first = yield Swap(self._key("first"), "", ABORT if moment.wanted else WITHDRAWN)
        if first == PARK:
            self._phase = Phase.DECIDED
        if met == 1:
            yield Erase((place,))
        if first and first != PARK:
            self._leave(first, (yield Look(sleeps=False)).now)
        return first == PARK

    def _raise(self, step: int) -> Generator[Action, Any, int]:
        """The greatest step at which a rank stands, this one with it."""
        seen: str = yield self._read("greatest")
        while not seen or int(seen) < step:
            seen = yield Swap(self._key("greatest"), seen, str(step))
        return int(seen)

    def _vote(self, second: str) -> Actions:
        heard: bool = yield Vote(second == MOVE)
        self._leave(second, (yield Look(sleeps=False)).now)
        return heard and second == MOVE

    def _leave(self, outcome: str, now: float) -> None:
        """The round is over."""
        self._phase = Phase.OUT
        self._round += 1
        if outcome == ABORT:
            self._rests_until = now + PAUSE_SECONDS

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"

    def _read(self, name: str) -> Swap:
        return Swap(self._key(name), "", "")
