"""ASGI middleware for a server that shrinks while it is idle.

::

    app = glake.asgi.Gate(app)                          # each request is a use; it refills evicted memory
    app = glake.asgi.Gate(app, when_closed="refuse")    # 503 with Retry-After instead

    client ── body ──► buffer ─► │ app runs: one use of the memory │ ─► buffer ── response ──► client
             no use              └─────────────────────────────────┘             no use

A use lasts as long as the application runs, and no client prolongs it: a request body arrives before the use begins, and a response
leaves from a buffer. A client that still delays the application counts as disconnected once a shrink waits for the use.

A held request is a task and takes no thread: ``/wake_up`` runs however many requests are held.

It works with every framework (Starlette and FastAPI: ``app.add_middleware(glake.asgi.Gate)``) and every ASGI server on asyncio, and needs
none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Literal

from . import _arguments
from ._gate import active, is_wanted, steps_begun
from ._waiting import WhenClosed
from .errors import ClosedError, InvalidError, OutOfMemoryError, StateError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Grain = Literal["request", "step"]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ADMINISTRATION = ("/health", "/metrics", "/sleep", "/wake_up", "/is_sleeping")

# Bytes that a buffered message counts for, besides its body.
_MESSAGE = 512
# Bytes that a client has to move within the stall timeout. Fewer count as none: a client that trickles is stalled.
_PROGRESS = 64 << 10
# Messages that are complete in themselves. Others may refer to a file that the application closes or removes after `send`.
_BUFFERED = frozenset(
    (
        *("http.response.start", "http.response.body", "http.response.trailers"),
        *("websocket.accept", "websocket.send", "websocket.close", "websocket.http.response.start", "websocket.http.response.body"),
    )
)
# Status of a websocket that is closed for the memory's sake: try again later.
_TRY_AGAIN = 1013


class Gate:
    """Wraps each request and each websocket in ``glake.active``.

    Args:
        app: the ASGI application.
        tags: the regions that it uses; none: all memory.
        when_closed: as for ``glake.active``.
        timeout: seconds to wait for the memory; None: no timeout.
        retry_after: seconds, sent to clients that are refused with status 503.
        exempt: paths that use no GPU memory and always pass.
        grain: "request": the request is one use. "step": the app has ``glake.active`` around each of its steps, with safe points or no
            block between them, so that memory may be evicted in the middle of a request; a request without any such block is an error.
        buffer: bytes of a request body that arrive before the use begins, and bytes of a response that wait for the client. A larger body
            is received inside the use. ``grain="step"`` buffers nothing.
        stall_timeout: seconds after which a client that delays the application counts as disconnected, if a shrink waits for the use.

    Inside a use the application waits for its client in three places: for the part of a body that exceeds the buffer, for room in the buffer
    of a response, and for a websocket's next message. After ``stall_timeout`` without progress there, and only while a shrink waits for the use,
    the application's ``receive`` returns a disconnect, ``send`` raises ``TimeoutError``, and the client gets status 408 or the websocket's
    code 1013. A body of undeclared length need not have ended: the use begins once the client has been silent for ``stall_timeout``.
    """

    def __init__(
        self,
        app: App,
        *,
        tags: Iterable[str] = (),
        when_closed: WhenClosed = "refill",
        timeout: float | None = None,
        retry_after: int = 1,
        exempt: Iterable[str] = ADMINISTRATION,
        grain: Grain = "request",
        buffer: int = 16 << 20,
        stall_timeout: float = 5.0,
    ) -> None:
        _arguments.function(app, "app", "an ASGI application, which is called with scope, receive and send")
        _arguments.choice(grain, "grain", {"request": None, "step": None})
        buffer = _arguments.amount(buffer, "buffer")
        stall_timeout = _arguments.seconds(stall_timeout, "stall_timeout")
        if stall_timeout == 0:
            raise InvalidError("stall_timeout is 0: seconds, more than 0")
        tags = tuple(_arguments.tags(tags))
        # Whether these can be, before the first request.
        active(*tags, when_closed=when_closed, timeout=timeout)
        self._app = app
        self._tags = tags
        self._when_closed: WhenClosed = when_closed
        self._timeout = timeout
        self._retry_after = _arguments.number(retry_after, "retry_after", "seconds, a whole number")
        self._exempt = frozenset(_arguments.text(path, "a path of exempt", "a path") for path in _arguments.several(exempt, "exempt", "paths"))
        self._grain = grain
        self._buffer = buffer
        self._stall_timeout = stall_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope.get("path") in self._exempt:
            await self._app(scope, receive, send)
            return
        if self._grain == "step":
            await self._in_steps(scope, receive, send)
            return
        using = active(*self._tags, when_closed=self._when_closed, timeout=self._timeout)
        client = _Client(scope, receive, send, self._buffer, _Patience(self._stall_timeout, using), _Patience(self._stall_timeout, using))
        try:
            if await client.receive_request():
                await self._in_use(using, scope, client)
        finally:
            client.end()

    async def _in_use(self, using: active, scope: Scope, client: _Client) -> None:
        try:
            await using.__aenter__()
        except (ClosedError, OutOfMemoryError) as error:
            await self._refuse(scope, client.send, str(error))
            await client.finish()
            client.raise_failure()
            return
        try:
            try:
                await self._app(scope, client.receive, client.send)
            finally:
                await using.__aexit__(None, None, None)
        except Exception:
            # The client gets the messages before the exception, as without the gate.
            await client.finish()
            raise
        await client.finish()
        client.raise_failure()

    async def _in_steps(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun: list[bool] = []
        token = steps_begun.set(begun)
        try:
            await self._app(scope, receive, send)
        finally:
            steps_begun.reset(token)
        if not begun:
            raise StateError(
                f"{scope.get('path')}: glake.asgi.Gate(grain='step') found no glake.active() block in the request: its memory could have left "
                "while it was used. Put the block around what uses the GPU, add the path to exempt, or take grain='request'"
            )

    async def _refuse(self, scope: Scope, send: Send, why: str) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _TRY_AGAIN, "reason": "the model is asleep"})
            return
        await _answer(send, 503, why, [(b"retry-after", str(self._retry_after).encode())])


async def _answer(send: Send, status: int, why: str, more: list[tuple[bytes, bytes]]) -> None:
    body = f"{why}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _Patience:
    """Time for which an application has waited for its client since the client's last progress."""

    def __init__(self, timeout: float, using: active) -> None:
        self.timeout, self._using = timeout, using
        self._waited, self._moved = 0.0, 0

    def progress(self, size: int) -> None:
        """Counts bytes that the client has moved."""
        self._moved += size
        if self._moved >= _PROGRESS:
            self._waited, self._moved = 0.0, 0

    def is_over(self) -> bool:
        """Whether the client is stalled while a shrink waits for the use."""
        return self._waited >= self.timeout and is_wanted(self._using)

    async def wait(self, *events: asyncio.Future[Any]) -> None:
        """Waits for the first of these events, for a part of the timeout. The loop runs between the parts: a loop that stood still for
        longer than the timeout does not make its clients stalled."""
        loop = asyncio.get_running_loop()
        begin, part = loop.time(), self.timeout / 4 if self._waited < self.timeout else self.timeout
        await asyncio.wait(events, timeout=part, return_when=asyncio.FIRST_COMPLETED)
        self._waited += min(loop.time() - begin, part)


class _Outgoing:
    """A message on its way to the server."""

    __slots__ = ("message", "sent", "size")

    def __init__(self, message: Message, size: int) -> None:
        self.message, self.size = message, size
        self.sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Client:
    """The client of one request or websocket, between the application and the server.

    One task at a time receives from the server and one sends to it. Both outlive calls of the application that are cancelled, so that no
    message is lost, and end with the request.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, limit: int, reads: _Patience, writes: _Patience) -> None:
        self._scope, self._server_receive, self._server_send = scope, receive, send
        self._limit, self._reads, self._writes = limit, reads, writes
        self._is_websocket = scope["type"] == "websocket"
        # Whether the body of the request has arrived.
        self._is_whole = self._is_websocket
        self._received: deque[Message] = deque()
        self._receiving: asyncio.Future[Message] | None = None
        self._outgoing: deque[_Outgoing] = deque()
        self._backlog = 0
        self._sending: asyncio.Task[None] | None = None
        self._has_started = False
        # Whether a websocket is closed, by either side, or was answered with a response instead.
        self._is_closed = False
        # Done once the client counts as disconnected.
        self._dismissed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Whether the server was sending at that time.
        self._was_blocked = False
        self._failure: BaseException | None = None
        self._has_told = False

    async def receive_request(self) -> bool:
        """Receives the request's body, up to the limit. Returns False if the client has disconnected before its end."""
        size, is_declared = 0, any(name.lower() == b"content-length" for name, _ in self._scope.get("headers", ()))
        while not self._is_whole and size < self._limit:
            receiving = self._start_receiving()
            # Without a length it may be a conversation, in which the client waits for an answer.
            await asyncio.wait((receiving,), timeout=None if is_declared else self._reads.timeout)
            if not receiving.done():
                break
            message = self._take(receiving)
            if message["type"] == "http.disconnect":
                return False
            self._received.append(message)
            size += _size(message)
        return True

    async def receive(self) -> Message:
        """The application's ``receive``."""
        while True:
            if self._received:
                return self._received.popleft()
            if self._dismissed.done():
                return self._disconnect()
            receiving = self._start_receiving()
            if receiving.done():
                return self._take(receiving)
            if self._is_whole and not self._is_websocket:
                # Only a disconnect follows.
                await asyncio.wait((receiving, self._dismissed), return_when=asyncio.FIRST_COMPLETED)
            elif self._reads.is_over():
                self._dismiss()
            else:
                await self._reads.wait(receiving, self._dismissed)

    async def send(self, message: Message) -> None:
        """The application's ``send``: returns once the message is sent or buffered.

        Raises:
            TimeoutError: the client is stalled.
            Exception: raised by the server's ``send``, for this message or an earlier one.
        """
        self._check()
        is_buffered = message.get("type") in _BUFFERED
        entry = _Outgoing(_copied(message) if is_buffered else message, _size(message))
        self._outgoing.append(entry)
        self._backlog += entry.size
        if self._is_websocket:
            self._reads.progress(_PROGRESS)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())
        # The server gets the message now, even if the application never lets the loop run.
        await asyncio.sleep(0)
        while not entry.sent.done() and (not is_buffered or self._backlog - entry.size > self._limit):
            if self._writes.is_over():
                self._dismiss()
                break
            await self._writes.wait(self._outgoing[0].sent, self._dismissed)
        self._check()

    async def finish(self) -> None:
        """Sends the buffered rest, and tells a stalled client that it is dismissed."""
        if self._sending is not None:
            await asyncio.wait((self._sending,))
        if not self._dismissed.done() or self._was_blocked or self._is_closed:
            return
        try:
            if self._is_websocket:
                await self._server_send({"type": "websocket.close", "code": _TRY_AGAIN, "reason": "the model is needed elsewhere"})
            elif not self._has_started:
                close = [(b"connection", b"close")] if str(self._scope.get("http_version", "")).startswith("1") else []
                await _answer(self._server_send, 408, "the request's body did not arrive in time", close)
        except Exception as error:
            # It is the answer to a client that may be gone.
            self._failure = error

    def raise_failure(self) -> None:
        """Raises an exception of the server that the application has not seen."""
        if self._failure is not None and not self._has_told:
            raise self._failure

    def end(self) -> None:
        """Ends both tasks."""
        for task in (self._receiving, self._sending):
            if task is not None and not task.done():
                task.cancel()
                task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    def _start_receiving(self) -> asyncio.Future[Message]:
        if self._receiving is None:
            self._receiving = asyncio.ensure_future(self._server_receive())
        return self._receiving

    def _take(self, receiving: asyncio.Future[Message]) -> Message:
        """Returns the message that the server gave."""
        self._receiving = None
        message = receiving.result()
        if message["type"] == "http.request":
            self._is_whole = not message.get("more_body", False)
        self._is_closed = self._is_closed or message["type"] == "websocket.disconnect"
        # A message of a websocket is progress however short it is.
        self._reads.progress(_PROGRESS if self._is_websocket else _size(message))
        return message

    async def _send_all(self) -> None:
        try:
            while self._outgoing:
                entry = self._outgoing[0]
                kind = entry.message.get("type")
                self._has_started = self._has_started or kind == "http.response.start"
                self._is_closed = self._is_closed or kind in ("websocket.close", "websocket.http.response.start")
                await self._server_send(entry.message)
                if self._dismissed.done():
                    return
                self._outgoing.popleft()
                self._backlog -= entry.size
                self._writes.progress(entry.size)
                entry.sent.set_result(None)
        except asyncio.CancelledError as error:
            # Unless the client was dismissed, the server's own: it passes to the application like any other failure.
            if not self._was_blocked:
                self._failure = error
                self._drop()
            raise
        except Exception as error:
            self._failure = error
            self._drop()
        finally:
            self._sending = None

    def _drop(self) -> None:
        """Drops the messages that are not sent."""
        dropped, self._outgoing, self._backlog = self._outgoing, deque(), 0
        for entry in dropped:
            entry.sent.set_result(None)

    def _dismiss(self) -> None:
        """Treats the client as disconnected."""
        if not self._dismissed.done():
            self._dismissed.set_result(None)
            if self._sending is not None:
                self._was_blocked = True
                self._sending.cancel()
            self._drop()

    def _check(self) -> None:
        """Raises if no message reaches the client any more."""
        if self._failure is not None:
            self._has_told = True
            raise self._failure
        if self._dismissed.done():
            raise TimeoutError("the client is stalled, and a shrink waits for the memory that this request uses: the client counts as disconnected")

    def _disconnect(self) -> Message:
        if self._is_websocket:
            return {"type": "websocket.disconnect", "code": _TRY_AGAIN, "reason": "the model is needed elsewhere"}
        return {"type": "http.disconnect"}


def _size(message: Message) -> int:
    """Returns the bytes that a message takes in a buffer."""
    return _MESSAGE + sum(len(message.get(part) or b"") for part in ("body", "bytes", "text"))


def _copied(message: Message) -> Message:
    """Returns a message that the application's later changes do not reach."""
    return {name: bytes(value) if isinstance(value, (bytearray, memoryview)) else value for name, value in message.items()}
