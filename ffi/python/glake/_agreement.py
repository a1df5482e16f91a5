"""Protocol by which the ranks of a process group park at the same step: the behaviour of one rank, as actions and their results.

::

    rank 0   ─ 7 wish ──── 8 ─────────────── 9 "all stop at 10" ── 10 stands ──┐          drained ─┐
    rank 1   ─ 7 ───────── 8 ─ wish ──────── 9 ─────────────────── 10 stands ──┴─ all stand ─ drained ┴─ "move": its memory leaves

A rank wishes when a shrink of its own waits for it, and goes on. The first that finds that all have wished says at which step they stop:
the next one, for another may wait for this rank inside of it, and can have passed this one, but not the next where each step has a
collective that its host waits for. At that step a rank stands and waits. Who finds that it has gone further names its own step, and who
stands behind goes on to that: all work up to there is enqueued or done where it was named, and needs nobody who waits. Who stands in vain
for a while names the next step, for another may be further and wait for this rank, on its host; each time it waits twice as long as
before. A rank that is wanted no longer withdraws, and who stands goes on.

All that ranks tell one another is one value in the store, the ``State``. Each change of it depends on all of what it was, so that of two
at once one is made anew: a timeout and the last arrival cannot disagree, nothing counts twice, and nothing is left behind. A round is over
with its outcome: "move", by the last rank whose GPU has ended its work, or "abort", by whoever has waited for too long. Nothing of any
rank moves before "move".

Invariants: a rank is said to stand where it does, and goes on only once that is said no longer; while all stand, no step changes. "move"
only where all stand at one step and have ended their work. Every wait has an end, whatever becomes of the others. A rank that cannot reach
the store any more does not move.

Nothing here knows a clock, a store or a GPU: ``_ranks`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

# How long a rank tries to meet the others once all have wished, and how long it waits for the work of their GPUs once they have met.
MEET_SECONDS = 10.0
DRAIN_SECONDS = 30.0
# How long it stands at a step at first, with few ranks: of many that change the state at once one after the other does.
STAND_SECONDS = 0.1
RANKS_A_STAND = 64
# How long ranks do not try again that were held up in vain. As long as the library parks none of them.
PAUSE_SECONDS = 5.0

MOVE, ABORT = "move", "abort"


class State(NamedTuple):
    """Shared state of the ranks. A set of ranks is an integer with a bit for each."""

    round: int = 0
    # Of the round before. Each rank reads it before the next round can have one: that takes the wishes of all.
    outcome: str = ""
    wished: int = 0
    # Where all stop, once all have wished.
    step: int | None = None
    # Those that wait at that step, and of these, once all do, those whose work has ended.
    stand: int = 0
    drained: int = 0

    def __str__(self) -> str:
        step = "-" if self.step is None else self.step
        return f"{self.round} {self.outcome or '-'} {self.wished:x} {step} {self.stand:x} {self.drained:x}"

    @staticmethod
    def of(text: str) -> State:
        """Parses the text form of a state."""
        number, outcome, wished, step, stand, drained = text.split()
        at = None if step == "-" else int(step)
        return State(int(number), outcome.strip("-"), int(wished, 16), at, int(stand, 16), int(drained, 16))

    def over(self, outcome: str) -> State:
        """Returns the initial state of the next round."""
        return State(self.round + 1, outcome)


class Read(NamedTuple):
    """Action that reads the state."""


class Swap(NamedTuple):
    """Action that writes a state if the current one equals ``expected``; its result is the state found."""

    expected: State
    desired: State


class Moment(NamedTuple):
    """The current time, and whether a shrink in this process still waits for this rank."""

    now: float
    wanted: bool


class Look(NamedTuple):
    """Action that returns a ``Moment``, after a short sleep or at once."""

    sleeps: bool


class Asked(NamedTuple):
    """Action that returns whether the parked work here has completed: 1 yes; 0 not yet; -1 no shrink waits for it any more."""


Action = Read | Swap | Look | Asked
Change = Callable[[State], State]
Actions = Generator[Action, Any, bool]
Changes = Generator[Action, Any, State]


class Rank:
    """Protocol state of one rank. Each of its methods runs to its end before the next begins."""

    def __init__(self, ranks: int, own: int) -> None:
        self._all, self._own = (1 << ranks) - 1, 1 << own
        # In which it has wished.
        self._round: int | None = None
        self._rests_until = float("-inf")
        # Until when it tries to meet the others, and how long it stands at the next step.
        self._meets_until: float | None = None
        self._stands = self._stands_at_first = STAND_SECONDS * max(1.0, ranks / RANKS_A_STAND)

    def has_wished(self) -> bool:
        """Whether this rank has wished, so that other ranks may wait for it."""
        return self._round is not None

    def meet(self, step: int) -> Actions:
        """Handles a safe point, the ``step``-th of this rank, while a shrink waits for it. Returns whether the rank must park
        here with all others; ``agree`` follows then.
        """
        now = (yield Look(sleeps=False)).now
        if self._round is None:
            if now < self._rests_until:
                return False
            self._round = (yield from self._change(self._wish)).round
            self._forget()
        until = None
        while True:
            state = yield from self._change(lambda found: self._arrive(found, step))
            if state.round != self._round:
                yield from self._leave(state)
                return False
            if state.stand == self._all:
                return True
            if state.step != step:
                if state.step is None:
                    self._forget()
                return False
            if until is None:
                self._meets_until = self._meets_until or now + MEET_SECONDS
                until, self._stands = now + self._stands, 2 * self._stands
            moment = yield Look(sleeps=True)
            if not moment.wanted:
                return (yield from self.withdraw())
            if self._meets_until and moment.now >= self._meets_until:
                yield from self._change(lambda found: found.over(ABORT) if self._is_in_vain(found, step) else found)
            elif moment.now >= until:
                yield from self._change(lambda found: found._replace(step=step + 1, stand=0) if self._is_in_vain(found, step) else found)

    def agree(self) -> Actions:
        """Completes the agreement once this rank is parked. Returns whether its memory moves, as that of all other ranks."""
        end, is_late = (yield Look(sleeps=False)).now + DRAIN_SECONDS, False
        while True:
            asked = (yield Asked()) if not is_late else -1
            state = yield from self._change(lambda found: self._drain(found, asked))
            if state.round != self._round:
                break
            is_late = (yield Look(sleeps=True)).now >= end
        # Of a round after the next one this rank knows nothing: it was begun anew without this one.
        moves = state.outcome == MOVE and state.round - 1 == self._round
        yield from self._leave(state)
        return moves

    def withdraw(self) -> Actions:
        """Withdraws the wish of a rank that has no reason to park any more. Returns whether it must park nonetheless because all
        ranks stand; ``agree`` follows then.
        """
        if self._round is None:
            return False
        state = yield from self._change(self._withdrawn)
        if state.round != self._round:
            yield from self._leave(state)
        elif state.stand == self._all:
            return True
        self._round = None
        return False

    def _wish(self, found: State) -> State:
        if found.wished & self._own:
            # An earlier group left it. Who of that is there still begins anew too.
            found = found.over("")
        return found._replace(wished=found.wished | self._own)

    def _arrive(self, found: State, step: int) -> State:
        if found.round != self._round or found.wished != self._all:
            return found
        if found.step is None:
            return found._replace(step=step + 1)
        if found.step < step:
            return found._replace(step=step, stand=self._own)
        return found._replace(stand=found.stand | self._own) if found.step == step else found

    def _is_in_vain(self, found: State, step: int) -> bool:
        return found.round == self._round and found.step == step and found.stand != self._all

    def _withdrawn(self, found: State) -> State:
        if found.round != self._round or found.stand == self._all:
            return found
        return found._replace(wished=found.wished & ~self._own, step=None, stand=0)

    def _drain(self, found: State, asked: int) -> State:
        if found.round != self._round or not asked:
            return found
        if asked < 0:
            return found.over(ABORT)
        found = found._replace(drained=found.drained | self._own)
        return found.over(MOVE) if found.drained == self._all else found

    def _leave(self, state: State) -> Generator[Action, Any, None]:
        """Leaves a round that has ended."""
        if state.outcome == ABORT:
            self._rests_until = (yield Look(sleeps=False)).now + PAUSE_SECONDS
        self._round = None

    def _forget(self) -> None:
        """Resets the waiting times of the round."""
        self._meets_until, self._stands = None, self._stands_at_first

    def _change(self, change: Change) -> Changes:
        """Changes the state unless another rank changed it first. Returns the resulting state."""
        while True:
            found: State = yield Read()
            desired = change(found)
            if desired != found:
                found = yield Swap(found, desired)
            if desired == found:
                return found
            yield Look(sleeps=True)
