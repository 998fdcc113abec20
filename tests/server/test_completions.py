"""/v1/completions and /v1/chat/completions over a scripted verifier: text, stops, usage, shapes."""

import asyncio
from typing import Any

import pytest

from protocol.messages import Failed
from tests.server.conftest import Stack, StackFactory

EMOJI = "naïve café 👩‍🚀 日本語 ✓ done"


async def test_whole_answer_has_openai_shape(stack: Stack) -> None:
    body = (await stack.complete(model="demo", max_tokens=64)).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "demo"
    choice = body["choices"][0]
    assert (choice["text"], choice["index"], choice["finish_reason"]) == ("A short answer.", 0, "stop")
    assert choice["logprobs"] is None
    assert choice["stop_reason"] is None
    num_tokens = len("A short answer.") + 1  # the end of the turn counts
    assert body["usage"]["completion_tokens"] == num_tokens
    assert body["usage"]["total_tokens"] == num_tokens + body["usage"]["prompt_tokens"]
    details = body["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert details["rejected_prediction_tokens"] > 0


async def test_drafts_beyond_a_cut_are_not_counted_as_accepted(stack: Stack) -> None:
    stack.says("abcdefgh", ends=False)
    usage = (await stack.complete(max_tokens=2)).json()["usage"]  # the prefill's token, and one of a block of four
    details = usage["completion_tokens_details"]
    assert usage["completion_tokens"] == 2
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (1, 7)


async def test_default_is_sixteen_tokens_and_null_fills_the_context(stack: Stack) -> None:
    stack.says("abcdefgh", ends=False)
    body = (await stack.complete()).json()
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"
    body = (await stack.complete(max_tokens=None)).json()
    assert body["usage"]["total_tokens"] == 512


@pytest.mark.parametrize("block", [1, 2, 5, 9])
async def test_stream_and_whole_answer_are_equal_for_every_block_size(stack: Stack, block: int) -> None:
    stack.says(EMOJI)
    stack.verifier.plan.block = block
    whole = await stack.text(max_tokens=100)
    stream = await stack.stream(max_tokens=100)
    assert whole == stream.text == EMOJI
    assert stream.finish_reasons == ["stop"]


@pytest.mark.parametrize("block", [1, 3, 8])
async def test_no_replacement_character_in_any_chunk(stack: Stack, block: int) -> None:
    stack.says("👩‍🚀日本語" * 3)
    stack.verifier.plan.block = block
    stream = await stack.stream(max_tokens=200)
    assert "\ufffd" not in stream.text
    assert stream.text == "👩‍🚀日本語" * 3


async def test_character_cut_by_the_limit_is_shown_the_same_in_both_forms(stack: Stack) -> None:
    stack.says("ab日", ends=False)
    whole = await stack.text(max_tokens=4)
    stream = await stack.stream(max_tokens=4)
    assert whole == stream.text
    assert whole.startswith("ab\ufffd")


@pytest.mark.parametrize("block", [1, 2, 4, 7])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_string_across_tokens(stack: Stack, block: int, include: bool) -> None:
    stack.says("one two three four")
    stack.verifier.plan.block = block
    for ask in (stack.text, stack.stream):
        answer = await ask(max_tokens=100, stop=["o thr", "four"], include_stop_str_in_output=include)
        text = answer if isinstance(answer, str) else answer.text
        assert text == ("one two thr" if include else "one tw")


async def test_stop_string_that_never_completes_loses_nothing(stack: Stack) -> None:
    stack.says("one two three")
    stream = await stack.stream(max_tokens=100, stop=["reeZZZ", "eQ"])
    assert stream.text == "one two three"
    assert stream.finish_reasons == ["stop"]


@pytest.mark.parametrize("max_tokens", [3, 4])
async def test_stop_string_completed_by_the_last_token_is_a_stop(stack: Stack, max_tokens: int) -> None:
    stack.says("abcdef", ends=False)
    body = (await stack.complete(max_tokens=max_tokens, stop="c")).json()["choices"][0]
    assert (body["text"], body["finish_reason"], body["stop_reason"]) == ("ab", "stop", "c")


async def test_stop_string_ends_the_sequence_at_the_verifier_and_counts_only_what_was_used(stack: Stack) -> None:
    stack.says("abcdefgh", ends=False)
    stack.verifier.plan.round_s = 0.005
    body = (await stack.complete(max_tokens=400, stop="d")).json()
    assert body["usage"]["completion_tokens"] == 4
    await asyncio.sleep(0.05)
    assert stack.verifier.aborted == [0]
    assert stack.engine.num_live == 0


async def test_end_of_turn_in_the_middle_of_a_block(stack: Stack) -> None:
    stack.says("ab")
    stack.verifier.plan.block = 8
    body = (await stack.complete(max_tokens=100)).json()
    assert body["choices"][0]["text"] == "ab"
    assert body["usage"]["completion_tokens"] == 3


async def test_ignore_eos_and_min_tokens_reach_the_verifier(stack: Stack) -> None:
    stack.says("ab")
    body = (await stack.complete(max_tokens=7, ignore_eos=True)).json()
    assert body["usage"]["completion_tokens"] == 7
    assert body["choices"][0]["text"] == "abababa"[:6]  # the special token in the middle has no text
    body = (await stack.complete(max_tokens=7, min_tokens=5)).json()
    assert body["usage"]["completion_tokens"] == 7
    assert stack.verifier.submitted[0].stop_token_ids == []
    assert stack.verifier.submitted[1].min_tokens == 5


async def test_stop_string_does_not_count_before_min_tokens(stack: Stack) -> None:
    stack.says("abcabcabc", ends=False)
    assert await stack.text(max_tokens=20, stop="c", min_tokens=4) == "abcab"


async def test_stop_token_id_is_named_as_the_reason(stack: Stack) -> None:
    stack.says("abc", ends=False)
    token = stack.tokenizer.encode("c")[0]
    choice = (await stack.complete(max_tokens=20, stop_token_ids=[token])).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", token)


async def test_sampling_parameters_reach_the_verifier(stack: Stack) -> None:
    given: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.05}
    given |= {"presence_penalty": -1.5, "frequency_penalty": 2, "repetition_penalty": 1.3}
    for ask in (stack.complete, stack.chat):
        response = await ask(**given, seed=-1, logit_bias={"5": -100, "17": 0.5}, speculative=False)
        assert response.status_code == 200, response.text
        submit = stack.verifier.submitted[-1]
        bias = [{"token_id": 5, "bias": -100.0}, {"token_id": 17, "bias": 0.5}]
        assert submit.sampling.model_dump() == given | {"seed": 2**63 - 1, "logit_bias": bias}
        assert submit.speculative is False


async def test_nulls_mean_defaults(stack: Stack) -> None:
    names = ["temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"]
    names += ["stream", "stream_options", "n", "best_of", "echo", "logprobs", "suffix", "user", "model", "logit_bias"]
    response = await stack.complete(**dict.fromkeys(names))
    assert response.status_code == 200, response.text
    sampling = stack.verifier.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)


async def test_values_that_ask_for_nothing_are_accepted(stack: Stack) -> None:
    response = await stack.complete(
        n=1,
        best_of=1,
        echo=False,
        suffix="",
        repetition_penalty=1.0,
        presence_penalty=0,
        top_k=-1,
        logit_bias={},
        response_format={"type": "text"},
        use_beam_search=False,
        length_penalty=1.0,
        bad_words=[],
        guided_json=None,
    )
    assert response.status_code == 200, response.text
    submit = stack.verifier.submitted[0]
    assert (submit.grammar, submit.num_logprobs, submit.num_prompt_logprobs) == (None, None, None)
    response = await stack.chat(modalities=["text"], store=False, function_call="none", parallel_tool_calls=True)
    assert response.status_code == 200, response.text


async def test_unseeded_requests_differ_and_a_server_seed_repeats_them(make_stack: StackFactory) -> None:
    async def seeds(**settings: object) -> list[int]:
        async with make_stack(**settings) as stack:
            for _ in range(3):
                await stack.complete()
            return [submit.sampling.seed for submit in stack.verifier.submitted]

    free = await seeds()
    assert len(set(free)) == 3
    assert free != await seeds()
    assert await seeds(seed=7) == await seeds(seed=7)


async def test_prompt_forms(stack: Stack) -> None:
    ids = stack.tokenizer.encode("hi")
    for prompt in ("hi", ["hi"], ids, [ids]):
        response = await stack.complete(prompt=prompt)
        assert response.status_code == 200, response.text
    assert [submit.prompt_token_ids for submit in stack.verifier.submitted] == [ids] * 4


async def test_usage_chunks(stack: Stack) -> None:
    stream = await stack.stream(max_tokens=50, stream_options={"include_usage": True})
    *chunks, last = stream.events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 16
    assert all(chunk["usage"] is None for chunk in chunks)
    assert chunks[-1]["choices"][0]["text"] == ""
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await stack.stream(max_tokens=50, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in stream.events]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert all("usage" not in event for event in (await stack.stream()).events)


async def test_returned_token_ids_are_those_of_the_text(stack: Stack) -> None:
    stack.says("日本語 text")
    stack.verifier.plan.block = 2
    whole = (await stack.complete(max_tokens=100, return_token_ids=True)).json()["choices"][0]
    stream = await stack.stream(max_tokens=100, return_token_ids=True)
    streamed = [token for event in stream.events for token in event["choices"][0].get("token_ids", [])]
    assert whole["token_ids"] == streamed == stack.tokenizer.encode("日本語 text")
    assert whole["prompt_token_ids"] == stack.tokenizer.encode("hi")


async def test_special_tokens_are_shown_when_asked_for(stack: Stack) -> None:
    stack.says("a")
    text = await stack.text(max_tokens=3, ignore_eos=True, skip_special_tokens=False)
    assert text == "a<|im_end|>a"


async def test_chat(stack: Stack) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    response = await stack.client.post("/v1/chat/completions", json={"messages": messages, "logprobs": False})
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "A short answer."}
    prompt = stack.tokenizer.decode(stack.verifier.submitted[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert stack.verifier.submitted[0].max_tokens == 512 - len(stack.verifier.submitted[0].prompt_token_ids)


async def test_chat_stream(stack: Stack) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    raw = (await stack.client.post("/v1/chat/completions", json=body)).text
    from tests.server.conftest import Stream

    deltas = [event["choices"][0]["delta"] for event in Stream(raw).events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "A short answer."
    assert deltas[-1] == {}


async def test_requests_at_the_same_time_do_not_mix(stack: Stack) -> None:
    texts = {f"prompt {index}": f"answer number {index}" * (index + 1) for index in range(6)}

    def tokens(submit: object) -> list[int]:
        prompt = stack.tokenizer.decode(submit.prompt_token_ids)  # type: ignore[attr-defined]
        return [*stack.tokenizer.encode(texts[prompt]), 2]

    stack.verifier.plan.tokens = tokens
    stack.verifier.plan.round_s = 0.001
    answers = await asyncio.gather(*(stack.text(prompt=prompt, max_tokens=200) for prompt in texts))
    assert answers == list(texts.values())


async def test_failure_before_the_first_token_is_a_plain_error_in_both_forms(stack: Stack) -> None:
    stack.verifier.plan.reject = Failed(sequence_id=0, code="context_length_exceeded", message="too long for me")
    for stream in (False, True):
        response = await stack.complete(stream=stream)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_failure_in_mid_stream_is_an_event_then_done(stack: Stack) -> None:
    stack.says("abcdefgh", ends=False)
    stack.verifier.plan.fail_after = 5
    stream = await stack.stream(max_tokens=100)
    assert stream.events[-1]["error"] == {
        "message": "a made-up fault",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert stream.text == "abcde"
    assert stream.finish_reasons == []
    response = await stack.complete(max_tokens=100)
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    stack.verifier.plan.fail_after = None
    assert await stack.text(max_tokens=5) == "abcde"
