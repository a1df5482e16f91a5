"""Safe points: a use whose threads and tasks are all at one waits while its memory is evicted, and finds the same bytes afterwards."""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import os
import signal
import threading
import time
import unittest
from unittest import mock

os.environ["GLAKE_DEVICE"] = "sim"

import glake  # noqa: E402
from glake import _gate, _library, _ranks, _safepoint  # noqa: E402

import child  # noqa: E402
from regions import MIB, made, view  # noqa: E402


class Steps:
    """Steps of a use in a thread or task, counted, each of which reads its memory."""

    def __init__(self, arrays, uses):
        self.arrays, self.uses = arrays, uses
        self.steps = self.parks = 0
        self.right = True
        self.over = threading.Event()

    def step(self):
        self.right = self.right and all(array.is_right() for array in self.arrays)
        self.steps += 1

    def run(self):
        with glake.active(self.uses):
            while not self.over.is_set():
                self.step()
                self.parks += glake.safepoint()
                time.sleep(0.001)

    async def run_async(self):
        async with glake.active(self.uses):
            while not self.over.is_set():
                self.step()
                self.parks += await glake.safepoint_async()
                await asyncio.sleep(0.001)


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("it does not come")
        time.sleep(0.001)


@contextlib.contextmanager
def shrinking():
    """Inside of a use: begins a shrink that waits for it, and returns the number of bytes copied once the memory is back."""
    tag, arrays = made()

    def swap():
        gone = glake.shrink(tag, timeout=60)
        glake.refill(tag)
        return gone["copied"]

    def begin():
        swapped = other.submit(swap)
        until(lambda: glake.gate()["closing"])
        return swapped

    with concurrent.futures.ThreadPoolExecutor() as other:
        with glake.active(tag):
            yield begin
    if not all(array.is_right() for array in arrays):
        raise AssertionError("other bytes came back")


class Parking(unittest.TestCase):
    def setUp(self):
        self.tag, self.arrays = made()

    def cycle(self, *all_steps, rounds=3):
        """Shrinks and refills while steps run: no step reads its memory in between, and all bytes are right afterwards."""
        for _ in range(rounds):
            before = [steps.parks for steps in all_steps]
            report = glake.shrink(self.tag, timeout=20)
            self.assertEqual(report["copied"], 16 * MIB)
            self.assertEqual(glake.gate()["parked"], 1)
            counts = [steps.steps for steps in all_steps]
            time.sleep(0.02)
            self.assertEqual([steps.steps for steps in all_steps], counts)
            glake.refill(self.tag)
            until(lambda: all(steps.steps > count + 1 for steps, count in zip(all_steps, counts)))
            self.assertTrue(all(steps.parks > parks for steps, parks in zip(all_steps, before)))
        for steps in all_steps:
            steps.over.set()

    def end(self, *threads):
        for thread in threads:
            thread.join(20)
            self.assertFalse(thread.is_alive())
        self.assertEqual((glake.gate()["uses"], glake.gate()["parked"]), (0, 0))

    def test_a_thread(self):
        steps = Steps(self.arrays, self.tag)
        thread = threading.Thread(target=steps.run)
        thread.start()
        until(lambda: steps.steps)
        self.cycle(steps)
        self.end(thread)
        self.assertTrue(steps.right)

    def test_all_threads_of_a_use(self):
        both = [Steps(self.arrays, self.tag) for _ in range(2)]

        with glake.active(self.tag):
            threads = [threading.Thread(target=contextvars.copy_context().run, args=[steps.run]) for steps in both]
            for thread in threads:
                thread.start()
            until(lambda: all(steps.steps for steps in both))
            self.assertEqual(glake.gate()["uses"], 1)
        self.cycle(*both)
        self.end(*threads)
        self.assertTrue(all(steps.right for steps in both))

    def test_tasks(self):
        both = [Steps(self.arrays, self.tag) for _ in range(2)]

        async def main():
            async with glake.active(self.tag):
                tasks = [asyncio.create_task(steps.run_async()) for steps in both]
                while not all(steps.steps for steps in both):
                    await asyncio.sleep(0.001)
            await asyncio.gather(*tasks)

        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()
        until(lambda: all(steps.steps > 3 for steps in both))
        self.cycle(*both)
        self.end(thread)
        self.assertTrue(all(steps.right for steps in both))

    def test_who_comes_to_no_safe_point_is_waited_for(self):
        steps = Steps(self.arrays, self.tag)
        with glake.active(self.tag):
            context = contextvars.copy_context()
            thread = threading.Thread(target=lambda: context.run(steps.run))
            thread.start()
            until(lambda: steps.steps)
            # On a thread that is not inside of the block: it would wait for itself.
            with concurrent.futures.ThreadPoolExecutor() as other:
                with self.assertRaises(glake.ClosedError):
                    other.submit(glake.shrink, self.tag, timeout=0.1).result(20)
            count = steps.steps
            until(lambda: steps.steps > count)
        steps.over.set()
        self.end(thread)

    def test_the_batch_steps_of_an_asgi_app(self):
        async def steps(_scope, _receive, _send):
            async with glake.active(self.tag):
                pass

        async def none(_scope, _receive, _send):
            pass

        scope = {"type": "http", "path": "/generate"}
        asyncio.run(glake.asgi.Gate(steps, grain="step")(scope, None, None))
        with self.assertRaisesRegex(glake.StateError, "/generate"):
            asyncio.run(glake.asgi.Gate(none, grain="step")(scope, None, None))
        asyncio.run(glake.asgi.Gate(none, grain="step", exempt=["/generate"])(scope, None, None))
        with self.assertRaises(glake.InvalidError):
            glake.asgi.Gate(none, grain="token")


class Places(unittest.TestCase):
    """Places at which a safe point does nothing."""

    def closed(self, ask):
        """Calls a function inside a use while a shrink waits for it."""
        tag, arrays = made()
        with concurrent.futures.ThreadPoolExecutor() as other:
            with glake.active(tag):
                shrunk = other.submit(glake.shrink, tag)
                until(lambda: glake.gate()["closing"])
                answer = ask()
            self.assertGreater(shrunk.result(20)["freed"], 0)
        glake.refill(tag)
        self.assertTrue(all(array.is_right() for array in arrays))
        return answer

    def test_outside_and_while_nobody_waits(self):
        self.assertFalse(glake.safepoint())
        with glake.active():
            self.assertFalse(glake.safepoint())
        self.assertFalse(asyncio.run(glake.safepoint_async()))

    def test_in_a_loop_and_in_a_rank_of_several(self):
        async def ask():
            return glake.safepoint()

        self.assertFalse(self.closed(lambda: asyncio.run(ask())))
        torch = mock.MagicMock()

        def ask_torch():
            with mock.patch.dict("sys.modules", torch=torch):
                return glake.safepoint()

        torch._C._current_graph_task_id.return_value = -1
        torch.cuda.is_current_stream_capturing.return_value = False
        torch.distributed.is_initialized.return_value = True
        torch.distributed.get_world_size.return_value = 2
        torch.distributed.distributed_c10d._get_default_store.side_effect = ValueError
        self.assertFalse(self.closed(ask_torch))
        torch.distributed.is_initialized.return_value = False
        with mock.patch.dict(os.environ, WORLD_SIZE="2"):
            self.assertFalse(self.closed(ask_torch))
        torch.cuda.is_current_stream_capturing.return_value = True
        self.assertFalse(self.closed(ask_torch))
        torch.cuda.is_current_stream_capturing.return_value = False
        torch._C._current_graph_task_id.return_value = 7
        self.assertFalse(self.closed(ask_torch))

    def test_where_it_cannot_be_told_whether_it_is_safe(self):
        def query(name):
            torch = mock.MagicMock()
            torch._C._current_graph_task_id.return_value = -1
            torch.cuda.is_current_stream_capturing.return_value = False
            torch.distributed.is_initialized.return_value = False
            queried = functools.reduce(getattr, name.split("."), torch)
            queried.side_effect = RuntimeError(f"CUDA error: an illegal memory access was encountered in {name}")
            return torch

        async def ask_async():
            return await glake.safepoint_async()

        def ask(torch):
            with mock.patch.dict("sys.modules", torch=torch):
                return glake.safepoint(), asyncio.run(ask_async()), glake.safepoint()

        names = ("_C._current_graph_task_id", "cuda.is_initialized", "cuda.is_current_stream_capturing", "distributed.is_initialized")
        for name in names:
            with self.subTest(name), mock.patch.object(_safepoint, "_has_told", False), self.assertLogs("glake", "WARNING") as told:
                self.assertEqual(self.closed(lambda: ask(query(name))), (False, False, False))
                self.assertEqual(len(told.output), 1)
                self.assertIn(f"illegal memory access was encountered in {name}", told.output[0])

    def test_what_the_library_refuses_to_say(self):
        api = mock.MagicMock(wraps=_library.api())
        asked = {"use_wanted": api.use_wanted, "gate": api.gate_json}
        for name, query in asked.items():
            with (
                self.subTest(name),
                mock.patch.multiple(_ranks, is_one_of_several=lambda: True, here=mock.MagicMock()),
                mock.patch.object(_safepoint, "_has_told", False),
                self.assertLogs("glake", "WARNING") as told,
            ):
                query.side_effect = glake.UnavailableError("the process ends")
                api.use_wanted.side_effect = query.side_effect if name == "use_wanted" else [True, False]

                def ask():
                    # Two uses, of which a shrink waits for one.
                    uses = [*_gate.own_uses(), mock.MagicMock()]
                    with mock.patch.object(_library, "api", lambda: api), mock.patch.object(_gate, "own_uses", lambda: uses):
                        return glake.safepoint()

                self.assertFalse(self.closed(ask))
                self.assertIn("the process ends", told.output[0])
                query.side_effect = None

    def test_what_ends_a_program_comes_out(self):
        torch = mock.MagicMock()
        for error in (KeyboardInterrupt, SystemExit):
            torch._C._current_graph_task_id.side_effect = error

            def ask():
                with mock.patch.dict("sys.modules", torch=torch), self.assertRaises(error):
                    glake.safepoint()

            self.closed(ask)

    def test_it_costs_little(self):
        with glake.active():
            best = float("inf")
            for _ in range(5):
                begin = time.thread_time()
                for _ in range(20_000):
                    glake.safepoint()
                best = min(best, (time.thread_time() - begin) / 20_000)
        self.assertLess(best, 5e-6)


class Alarm:
    """Raises after the given number of seconds, at any place at which Python handles signals; never after its end."""

    def __init__(self, seconds):
        self.seconds, self.is_set = seconds, False

    def ring(self, *_):
        if self.is_set:
            self.is_set = False
            raise KeyboardInterrupt

    def __enter__(self):
        self.before = signal.signal(signal.SIGALRM, self.ring)
        self.is_set = True
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_):
        self.is_set = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


class Signals(unittest.TestCase):
    """An exception raised by a signal handler at any time comes out with no use parked and all memory resident: the program may
    continue.
    """

    async def raised(self, after, tag, ask):
        """Parks a use that receives a signal; returns whether it raised."""
        with concurrent.futures.ThreadPoolExecutor() as other:
            async with glake.active(tag):
                shrunk = other.submit(glake.shrink, tag, timeout=20)
                until(lambda: glake.gate()["closing"])
                other.submit(lambda: (shrunk.result(), time.sleep(0.002), glake.refill(tag)))
                try:
                    with Alarm(after):
                        parked = ask()
                        if not isinstance(parked, bool):
                            await parked
                    return False
                except KeyboardInterrupt:
                    return True
                finally:
                    self.assertEqual((glake.gate()["parked"], view(tag)["evicted"]), (0, 0), f"a signal after {after} s")
            self.assertEqual(shrunk.result()["resident"], 0)

    def check(self, run, ask):
        tag, arrays = made()
        raised = sum(run(self.raised(1e-6 + step * 4e-6, tag, ask)) for step in range(100))
        self.assertGreater(raised, 50)
        glake.refill(tag)
        self.assertTrue(all(array.is_right() for array in arrays))

    def test_in_a_thread(self):
        def run(coroutine):
            with self.assertRaises(StopIteration) as ended:
                coroutine.send(None)
            return ended.exception.value

        self.check(run, glake.safepoint)

    def test_in_a_task(self):
        def run(coroutine):
            try:
                return asyncio.run(coroutine)
            except KeyboardInterrupt:
                # It met the loop, which has ended the task.
                return True

        self.check(run, glake.safepoint_async)


BEGIN = """
import os, signal, threading, time
import glake
from glake import _library

api = _library.api()
with glake.region("weights"):
    address = api.alloc(0, 1 << 24)

def steps():
    with glake.active("weights"):
        while not glake.safepoint():
            time.sleep(0.001)
        assert next(region for region in glake.regions() if region["tag"] == "weights")["evicted"] == 0
"""


class Ends(unittest.TestCase):
    def test_a_signal_asks_for_the_memory(self):
        child.check(
            self,
            BEGIN
            + """
# Who was started in the background of a shell ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt():
    glake.shrink("weights")
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    steps()
except KeyboardInterrupt:
    assert next(region for region in glake.regions() if region["tag"] == "weights")["evicted"] == 0
else:
    raise AssertionError("nothing was raised")
""",
        )

    def test_a_handler_s_error_comes_out_too(self):
        child.check(
            self,
            BEGIN
            + """
class Late(Exception):
    pass

def late(*_):
    raise Late

def interrupt():
    glake.shrink("weights")
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGALRM)

signal.signal(signal.SIGALRM, late)
threading.Thread(target=interrupt).start()
try:
    steps()
except Late:
    assert next(region for region in glake.regions() if region["tag"] == "weights")["evicted"] == 0
else:
    raise AssertionError("nothing was raised")
""",
        )

    def test_a_child_s_thread_is_inside_of_what_its_parent_began(self):
        child.check(
            self,
            BEGIN
            + """
import contextvars

def inside():
    with glake.active("weights"):
        done.append(glake.safepoint())

done = []
with glake.active("weights"):
    process = os.fork()
    if process == 0:
        thread = threading.Thread(target=contextvars.copy_context().run, args=[inside])
        thread.start()
        thread.join()
        os._exit(0 if done == [False] else 1)
    assert os.waitpid(process, 0)[1] == 0
""",
        )

    def test_a_program_that_ends_is_not_kept(self):
        child.check(
            self,
            BEGIN
            + """
threading.Thread(target=steps).start()
while not glake.gate()["uses"]:
    time.sleep(0.001)
glake.shrink("weights")
""",
        )


if __name__ == "__main__":
    unittest.main()
