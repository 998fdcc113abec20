"""Responses that watch their client: server-sent events, and work that ends when the client leaves.

Starlette's own streaming notices a client's departure in some servers only, and plain handlers never do. Here one rule
holds for both: the work runs beside a watcher of the connection and is cancelled when the watcher returns.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ApiError

logger = logging.getLogger("jetspec.http")

T = TypeVar("T")
Event = dict[str, Any]

WRITE_TIMEOUT_S = 60.0
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientDisconnected(Exception):
    """The client left before its answer was complete."""


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, with `ClientDisconnected`, when the client leaves first."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. An error before the first event becomes a plain error response, a later one an event."""

    def __init__(self, events: AsyncIterator[Event], on_disconnect: Callable[[], None]) -> None:
        super().__init__(headers=STREAM_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._on_disconnect = on_disconnect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(receive, self._run(scope, receive, send))
        except (ClientDisconnected, TimeoutError, OSError):
            self._on_disconnect()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with _closing(self._events) as events:
            try:
                async for event in events:
                    if not started:
                        await self._start(send)
                        started = True
                    await self._write(send, _encode(event))
            except ApiError as error:
                if not started:
                    await error.response()(scope, receive, send)
                    return
                await self._write(send, _encode(error.body()))
        await self._write(send, b"data: [DONE]\n\n", more=False)

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _write(self, send: Send, data: bytes, more: bool = True) -> None:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await send({"type": "http.response.body", "body": data, "more_body": more})


@contextlib.asynccontextmanager
async def _closing(events: AsyncIterator[Event]) -> AsyncIterator[AsyncIterator[Event]]:
    """Close a generator however its consumer ends, so that its own clean-up runs now and not at some collection."""
    try:
        yield events
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()


def _encode(event: Event) -> bytes:
    text = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8", "backslashreplace") + b"\n\n"
