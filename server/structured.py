"""What form an answer must have: from `response_format` or `structured_outputs` to a grammar of the wire."""

import json
from dataclasses import dataclass

from protocol.fields import (
    ChoiceGrammar,
    Grammar,
    JsonObjectGrammar,
    JsonSchemaGrammar,
    LarkGrammar,
    RegexGrammar,
)
from server.errors import invalid
from server.openai_types import MAX_GRAMMAR_CHARACTERS, ResponseFormat, SamplingBody, StructuredOutputs

MAX_DEPTH = 64


@dataclass(frozen=True)
class AskedGrammar:
    """A grammar, and the parameter that it came from."""

    grammar: Grammar
    param: str


def grammar_of(body: SamplingBody) -> AskedGrammar | None:
    """The grammar a request asks for; raises `ApiError` naming the parameter that is wrong."""
    from_format = _of_format(body.response_format) if body.response_format is not None else None
    if body.structured_outputs is None:
        return from_format
    if from_format is not None:
        raise invalid("structured_outputs", "cannot be combined with response_format")
    return AskedGrammar(_of_structured(body.structured_outputs), "structured_outputs")


def _of_format(wanted: ResponseFormat) -> AskedGrammar | None:
    param = "response_format"
    if wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise invalid(param, "type json_schema needs json_schema.schema")
        return AskedGrammar(_json_schema(wanted.json_schema.schema_, param), param)
    if wanted.json_schema is not None:
        raise invalid(param, "json_schema needs type json_schema")
    return AskedGrammar(JsonObjectGrammar(), param) if wanted.type == "json_object" else None


def _of_structured(wanted: StructuredOutputs) -> Grammar:
    param = "structured_outputs"
    given = [name for name in StructuredOutputs.model_fields if getattr(wanted, name) not in (None, False)]
    if len(given) != 1:
        raise invalid(param, "give exactly one of json, json_object, regex, choice and grammar")
    if wanted.regex is not None:
        return RegexGrammar(pattern=wanted.regex)
    if wanted.choice is not None:
        return ChoiceGrammar(choices=wanted.choice)
    if wanted.grammar is not None:
        return LarkGrammar(grammar_text=wanted.grammar)
    if wanted.json_ is None:
        return JsonObjectGrammar()
    if not isinstance(wanted.json_, str):
        return _json_schema(wanted.json_, param)
    try:
        schema = json.loads(wanted.json_)
    except (ValueError, RecursionError):
        raise invalid(param, "json is no valid JSON text") from None
    return _json_schema(schema, param)


def _json_schema(schema: object, param: str) -> JsonSchemaGrammar:
    if not isinstance(schema, dict | bool):
        raise invalid(param, "a JSON schema is an object or a boolean")
    if _depth(schema) > MAX_DEPTH:
        raise invalid(param, f"the schema is nested more than {MAX_DEPTH} deep")
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise invalid(param, f"the schema has {len(text)} characters, more than {MAX_GRAMMAR_CHARACTERS}")
    return JsonSchemaGrammar(schema_text=text)


def _depth(value: object) -> int:
    """Nesting, found without recursion and only as far as it matters."""
    level: list[object] = [value]
    depth = 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        inner: list[object] = []
        for item in level:
            inner += list(item.values()) if isinstance(item, dict) else item if isinstance(item, list) else []
        level = inner
    return depth
