"""The body of a request as it comes in: declared as JSON, whole within a time, and checked."""

import asyncio
from typing import TypeVar

from starlette.requests import Request

from server.errors import ApiError, wrong_media_type
from server.openai_types import RequestBody
from server.parsing import parse
from server.state import ServerState
from server.strict_json import check_json

BodyT = TypeVar("BodyT", bound=RequestBody)


async def read_body(request: Request, kind: type[BodyT], state: ServerState) -> BodyT:
    """The checked body of a request. Raises `ApiError`: 415 for what is not declared as JSON, 408 for a client that
    stops sending, 400 for what it says."""
    media_type, *parameters = (part.strip().lower() for part in request.headers.get("content-type", "").split(";"))
    # Declared by the client on purpose: a web page of another origin can send any text, but not this type.
    if media_type != "application/json":
        raise wrong_media_type("The body must be JSON, sent with 'Content-Type: application/json'.")
    charsets = [
        value.strip('"') for name, _, value in (part.partition("=") for part in parameters) if name == "charset"
    ]
    if any(charset not in ("utf-8", "utf8", "us-ascii") for charset in charsets):
        raise wrong_media_type("JSON is UTF-8; other encodings are not read.")
    try:
        async with asyncio.timeout(state.config.request_read_timeout):
            data = await request.body()
    except TimeoutError:
        limit_s = state.config.request_read_timeout
        message = f"The body did not arrive within {limit_s:g} s."
        raise ApiError(408, message, "request_timeout", headers={"Connection": "close"}) from None
    check_json(data)
    return parse(kind, data, state.unknown_fields)
