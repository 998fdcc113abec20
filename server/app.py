"""The ASGI application: routes, the one error body, and the layers around them in their order."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware

from server.build import package_version
from server.errors import REQUEST_ID_HEADER, install_handlers
from server.middleware import (
    METRICS_PATH,
    OPEN_PATHS,
    KeyCheck,
    LingeringClose,
    PathNormaliser,
    RequestIds,
    RequestLimits,
)
from server.openai_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from server.page import PAGE_PATHS
from server.routes import create_router
from server.state import ServerState
from server.tracing import RequestTracing, SpanSink

TITLE = "JetSpec++"
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def create_app(state: ServerState, spans: SpanSink | None = None) -> FastAPI:
    """The application that serves from `state`, which may still be loading; `spans` gets one span a request."""
    docs = {"openapi_url": None, "docs_url": None} if state.config.disable_fastapi_docs else {}
    app = FastAPI(title=TITLE, version=package_version(), redirect_slashes=False, redoc_url=None, **docs)  # type: ignore[arg-type]
    install_handlers(app)
    app.include_router(create_router(state))
    _add_layers(app, state, spans)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _add_layers(app: FastAPI, state: ServerState, spans: SpanSink | None) -> None:
    """Innermost first: each added layer comes before those already there."""
    config = state.config
    app.add_middleware(RequestLimits, max_headers=config.h11_max_header_count, max_body_bytes=config.max_body_bytes)
    if spans is not None:  # within the keys: strangers make no spans
        app.add_middleware(RequestTracing, spans=spans)
    if state.keys.are_required:
        open_paths = OPEN_PATHS if config.metrics_require_auth else OPEN_PATHS | {METRICS_PATH}
        if not config.disable_page:
            open_paths |= PAGE_PATHS
        app.add_middleware(KeyCheck, keys=state.keys, open_paths=open_paths)
    app.add_middleware(PathNormaliser)
    if config.allowed_origins:  # before the keys: a browser asks for permission without them
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=[REQUEST_ID_HEADER, "Retry-After"],
        )
    if config.enable_request_id_headers:
        app.add_middleware(RequestIds)
    app.add_middleware(LingeringClose)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The generated schema, with the models that the hand-parsed bodies refer to and the one error body."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        for kind in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody):
            described = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            components.update(described.pop("$defs", {}))
        _describe_errors(schema)
        app.openapi_schema = schema
    return app.openapi_schema


def _describe_errors(schema: dict[str, Any]) -> None:
    """Every operation may be refused or fail with the error body; FastAPI's own 422 is never sent."""
    components = schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    components["Error"] = ERROR_SCHEMA
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"].setdefault("default", {"description": "The request failed", "content": content})
