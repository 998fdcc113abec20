"""Options of a request that change neither its sampling nor its text's length: prompts cut, ids, statistics, rounds."""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from protocol.messages import Failed
from server.build import Weights
from tests.server.conftest import Stack, StackFactory, Stream
from tests.server.test_errors import check_error


async def test_a_prompt_is_cut_from_the_front(stack: Stack) -> None:
    ids = stack.tokenizer.encode("abcdefgh")
    for prompt in ("abcdefgh", ids, ["abcdefgh"]):
        response = await stack.complete(prompt=prompt, truncate_prompt_tokens=3, echo=True)
        assert response.json()["choices"][0]["text"] == "fghA short answer."
        assert stack.verifier.submitted[-1].prompt_token_ids == ids[-3:]
    await stack.complete(prompt=ids, truncate_prompt_tokens=100)
    assert stack.verifier.submitted[-1].prompt_token_ids == ids
    stack.says("abc", ends=False)
    response = await stack.complete(prompt="x" * 5000, truncate_prompt_tokens=-1, max_tokens=40)
    assert response.status_code == 200, response.text
    assert len(stack.verifier.submitted[-1].prompt_token_ids) == 512 - 40
    check_error(await stack.complete(prompt="x" * 5000, truncate_prompt_tokens=600), 400, "context_length_exceeded")
    await stack.chat("y" * 50, truncate_prompt_tokens=9)
    assert len(stack.verifier.submitted[-1].prompt_token_ids) == 9


async def test_request_ids_name_the_response_and_nothing_else(stack: Stack) -> None:
    stack.verifier.plan.round_s = 0.001
    texts = {f"prompt {index}": f"answer {index}" for index in range(20)}
    stack.verifier.plan.tokens = lambda submit: [
        *stack.tokenizer.encode(texts[stack.tokenizer.decode(submit.prompt_token_ids)]),
        2,
    ]
    answers = await asyncio.gather(*(stack.complete(prompt=prompt, request_id="same") for prompt in texts))
    assert [answer.json()["choices"][0]["text"] for answer in answers] == list(texts.values())
    assert {answer.json()["id"] for answer in answers} == {"cmpl-same"}


async def test_fingerprint_is_that_of_the_weights(stack: Stack) -> None:
    first = (await stack.complete()).json()["system_fingerprint"]
    assert (await stack.chat()).json()["system_fingerprint"] == first
    assert all(event["system_fingerprint"] == first for event in (await stack.stream()).events)
    assert stack.state.model is not None
    stack.state.model = replace(stack.state.model, weights=(Weights("target", "tiny", "sha256-1"),))
    assert (await stack.complete()).json()["system_fingerprint"] != first


async def test_fields_without_an_effect_are_accepted(stack: Stack) -> None:
    response = await stack.complete(user="someone", priority=0, cache_salt="s", spaces_between_special_tokens=False)
    assert response.status_code == 200, response.text
    response = await stack.chat(metadata={"a": "b"}, safety_identifier="x", prompt_cache_key="y")
    assert response.status_code == 200, response.text


async def test_a_priority_is_mentioned(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jetspec.http"):
        for _ in range(2):
            assert (await stack.complete(priority=3)).status_code == 200
    assert sum("priority" in record.getMessage() for record in caplog.records) == 1


async def test_unknown_stream_options_count_as_unknown_fields(make_stack: StackFactory) -> None:
    async with make_stack(strict_params=True) as stack:
        response = await stack.complete(stream=True, stream_options={"wibble": True})
        check_error(response, 400, "unsupported_parameter", "stream_options.wibble")
        assert (await stack.complete(guided_json=None, use_beam_search=False)).status_code == 200


async def test_statistics_of_a_request(stack: Stack) -> None:
    body = (await stack.complete(max_tokens=64, jetspec=True, n=2)).json()
    found = body["jetspec"]
    kinds = ("hits", "late_hits", "misses", "first", "autoregressive")
    assert found["rounds"] == sum(found[kind] for kind in kinds) > 0
    assert found["first"] == 2
    assert 0 < found["hit_rate"] < 1
    assert found["acceptance_length"] == stack.verifier.plan.block
    details = body["usage"]["completion_tokens_details"]
    assert found["accepted_tokens"] == details["accepted_prediction_tokens"]
    assert found["draft_tokens"] == sum(details.values())
    assert found["verify_ms"] == pytest.approx(6.0 * found["rounds"])
    assert "jetspec" not in (await stack.complete()).json()
    for options in (None, {"include_usage": True}):
        stream = await stack.stream(max_tokens=64, jetspec=True, n=2, stream_options=options)
        assert stream.events[-1]["jetspec"] == found
        assert all("jetspec" not in event for event in stream.events[:-1])


async def test_statistics_without_speculation(stack: Stack) -> None:
    found = (await stack.complete(jetspec=True, speculative=False)).json()["jetspec"]
    assert (found["autoregressive"], found["rounds"]) == (found["rounds"], found["rounds"])
    assert found["hit_rate"] is None
    assert found["draft_tokens"] == 0


@pytest.mark.parametrize("block", [1, 3, 8])
async def test_rounds_in_a_stream(stack: Stack, block: int) -> None:
    stack.says("日本 text, and more")
    stack.verifier.plan.block = block
    body: dict[str, Any] = {"max_tokens": 64, "stream_options": {"jetspec_rounds": True}}
    stream = await stack.stream(**body)
    rounds = [part["jetspec_round"] for part in stream.choices() if "jetspec_round" in part]
    tokens = [token for item in rounds for token in item["tokens"]]
    assert [token["id"] for token in tokens] == stack.tokenizer.encode("日本 text, and more")
    assert "".join(token["text"] for token in tokens) == stream.text == "日本 text, and more"
    assert rounds[0]["outcome"] == "prefill"
    assert [item["round"] for item in rounds] == list(range(len(rounds)))
    for item in rounds[1:]:
        assert item["outcome"] in ("first", "hit", "late_hit", "miss")
        assert (item["num_drafts"], item["num_accepted"]) == (8, block - 1)
        assert (item["verify_ms"], item["exposed_ms"]) == (6.0, 0.7)
        assert item["fallback_ms"] == (4.0 if item["outcome"] in ("miss", "first") else None)
        assert item["alone_because"] is None
        sources = [token["source"] for token in item["tokens"]]
        assert sources == (["draft"] * (block - 1) + ["bonus"])[: len(sources)]
    chat = Stream((await stack.chat(stream=True, **body)).text)
    assert [part["jetspec_round"] for part in chat.choices() if "jetspec_round" in part] == rounds
    assert all("jetspec_round" not in part for part in (await stack.stream()).choices())


async def test_faults_found_by_the_verifier_name_the_request_s_own_parameter(stack: Stack) -> None:
    def rejects(parameter: str | None, code: str = "invalid_request") -> None:
        stack.verifier.plan.reject = Failed(
            sequence_id=0,
            code=code,  # type: ignore[arg-type]
            message=f"a fault in {parameter}",
            parameter=parameter,
        )

    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}
    rejects("grammar")
    for stream in (False, True):
        check_error(await stack.chat(response_format=schema, stream=stream), 400, param="response_format")
        wanted = {"regex": "(?=a)"}
        check_error(await stack.complete(structured_outputs=wanted, stream=stream), 400, param="structured_outputs")
    rejects("logit_bias")
    check_error(await stack.complete(logit_bias={"5": 1}), 400, param="logit_bias")
    rejects("prompt_token_ids", "context_length_exceeded")
    check_error(await stack.complete(), 400, "context_length_exceeded")
    assert (await stack.chat()).json()["error"]["param"] == "messages"
    rejects(None)
    check_error(await stack.complete(), 400, "invalid_request")


async def test_a_stop_token_is_shown_when_stops_are(stack: Stack) -> None:
    stack.says("abc", ends=False)
    token = stack.tokenizer.encode("c")[0]
    body: dict[str, Any] = {"stop_token_ids": [token], "include_stop_str_in_output": True}
    assert await stack.text(**body) == (await stack.stream(**body)).text == "abc"
    stack.says("ab")
    assert await stack.text(include_stop_str_in_output=True) == "ab"
    assert await stack.text(include_stop_str_in_output=True, skip_special_tokens=False) == "ab<|im_end|>"
