"""The protocol by which ranks agree to park, in isolation: a simulated store, a clock and interdependent steps, in any order and with
any faults.
"""

import heapq
import random
import unittest

from glake._agreement import ABORT, MOVE, Asked, Look, Moment, Rank, Read, State, Swap

# As in the library.
DRAIN, PAUSE = 2.0, 5.0
# How long who is at a safe point may not be heard of.
HEARD = 5.0


class Store:
    """A store of one value with compare-and-swap."""

    def __init__(self):
        self.state = State()
        self.in_vain = 0  # rounds in which ranks have not met

    def answer(self, action):
        if isinstance(action, Swap) and self.state == action.expected:
            found, self.state = self.state, State.of(str(action.desired))
            self.in_vain += self.state.outcome == ABORT and self.state.round > found.round and found.stand != found.wished
        return self.state


class Gone(Exception):
    """The store does not answer."""


class Dead(Exception):
    """The process has died."""


class Sleep:
    def __init__(self, seconds):
        self.seconds = seconds


class Arrival:
    """State of a process at a safe point, shared by its program and its ranks' thread."""

    def __init__(self, process, step):
        self.process, self.step = process, step
        self.is_there, self.asked, self.seen = True, 0, process.world.now
        self.parks = self.moves = None
        self.is_left = False

    def told(self):
        return self.asked if self.is_there and self.process.world.now - self.seen < HEARD else -1

    def heard(self, answer):
        self.seen = self.process.world.now
        return False if answer is None and self.process.is_cut_off else answer


class Process:
    """A rank's program: steps, and safe points between them; its shrinks arrive at any time. Its ranks' thread runs beside it."""

    def __init__(self, world, own):
        self.world, self.own, self.rank = world, own, Rank(len(world.delays), own)
        self.step = 0  # steps that are enqueued
        self.wants_from, self.wants_until = None, None
        self.rests_until = self.evicted_until = 0.0
        self.is_parked = self.is_asked = self.is_dead = self.is_over = False
        self.is_cut_off = False  # the store answers no more
        self.parked_at = None
        self.moves = []
        self.arrivals, self.served = [], None
        self.broke_off = set()  # rounds in which its program did not hear what was decided
        self.offset = world.offsets[own]
        self.next_shrink()

    def next_shrink(self):
        random, now = self.world.random, self.world.now
        self.wants_from = now + random.uniform(0, 3)
        self.wants_until = self.wants_from + random.choice([0.5, 5, 60])

    def wanted(self):
        """Whether a shrink waits; a shrink that timed out is followed by another."""
        if self.world.now > self.wants_until and not self.is_parked:
            self.next_shrink()
        return self.wants_from <= self.world.now <= self.wants_until and self.world.now >= self.rests_until

    def has_drained(self):
        """Whether all work enqueued here has completed: the work of each step waits for the other ranks'."""
        return all(other.step >= self.step for other in self.world.ranks) and self.world.now >= self.drains_from

    def ballot(self):
        if not self.is_parked:
            return -1
        if not self.is_asked:
            if self.has_drained():
                self.is_asked = True
            elif self.world.now > self.parked_at + DRAIN:
                self.go_on()
                return -1
        return int(self.is_asked)

    def go_on(self):
        self.is_parked, self.rests_until = False, self.world.now + PAUSE
        self.next_shrink()

    def vote(self, yes):
        if not self.is_parked:
            return
        if not yes:
            self.go_on()
            return
        assert self.is_asked
        self.moves.append((self.voted_in, self.step + self.offset))
        self.evicted_until = self.world.now + self.world.random.uniform(0, 1)
        self.next_shrink()

    # Its program

    def program(self):
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
            if self.wanted() and not self.is_cut_off:
                yield from self.safepoint()
        self.is_over = True

    entered = 0
    drains_from = 0.0

    def is_interrupted(self):
        return self.world.random.random() < self.world.interrupts

    def wait(self):
        seconds = self.world.random.uniform(0.001, 0.1)
        if self.world.random.random() < self.world.stalls:
            seconds += self.world.random.uniform(1, 60)
        yield Sleep(seconds)

    def safepoint(self):
        """The logic of ``_safepoint._wait``."""
        arrival = Arrival(self, self.step + self.offset)
        self.arrivals.append(arrival)
        while (parks := arrival.heard(arrival.parks)) is None:
            yield from self.wait()
            if self.is_interrupted():
                # It may be cut off before it can say so.
                arrival.is_there, arrival.is_left = self.world.random.random() < 0.2, True
                return
        if not parks:
            return
        self.voted_in = self.rank._round if self.rank._round is not None else self.world.store.state.round - 1
        self.is_parked, self.is_asked, self.parked_at = self.wanted(), False, self.world.now
        while True:
            arrival.asked = self.ballot()
            if (moves := arrival.heard(arrival.moves)) is not None:
                break
            yield from self.wait()
            if self.is_interrupted():
                arrival.is_there = False
                if self.is_interrupted():
                    # It comes again at the only place at which it is not caught.
                    self.broke_off.add(self.voted_in)
                    moves, arrival.is_left = False, True
                    break
        self.vote(moves)
        while self.world.now < self.evicted_until:
            yield Sleep(0.02)
        self.is_parked = False

    # Its ranks' thread

    def thread(self):
        while not self.is_over or self.arrivals:
            if self.arrivals:
                self.served = arrival = self.arrivals.pop(0)
                arrival.parks = yield from self.drive(self.rank.meet(arrival.step), arrival)
                if arrival.parks:
                    arrival.moves = yield from self.drive(self.rank.agree(), arrival)
            elif self.rank.has_wished() and not self.wanted():
                yield from self.drive(self.rank.withdraw(), None)
            yield Sleep(0.02)

    def drive(self, actions, arrival):
        answer = None
        while True:
            try:
                action = actions.send(answer)
            except StopIteration as ended:
                return ended.value
            if isinstance(action, Look):
                if action.sleeps:
                    yield from self.wait()
                    for other in self.arrivals:
                        other.parks = False
                    self.arrivals.clear()
                answer = Moment(self.world.now, arrival is not None and arrival.told() >= 0 and self.wanted())
            elif isinstance(action, Asked):
                answer = -1 if arrival is None else arrival.told()
            else:
                answer = yield action


class World:
    def __init__(
        self, seed, deaths=0.0, losses=0.0, interrupts=0.0, stalls=0.0, offset=0, hosts_wait=None, length=60.0, store=None, now=0.0
    ):
        self.random = random.Random(seed)
        self.now, self.length, self.interrupts = now, now + length, interrupts
        count = self.random.randint(2, 4)
        self.delays = [self.random.choice([0.02, 0.1, 0.5]) for _ in range(count)]
        self.offsets = [0] * count
        self.offsets[0] = offset
        self.hosts_wait = self.random.random() < 0.5 if hosts_wait is None else hosts_wait
        self.store = store or Store()
        # Those before are an earlier group's.
        self.first_round = self.store.state.round + bool(store)
        self.ranks = [Process(self, own) for own in range(count)]
        self.deaths, self.losses, self.stalls = deaths, losses, stalls

    def run(self, until=float("inf")):
        lives = [(rank, life) for rank in self.ranks for life in (rank.program(), rank.thread())]
        answers, wakes = [None] * len(lives), [self.now] * len(lives)
        alive = set(range(len(lives)))
        while alive and self.now < until:
            ready = [each for each in alive if wakes[each] <= self.now]
            if not ready:
                self.now = min(wakes[each] for each in alive)
                continue
            each = self.random.choice(ready)
            rank, life = lives[each]
            try:
                action = life.send(answers[each])
                answers[each] = None
                if isinstance(action, Sleep):
                    wakes[each] = self.now + action.seconds
                else:
                    answers[each] = self.ask(rank, action)
            except (StopIteration, Gone):
                alive.remove(each)
            except Dead:
                rank.is_dead = rank.is_over = True
                alive -= {place for place, (other, _) in enumerate(lives) if other is rank}
            if self.now > self.length + 180:
                raise AssertionError(f"{[lives[each] for each in alive]} wait for ever")
        return self

    def ask(self, rank, action):
        if self.random.random() < self.deaths:
            raise Dead
        if self.random.random() < self.losses:
            # It may have been done, and only the answer is lost.
            if self.random.random() < 0.5:
                self.store.answer(action)
            rank.is_cut_off = True
            raise Gone
        before = self.store.state
        answer = self.store.answer(action)
        self.check(before)
        return answer

    def check(self, before):
        """Checks the invariants of the published state."""
        state = self.store.state
        for rank in self.ranks:
            if state.stand >> rank.own & 1 and not (rank.is_dead or rank.is_cut_off or state.round < self.first_round):
                assert rank.served.step == state.step, (rank.own, state)
                assert rank.served.is_left or rank.step + rank.offset == state.step, (rank.own, state)
        if state.outcome == MOVE and state.round > before.round:
            steps = {rank.served.step for rank in self.ranks}
            assert steps == {before.step} and all(rank.served.parks and rank.served.asked == 1 for rank in self.ranks), steps

    def rounds(self):
        """Returns the ranks that moved in each round, and the step."""
        found = {}
        for rank in self.ranks:
            for number, step in rank.moves:
                found.setdefault(number, {})[rank.own] = step
        return found


class Together(unittest.TestCase):
    def check(self, seeds, **faults):
        """Checks that all ranks move at one step or none does, and that no rank waits forever. Returns the number of rounds that
        moved.
        """
        moved = self.in_vain = 0
        for seed in range(seeds):
            world = World(seed, **faults).run()
            self.in_vain += world.store.in_vain
            moved += self.check_rounds(world, f"seed {seed}")
        return moved

    def check_rounds(self, world, seed):
        for number, steps in world.rounds().items():
            self.assertEqual(len(set(steps.values())), 1, f"{seed}, round {number}: {steps}")
            # Who died, lost the store or was cut off may not have heard it.
            heard = [rank for rank in world.ranks if not rank.is_dead and not rank.is_cut_off and number not in rank.broke_off]
            self.assertFalse([rank.own for rank in heard if rank.own not in steps], f"{seed}, round {number}: {steps}")
        return len(world.rounds())

    def test_with_collectives_that_hosts_wait_for(self):
        self.assertGreater(self.check(30, hosts_wait=True), 150)
        self.assertEqual(self.in_vain, 0)

    def test_with_hosts_that_run_ahead(self):
        # One may be behind by more than the others wait for it: eight steps of a second.
        moved = self.check(30, hosts_wait=False)
        self.assertGreater(moved, 20 + 10 * self.in_vain)

    def test_with_deaths(self):
        self.assertGreater(self.check(40, deaths=0.002), 20)

    def test_where_the_store_is_lost(self):
        self.assertGreater(self.check(40, losses=0.002), 20)

    def test_with_ranks_that_are_interrupted(self):
        self.assertGreater(self.check(40, interrupts=0.05), 20)

    def test_with_ranks_that_stand_still_for_long(self):
        self.assertGreater(self.check(40, stalls=0.002), 20)

    def test_all_of_it(self):
        self.check(40, deaths=0.001, losses=0.001, interrupts=0.02, stalls=0.001)

    def test_ranks_that_count_otherwise_are_not_parked_where_their_work_waits(self):
        self.check(20, offset=1)

    def test_a_group_whose_store_has_what_earlier_ones_left_in_it(self):
        for seed in range(20):
            # The seed says how many ranks there are: the store has a value for each number.
            store, now = Store(), 0.0
            for group in range(3):
                world = World(seed, hosts_wait=True, store=store, now=now)
                world.random.seed(f"{seed} {group}")
                world.run(now + world.random.uniform(0, 20) if group < 2 else float("inf"))
                now = world.now
            self.assertGreater(self.check_rounds(world, f"seed {seed}"), 0)


class Many(unittest.TestCase):
    """Many ranks that shrink at once, with a collective in each step, and a store that serves one request at a time."""

    REQUEST, WAY, STEP = 30e-6, 100e-6, 5e-3

    def agree(self, count):
        """Returns the time and the step at which they have agreed."""
        order, store, ranks = random.Random(count), Store(), [Rank(count, own) for own in range(count)]
        # As `_ranks`.
        poll = 0.001 * max(1.0, count / 16)
        lives = [self.live(rank) for rank in ranks]
        events = [(order.uniform(0, self.STEP), own, None) for own in range(count)]
        heapq.heapify(events)
        is_free_at, came, ended = 0.0, [], []
        while events:
            now, own, answer = heapq.heappop(events)
            if isinstance(answer, (Read, Swap)):
                answer = store.answer(answer)
                now += self.WAY
            action = lives[own].send(answer(now) if callable(answer) else answer)
            while isinstance(action, (Look, Asked)) and not getattr(action, "sleeps", False):
                action = lives[own].send(Moment(now, True) if isinstance(action, Look) else 1)
            if isinstance(action, Look):
                heapq.heappush(events, (now + poll * order.uniform(0.5, 1.5), own, lambda now: Moment(now, True)))
            elif isinstance(action, (Read, Swap)):
                is_free_at = max(is_free_at, now + self.WAY) + self.REQUEST
                heapq.heappush(events, (is_free_at, own, action))
            elif isinstance(action, bool):
                ended.append((action, now))
            else:
                came.append(own)
                if len(came) == count:
                    for own in came:
                        heapq.heappush(events, (now + self.STEP * order.uniform(1, 1.2), own, None))
                    came = []
        self.assertTrue(len(ended) == count and all(moves for moves, _ in ended))
        return max(now for _, now in ended)

    def live(self, rank):
        step = 0
        while not (yield from rank.meet(step)):
            step += 1
            yield "a collective"
        yield (yield from rank.agree())

    def test_they_agree_soon(self):
        self.assertLess(self.agree(16), 0.1)
        self.assertLess(self.agree(256), 1.0)


def ask(store, actions, looks=(), asked=1):
    """Runs it alone with these moments, then ever later ones."""
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
            answer = asked if isinstance(action, Asked) else store.answer(action)


class Alone(unittest.TestCase):
    """Behaviour of one of two ranks."""

    def setUp(self):
        self.store, self.first, self.other = Store(), Rank(2, 0), Rank(2, 1)

    def test_it_goes_on_until_all_have_wished_and_then_waits_no_longer_than_it_says(self):
        self.assertFalse(ask(self.store, self.first.meet(3)))
        self.assertFalse(ask(self.store, self.first.meet(4)))
        self.assertTrue(self.first.has_wished())
        self.assertFalse(ask(self.store, self.other.meet(9)))
        self.assertEqual(self.store.state, State(wished=3, step=10))
        # In vain: it names the next step, and at last gives up.
        self.assertFalse(ask(self.store, self.other.meet(10), [Moment(0.0, True)]))
        self.assertEqual(self.store.state, State(wished=3, step=11))
        self.assertFalse(ask(self.store, self.other.meet(11), [Moment(9.9, True), Moment(10.0, True)]))
        self.assertEqual(self.store.state, State(1, ABORT))
        # The other finds that, and both try again after a while.
        self.assertFalse(ask(self.store, self.first.meet(5)))
        self.assertFalse(self.first.has_wished())
        self.assertFalse(ask(self.store, self.first.meet(6), [Moment(2.0, True)]))
        self.assertFalse(self.first.has_wished())
        self.assertFalse(ask(self.store, self.first.meet(7), [Moment(99.0, True)]))
        self.assertTrue(self.first.has_wished())

    def test_who_is_behind_goes_on_to_the_step_that_is_named_and_who_is_further_names_its_own(self):
        self.store.state = State(wished=2, step=None)
        self.assertFalse(ask(self.store, self.first.meet(7)))
        self.store.state = State(wished=3, step=9, stand=2)
        self.assertFalse(ask(self.store, self.first.meet(8)))
        self.assertTrue(ask(self.store, self.first.meet(9)))
        self.store.state = self.store.state._replace(drained=2)
        self.assertTrue(ask(self.store, self.first.agree()))
        self.assertEqual(self.store.state, State(1, MOVE))
        self.store.state = State(1, MOVE, wished=2)
        self.assertFalse(ask(self.store, self.first.meet(11)))
        self.store.state = self.store.state._replace(step=12, stand=2)
        self.assertFalse(ask(self.store, self.first.meet(14), [Moment(0.0, True)]))
        self.assertEqual(self.store.state, State(1, MOVE, wished=3, step=15))

    def test_who_withdraws_lets_those_go_on_that_stand_and_nothing_is_left_of_it(self):
        self.assertFalse(ask(self.store, self.first.meet(3)))
        for step in range(3, 100):
            # A shrink that one of them gives up again and again.
            self.assertFalse(ask(self.store, self.other.meet(step)))
            ask(self.store, self.other.withdraw())
            self.assertEqual(self.store.state, State(wished=1))
        self.assertFalse(ask(self.store, self.other.meet(100)))
        self.assertFalse(ask(self.store, self.other.meet(101), [Moment(0.0, True), Moment(0.0, False)]))
        self.assertEqual(self.store.state, State(wished=1))
        self.assertFalse(ask(self.store, self.first.meet(50)))
        self.assertTrue(self.first.has_wished())

    def test_who_is_parked_and_cannot_be_keeps_all_from_moving(self):
        self.assertFalse(ask(self.store, self.first.meet(3)))
        self.store.state = State(wished=3, step=4, stand=2)
        self.assertTrue(ask(self.store, self.first.meet(4)))
        self.assertFalse(ask(self.store, self.first.agree(), asked=-1))
        self.assertEqual(self.store.state, State(1, ABORT))

    def test_what_an_earlier_group_decided_is_not_for_a_rank_that_was_not_there(self):
        for left in (
            State(7, MOVE, wished=1),
            State(7, ABORT, wished=3, step=3, stand=2),
            State(7, MOVE, wished=3, step=3, stand=3),
            State(7, MOVE, wished=3, step=3, stand=3, drained=2),
        ):
            self.store.state, self.first = left, Rank(2, 0)
            self.assertFalse(ask(self.store, self.first.meet(3)))
            self.assertEqual(self.store.state, State(8, wished=1))

    def test_what_a_group_decided_that_began_anew_without_it_moves_nothing_of_a_rank(self):
        self.assertFalse(ask(self.store, self.first.meet(3)))
        self.store.state = State(wished=3, step=4, stand=2)
        self.assertTrue(ask(self.store, self.first.meet(4)))
        self.store.state = State(2, MOVE)
        self.assertFalse(ask(self.store, self.first.agree()))

    def test_where_the_store_fails_at_any_request_nothing_moves_but_what_was_agreed(self):
        for fails_at in range(40):
            store, ranks = Store(), [Rank(2, 0), Rank(2, 1)]
            requests, lost, moves = 0, set(), {}

            def run(own, actions):
                nonlocal requests
                answer = None
                while True:
                    try:
                        action = actions.send(answer)
                    except StopIteration as ended:
                        return ended.value
                    if isinstance(action, (Read, Swap)):
                        requests += 1
                        if requests == fails_at:
                            lost.add(own)
                            return None
                    if isinstance(action, Look) and action.sleeps:
                        yield
                    self.now += 0.01
                    answer = (
                        Moment(self.now, True) if isinstance(action, Look) else 1 if isinstance(action, Asked) else store.answer(action)
                    )

            def live(own):
                for step in range(8):
                    if (yield from run(own, ranks[own].meet(step))):
                        moves[own] = step, (yield from run(own, ranks[own].agree()))
                        return
                    yield

            self.now = 0.0
            alive = [live(0), live(1)]
            while alive:
                for life in list(alive):
                    if next(life, "over") == "over":
                        alive.remove(life)
            agreed = store.state.outcome == MOVE
            self.assertFalse(any(moved for _, moved in moves.values()) and not agreed, (fails_at, moves))
            self.assertTrue(all(moves[own][1] for own in {0, 1} - lost) if agreed else True, (fails_at, moves))
            self.assertTrue(agreed or lost, (fails_at, moves))


if __name__ == "__main__":
    unittest.main()
