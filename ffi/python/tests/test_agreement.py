"""How ranks agree to be parked, by itself: a store, a clock and steps that depend on one another are played, in any order, with any faults."""

import random
import unittest

from glake._agreement import ABORT, MOVE, PARK, Add, Asked, Erase, Look, Moment, Rank, Swap, Vote

# As in the library.
DRAIN, VOTES, PAUSE = 2.0, 300.0, 5.0


class Store:
    """Atomic, as torch's."""

    def __init__(self):
        self.values = {}
        self.in_vain = 0  # rounds in which ranks have not met

    def answer(self, action):
        if isinstance(action, Swap) and action.key.endswith("/step") and action.desired == ABORT:
            self.in_vain += self.values[action.key] == action.expected
        if isinstance(action, Add):
            self.values[action.key] = self.values.get(action.key, 0) + action.amount
            return self.values[action.key]
        if isinstance(action, Swap):
            if self.values.setdefault(action.key, "" if not action.expected else action.expected) == action.expected:
                self.values[action.key] = action.desired
            return self.values[action.key]
        for key in action.keys:
            self.values.pop(key, None)
        return None


class Gone(Exception):
    """The store does not answer."""


class Interrupt(Exception):
    """A signal."""


class Dead(Exception):
    """The rank is not there any more."""


class Sleep:
    def __init__(self, seconds):
        self.seconds = seconds


class Process:
    """A rank's program: steps, and safe points between them; its shrinks come when they come."""

    def __init__(self, world, own):
        self.world, self.own, self.rank = world, own, Rank(len(world.delays))
        self.step = 0  # steps that are enqueued
        self.wants_from, self.wants_until = None, None
        self.rests_until = self.evicted_until = 0.0
        self.is_parked = self.is_asked = self.is_dead = self.is_over = False
        self.is_cut_off = False  # the store answers no more
        self.parked_at = None
        self.moves, self.wake = [], 0.0
        self.offset = world.offsets[own]
        self.next_shrink()

    def next_shrink(self):
        random, now = self.world.random, self.world.now
        self.wants_from = now + random.uniform(0, 3)
        self.wants_until = self.wants_from + random.choice([0.5, 5, 60])

    def wanted(self):
        """Whether a shrink waits; one that has waited in vain is followed by another."""
        if self.world.now > self.wants_until and not self.is_parked:
            self.next_shrink()
        return self.wants_from <= self.world.now <= self.wants_until

    def has_drained(self):
        """Whether all work enqueued here has ended: each step's waits for the others' and takes a moment."""
        return all(other.step >= self.step for other in self.world.ranks) and self.world.now >= self.drains_from

    def ballot(self):
        if not self.is_parked:
            return -1
        if not self.is_asked:
            if self.has_drained():
                self.is_asked = True
            elif self.world.now > self.parked_at + DRAIN:
                self.rests_until = self.world.now + PAUSE
                self.next_shrink()
                self.is_parked = False
                return -1
        return int(self.is_asked)

    def vote(self, yes):
        if not self.is_parked:
            return False
        if yes:
            assert self.is_asked
            self.moves.append((self.rank._round, self.step + self.offset))
            self.evicted_until = self.world.now + self.world.random.uniform(0, 1)
        else:
            self.is_parked = False
            self.rests_until = self.world.now + PAUSE
        self.next_shrink()
        return True

    def drive(self, actions):
        answer = None
        while True:
            try:
                action = actions.send(answer)
            except StopIteration as ended:
                return ended.value
            answer = yield action

    def life(self):
        world = self.world
        while world.now < world.length:
            # A collective in which the host waits for the others needs all to come to it.
            if world.hosts_wait:
                self.entered = self.step + 1
                while any(other.entered <= self.step and not other.is_over for other in world.ranks):
                    yield Sleep(0.01)
            self.step += 1
            self.drains_from = world.now + world.random.uniform(0, 0.3)
            yield Sleep(world.random.uniform(0, 2 * world.delays[self.own]))
            # Hosts do not run ahead of the GPUs for ever.
            while any(other.step < self.step - 8 and not other.is_over for other in world.ranks):
                yield Sleep(0.01)
            if self.is_cut_off:
                continue
            try:
                yield from self.safepoint()
            except Gone:
                self.is_cut_off = True
                if self.is_parked:
                    self.vote(False)

    entered = 0
    drains_from = 0.0

    def safepoint(self):
        if not self.wanted() or self.world.now < self.rests_until:
            if self.rank.has_wished():
                yield from self.drive(self.rank.give_up())
            return
        self.may_be_interrupted = True
        try:
            if not (yield from self.drive(self.rank.meet(self.step + self.offset))):
                return
            self.is_parked, self.is_asked, self.parked_at = self.wanted(), False, self.world.now
            self.world.parked.setdefault(self.rank._round, {})[self.own] = self.step + self.offset
            yield from self.drive(self.rank.agree(self.is_parked))
        except Interrupt:
            yield from self.drive(self.rank.give_up())
        finally:
            self.may_be_interrupted = False
        while self.world.now < self.evicted_until:
            yield Sleep(0.02)
        self.is_parked = False

    may_be_interrupted = False


class World:
    def __init__(self, seed, deaths=0.0, losses=0.0, interrupts=0.0, stalls=0.0, offset=0, hosts_wait=None, length=60.0):
        self.random = random.Random(seed)
        self.now, self.length, self.interrupts = 0.0, length, interrupts
        count = self.random.randint(2, 4)
        self.delays = [self.random.choice([0.02, 0.1, 0.5]) for _ in range(count)]
        self.offsets = [0] * count
        self.offsets[0] = offset
        self.hosts_wait = self.random.random() < 0.5 if hosts_wait is None else hosts_wait
        self.store, self.parked = Store(), {}
        self.ranks = [Process(self, own) for own in range(count)]
        self.deaths, self.losses, self.stalls = deaths, losses, stalls

    def run(self):
        lives = [rank.life() for rank in self.ranks]
        answers = [None] * len(lives)
        alive = list(range(len(lives)))
        while alive:
            ready = [own for own in alive if self.ranks[own].wake <= self.now]
            if not ready:
                self.now = min(self.ranks[own].wake for own in alive)
                continue
            own = self.random.choice(ready)
            rank = self.ranks[own]
            try:
                action = lives[own].send(answers[own])
                while not isinstance(action, Sleep):
                    if rank.may_be_interrupted and self.random.random() < self.interrupts:
                        rank.may_be_interrupted = False
                        # What it was about to do may have been done.
                        if isinstance(action, (Add, Swap, Erase)) and self.random.random() < 0.5:
                            self.store.answer(action)
                        action = lives[own].throw(Interrupt())
                        continue
                    if isinstance(action, (Add, Swap, Erase)):
                        if self.random.random() < self.deaths:
                            raise Dead
                        if rank.is_cut_off or self.random.random() < self.losses:
                            # It may have been done, and only the answer is lost.
                            if self.random.random() < 0.5:
                                self.store.answer(action)
                            action = lives[own].throw(Gone())
                            continue
                        answers[own] = self.store.answer(action)
                        self.check()
                        break
                    if isinstance(action, Look):
                        answers[own] = Moment(self.now, rank.wanted())
                        if action.sleeps:
                            rank.wake = self.now + self.random.uniform(0.001, 0.2)
                            if self.random.random() < self.stalls:
                                rank.wake += self.random.uniform(1, 60)
                            answers[own] = Moment(rank.wake, answers[own].wanted)
                            break
                    elif isinstance(action, Asked):
                        answers[own] = rank.ballot()
                    elif isinstance(action, Vote):
                        answers[own] = rank.vote(action.yes)
                    action = lives[own].send(answers[own])
                else:
                    answers[own] = None
                    rank.wake = self.now + action.seconds
            except StopIteration:
                rank.is_over = True
                alive.remove(own)
            except Dead:
                rank.is_dead = rank.is_over = True
                alive.remove(own)
            if self.now > self.length + 120:
                raise AssertionError(f"ranks {alive} wait for ever")
        return self

    def check(self):
        """What was decided holds of all ranks."""
        for key, value in self.store.values.items():
            number, _, name = key.partition("/")
            if (name, value) == ("second", MOVE):
                steps = self.parked[int(number)]
                assert len(steps) == len(self.ranks) and len(set(steps.values())) == 1, steps

    def rounds(self):
        """Which ranks moved in each round, at which step."""
        found = {}
        for rank in self.ranks:
            for number, step in rank.moves:
                found.setdefault(number, {})[rank.own] = step
        return found


class Together(unittest.TestCase):
    def check(self, seeds, **faults):
        """Whoever moves, all move, at one step; and nobody waits for ever. Answers how many rounds moved."""
        moved = self.in_vain = 0
        for seed in range(seeds):
            world = World(seed, **faults).run()
            self.in_vain += world.store.in_vain
            for number, steps in world.rounds().items():
                moved += 1
                self.assertEqual(len(set(steps.values())), 1, f"seed {seed}, round {number}: {steps}")
                # Who died, or lost the store, may not have heard it.
                missing = [rank for rank in world.ranks if rank.own not in steps and not rank.is_dead and not rank.is_cut_off]
                self.assertFalse(missing, f"seed {seed}, round {number}: {steps}")
        return moved

    def test_with_collectives_that_hosts_wait_for(self):
        self.assertGreater(self.check(30, hosts_wait=True), 150)
        self.assertEqual(self.in_vain, 0)

    def test_with_hosts_that_run_ahead(self):
        # One may be behind by more than the others wait for it: eight steps of a second.
        moved = self.check(30, hosts_wait=False)
        self.assertGreater(moved, 20 + 10 * self.in_vain)

    def test_with_deaths(self):
        self.assertGreater(self.check(60, deaths=0.002), 20)

    def test_where_the_store_is_lost(self):
        self.assertGreater(self.check(60, losses=0.002), 20)

    def test_with_ranks_that_are_interrupted(self):
        self.assertGreater(self.check(60, interrupts=0.05), 20)

    def test_with_ranks_that_stand_still_for_long(self):
        self.assertGreater(self.check(60, stalls=0.02), 20)

    def test_all_of_it(self):
        self.check(60, deaths=0.001, losses=0.001, interrupts=0.02, stalls=0.01)

    def test_ranks_that_count_otherwise_are_not_parked_where_their_work_waits(self):
        self.check(20, offset=1)


def ask(store, actions, looks=()):
    """Runs it alone, with these moments, then ever later ones."""
    looks, answer, now = list(looks), None, 0.0
    while True:
        try:
            action = actions.send(answer)
        except StopIteration as ended:
            return ended.value
        if isinstance(action, Look):
            now += 1.0
            answer = looks.pop(0) if looks else Moment(now, True)
        else:
            answer = 1 if isinstance(action, (Asked, Vote)) else store.answer(action)


class Alone(unittest.TestCase):
    """What one of two does."""

    def setUp(self):
        self.store, self.first, self.other = Store(), Rank(2), Rank(2)

    def test_it_goes_on_until_all_have_wished_and_then_waits_no_longer_than_it_says(self):
        self.assertFalse(ask(self.store, self.first.meet(3)))
        self.assertFalse(ask(self.store, self.first.meet(4)))
        self.assertTrue(self.first.has_wished())
        self.assertFalse(ask(self.store, self.other.meet(9)))
        self.assertEqual(self.store.values["0/step"], "10")
        # In vain: it names the next step, and at last gives up.
        self.assertFalse(ask(self.store, self.other.meet(10), [Moment(0.0, True)]))
        self.assertEqual(self.store.values["0/step"], "11")
        self.assertFalse(ask(self.store, self.other.meet(11), [Moment(9.9, True), Moment(10.0, True)]))
        self.assertEqual(self.store.values["0/step"], ABORT)
        # The other finds that, and both try again after a while.
        self.assertFalse(ask(self.store, self.first.meet(5)))
        self.assertFalse(self.first.has_wished())
        self.assertFalse(ask(self.store, self.first.meet(6), [Moment(2.0, True)]))
        self.assertFalse(self.first.has_wished())
        self.assertFalse(ask(self.store, self.first.meet(7), [Moment(99.0, True)]))
        self.assertTrue(self.first.has_wished())

    def test_who_is_behind_goes_on_to_the_step_that_is_named_and_who_is_further_names_its_own(self):
        self.store.values.update({"0/wishes": 1, "0/step": "8", "0/at/8": 1})
        self.assertFalse(ask(self.store, self.first.meet(7)))
        self.assertTrue(ask(self.store, self.first.meet(8)))
        self.assertEqual(self.store.values["0/step"], PARK)
        self.store.values["0/drained"] = 1
        self.assertTrue(ask(self.store, self.first.agree(True)))
        self.assertEqual(self.store.values["0/second"], MOVE)
        self.store.values.update({"1/wishes": 1, "1/step": "12", "1/at/12": 1, "1/at/14": 1})
        self.assertTrue(ask(self.store, self.first.meet(14)))

    def test_it_withdraws_where_no_shrink_waits_any_more(self):
        self.assertFalse(ask(self.store, self.first.meet(3)))
        ask(self.store, self.first.give_up())
        self.assertFalse(ask(self.store, self.other.meet(3)))
        # Nobody has waited in vain: it may wish at once.
        self.assertFalse(ask(self.store, self.other.meet(4)))
        self.assertFalse(ask(self.store, self.other.meet(5)))
        self.assertEqual(self.store.values["1/wishes"], 1)

    def test_who_is_parked_and_cannot_be_keeps_all_from_moving(self):
        self.store.values.update({"0/wishes": 1, "0/step": "3", "0/at/3": 1})
        self.assertTrue(ask(self.store, self.first.meet(3)))
        self.assertFalse(ask(self.store, self.first.agree(False)))
        self.assertEqual(self.store.values["0/second"], ABORT)

    def test_what_nobody_looks_at_any_more_is_erased(self):
        for number in range(5):
            for rank in (self.first, self.other):
                rank._rests_until = 0.0
            ask(self.store, self.first.meet(3 * number))
            ask(self.store, self.other.meet(3 * number))
            ask(self.store, self.other.meet(3 * number + 1), [Moment(0.0, True), Moment(99.0, True)])
            ask(self.store, self.first.meet(3 * number + 1))
        self.assertEqual({key.partition("/")[0] for key in self.store.values}, {"4"})


if __name__ == "__main__":
    unittest.main()
