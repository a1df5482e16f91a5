"""Clients that delay an ASGI app behind `glake.asgi.Gate`: they hold no memory, and what the app computes runs inside its use."""

import asyncio
import os
import threading
import unittest

os.environ["GLAKE_DEVICE"] = "sim"

import glake  # noqa: E402

from regions import made, view  # noqa: E402

# Bound of each wait of a test: none decides its outcome.
LONG = 60
KIB = 1 << 10
LENGTH = (b"content-length", b"1")


class Client:
    """A client and its server: it sends the messages that a test gives it, and takes answers while it `reads`."""

    def __init__(self, *parts, kind="http", headers=(LENGTH,), path="/"):
        self.scope = {"type": kind, "path": path, "method": "POST", "headers": list(headers), "http_version": "1.1"}
        self.messages, self.sent, self.tries = asyncio.Queue(), [], 0
        self.reads = asyncio.Event()
        self.reads.set()
        self.failure = None
        for part in parts:
            self.gives(part)

    def gives(self, part, more=False):
        self.messages.put_nowait(part if isinstance(part, dict) else {"type": "http.request", "body": part, "more_body": more})

    async def receive(self):
        return await self.messages.get()

    async def send(self, message):
        self.tries += 1
        if self.failure is not None:
            raise self.failure
        await self.reads.wait()
        self.sent.append(message)

    def asks(self, app):
        return asyncio.create_task(app(self.scope, self.receive, self.send))

    def body(self):
        return b"".join(message.get("body", b"") for message in self.sent)

    def status(self):
        return self.sent[0]["status"]


async def until(condition):
    async def polls():
        while not condition():
            await asyncio.sleep(0.001)

    await within(polls())


async def within(awaitable):
    return await asyncio.wait_for(awaitable, LONG)


async def everything(receive):
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client went away")
        body += message["body"]
        if not message["more_body"]:
            return body


async def answers(send, *parts, more=False):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for number, part in enumerate(parts):
        await send({"type": "http.response.body", "body": part, "more_body": more or number + 1 < len(parts)})


class Stalls(unittest.IsolatedAsyncioTestCase):
    def setUp(self):
        self.tag, self.arrays = made(size=1 << 20)
        # Each step of an app's computation: whether its memory was there, inside a use.
        self.steps = []

    def tearDown(self):
        self.assertEqual(set(self.steps) - {True}, set())
        self.assertEqual((glake.gate()["uses"], glake.gate()["closing"]), (0, []))
        glake.shrink(self.tag, timeout=1)
        glake.refill(self.tag)

    def computes(self):
        self.steps.append(glake.gate()["uses"] == 1 and all(array.is_right() for array in self.arrays))

    def gate(self, app, **options):
        return glake.asgi.Gate(app, tags=[self.tag], **options)

    def shrinks(self, timeout=LONG):
        """Begins a shrink, which waits for uses."""
        return asyncio.create_task(asyncio.to_thread(glake.shrink, self.tag, timeout=timeout))

    async def test_an_upload_that_stalls_holds_no_memory(self):
        async def app(_scope, receive, send):
            body = await everything(receive)
            self.computes()
            await answers(send, body)

        client = Client()
        client.gives(b"first, ", more=True)
        asked = client.asks(self.gate(app))
        await until(client.messages.empty)
        self.assertGreater((await within(self.shrinks(timeout=1)))["freed"], 0)
        self.assertFalse(asked.done())
        client.gives(b"second")
        await within(asked)
        self.assertEqual((client.status(), client.body(), self.steps), (200, b"first, second", [True]))

    async def test_a_reader_that_stalls_holds_no_memory(self):
        tokens = [f"token {number} ".encode() for number in range(50)]

        async def app(_scope, _receive, send):
            # As a model that streams: it computes between two messages.
            async def computed():
                for token in tokens:
                    self.computes()
                    yield token

            await send({"type": "http.response.start", "status": 200, "headers": []})
            async for token in computed():
                await send({"type": "http.response.body", "body": token, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        client = Client(b"")
        client.reads.clear()
        asked = client.asks(self.gate(app))
        await until(lambda: len(self.steps) == len(tokens) and not glake.gate()["uses"])
        self.assertGreater((await within(self.shrinks(timeout=1)))["freed"], 0)
        self.assertEqual((client.sent, asked.done()), ([], False))
        client.reads.set()
        await within(asked)
        self.assertEqual(client.body(), b"".join(tokens))

    async def test_threads_of_a_request_compute_while_its_reader_stalls(self):
        # As transformers' TextIteratorStreamer: a thread that the gate does not know computes, and the request sends its results.
        for stall_timeout, buffer in ((5.0, 16 << 20), (0.02, KIB)):
            with self.subTest(buffer=buffer):
                loop, results, go_on = asyncio.get_running_loop(), asyncio.Queue(), threading.Event()
                self.steps.clear()

                def generates(loop=loop, results=results, go_on=go_on):
                    for number in range(20):
                        if number == 10:
                            go_on.wait(LONG)
                        self.computes()
                        loop.call_soon_threadsafe(results.put_nowait, b"%d" % number * KIB)
                    loop.call_soon_threadsafe(results.put_nowait, None)

                async def app(_scope, _receive, send, results=results, generates=generates):
                    thread = threading.Thread(target=generates)
                    thread.start()
                    try:
                        await send({"type": "http.response.start", "status": 200, "headers": []})
                        while (token := await results.get()) is not None:
                            await send({"type": "http.response.body", "body": token, "more_body": True})
                    finally:
                        await asyncio.to_thread(thread.join)

                client = Client(b"")
                client.reads.clear()
                asked = client.asks(self.gate(app, buffer=buffer, stall_timeout=stall_timeout))
                await until(lambda: len(self.steps) == 10)
                shrunk = self.shrinks()
                await until(lambda: glake.gate()["closing"])
                if buffer == KIB:
                    # It counts as disconnected, and the use lasts until the thread has ended.
                    await until(lambda: not client.reads.is_set() and not asked.done() and client.tries == 1)
                self.assertFalse(shrunk.done())
                go_on.set()
                self.assertGreater((await within(shrunk))["freed"], 0)
                self.assertEqual(self.steps, [True] * 20)
                client.reads.set()
                if buffer == KIB:
                    with self.assertRaises(TimeoutError):
                        await within(asked)
                else:
                    await within(asked)
                    self.assertEqual(len(client.sent), 21)
                glake.refill(self.tag)

    async def test_a_slow_reader_gets_all_while_no_shrink_waits(self):
        parts = [bytes([number]) * (64 * KIB) for number in range(40)]

        async def app(_scope, _receive, send):
            await answers(send, *parts)

        client = Client(b"")
        client.reads.clear()
        asked = client.asks(self.gate(app, buffer=128 * KIB, stall_timeout=0.001))
        for _ in range(100):
            await asyncio.sleep(0.001)
        self.assertEqual((asked.done(), glake.gate()["uses"]), (False, 1))
        client.reads.set()
        await within(asked)
        self.assertEqual(client.body(), b"".join(parts))

    async def test_a_reader_beyond_the_buffer_counts_as_disconnected_once_a_shrink_waits(self):
        seen = []

        async def app(_scope, receive, send):
            await everything(receive)
            # As Starlette's StreamingResponse, which listens for the end of the client meanwhile.
            listens = asyncio.create_task(receive())
            try:
                while True:
                    self.computes()
                    await send({"type": "http.response.body", "body": bytes(64 * KIB), "more_body": True})
            except OSError as error:
                seen.append(error)
            seen.append((await listens)["type"])
            with self.assertRaises(TimeoutError):
                await send({"type": "http.response.body", "body": b""})

        client = Client(b"")
        client.reads.clear()
        asked = client.asks(self.gate(app, buffer=256 * KIB, stall_timeout=0.05))
        await until(lambda: client.tries)
        shrunk = self.shrinks()
        self.assertGreater((await within(shrunk))["freed"], 0)
        await within(asked)
        self.assertIsInstance(seen[0], TimeoutError)
        self.assertIn("a shrink waits", str(seen[0]))
        self.assertEqual(seen[1], "http.disconnect")

    async def test_a_large_upload_that_stalls_or_trickles(self):
        async def app(_scope, receive, send):
            await answers(send, await everything(receive))

        async def trickles(client):
            while True:
                client.gives(b".", more=True)
                await asyncio.sleep(0.002)

        for trickle in (False, True):
            with self.subTest(trickle=trickle):
                client = Client()
                client.gives(bytes(64 * KIB), more=True)
                asked = client.asks(self.gate(app, buffer=32 * KIB, stall_timeout=0.05))
                await until(lambda: glake.gate()["uses"])
                feeds = asyncio.create_task(trickles(client)) if trickle else None
                self.assertGreater((await within(self.shrinks()))["freed"], 0)
                with self.assertRaises(ConnectionError):
                    await within(asked)
                self.assertEqual((client.status(), client.sent[0]["headers"][-1]), (408, (b"connection", b"close")))
                if feeds is not None:
                    feeds.cancel()
                glake.refill(self.tag)
        client = Client()
        client.gives(bytes(64 * KIB), more=True)
        asked = client.asks(self.gate(app, buffer=32 * KIB, stall_timeout=0.001))
        await until(lambda: glake.gate()["uses"])
        await asyncio.sleep(0.02)
        client.gives(b"end")
        await within(asked)
        self.assertEqual((client.status(), len(client.body())), (200, 64 * KIB + 3))

    async def test_a_conversation_without_a_length(self):
        # The client sends the second part once it has the answer to the first.
        async def app(_scope, receive, send):
            first = await receive()
            self.computes()
            await answers(send, first["body"], more=True)
            await send({"type": "http.response.body", "body": await everything(receive)})

        client = Client(headers=())
        client.gives(b"one, ", more=True)
        asked = client.asks(self.gate(app, stall_timeout=0.02))
        await until(lambda: client.body() == b"one, ")
        client.gives(b"two")
        await within(asked)
        self.assertEqual(client.body(), b"one, two")

    async def test_an_idle_websocket_is_closed_once_a_shrink_waits(self):
        heard = []

        async def app(_scope, receive, send):
            while (message := await receive())["type"] != "websocket.disconnect":
                if message["type"] == "websocket.connect":
                    await send({"type": "websocket.accept"})
                else:
                    self.computes()
                    await send({"type": "websocket.send", "text": message["text"].upper()})
            heard.append(message)

        client = Client({"type": "websocket.connect"}, kind="websocket")
        asked = client.asks(self.gate(app, stall_timeout=0.05))
        client.gives({"type": "websocket.receive", "text": "hello"})
        await until(lambda: len(client.sent) == 2)
        await asyncio.sleep(0.1)
        client.gives({"type": "websocket.receive", "text": "still there"})
        await until(lambda: len(client.sent) == 3)
        self.assertGreater((await within(self.shrinks()))["freed"], 0)
        await within(asked)
        self.assertEqual([message.get("text") for message in client.sent[1:3]], ["HELLO", "STILL THERE"])
        self.assertEqual((heard[0]["code"], client.sent[3]["type"], client.sent[3]["code"]), (1013, "websocket.close", 1013))

    async def test_a_websocket_that_is_closed_already_is_not_closed_again(self):
        async def closes(receive, send):
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.close", "code": 1000})
            return await receive()

        async def denies(receive, send):
            await send({"type": "websocket.http.response.start", "status": 403, "headers": []})
            return await receive()

        async def listens_on(receive, _send):
            client.gives({"type": "websocket.disconnect", "code": 1001})
            await receive()
            return await receive()

        for part, sent in ((closes, ["websocket.accept", "websocket.close"]), (denies, ["websocket.http.response.start"]), (listens_on, [])):
            with self.subTest(part.__name__):
                ends = []

                async def app(_scope, receive, send, part=part, ends=ends):
                    await receive()
                    ends.append(await part(receive, send))

                client = Client({"type": "websocket.connect"}, kind="websocket")
                asked = client.asks(self.gate(app, stall_timeout=0.05))
                await until(lambda: glake.gate()["uses"])
                await within(self.shrinks())
                await within(asked)
                self.assertEqual((ends[0]["code"], [message["type"] for message in client.sent]), (1013, sent))
                glake.refill(self.tag)

    async def test_background_work_after_the_response_is_inside_the_use(self):
        taken = asyncio.Event()

        async def app(_scope, _receive, send):
            await answers(send, b"done")
            await taken.wait()
            self.computes()

        client = Client(b"")
        asked = client.asks(self.gate(app))
        await until(lambda: client.body() == b"done")
        taken.set()
        await within(asked)
        self.assertEqual(self.steps, [True])

    async def test_a_message_is_with_the_server_before_the_app_goes_on(self):
        async def app(_scope, _receive, send):
            for number in range(10):
                await send({"type": "http.response.body", "body": b".", "more_body": True})
                # An app that computes on the loop lets no task run here.
                seen.append(len(client.sent) == number + 1)

        seen, client = [], Client(b"")
        await within(client.asks(self.gate(app)))
        self.assertEqual(seen, [True] * 10)

    async def test_messages_that_refer_to_files_and_buffers(self):
        shared = bytearray(b"before")

        async def app(_scope, _receive, send):
            await send({"type": "http.response.body", "body": memoryview(shared), "more_body": True})
            shared[:] = b"after!"
            await send({"type": "http.response.pathsend", "path": "/file"})
            # Whoever removes the file now does so after it was sent.
            seen.append([message["type"] for message in client.sent])

        seen, client = [], Client(b"")
        client.reads.clear()
        asked = client.asks(self.gate(app))
        await until(lambda: client.tries)
        self.assertEqual(seen, [])
        client.reads.set()
        await within(asked)
        self.assertEqual((client.body(), seen), (b"before", [["http.response.body", "http.response.pathsend"]]))


class Ends(unittest.IsolatedAsyncioTestCase):
    def tearDown(self):
        self.assertEqual(glake.gate()["uses"], 0)

    async def test_a_client_that_leaves_before_its_body_has_ended(self):
        async def app(_scope, _receive, _send):
            self.fail("it is not asked")

        client = Client()
        client.gives(b"first", more=True)
        client.gives({"type": "http.disconnect"})
        await within(client.asks(glake.asgi.Gate(app)))
        self.assertEqual(client.sent, [])

    async def test_what_a_server_raises_reaches_the_app_or_the_server(self):
        async def app(_scope, _receive, send):
            for _ in range(messages):
                await send({"type": "http.response.body", "body": b".", "more_body": True})

        for messages in (1, 3):
            client = Client(b"")
            client.failure = BrokenPipeError("no client")
            with self.subTest(messages=messages), self.assertRaises(BrokenPipeError):
                await within(client.asks(glake.asgi.Gate(app)))

    async def test_a_server_that_cancels_its_own_send(self):
        async def app(_scope, _receive, send):
            for _ in range(messages):
                await send({"type": message, "body": b".", "more_body": True})

        for messages, message in ((1, "http.response.body"), (3, "http.response.body"), (1, "http.response.pathsend")):
            client = Client(b"")
            client.failure = asyncio.CancelledError("the server is shutting down")
            asked = client.asks(glake.asgi.Gate(app))
            with self.subTest(messages=messages, message=message):
                self.assertTrue((await asyncio.wait((asked,), timeout=LONG))[0], "the request hangs")
                self.assertTrue(asked.cancelled())

    async def test_messages_before_an_exception_are_sent(self):
        async def app(_scope, _receive, send):
            await answers(send, b"one", b"two", more=True)
            raise ValueError("three")

        client = Client(b"")
        client.reads.clear()
        asked = client.asks(glake.asgi.Gate(app))
        await until(lambda: client.tries and not glake.gate()["uses"])
        client.reads.set()
        with self.assertRaisesRegex(ValueError, "three"):
            await within(asked)
        self.assertEqual(client.body(), b"onetwo")

    async def test_receives_that_are_cancelled_lose_no_message(self):
        async def app(_scope, receive, send):
            await everything(receive)
            for _ in range(3):
                # As Starlette's Request.is_disconnected.
                asks = asyncio.create_task(receive())
                await asyncio.sleep(0)
                asks.cancel()
                await asyncio.wait((asks,))
            client.gives({"type": "http.disconnect"})
            await answers(send, (await within(receive()))["type"].encode())

        client = Client(b"")
        await within(client.asks(glake.asgi.Gate(app)))
        self.assertEqual(client.body(), b"http.disconnect")

    async def test_a_request_that_is_cancelled_anywhere(self):
        async def app(_scope, receive, send):
            body = await everything(receive)
            async with glake.active():
                await asyncio.sleep(0)
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.pathsend", "path": "/file"})
            await answers(send, body)
            await receive()

        async def cancelled(steps, reads):
            client = Client()
            client.gives(b"first", more=True)
            client.gives(bytes(256 * KIB))
            if not reads:
                client.reads.clear()
            asked = client.asks(glake.asgi.Gate(app, buffer=KIB))
            for _ in range(steps):
                await asyncio.sleep(0)
            asked.cancel()
            done = await asyncio.wait((asked,), timeout=LONG)
            self.assertEqual((len(done[0]), glake.gate()["uses"]), (1, 0), steps)
            for _ in range(2):
                await asyncio.sleep(0)
            self.assertEqual(asyncio.all_tasks(), {asyncio.current_task()}, steps)

        for steps in range(40):
            for reads in (True, False):
                await cancelled(steps, reads)

    def test_bounds_that_are_none(self):
        async def app(_scope, _receive, _send):
            pass

        for options in ({"buffer": -1}, {"stall_timeout": 0}, {"stall_timeout": float("nan")}, {"stall_timeout": float("inf")}):
            with self.subTest(options), self.assertRaisesRegex(glake.InvalidError, next(iter(options))):
                glake.asgi.Gate(app, **options)


if __name__ == "__main__":
    unittest.main()
