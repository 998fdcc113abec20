"""From the bytes of a request to a checked body, or to an error that names the field at fault."""

import logging
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from server.errors import ApiError, invalid, unsupported
from server.openai_types import ChatBody, RequestBody, SamplingBody

logger = logging.getLogger("jetspec.http")

BodyT = TypeVar("BodyT", bound=RequestBody)


class UnknownFields:
    """Fields without an effect are mentioned once each, unknown ones refused with `--strict-params`."""

    MAX_REMEMBERED: ClassVar[int] = 1000

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._seen: set[str] = set()

    def check(self, body: RequestBody) -> None:
        """Raises an error naming the field in strict mode."""
        for name in body.unknown_fields():
            if self._strict:
                raise unsupported(name[:100], "this parameter is not known here")
            self._mention(name, "the unknown request field %r is ignored")
        if isinstance(body, SamplingBody) and body.priority:
            self._mention("priority", "the request field %r has no effect: requests are served in order of arrival")

    def _mention(self, name: str, message: str) -> None:
        if name not in self._seen and len(self._seen) < self.MAX_REMEMBERED:
            self._seen.add(name)
            logger.warning(message, name[:100])


def parse(kind: type[BodyT], data: bytes, unknown: UnknownFields) -> BodyT:
    """Check a request's JSON; raises a 400 `ApiError` that names the field at fault."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise _describe(error, kind) from None
    _refuse_what_is_not_offered(body)
    unknown.check(body)
    return body


def body_schema(kind: type[RequestBody]) -> dict[str, Any]:
    """The request body's place in /openapi.json: bodies are parsed by hand, so FastAPI cannot see them."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _refuse_what_is_not_offered(body: RequestBody) -> None:
    if isinstance(body, ChatBody) and body.tools and body.tool_choice != "none":
        raise unsupported("tools", 'not supported by this server; only tool_choice "none" is accepted')
    for name, neutral in body.neutral.items():
        value = getattr(body, name, None)
        if value is not None and not any(_is_same(value, item) for item in neutral):
            allowed = " or ".join(["null", *(repr(item) for item in neutral)])
            hint = "; see structured_outputs" if name in STRUCTURED_ELSEWHERE else ""
            raise unsupported(name, f"not supported by this server; only {allowed} is accepted{hint}")


STRUCTURED_ELSEWHERE = frozenset(
    {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf", "grammar", "json_schema"}
)


def _is_same(value: object, neutral: object) -> bool:
    """Equality in which true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _describe(error: ValidationError, kind: type[RequestBody]) -> ApiError:
    """The first fault only, and never the rejected value: a small body must not get a large answer."""
    faults = error.errors(include_url=False, include_input=False)
    first = faults[0]
    if first["type"] == "json_invalid":
        return invalid(None, f"The body is no valid JSON: {first['msg'][:200]}", "invalid_json")
    if not first["loc"]:
        return invalid(None, "The body must be a JSON object.", "invalid_type")
    # A field that takes several types reports one fault for each of them, with the type's name in the location.
    field = str(first["loc"][0])[:100]
    if field not in kind.model_fields:
        return invalid(None, str(first["msg"])[:200])
    messages = {_place(item["loc"], kind.model_fields) + item["msg"] for item in faults if item["loc"][0] == field}
    return invalid(field, " or ".join(sorted(messages))[:300])


def _place(location: tuple[int | str, ...], fields: Mapping[str, object]) -> str:
    """The inner field that a fault lies in, where there is one."""
    inner = [str(part) for part in location[1:] if isinstance(part, str) and "[" not in part and "(" not in part]
    return f"{inner[-1][:50]}: " if inner and inner[-1] not in ("str", "int") and location[0] in OBJECTS else ""


OBJECTS = frozenset({"stream_options", "response_format", "structured_outputs", "chat_template_kwargs", "logit_bias"})
