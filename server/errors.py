"""Errors as clients see them: OpenAI's nested body and string codes, whatever went wrong and wherever.

Knows how an error looks, not when it is one. A failure that would repeat says `x-should-retry: false`, because client
libraries send a request again after every 5xx.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from server.engine import EngineDead, EngineError, EngineUnavailable, QueueFull, RequestFailed

logger = logging.getLogger("jetspec.http")

REQUEST_ID_HEADER = "X-Request-Id"
RETRY_AFTER_S = 1
NO_RETRY = {"x-should-retry": "false"}
CLIENT_CLOSED_REQUEST = 499
STATUS_CODES: Mapping[int, str] = {
    400: "invalid_request",
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    431: "request_headers_too_large",
    503: "service_unavailable",
}


class ApiError(Exception):
    """A request that gets an error instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body, also the data of an error event in a stream."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The error as a whole response."""
        return json_response(self.body(), self.status, self.headers)


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response. Text that is no valid Unicode is escaped, never a failure of its own."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    data = text.encode("utf-8", "backslashreplace")
    return Response(data, status, dict(headers or {}), media_type="application/json")


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A parameter that cannot be used."""
    return ApiError(400, message if param is None else f"{param}: {message}", code, param=param)


def unsupported(param: str, message: str) -> ApiError:
    """A parameter that is known and not offered."""
    return ApiError(400, f"{param}: {message}", "unsupported_parameter", param=param)


def context_too_long(param: str, message: str) -> ApiError:
    """More tokens than the model takes."""
    return ApiError(400, message, "context_length_exceeded", param=param)


def unknown_model(name: str) -> ApiError:
    """A model that is not served here."""
    return ApiError(404, f"The model `{name}` does not exist.", "model_not_found", param="model")


def too_large(limit_bytes: int) -> ApiError:
    """A body over the limit; the rest of it will not be read, so the connection ends."""
    message = f"The body is larger than {limit_bytes} bytes."
    return ApiError(413, message, "request_too_large", headers={"Connection": "close"})


def wrong_media_type(message: str) -> ApiError:
    """A body that is not JSON by its own declaration."""
    return ApiError(415, message, "unsupported_media_type")


def unavailable(message: str, *, closing: bool = False) -> ApiError:
    """The whole server cannot answer now."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    if closing:
        headers["Connection"] = "close"
    return ApiError(503, message, "service_unavailable", headers=headers)


def from_engine(error: EngineError) -> ApiError:
    """The client's view of an engine error."""
    match error:
        case QueueFull():
            message = "The server is busy: too many requests are waiting."
            return ApiError(429, message, "rate_limit_exceeded", headers={"Retry-After": str(RETRY_AFTER_S)})
        case RequestFailed(code="context_length_exceeded"):
            return context_too_long("prompt", error.message)
        case RequestFailed(code="invalid_request"):
            return invalid(None, error.message, "invalid_request")
        case RequestFailed(code="overloaded"):
            return unavailable(error.message)
        case RequestFailed():
            return ApiError(500, error.message, "internal_error", headers=NO_RETRY)
        case EngineUnavailable():
            return unavailable(f"The server is not ready: {error}.")
        case EngineDead():
            return unavailable(f"The engine has stopped: {error}.")
        case _:
            return ApiError(500, "The request could not be completed.", "internal_error", headers=NO_RETRY)


def install_handlers(app: FastAPI) -> None:
    """Give every error of the application the one body."""

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        request.scope.setdefault("state", {})["error_code"] = error.code  # for the request's span
        return error.response()

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = STATUS_CODES.get(error.status_code, "http_error")
        message = {
            404: f"There is nothing at {request.method} {request.url.path[:200]}.",
            405: f"{request.method} is not allowed at {request.url.path[:200]}.",
        }.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, code, headers=error.headers).response()

    async def on_wrong_query(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]  # one of them, and never the value: a short request must not get a long answer
        return invalid(str(first["loc"][-1])[:100], str(first["msg"])[:200]).response()

    async def on_departure(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # nobody reads it

    async def on_crash(request: Request, error: Exception) -> Response:
        # This handler runs outside every layer of ours, so the id is added here.
        request_id = request.scope.get("state", {}).get("request_id")
        logger.error("request %s failed", request_id)
        headers = NO_RETRY | ({REQUEST_ID_HEADER: request_id} if request_id else {})
        message = "The server failed to answer; its log says why."
        return ApiError(500, message, "internal_error", headers=headers).response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_wrong_query)
    app.add_exception_handler(ClientDisconnect, on_departure)
    app.add_exception_handler(Exception, on_crash)
