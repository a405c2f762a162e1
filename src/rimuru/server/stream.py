"""Server-sent events and clients that leave.

Room: the ASGI edge. Rule: one `send` an event and no task switch between; a disconnect cancels the
work behind the response whether it streams or not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from .errors import ApiError, as_api_error

log = logging.getLogger("rimuru.server")
T = TypeVar("T")

PING_SECONDS = 15.0  # proxies drop connections that stay silent for a minute or so
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientLeft(Exception):
    """The connection closed before the answer was complete."""


def answer_to(exc: BaseException) -> ApiError:
    """`as_api_error`, with the causes nobody foresaw written to the log."""
    error = as_api_error(exc)
    if error.status == 500 and not isinstance(exc, ApiError):
        log.error("unhandled error in a request", exc_info=exc)
    return error


async def until_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, cancelled with `ClientLeft` if the client disconnects first."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """ASGI response that sends each item of `events` as it comes, then `[DONE]`.

    Headers go out with the first event, so that what fails before it keeps its HTTP status; a silent
    wait sends them with a comment line. What fails later becomes an event with `error`.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], headers: list[tuple[bytes, bytes]]):
        self.events = events
        self.headers = _HEADERS + headers
        self.started = False
        self.sent_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ping = asyncio.create_task(self._ping(send))
        try:
            with suppress(ClientLeft):
                await until_left(receive, self._pump(send))
        finally:
            ping.cancel()

    async def _pump(self, send: Send) -> None:
        tail = b"data: [DONE]\n\n"
        try:
            async with aclosing(self.events) as events:
                async for event in events:
                    if not self.started:
                        await self._start(send)
                    self.sent_at = time.monotonic()
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as exc:
            error = answer_to(exc)
            if not self.started:
                await self._refuse(send, error)
                return
            tail = b"data: " + error.json() + b"\n\n" + tail
        if not self.started:
            await self._start(send)
        await send({"type": "http.response.body", "body": tail, "more_body": False})

    async def _start(self, send: Send) -> None:
        self.started = True
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})

    async def _refuse(self, send: Send, error: ApiError) -> None:
        self.started = True
        body = error.json()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += self.headers[len(_HEADERS) :]
        headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _ping(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self.sent_at + PING_SECONDS - time.monotonic())
            if time.monotonic() - self.sent_at >= PING_SECONDS:
                if not self.started:
                    await self._start(send)
                self.sent_at = time.monotonic()
                await send({"type": "http.response.body", "body": b": ping\n\n", "more_body": True})
