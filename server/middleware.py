"""Layers around the application, in plain ASGI: request ids, keys, tidy paths, and limits on what is read.

Starlette's base class for middleware hides a client's departure from the handlers, so none of this uses it. Each layer
sees raw headers and paths only; what a body means is the application's business.
"""

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import Collection, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import REQUEST_ID_HEADER, ApiError, too_large
from server.keys import ApiKeys

logger = logging.getLogger("jetspec.http")

MAX_LOGGED_CHARACTERS = 200
REQUEST_ID = re.compile(rb"[!-~]{1,128}")
OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
METRICS_PATH = "/metrics"
LINGER_S = 5.0
LINGER_IDLE_S = 1.0


class RequestIds:
    """Echoes `X-Request-Id`, or a new id where none, or no harmless one, was sent. Ids are for logs, never for keys.

    The log names every response at level debug, and those that say the server is at fault as warnings.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = next((value for name, value in scope["headers"] if name == REQUEST_ID_HEADER.lower().encode()), b"")
        request_id = sent if REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                level = logging.WARNING if message["status"] == 500 else logging.DEBUG
                path = scope["path"][:MAX_LOGGED_CHARACTERS]
                logger.log(level, "%s %r: %d, id %s", scope["method"], path, message["status"], request_id.decode())
                message = {
                    **message,
                    "headers": [*message["headers"], (REQUEST_ID_HEADER.lower().encode(), request_id)],
                }
            await send(message)

        await self._app(scope, receive, send_with_id)


class LingeringClose:
    """Before a connection closes, reads away what is left of the request's body, for a few seconds at most.

    Closing a socket with unread input resets the connection, and a client still sending its body then fails before it
    has read the answer: a refusal of a body that is too large, or one while shutting down. The answer is out by then;
    only the message that ends it, and closes the connection, waits.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_read = False
        closes = scope["http_version"] == "1.0" or _says_close(scope["headers"])

        async def watched_receive() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = not message.get("more_body", False)
            return message

        async def send_and_linger(message: Message) -> None:
            nonlocal closes
            if message["type"] == "http.response.start":
                closes = closes or _says_close(message["headers"])
            elif closes and not is_read and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await read_away()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        async def read_away() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while not is_read:
                        await asyncio.wait_for(watched_receive(), LINGER_IDLE_S)

        await self._app(scope, watched_receive, send_and_linger)


def _says_close(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name == b"connection" and value.lower() == b"close" for name, value in headers)


class PathNormaliser:
    """`//v1/models/` means `/v1/models`: base URLs are often joined with a slash too many."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = re.sub(r"/{2,}", "/", scope["path"])
            scope = {**scope, "path": path if path == "/" else path.rstrip("/")}
        await self._app(scope, receive, send)


class KeyCheck:
    """Refuses requests without a key, except at the paths that probes use. Comes after `PathNormaliser`: a path that
    is checked must be the path that is served."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"] not in self._open_paths
        if guarded and not self._keys.admit(scope["headers"]):
            message = "A valid API key is needed: send it as 'Authorization: Bearer KEY'."
            error = ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


class RequestLimits:
    """Refuses too many headers, and bodies over the limit, counted as they arrive and not only as announced."""

    def __init__(self, app: ASGIApp, max_headers: int, max_body_bytes: int) -> None:
        self._app = app
        self._max_headers = max_headers
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = self._refuse(scope)
        if error is not None:
            await error.response()(scope, receive, send)
            return
        num_bytes = 0

        async def counted_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise too_large(self._max_body_bytes)
            return message

        await self._app(scope, counted_receive, send)

    def _refuse(self, scope: Scope) -> ApiError | None:
        headers = scope["headers"]
        if len(headers) > self._max_headers:
            return ApiError(431, f"More than {self._max_headers} headers.", "request_headers_too_large")
        announced = next((value for name, value in headers if name == b"content-length"), b"0")
        if announced.isdigit() and (len(announced) > 18 or int(announced) > self._max_body_bytes):
            return too_large(self._max_body_bytes)
        return None
