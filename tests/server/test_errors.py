"""What a wrong request gets: the right status, the nested body, and the name of the parameter."""

import asyncio
import logging
from typing import Any

import httpx
import pytest

from tests.server.conftest import Stack, StackFactory

WRONG = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"max_tokens": 2.0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.5}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [300]}, "stop_token_ids"),
    ({"min_tokens": 20}, "min_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
    ({"speculative": "no"}, "speculative"),
    ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options"),
    ({"jetspec": 1}, "jetspec"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 17}, "n"),
    ({"n": 2.0}, "n"),
    ({"n": "1"}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 17}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"echo": 1}, "echo"),
    ({"echo": "yes"}, "echo"),
    ({"max_tokens": 0, "echo": False}, "max_tokens"),
    ({"max_tokens": 10**18}, "max_tokens"),
    ({"max_tokens": 1e18}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": "1"}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"suffix": "end"}, "suffix"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"logit_bias": {"262": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999999": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {str(index): 1 for index in range(1025)}}, "logit_bias"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"add_special_tokens": "no"}, "add_special_tokens"),
    ({"request_id": "two words"}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"request_id": "é"}, "request_id"),
    ({"priority": "high"}, "priority"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"length_penalty": True}, "length_penalty"),
    ({"typical_p": 0.5}, "typical_p"),
    ({"bad_words": ["a"]}, "bad_words"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"stop_regex": "a+"}, "stop_regex"),
    ({"guided_json": {}}, "guided_json"),
    ({"regex": "a"}, "regex"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [[5], []]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [[1], [1.5]]}, "prompt"),
    ({"prompt": [["a"]]}, "prompt"),
    ({"prompt": [[5], [-1]]}, "prompt"),
    ({"prompt": [[5], [262]]}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[999999999]]}, "prompt"),
    ({"prompt": [262]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"model": 5}, "model"),
]


def check_error(response: httpx.Response, status: int, code: str | None = None, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str)
    assert len(response.content) < 1000
    if code is not None:
        assert error["code"] == code
    if param is not None:
        assert error["param"] == param
        assert param in error["message"]


@pytest.mark.parametrize(("wrong", "param"), WRONG, ids=lambda value: str(value)[:40])
async def test_wrong_parameter_is_named(stack: Stack, wrong: dict[str, Any], param: str) -> None:
    check_error(await stack.complete(**wrong), 400, param=param)
    assert stack.verifier.submitted == []
    assert (await stack.complete()).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":Infinity}',
        b'{"prompt":"a","temperature":1e999}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"a\xff"}',
        b'{"prompt":"a","max_tokens":' + b"9" * 5000 + b"}",
        b'{"prompt":' + b"[" * 100_000,
        b"{}",
    ],
    ids=lambda body: repr(body[:30]),
)
async def test_bad_json_is_a_400(stack: Stack, body: bytes) -> None:
    check_error(await stack.client.post("/v1/completions", content=body), 400)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"a","wibble":NaN}',
        b'{"prompt":"a","wibble":[{"deep":-1e999}]}',
        b'{"prompt":"a","wibble":' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"prompt":"a","wibble":' + b'{"a":' * 70 + b"1" + b"}" * 71,
    ],
    ids=lambda body: repr(body[:30]),
)
async def test_json_nobody_reads_is_checked_too(stack: Stack, body: bytes) -> None:
    check_error(await stack.client.post("/v1/completions", content=body), 400, "invalid_json")


async def test_nesting_that_is_allowed_and_repeated_keys(stack: Stack) -> None:
    body = b'{"prompt":"b","prompt":"a","wibble":' + b"[" * 60 + b"]" * 60 + b"}"
    assert (await stack.client.post("/v1/completions", content=body)).status_code == 200
    assert stack.verifier.submitted[0].prompt_token_ids == stack.tokenizer.encode("a")


@pytest.mark.parametrize(
    "media_type",
    ["text/plain", "application/x-www-form-urlencoded", "", "application/json; charset=utf-16", "application/jsonp"],
)
async def test_wrong_content_type(stack: Stack, media_type: str) -> None:
    headers = {"Content-Type": media_type}
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = await stack.client.post(path, content=b'{"prompt":"a"}', headers=headers)
        check_error(response, 415, "unsupported_media_type")


@pytest.mark.parametrize("media_type", ["application/json; charset=UTF-8", 'Application/JSON;charset="utf-8"'])
async def test_right_content_type(stack: Stack, media_type: str) -> None:
    response = await stack.client.post(
        "/v1/completions", content='{"prompt":"ü"}'.encode(), headers={"Content-Type": media_type}
    )
    assert response.status_code == 200


async def test_body_that_never_ends_is_a_408(make_stack: StackFactory) -> None:
    async def trickle() -> Any:
        yield b'{"prompt":'
        await asyncio.sleep(1000.0)

    async with make_stack(request_read_timeout=0.1) as stack:
        check_error(await stack.client.post("/v1/completions", content=trickle()), 408, "request_timeout")
        assert (await stack.complete()).status_code == 200


async def test_answer_to_a_long_wrong_list_is_short(stack: Stack) -> None:
    check_error(await stack.complete(prompt=["x", *range(200_000)]), 400, param="prompt")


async def test_context_length(stack: Stack) -> None:
    stack.says("abc", ends=False)
    num_prompt = len(stack.tokenizer.encode("hi"))
    assert (await stack.complete(max_tokens=512 - num_prompt)).status_code == 200
    response = await stack.complete(max_tokens=512 - num_prompt + 1)
    check_error(response, 400, "context_length_exceeded", "prompt")
    assert "This model's maximum context length is 512 tokens" in response.json()["error"]["message"]
    check_error(await stack.complete(prompt=[5] * 512, max_tokens=None), 400, "context_length_exceeded")
    check_error(await stack.complete(prompt="x" * 600), 400, "context_length_exceeded")
    check_error(await stack.complete(prompt="x" * 1_000_000), 400, "context_length_exceeded")
    messages = [{"role": "user", "content": "y" * 600}]
    chat = await stack.client.post("/v1/chat/completions", json={"messages": messages})
    check_error(chat, 400, "context_length_exceeded", "messages")


async def test_unknown_model(stack: Stack) -> None:
    check_error(await stack.complete(model="other"), 404, "model_not_found", "model")
    check_error(await stack.client.get("/v1/models/other"), 404, "model_not_found")
    assert (await stack.complete(model="real/name")).json()["model"] == "real/name"


async def test_unknown_paths_and_methods_are_json(stack: Stack) -> None:
    check_error(await stack.client.get("/nothing/here"), 404, "not_found")
    check_error(await stack.client.get("/v1/completions"), 405, "method_not_allowed")
    check_error(await stack.client.post("/v1/models", json={}), 405, "method_not_allowed")


async def test_paths_of_badly_joined_base_urls(stack: Stack) -> None:
    for path in ("//v1/models", "/v1/models/", "/v1//models"):
        assert (await stack.client.get(f"http://server{path}")).json()["data"][0]["id"] == "demo"


async def test_body_limit_counts_what_arrives(make_stack: StackFactory) -> None:
    async with make_stack(max_body_bytes=2000) as stack:
        check_error(await stack.complete(prompt="x" * 3000), 413, "request_too_large")

        async def chunks() -> Any:
            for _ in range(100):
                yield b"x" * 100

        check_error(await stack.client.post("/v1/completions", content=chunks()), 413, "request_too_large")
        headers = {f"x-{index}": "1" for index in range(200)}
        check_error(await stack.client.get("/health", headers=headers), 431)
        assert (await stack.complete()).status_code == 200


async def test_unknown_field_is_mentioned_once(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jetspec.http"):
        for _ in range(2):
            assert (await stack.complete(wibble=1)).status_code == 200
    assert [record.getMessage() for record in caplog.records if "wibble" in record.getMessage()] == [
        "the unknown request field 'wibble' is ignored"
    ]


async def test_unknown_field_is_refused_in_strict_mode(make_stack: StackFactory) -> None:
    async with make_stack(strict_params=True) as stack:
        check_error(await stack.complete(wibble=1), 400, "unsupported_parameter", "wibble")


async def test_full_queue_is_a_429(make_stack: StackFactory) -> None:
    async with make_stack(max_num_seqs=1, max_num_queued_reqs=1) as stack:
        stack.says("abc", ends=False)
        stack.verifier.plan.round_s = 0.02
        running = [asyncio.create_task(stack.complete(max_tokens=60)) for _ in range(2)]
        while stack.engine.num_live < 2:
            await asyncio.sleep(0.001)
        for stream in (False, True):
            response = await stack.complete(stream=stream)
            check_error(response, 429, "rate_limit_exceeded")
            assert int(response.headers["retry-after"]) >= 1
        assert [(await task).status_code for task in running] == [200, 200]
        assert stack.sample("jetspec_admission_rejections_total", reason="queue_full") == 2
        assert (await stack.complete()).status_code == 200


async def test_loading_and_draining_are_503(stack: Stack) -> None:
    stack.state.is_ready = False
    response = await stack.complete()
    check_error(response, 503, "service_unavailable")
    assert "retry-after" in response.headers
    health = await stack.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "loading")
    assert (await stack.client.get("/metrics")).status_code == 200
    stack.state.is_ready = True
    stack.state.is_draining = True
    check_error(await stack.complete(), 503, "service_unavailable")
    assert (await stack.client.get("/ready")).status_code == 503
    assert (await stack.client.get("/health")).status_code == 200


async def test_a_crash_in_a_handler_is_a_500_without_details(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("secret path")

    monkeypatch.setattr("server.reading.parse", broken)
    response = await stack.complete()
    check_error(response, 500, "internal_error")
    assert "secret" not in response.text
    assert response.headers["x-should-retry"] == "false"
    assert response.headers["x-request-id"]
