"""The ASGI application: routes, the one error body, and limits on what is read before any of it is understood.

Middleware here is plain ASGI: Starlette's base class for it hides a client's departure from the handlers.
"""

import re
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, install_handlers
from server.openai_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from server.routes import create_router, package_version
from server.state import ServerState

MAX_HEADERS = 128
TITLE = "JetSpec++"


def create_app(state: ServerState) -> FastAPI:
    """The application that serves from `state`, which may still be loading."""
    app = FastAPI(title=TITLE, version=package_version(), redirect_slashes=False, redoc_url=None)
    install_handlers(app)
    app.include_router(create_router(state))
    app.add_middleware(RequestLimits, max_body_bytes=state.config.max_body_bytes)
    app.add_middleware(PathNormaliser)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


class PathNormaliser:
    """`//v1/models/` means `/v1/models`: base URLs are often joined with a slash too many."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = re.sub(r"/{2,}", "/", scope["path"])
            scope = {**scope, "path": path if path == "/" else path.rstrip("/")}
        await self._app(scope, receive, send)


class RequestLimits:
    """Refuses too many headers, and bodies over the limit, counted as they arrive and not only as announced."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
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
                raise self._too_large()
            return message

        await self._app(scope, counted_receive, send)

    def _refuse(self, scope: Scope) -> ApiError | None:
        headers = scope["headers"]
        if len(headers) > MAX_HEADERS:
            return ApiError(431, f"More than {MAX_HEADERS} headers.", "request_headers_too_large")
        announced = next((value for name, value in headers if name == b"content-length"), b"0")
        if announced.isdigit() and (len(announced) > 18 or int(announced) > self._max_body_bytes):
            return self._too_large()
        return None

    def _too_large(self) -> ApiError:
        message = f"The body is larger than {self._max_body_bytes} bytes."
        return ApiError(413, message, "request_too_large", headers={"Connection": "close"})


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The generated schema, with the models that the hand-parsed bodies refer to."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        for kind in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody):
            described = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            components.update(described.pop("$defs", {}))
        app.openapi_schema = schema
    return app.openapi_schema
