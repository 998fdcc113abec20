"""What a request's JSON must be before anybody asks what it means: valid, finite, and not nested without end.

The parser takes `1e999` for infinity, and fields that nobody reads are not checked later; so the whole body is looked
at here. Of a key that occurs twice the last value counts, as in JavaScript.
"""

import math

from pydantic_core import from_json

from server.errors import ApiError, invalid

MAX_DEPTH = 64


def check_json(data: bytes) -> None:
    """Raises a 400 `ApiError` for a body that is no JSON, holds NaN or an infinity, or is nested too deeply."""
    try:
        content = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise _invalid(f"The body is no valid JSON: {str(error)[:200]}") from None
    level = [content]
    for _ in range(MAX_DEPTH + 1):
        containers = []
        for value in level:
            if isinstance(value, float) and not math.isfinite(value):
                raise _invalid("The body holds a number that is too large.")
            if isinstance(value, dict | list):
                containers.append(value)
        if not containers:
            return
        level = [item for value in containers for item in (value.values() if isinstance(value, dict) else value)]
    raise _invalid(f"The body is nested more than {MAX_DEPTH} levels deep.")


def _invalid(message: str) -> ApiError:
    return invalid(None, message, "invalid_json")
