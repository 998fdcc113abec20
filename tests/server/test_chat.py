"""/v1/chat/completions: templates and their options, continued messages, tools, and what is refused."""

import json
import logging
from typing import Any

import pytest

from server.tokenizer import Tokenizer
from tests.server.conftest import Stack
from tests.server.test_errors import check_error

USER = {"role": "user", "content": "a"}


def prompt_of(stack: Stack) -> str:
    """The prompt of the newest request, special tokens included."""
    return stack.tokenizer.decode(stack.verifier.submitted[-1].prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "pirate", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function"}], "tool_choice": "auto"}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"n": 17}, "n"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_wrong_chat(stack: Stack, body: dict[str, Any], param: str) -> None:
    check_error(await stack.client.post("/v1/chat/completions", json={"messages": [USER], **body}), 400, param=param)
    assert stack.verifier.submitted == []


async def test_tools_that_may_not_be_called_are_accepted(stack: Stack) -> None:
    response = await stack.chat(tools=[{"type": "function"}], tool_choice="none", parallel_tool_calls=False)
    assert response.status_code == 200, response.text


async def test_the_last_message_is_continued(stack: Stack) -> None:
    messages = [USER, {"role": "assistant", "content": "I think that "}]
    asked: list[dict[str, Any]] = [{}, {"add_generation_prompt": False}]
    for options in asked:
        response = await stack.chat(messages=messages, continue_final_message=True, **options)
        assert response.status_code == 200, response.text
        expected = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nI think that "
        assert prompt_of(stack) == expected


async def test_a_template_that_drops_the_last_message_cannot_continue_it(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "render_chat", lambda *arguments, **options: "always the same")
    check_error(await stack.chat(continue_final_message=True), 400, param="continue_final_message")


async def test_without_a_generation_prompt(stack: Stack) -> None:
    await stack.chat("a", add_generation_prompt=False)
    assert prompt_of(stack) == "<|im_start|>user\na<|im_end|>\n"


async def test_template_options_reach_the_template(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, object]] = []

    def render(self: Tokenizer, messages: list[dict[str, str]], **options: object) -> str:
        seen.append({"messages": messages, **options})
        return "x"

    monkeypatch.setattr(Tokenizer, "render_chat", render)
    options = {"enable_thinking": False, "reasoning_effort": "low"}
    message = {"role": "tool", "content": "4", "name": "sum", "tool_call_id": "c1"}
    response = await stack.chat(messages=[USER, message], chat_template_kwargs=options)
    assert response.status_code == 200, response.text
    assert seen == [{"messages": [USER, message], "add_generation_prompt": True, **options}]


async def test_fields_of_an_assistant_message_that_say_nothing(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    """The SDK's own messages, sent back, carry nulls and empty lists."""
    echoed: dict[str, Any] = {
        "role": "assistant",
        "content": "b",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "audio": None,
    }
    with caplog.at_level(logging.WARNING, "jetspec.http"):
        assert (await stack.chat(messages=[USER, echoed, USER])).status_code == 200
        assert not caplog.records
        assert (await stack.chat(messages=[{**USER, "wibble": 1}])).status_code == 200
    assert "messages.wibble" in caplog.text


async def test_prompt_token_ids_of_a_chat(stack: Stack) -> None:
    body = (await stack.chat(return_token_ids=True)).json()
    assert body["prompt_token_ids"] == stack.verifier.submitted[0].prompt_token_ids
    assert body["choices"][0]["token_ids"] == stack.tokenizer.encode("A short answer.")


async def test_structured_answers_reach_the_verifier_as_grammars(stack: Stack) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"response_format": {"type": "json_object"}}, {"kind": "json_object"}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": schema, "strict": True},
                }
            },
            {"kind": "json_schema", "schema_text": json.dumps(schema, separators=(",", ":"))},
        ),
        (
            {"structured_outputs": {"json": schema}},
            {"kind": "json_schema", "schema_text": json.dumps(schema, separators=(",", ":"))},
        ),
        (
            {"structured_outputs": {"json": json.dumps(schema)}},
            {"kind": "json_schema", "schema_text": json.dumps(schema, separators=(",", ":"))},
        ),
        ({"structured_outputs": {"json_object": True}}, {"kind": "json_object"}),
        ({"structured_outputs": {"regex": "[a-c]+"}}, {"kind": "regex", "pattern": "[a-c]+"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"kind": "choice", "choices": ["yes", "no"]}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"kind": "lark", "grammar_text": 'start: "a"'}),
    ]
    for body, expected in asked:
        for ask in (stack.complete, stack.chat):
            response = await ask(**body)
            assert response.status_code == 200, response.text
            grammar = stack.verifier.submitted[-1].grammar
            assert grammar is not None
            assert grammar.model_dump() == expected


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": "json"},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "structural_tag"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "text"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"title": "x" * 70_000}}}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"json": "{"}},
        {"structured_outputs": {"json": "5"}},
        {"structured_outputs": {"json": json.dumps(nested(70))}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"choice": [""]}},
        {"structured_outputs": {"regex": ""}},
        {"structured_outputs": {"whitespace_pattern": "a"}},
        {"structured_outputs": {"json_object": True}, "response_format": {"type": "json_object"}},
    ],
    ids=lambda value: str(value)[:60],
)
async def test_wrong_structured_answers(stack: Stack, body: dict[str, Any]) -> None:
    param = next(iter(body))
    check_error(await stack.chat(**body), 400, param=param)
    check_error(await stack.complete(**body), 400, param=param)
    assert stack.verifier.submitted == []
