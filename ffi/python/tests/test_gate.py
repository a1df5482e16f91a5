"""The gate of regions on simulated GPUs: uses hold a shrink, a shrink holds uses, and requests wait for memory."""

import asyncio
import contextvars
import functools
import gc
import os
import sys
import threading
import time
import unittest
from unittest import mock

os.environ["GLAKE_DEVICE"] = "sim"

import glake  # noqa: E402
from glake import _waiting  # noqa: E402

import child  # noqa: E402
from regions import made, tags, view  # noqa: E402


class Gate(unittest.TestCase):
    def test_a_use_holds_a_shrink_and_a_shrink_a_use(self):
        tag, arrays = made()
        entered, end, done = threading.Event(), threading.Event(), []

        def works():
            with glake.active(tag):
                entered.set()
                end.wait()
                done.append(all(array.is_right() for array in arrays))

        worker = threading.Thread(target=works)
        worker.start()
        entered.wait()
        self.assertGreaterEqual(glake.gate()["uses"], 1)
        with self.assertRaises(glake.ClosedError):
            glake.shrink(tag, timeout=0.05)
        shrinking = threading.Thread(target=glake.shrink, args=(tag,))
        shrinking.start()
        time.sleep(0.05)
        self.assertEqual(view(tag)["evicted"], 0)
        end.set()
        worker.join()
        shrinking.join()
        self.assertEqual(done, [True])
        self.assertGreater(view(tag)["evicted"], 0)
        with self.assertRaises(glake.ClosedError):
            glake.active(tag, when_closed="refuse").__enter__()
        with self.assertRaises(glake.ClosedError):
            glake.active(tag, when_closed="hold", timeout=0.05).__enter__()
        with glake.active(tag):
            self.assertTrue(all(array.is_right() for array in arrays))

    def test_a_refill_outlasts_those_who_do_not_wait_for_it(self):
        tag, arrays = made()
        for call in (lambda: glake.active(tag, timeout=0.05).__enter__(), lambda: glake.refill(tag, timeout=0.05)):
            glake.shrink(tag)
            begun, go_on = threading.Event(), threading.Event()

            def before(event, begun=begun, go_on=go_on):
                begun.set()
                go_on.wait()

            glake.hooks(before)
            with self.assertRaises(glake.ClosedError):
                call()
            begun.wait()
            self.assertGreater(view(tag)["evicted"], 0)
            go_on.set()
            with glake.active(tag, when_closed="hold"):
                self.assertTrue(all(array.is_right() for array in arrays))
            glake.hooks()
        glake.shrink(tag)
        with glake.active(tag, timeout=60):
            self.assertTrue(all(array.is_right() for array in arrays))

    def test_blocks_inside_blocks(self):
        tag, _arrays = made()
        with glake.active():
            before = glake.gate()["uses"]
            with glake.active(tag), glake.active():
                self.assertEqual(glake.gate()["uses"], before)
        self.assertEqual(glake.gate()["uses"], before - 1)

    def test_a_block_of_a_generator_that_is_given_up(self):
        from glake import _gate

        def generator():
            with glake.active():
                yield

        def ends():
            values = generator()
            next(values)
            # As garbage collection ends it, wherever its thread is.
            with _gate._lock:
                del values
                gc.collect()

        thread = threading.Thread(target=ends, daemon=True)
        thread.start()
        thread.join(20)
        self.assertFalse(thread.is_alive(), "it waits for itself")
        self.assertEqual(glake.gate()["uses"], 0)

    def test_times_that_are_none(self):
        for timeout in (-1, float("nan"), float("inf")):
            for call in (glake.active, lambda timeout: glake.asgi.Gate(nothing, timeout=timeout)):
                with self.assertRaisesRegex(glake.InvalidError, "timeout is .*: seconds, 0 or more, or None"):
                    call(timeout=timeout)
        with self.assertRaisesRegex(ValueError, "when_closed is 'refus'"):
            glake.asgi.Gate(nothing, when_closed="refus")

    def test_functions(self):
        tag, arrays = made()

        @glake.active(tag)
        def now():
            return all(array.is_right() for array in arrays)

        @glake.active(tag)
        async def later():
            await asyncio.sleep(0)
            return now()

        glake.shrink(tag)
        self.assertTrue(now())
        glake.shrink(tag)
        self.assertTrue(asyncio.run(later()))
        with self.assertRaises(TypeError):

            @glake.active(tag)
            def numbers():
                yield 1

    def test_a_task_that_is_cancelled_while_it_waits(self):
        tag, _arrays = made()
        glake.shrink(tag)

        async def story():
            async def use():
                async with glake.active(tag, when_closed="hold"):
                    self.fail("the gate is shut")

            task = asyncio.create_task(use())
            await asyncio.sleep(0.05)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(glake.refill, tag)

        asyncio.run(story())
        self.assertEqual(glake.gate()["uses"], 0)
        glake.shrink(tag, timeout=1)
        glake.refill(tag)


class Lives(unittest.TestCase):
    """A block holds memory from its begin to its end, whatever other blocks were created inside of another one."""

    def setUp(self):
        self.tag, self.arrays = made()

    def tearDown(self):
        self.assertEqual(glake.gate()["uses"], 0)
        glake.shrink(self.tag, timeout=1)
        glake.refill(self.tag)
        self.assertTrue(all(array.is_right() for array in self.arrays))

    def is_held(self):
        """Returns whether a shrink has to wait for a use."""
        try:
            glake.shrink(self.tag, timeout=0.05)
        except glake.ClosedError:
            return True
        glake.refill(self.tag)
        return False

    def test_a_task_that_was_born_inside_is_inside_no_longer_than_that(self):
        for outer in ((), (self.tag,)):
            for ends in ("before", "between"):

                async def story(outer=outer, ends=ends):
                    ended, entered, leave = asyncio.Event(), asyncio.Event(), asyncio.Event()

                    async def child():
                        if ends == "before":
                            await ended.wait()
                        async with glake.active(self.tag):
                            entered.set()
                            await leave.wait()

                    async with glake.active(*outer):
                        task = asyncio.create_task(child())
                        if ends == "between":
                            await entered.wait()
                    ended.set()
                    await entered.wait()
                    self.assertTrue(await asyncio.get_running_loop().run_in_executor(None, self.is_held))
                    leave.set()
                    await task
                    self.assertFalse(await asyncio.get_running_loop().run_in_executor(None, self.is_held))

                with self.subTest(outer=outer, ends=ends):
                    asyncio.run(story())

    def test_a_task_that_was_born_inside_may_shrink_later(self):
        async def story():
            ended = asyncio.Event()

            async def child():
                await ended.wait()
                return await asyncio.to_thread(glake.shrink, self.tag, timeout=1)

            async with glake.active():
                task = asyncio.create_task(child())
                with self.assertRaises(glake.StateError):
                    await asyncio.to_thread(glake.shrink, self.tag, timeout=1)
            ended.set()
            return await task

        self.assertGreater(asyncio.run(story())["freed"], 0)

    def test_enter_and_exit_in_two_contexts(self):
        async def numbers():
            async with glake.active(self.tag):
                for number in range(4):
                    self.assertTrue(all(array.is_right() for array in self.arrays))
                    yield number

        async def each_in_a_task(numbers):
            async def following():
                return await anext(numbers, None)

            while await asyncio.create_task(following()) is not None:
                pass

        async def left_behind(numbers):
            async def following():
                return await anext(numbers, None)

            await asyncio.create_task(following())
            await asyncio.create_task(numbers.aclose())

        for story in (each_in_a_task, left_behind):
            with self.subTest(story.__name__):
                asyncio.run(story(numbers()))
                self.assertEqual(glake.gate()["uses"], 0)
        block = glake.active(self.tag)
        contextvars.Context().run(block.__enter__)
        self.assertTrue(self.is_held())
        contextvars.Context().run(block.__exit__, None, None, None)
        self.assertFalse(self.is_held())

    def test_one_object_in_many_tasks(self):
        shared = glake.active(self.tag)

        async def story():
            async def user(number):
                await asyncio.sleep(number % 3 / 1000)
                async with shared:
                    await asyncio.sleep(number % 5 / 1000)
                    self.assertGreaterEqual(glake.gate()["uses"], 1)
                    async with shared:
                        await asyncio.sleep(number % 2 / 1000)
                    self.assertGreaterEqual(glake.gate()["uses"], 1)

            await asyncio.gather(*(user(number) for number in range(20)))

        asyncio.run(story())

    def test_a_tag_that_no_region_has(self):
        async def later():
            async with glake.active("typo"):
                pass

        def now(**options):
            with glake.active("typo", **options):
                pass

        calls = {when: functools.partial(now, when_closed=when) for when in ("refill", "hold", "refuse")}
        calls["async"] = lambda: asyncio.run(later())
        calls["decorated"] = lambda: glake.active("typo")(lambda: None)()
        for name, call in calls.items():
            with self.subTest(name), self.assertRaisesRegex(glake.InvalidError, f"no region 'typo'.*'{self.tag}'"):
                call()
            with self.subTest(name, inside=True), self.assertRaisesRegex(glake.InvalidError, "no region 'typo'"):
                with glake.active():
                    if name == "async":
                        later().send(None)
                    else:
                        call()


async def nothing():
    """Receives a request without a body."""
    return {"type": "http.request", "body": b"", "more_body": False}


class Requests(unittest.TestCase):
    def ask(self, app, path="/", kind="http"):
        sent = []

        async def send(message):
            sent.append(message)

        asyncio.run(app({"type": kind, "path": path, "method": "GET"}, nothing, send))
        return sent

    def test_a_request_brings_the_memory_back(self):
        tag, arrays = made()

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200 if all(array.is_right() for array in arrays) else 500, "headers": []})

        glake.shrink(tag)
        refusing, holding = glake.asgi.Gate(app, tags=[tag], when_closed="refuse", retry_after=7), glake.asgi.Gate(app, tags=[tag])
        start, text = self.ask(refusing)
        self.assertEqual(start["status"], 503)
        self.assertIn((b"retry-after", b"7"), start["headers"])
        self.assertIn(tag.encode(), text["body"])
        self.assertEqual(self.ask(refusing, kind="websocket")[0]["code"], 1013)
        self.assertEqual(self.ask(holding)[0]["status"], 200)
        self.assertEqual(glake.gate()["uses"], 0)

    def test_only_the_program_s_blocks_are_uses(self):
        # Neither the thread that waits for all nor a check of names is one at any time: a shrink would wait for it.
        tag, _ = made()
        began, enter = [], _waiting.enter

        def notes(*arguments):
            use = enter(*arguments)
            began.append(threading.current_thread())
            return use

        async def app(scope, receive, send):
            self.assertEqual(glake.gate()["uses"], 1)

        async def named_inside():
            async with glake.active(), glake.active(tag):
                self.assertEqual(glake.gate()["uses"], 1)

        with mock.patch.object(_waiting, "enter", notes):
            for options in ({}, {"when_closed": "hold", "timeout": 0.05}):
                glake.shrink(tag)
                self.ask(glake.asgi.Gate(app, tags=[tag], **options))
            # The thread of those who were held outlives them for a moment, and meets this.
            glake.refill(tag)
            for thread in threading.enumerate():
                if thread.name == "glake-gate":
                    thread.join()
            asyncio.run(named_inside())
        self.assertEqual(set(began), {threading.main_thread()})
        self.assertEqual((len(began), glake.gate()["uses"]), (2, 0))

    def test_what_passes(self):
        async def app(scope, receive, send):
            await send({"active": glake.gate()["uses"]})

        gated = glake.asgi.Gate(app)
        for path, kind, active in [("/", "http", 1), ("/health", "http", 0), ("/", "lifespan", 0)]:
            self.assertEqual(self.ask(gated, path, kind), [{"active": active}])

    def test_an_app_that_raises(self):
        async def app(scope, receive, send):
            raise glake.ClosedError("its own")

        with self.assertRaisesRegex(glake.ClosedError, "its own"):
            self.ask(glake.asgi.Gate(app))
        self.assertEqual(glake.gate()["uses"], 0)

    def test_held_requests_take_no_threads(self):
        tag, arrays = made()
        done = []

        async def app(scope, receive, send):
            if scope["path"] == "/wake_up":
                await asyncio.to_thread(glake.refill, tag)
            else:
                self.assertTrue(all(array.is_right() for array in arrays))
            done.append(scope["path"])

        async def story(when_closed):
            glake.shrink(tag)
            gated = glake.asgi.Gate(app, tags=[tag], when_closed=when_closed)
            threads = threading.active_count()
            ask = lambda path: asyncio.create_task(gated({"type": "http", "path": path, "method": "GET"}, nothing, None))  # noqa: E731
            held = [ask("/") for _ in range(200)]
            await asyncio.sleep(0.2)
            self.assertLess(threading.active_count() - threads, 8)
            if when_closed == "hold":
                self.assertEqual(done, [])
                await asyncio.wait_for(ask("/wake_up"), 10)
            await asyncio.wait_for(asyncio.gather(*held), 20)

        for when_closed, expected in (("hold", 201), ("refill", 200)):
            with self.subTest(when_closed):
                done.clear()
                asyncio.run(story(when_closed))
                self.assertEqual(len(done), expected)
                self.assertEqual(glake.gate()["uses"], 0)

    def test_held_requests_are_told_what_their_refill_meets(self):
        tag, arrays = made()

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})

        def refuses(event):
            raise ValueError("not now")

        async def story(*options):
            gated = [glake.asgi.Gate(app, tags=[tag], **option) for option in options]
            sent = []

            async def send(message):
                sent.append(message.get("status"))

            tasks = [gate({"type": "http", "path": "/", "method": "GET"}, nothing, send) for gate in gated for _ in range(10)]
            return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20), sent

        glake.shrink(tag)
        answers, sent = asyncio.run(story({"when_closed": "hold", "timeout": 0.05}, {"when_closed": "hold", "timeout": 0.3}))
        self.assertEqual((set(answers), {status for status in sent if status}), ({None}, {503}))
        with self.assertRaisesRegex(glake.ClosedError, tag):
            asyncio.run(self.enter(glake.active(tag, when_closed="hold", timeout=0.05)))
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        glake.hooks(before=refuses)
        answers, sent = asyncio.run(story({}))
        glake.hooks()
        sys.unraisablehook = hook
        self.assertEqual((set(answers), {status for status in sent if status}), ({None}, {503}))
        self.assertEqual(set(asyncio.run(story({}))[1]), {200})
        self.assertTrue(all(array.is_right() for array in arrays))
        self.assertEqual(glake.gate()["uses"], 0)

    async def enter(self, block):
        async with block:
            pass

    def test_a_program_ends_whatever_is_held(self):
        out = child.check(
            self,
            """
            import asyncio, glake
            from glake import _library
            with glake.region("r"):
                _library.api().alloc(0, 1 << 20)
            glake.shrink("r")
            async def use():
                async with glake.active("r", when_closed="hold"):
                    pass
            loop = asyncio.new_event_loop()
            task = loop.create_task(use())
            loop.run_until_complete(asyncio.sleep(0.2))
            print("over")
            """,
        )
        self.assertEqual(out.strip(), "over")


if __name__ == "__main__":
    unittest.main()
