"""How the ranks of a process group agree to be parked at the same step: what one rank does, as actions of others and their answers.

::

    rank 0   ─ 7 wish ──── 8 ─────────────── 9 "all stop at 10" ── 10 stands ──┐          drained ─┐
    rank 1   ─ 7 ───────── 8 ─ wish ──────── 9 ─────────────────── 10 stands ──┴─ "park" ─ drained ┴─ "move": its memory leaves

A rank wishes when a shrink of its own waits for it, and goes on. The first that finds that all have wished says at which step they stop: the
next one, for another may wait for this rank inside of it, and can have passed this one, but not the next where each step has a collective
that its host waits for. At that step a rank stands and waits. Who finds that it has gone further names its own step, and who stands behind
goes on to that: all work up to there is enqueued or done where it was named, and needs nobody who waits. Who stands in vain for a while
names the next step, for another may be further and wait for this rank, on its host; each time it waits twice as long as before.

The step is one value in the store, changed only from what it was: to a greater step, or, by the rank that completes it, to "park", or to the
opposite by whoever has waited too long. So a timeout and the last arrival cannot disagree. The second decision is one value too: "move", by
the last rank whose GPU has ended its work, or the opposite. Nothing of any rank moves before "move".

A round is over with its decision, which each of its ranks reads before it wishes again: all count rounds alike, and no number comes twice.

Invariants: "park" only where all ranks stand at one step and none goes on from it. "move" only after "park", where all have ended their
work. Every wait has an end, whatever becomes of the others. A rank that cannot reach the store any more does not move.

Nothing here knows a clock, a store or a GPU: ``_ranks`` does.
"""

from __future__ import annotations

import enum
from collections.abc import Generator
from typing import Any, NamedTuple

# How long a rank tries to meet the others once all have wished, and how long it waits for the work of their GPUs once they have met.
MEET_SECONDS = 10.0
DRAIN_SECONDS = 30.0
# How long it stands at a step at first.
STAND_SECONDS = 0.1
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
        # Of this round: until when it tries to meet the others, and how long it stands at the next step.
        self._meets_until: float | None = None
        self._stands = STAND_SECONDS

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
                yield Erase(tuple(f"{self._round - 1}/{name}" for name in ("wishes", "step", "drained", "second")))
        else:
            wishes = yield Add(self._key("wishes"), 0)
        found: str = yield self._read("step")
        if not found and wishes == self._ranks:
            found = yield Swap(self._key("step"), "", str(step + 1))
        while found.isdecimal() and int(found) < step:
            found = yield Swap(self._key("step"), found, str(step))
        if found == str(step):
            found = yield from self._stand(step, now)
        if found == PARK:
            self._phase = Phase.DECIDED
        elif found and not found.isdecimal():
            self._leave(found, (yield Look(sleeps=False)).now)
        return found == PARK

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
            found: str = yield self._read("step")
            while not found or found.isdecimal():
                found = yield Swap(self._key("step"), found, WITHDRAWN)
            if found != PARK:
                self._leave(found, (yield Look(sleeps=False)).now)
                return False
            self._phase = Phase.DECIDED
        second = yield Swap(self._key("second"), "", ABORT)
        return (yield from self._vote(second))

    def _stand(self, step: int, now: float) -> Generator[Action, Any, str]:
        """Waits at the step for the others; what stands in its place then."""
        if self._meets_until is None:
            self._meets_until = now + MEET_SECONDS
        until, self._stands = now + self._stands, 2 * self._stands
        key, place, own = self._key("step"), self._key(f"at/{step}"), str(step)
        met = yield Add(place)
        found: str = own
        if met == self._ranks:
            found = yield Swap(key, own, PARK)
        while found == own:
            moment = yield Look(sleeps=True)
            if not moment.wanted:
                found = yield Swap(key, own, WITHDRAWN)
            elif moment.now >= self._meets_until:
                found = yield Swap(key, own, ABORT)
            elif moment.now >= until:
                found = yield Swap(key, own, str(step + 1))
            else:
                found = yield self._read("step")
        if met == 1:
            yield Erase((place,))
        return found

    def _vote(self, second: str) -> Actions:
        heard: bool = yield Vote(second == MOVE)
        self._leave(second, (yield Look(sleeps=False)).now)
        return heard and second == MOVE

    def _leave(self, outcome: str, now: float) -> None:
        """The round is over."""
        self._phase = Phase.OUT
        self._round += 1
        self._meets_until, self._stands = None, STAND_SECONDS
        if outcome == ABORT:
            self._rests_until = now + PAUSE_SECONDS

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"

    def _read(self, name: str) -> Swap:
        return Swap(self._key(name), "", "")
