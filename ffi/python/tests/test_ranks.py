"""Two ranks, each a process with a simulated GPU, an all-reduce in each step: they are parked at the same step, or not at all. And the
thread that speaks for a rank, by itself."""

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import unittest
import warnings
from unittest import mock

import child
from clock import Clock
from glake import _library, _ranks, _safepoint

# Whether every place is tried, and not each seventh.
SOAK = "GLAKE_SOAK" in os.environ


class Ranks(unittest.TestCase):
    def run_ranks(self, scene, **environment):
        """Returns the output of both ranks, or None for one that ended without any."""
        names = {**os.environ, "GLAKE_DEVICE": "sim", **environment}
        sockets = socket.socketpair()
        with tempfile.NamedTemporaryFile() as store:
            ranks = []
            for own, end in enumerate(sockets):
                command = [sys.executable, child.TESTS / "rank.py", own, 2, store.name, end.fileno(), scene]
                pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
                ranks.append(subprocess.Popen([str(part) for part in command], env=names, pass_fds=[end.fileno()], **pipes))
            for end in sockets:
                end.close()
            found = []
            for rank in ranks:
                try:
                    out, err = rank.communicate(timeout=120)
                except subprocess.TimeoutExpired:
                    for other in ranks:
                        other.kill()
                    out, err = rank.communicate()
                    err += "\nended after 120 s"
                found.append((rank.returncode, out, err))
        for own, (code, out, err) in enumerate(found):
            self.assertEqual(code, 0, f"rank {own}: {out}\n{err}")
        return [json.loads(out) if out else None for _, out, _ in found]

    def parks(self, scene):
        first, second = self.run_ranks(scene)
        self.assertEqual((first["failed"], second["failed"]), (0, 0), f"{first}\n{second}")
        self.assertEqual(first["waited_at"], second["waited_at"])
        self.assertEqual((len(first["waited_at"]), first["parked"], second["parked"]), (20, 20, 20))

    def test_they_are_parked_at_the_same_steps(self):
        self.parks("threads")

    def test_tasks_are_parked_at_the_same_steps(self):
        self.parks("tasks")

    def test_nobody_waits_where_only_one_shrinks(self):
        first, second = self.run_ranks("alone")
        self.assertEqual((first["waited_at"], second["waited_at"], first["failed"]), ([], [], 10))
        self.assertLess(max(first["longest"], second["longest"]), 5.0)
        self.assertEqual(first["keys"], 1)

    def test_one_that_dies_is_waited_for_no_longer_than_was_said(self):
        first, second = self.run_ranks("dies", MEET_SECONDS="1")
        self.assertEqual((first["waited_at"], second), ([], None))
        self.assertLess(first["longest"], 8.0)

    def test_where_one_cannot_be_parked_nothing_moves(self):
        first, second = self.run_ranks("in_use", DRAIN_SECONDS="0.5")
        self.assertEqual((first["failed"], second["failed"]), (1, 1))
        self.assertIn("another rank", first["error"])
        self.assertLess(max(first["longest"], second["longest"]), 2.9)
        self.assertEqual((first["waited_at"], second["waited_at"]), ([], []))
        # Who asks again and again makes no store's file longer.
        self.assertLess(first["size"], 5000)

    def test_uses_that_no_shrink_waits_for_are_in_nobody_s_way(self):
        first, second = self.run_ranks("nested")
        self.assertEqual((first["failed"], second["failed"]), (0, 0), f"{first}\n{second}")
        self.assertEqual((first["waited_at"], first["parked"]), (second["waited_at"], 5))

    def test_they_are_parked_once_all_uses_that_a_shrink_waits_for_can_be(self):
        first, second = self.run_ranks("quanta")
        self.assertEqual((first["failed"], second["failed"]), ([], []))
        self.assertEqual((first["waited_at"], len(first["waited_at"])), (second["waited_at"], 2))
        self.assertLess(max(first["longest"], second["longest"]), 10.0)

    def test_a_group_has_nothing_of_an_earlier_one_with_its_store(self):
        first, second = self.run_ranks("groups")
        self.assertEqual((first["failed"], second["failed"]), (0, 0), f"{first}\n{second}")
        self.assertEqual((first["waited_at"], len(first["waited_at"])), (second["waited_at"], 3))

    def test_signals_at_whatever_place(self):
        first, second = self.run_ranks("signals", MEET_SECONDS="2", DRAIN_SECONDS="2", PARKS="15" if SOAK else "7")
        self.assertGreater(first["raised"], 15 if SOAK else 7)
        self.assertLess(max(first["longest"], second["longest"]), 6.0)
        self.assertEqual((first["parked"][-3:], second["parked"][-3:], first["keys"]), ([True] * 3, [True] * 3, 1))

    def test_a_signal_ends_the_wait_for_another(self):
        first, second = self.run_ranks("interrupted")
        self.assertLess(first["raised"], 8.0)
        self.assertFalse(first["waited"] or second["waited"])

    def test_one_that_cannot_ask_the_store_is_not_parked(self):
        for scene in ("store_is_lost", "store_does_not_answer"):
            with self.subTest(scene):
                first, second = self.run_ranks(scene, MEET_SECONDS="0.5", ANSWER_SECONDS="0.5")
                self.assertEqual((first["waited_at"], second["waited_at"], first["failed"], second["failed"]), ([], [], 1, 1))
                self.assertLess(max(first["longest"], second["longest"]), 2.9)


class Store:
    """A store shared by all ranks of a process, which fails at a given request."""

    def __init__(self, fails_at=None):
        self.value, self.requests, self.lock = "", 0, threading.Lock()
        self.fails_at = fails_at

    def compare_set(self, _key, expected, desired):
        with self.lock:
            self.requests += 1
            if self.requests == self.fails_at:
                raise RuntimeError("Connection reset by peer")
            if self.value == expected:
                self.value = desired
            return self.value.encode()


class Threads(unittest.TestCase):
    """Ranks of one process, whose uses are wanted until they end that. Time stands still while any of them runs."""

    def setUp(self):
        self.unwanted = set()
        self.clock = Clock()
        here = contextlib.ExitStack()
        here.enter_context(self.clock.of(_ranks, _safepoint))
        self.addCleanup(here.close)
        wanted = mock.patch.object(_ranks, "_is_wanted", lambda uses: any(use not in self.unwanted for use in uses))
        for patch in (
            wanted,
            mock.patch.object(_ranks, "_ANSWER_SECONDS", 0.4),
            mock.patch.multiple(_ranks._agreement, MEET_SECONDS=0.7, DRAIN_SECONDS=0.4),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def arrive(self, ranks, step, use):
        arrival = _ranks.Arrival(ranks, step, [use])
        arrival.come()
        return arrival

    def heard(self, ask):
        end = self.clock.monotonic() + 5.0
        while (answer := ask()) is None:
            self.assertLess(self.clock.monotonic(), end)
            self.clock.sleep(0.001)
        return answer

    def come(self, ranks, step, use):
        arrival = self.arrive(ranks, step, use)
        return arrival, self.heard(arrival.parks)

    def test_two_agree_at_whatever_request_the_store_fails_or_nothing_moves(self):
        outcomes = set()
        for fails_at in (None, *range(1, 30)):
            store = Store(fails_at)
            both = [_ranks.Ranks(store, 2, own) for own in range(2)]
            found = [None, None]

            def live(own):
                # Until the memory moves or one of them is lost.
                for step in range(20):
                    is_last = any(ranks.are_over() for ranks in both)
                    arrival, parks = self.come(both[own], step, "use")
                    found[own] = (step, parks and self.heard(lambda: arrival.moves(1)))
                    if found[own][1] or is_last:
                        break

            threads = [self.clock.thread(target=live, args=[own]) for own in range(2)]
            with mock.patch.object(_ranks._logger, "warning"):
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            over = [ranks.are_over() for ranks in both]
            if not any(over):
                self.assertEqual(found[0], found[1])
                self.assertTrue(found[0][1])
            for own, other in ((0, 1), (1, 0)):
                # The one that lost the store may not have heard it.
                if found[own][1] and not over[other]:
                    self.assertEqual(found[own], found[other])
            outcomes.add(tuple(moved for _, moved in found))
        self.assertIn((True, True), outcomes)
        self.assertIn((False, False), outcomes)

    def test_who_left_without_a_word_is_not_waited_for_for_long(self):
        store = Store()
        first, second = (_ranks.Ranks(store, 2, own) for own in range(2))
        self.come(first, 0, "use")
        self.come(second, 0, "use")
        # It stands, and is never asked for again.
        self.arrive(first, 1, "use")
        begin = self.clock.monotonic()
        arrival, parks = self.come(second, 1, "use")
        self.assertFalse(parks and self.heard(lambda: arrival.moves(1)))
        self.assertLess(self.clock.monotonic() - begin, 0.9)
        # Nor does it keep the next from agreeing, once the first one too has seen that nobody came.
        self.clock.sleep(5.0)
        for ranks in (first, second):
            ranks._rank._rests_until = 0.0
        found = []

        def live(ranks):
            for step in range(2, 20):
                arrival, parks = self.come(ranks, step, "use")
                if parks:
                    found.append((step, self.heard(lambda: arrival.moves(1))))
                    break

        threads = [self.clock.thread(target=live, args=[ranks]) for ranks in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(found), 2)
        self.assertTrue(found[0] == found[1] and found[0][1], found)

    def test_another_thread_is_refused_while_one_stands(self):
        store = Store()
        first, second = (_ranks.Ranks(store, 2, own) for own in range(2))
        self.come(first, 0, "use")
        self.come(second, 0, "use")
        stands = self.arrive(first, 1, "use")
        begin = self.clock.monotonic()
        self.assertFalse(self.come(first, 1, "other")[1])
        self.assertLess(self.clock.monotonic() - begin, 0.09)
        self.assertIsNone(stands.parks())
        stands.leave()

    def test_a_wish_lasts_as_long_as_one_use_is_wanted_that_was_wished_for(self):
        store = Store()
        ranks = _ranks.Ranks(store, 2, 0)
        self.come(ranks, 0, "first")
        self.come(ranks, 1, "second")
        self.unwanted.add("first")
        self.clock.sleep(0.1)
        self.assertTrue(ranks._rank.has_wished())
        self.unwanted.add("second")
        self.clock.sleep(0.1)
        self.assertFalse(ranks._rank.has_wished())

    def test_a_store_without_an_answer_holds_nobody_for_longer_than_was_said(self):
        for request in ("compare_set", "clone"):
            store = Store()
            setattr(store, request, lambda *_: self.clock.sleep(30.0))
            begin = self.clock.monotonic()
            ranks = _ranks.Ranks(store, 2, 0)
            self.assertEqual(self.clock.monotonic(), begin)
            with self.assertLogs("glake", "WARNING"):
                self.assertFalse(self.come(ranks, 0, "use")[1])
            self.assertLess(self.clock.monotonic() - begin, 0.5)
            self.assertTrue(ranks.are_over())

    def test_a_group_s_store_and_thread_end_with_the_group(self):
        before = set(threading.enumerate())
        store = Store()
        ranks = _ranks.Ranks(store, 2, 0)
        self.come(ranks, 0, "use")
        (thread,) = set(threading.enumerate()) - before
        del store
        thread.join(2.0)
        self.assertEqual((thread.is_alive(), ranks.are_over()), (False, True))

    def test_whatever_is_raised_at_whatever_place_of_a_safe_point(self):
        """An exception ends only its own round for both ranks, and both park after it. Both move or none, except if an exception
        meets an earlier one.
        """
        # A call that is cut off before it is awaited.
        warnings.simplefilter("ignore", RuntimeWarning)
        raised, step = 0, 1 if SOAK else 7
        for second in (None, 3):
            for place in itertools.count(step=step if second is None else 3 * step):
                interrupts = Interrupts(place, second)
                with self.subTest(place=place, second=second), Parked.of_a_rank() as (ranks, other, store):
                    votes, others = self.both_at(ranks, other, 0)
                    votes, others = self.both_at(ranks, other, 1, interrupts, interrupts.sleep)
                    if second is None:
                        self.assertEqual(votes == [True], others, "one moves without the other")
                    self.assertFalse(votes == [True] and not others, "it moves alone")
                    if interrupts.raised:
                        raised += 1
                        ends = (self.both_at(ranks, other, step) for step in range(2, 10))
                        self.assertIn(([True], True), ends)
                if not interrupts.raised:
                    break
        self.assertGreater(raised, 500 // step)

    def test_a_task_that_is_cancelled_at_whatever_place(self):
        for place in itertools.count():
            cancels = 0

            async def sleep(seconds):
                nonlocal cancels
                self.clock.sleep(seconds)
                cancels += 1
                if place <= cancels <= place + 1:
                    raise asyncio.CancelledError

            with self.subTest(place=place), Parked.of_a_rank() as (ranks, other, store):
                self.both_at(ranks, other, 0)
                votes, others = self.both_at(ranks, other, 1, sleep=sleep)
                self.assertEqual(votes == [True], others)
                if cancels < place:
                    break
                self.assertIn(([True], True), (self.both_at(ranks, other, step) for step in range(2, 10)))
        self.assertGreater(place, 1)

    def both_at(self, ranks, other, step, interrupts=None, sleep=_safepoint._sleep):
        """Brings both ranks to a safe point and returns the votes of one, and whether the other's memory moves. They reach the
        next one together.
        """
        found = []

        def come():
            arrival, parks = self.come(other, step, "use")
            found.append(parks and self.heard(lambda: arrival.moves(1)))

        thread = self.clock.thread(target=come)
        thread.start()
        Parked.votes = []
        begin = self.clock.monotonic()
        try:
            with interrupts or mock.MagicMock():
                _safepoint._wait(step, sleep).send(None)
        except (StopIteration, KeyboardInterrupt, asyncio.CancelledError):
            pass
        self.assertLess(self.clock.monotonic() - begin, 2.0)
        thread.join()
        return Parked.votes, found[0]


class Interrupts:
    """Raises at the ``place``-th instruction that a safe point executes, and again after a given number of instructions."""

    def __init__(self, place, second):
        self.places = {place} if second is None else {place, place + 1 + second}
        self.executed, self.raised = 0, 0

    def trace(self, frame, event, _):
        if frame.f_code.co_filename not in (_safepoint.__file__, _ranks.__file__) or not self.is_on:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.executed += 1
            if self.executed - 1 in self.places:
                self.raised += 1
                raise KeyboardInterrupt
        return self.trace

    async def sleep(self, seconds):
        """Sleep that does not raise again from its own frame unless it is armed anew."""
        _safepoint.time.sleep(seconds)
        frame = sys._getframe(1)
        while frame and frame.f_code.co_filename == _safepoint.__file__:
            frame.f_trace, frame.f_trace_opcodes, frame = self.trace, True, frame.f_back
        sys.settrace(self.trace)

    def __enter__(self):
        self.is_on = True
        sys.settrace(self.trace)

    def __exit__(self, *_):
        sys.settrace(None)
        self.is_on = False


class Parked:
    """Fake of the library's class: a use that votes, and whose work has completed."""

    votes: list = []

    def __init__(self, _uses, _meanwhile, _votes):
        self.has_voted = False

    def __enter__(self):
        return True

    def __exit__(self, *_):
        if not self.has_voted:
            self.votes.append(False)

    def asked(self, _timeout):
        return 1

    def vote(self, yes):
        if self.has_voted:
            return False
        self.has_voted = True
        self.votes.append(yes)
        return True

    def have_gone_on(self):
        return True

    @classmethod
    @contextlib.contextmanager
    def of_a_rank(cls):
        """Sets up this process as one rank, and another one."""
        store = Store()
        ranks, other = (_ranks.Ranks(store, 2, own) for own in range(2))
        use = mock.MagicMock()
        with (
            mock.patch.object(_ranks, "here", lambda: ranks),
            mock.patch.object(_ranks, "is_one_of_several", lambda: True),
            mock.patch.multiple(_ranks._agreement, PAUSE_SECONDS=0.0, STAND_SECONDS=0.02),
            mock.patch.object(_library, "api", lambda: mock.MagicMock(Parked=cls)),
            mock.patch("glake._gate.own_uses", lambda: [use]),
        ):
            yield ranks, other, store


if __name__ == "__main__":
    unittest.main()
