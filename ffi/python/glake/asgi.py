"""ASGI middleware for a server that shrinks while it is idle.

::

    app = glake.asgi.Gate(app)                          # each request is a use; it refills evicted memory
    app = glake.asgi.Gate(app, when_closed="refuse")    # 503 with Retry-After instead

A held request is a task and takes no thread: ``/wake_up`` runs however many requests are held.

It works with every ASGI server and framework (Starlette and FastAPI: ``app.add_middleware(glake.asgi.Gate)``), and needs none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Literal

from ._gate import active, steps_begun
from ._waiting import WhenClosed
from .errors import ClosedError, InvalidError, OutOfMemoryError, StateError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Grain = Literal["request", "step"]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ADMINISTRATION = ("/health", "/metrics", "/sleep", "/wake_up", "/is_sleeping")


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
    ) -> None:
        if grain not in ("request", "step"):
            raise InvalidError(f"grain is {grain!r}: 'request' and 'step' are there")
        tags = tuple(tags)
        # Whether these can be, before the first request.
        active(*tags, when_closed=when_closed, timeout=timeout)
        self._app = app
        self._tags = tags
        self._when_closed: WhenClosed = when_closed
        self._timeout = timeout
        self._retry_after = retry_after
        self._exempt = frozenset(exempt)
        self._grain = grain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope.get("path") in self._exempt:
            await self._app(scope, receive, send)
            return
        if self._grain == "step":
            await self._in_steps(scope, receive, send)
            return
        using = active(*self._tags, when_closed=self._when_closed, timeout=self._timeout)
        try:
            await using.__aenter__()
        except (ClosedError, OutOfMemoryError) as error:
            await self._refuse(scope, send, str(error))
            return
        # Whatever the app raises goes through.
        try:
            await self._app(scope, receive, send)
        finally:
            await using.__aexit__(None, None, None)

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
            # 1013: try again later.
            await send({"type": "websocket.close", "code": 1013, "reason": "the model is asleep"})
            return
        body = f"{why}\n".encode()
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", str(self._retry_after).encode()),
        ]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})
