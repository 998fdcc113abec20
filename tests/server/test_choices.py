"""Several prompts and several choices in one request: order, usage, seeds, selection, and one fate for all."""

import asyncio
from typing import Any

import pytest

from protocol.messages import Submit
from tests.server.conftest import Stack, StackFactory, Stream
from tests.server.fakes import made_up_logprobs
from tests.server.test_errors import check_error

PROMPTS = ["one", "two", "three"]


def answers_by_prompt_and_seed(stack: Stack) -> None:
    """Every sequence answers with its prompt and its place among the sequences of that prompt, at its own pace."""
    seen: dict[str, list[int]] = {}

    def tokens(submit: Submit) -> list[int]:
        prompt = stack.tokenizer.decode(submit.prompt_token_ids)
        places = seen.setdefault(prompt, [])
        places.append(submit.sequence_id)
        text = f"{prompt} {len(places) - 1} " + "x" * (5 * len(prompt) - 7 * len(places) + 20)
        return [*stack.tokenizer.encode(text), 2]

    stack.verifier.plan.tokens = tokens


async def test_indices_are_prompt_major_and_usage_sums(stack: Stack) -> None:
    answers_by_prompt_and_seed(stack)
    body = (await stack.complete(prompt=PROMPTS, n=2, max_tokens=100)).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    beginnings = [" ".join(choice["text"].split()[:2]) for choice in body["choices"]]
    assert beginnings == ["one 0", "one 1", "two 0", "two 1", "three 0", "three 1"]
    num_prompt_tokens = sum(len(stack.tokenizer.encode(prompt)) for prompt in PROMPTS)
    num_tokens = sum(len(choice["text"]) + 1 for choice in body["choices"])  # a token a byte, and the end of the turn
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt_tokens, num_tokens)
    assert usage["total_tokens"] == num_prompt_tokens + num_tokens
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert stack.sample("jetspec_generation_tokens_total") == num_tokens
    assert stack.sample("jetspec_requests_total", finished_reason="stop") == 1
    assert stack.engine.num_live == 0


async def test_stream_of_many_choices_equals_the_whole_answer(stack: Stack) -> None:
    stack.verifier.plan.round_s = 0.001
    answers_by_prompt_and_seed(stack)
    whole = (await stack.complete(prompt=PROMPTS, n=2, max_tokens=100)).json()
    answers_by_prompt_and_seed(stack)
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await stack.stream(prompt=PROMPTS, n=2, max_tokens=100, stream_options=options)
    for choice in whole["choices"]:
        parts = stream.choices(choice["index"])
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["stop"]
        assert parts[-1]["finish_reason"] == "stop"
    assert stream.events[-1]["choices"] == []
    assert stream.events[-1]["usage"] == whole["usage"]
    counts = [event["usage"]["completion_tokens"] for event in stream.events]
    assert counts == sorted(counts)
    indices = [event["choices"][0]["index"] for event in stream.events[:-1]]
    assert indices != sorted(indices), "the choices come as they are made, not one after the other"


async def test_prompts_of_every_form(stack: Stack) -> None:
    ids = [stack.tokenizer.encode(prompt) for prompt in PROMPTS]
    for prompt in (PROMPTS, ids):
        assert (await stack.complete(prompt=prompt)).status_code == 200
    assert [submit.prompt_token_ids for submit in stack.verifier.submitted] == ids * 2


async def test_chat_with_several_choices(stack: Stack) -> None:
    body = (await stack.chat(n=3)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in body["choices"]} == {"A short answer."}
    assert body["usage"]["prompt_tokens"] == len(stack.verifier.submitted[0].prompt_token_ids)
    stream = Stream((await stack.chat(n=3, stream=True)).text)
    for index in range(3):
        deltas = [part["delta"] for part in stream.choices(index)]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == "A short answer."
        assert deltas[-1] == {}


async def test_seeds_of_choices_are_derived_and_independent_of_the_other_prompts(stack: Stack) -> None:
    async def seeds(**body: Any) -> list[int]:
        stack.verifier.submitted.clear()
        assert (await stack.complete(**body)).status_code == 200
        return [submit.sampling.seed for submit in stack.verifier.submitted]

    four = await seeds(n=4, seed=11)
    assert four[0] == 11
    assert len(set(four)) == 4
    assert await seeds(n=4, seed=11) == four
    assert await seeds(n=2, seed=11) == four[:2]
    assert await seeds(n=2, seed=11, prompt=["a", "b"]) == four[:2] * 2
    assert len(set(await seeds(n=4, seed=None))) == 4
    assert set(four[1:]).isdisjoint(await seeds(n=4, seed=12))


async def test_choices_of_a_greedy_request_are_equal_texts(stack: Stack) -> None:
    body = (await stack.complete(n=2, temperature=0)).json()
    assert [choice["text"] for choice in body["choices"]] == ["A short answer."] * 2


async def test_best_of_keeps_the_likeliest(stack: Stack) -> None:
    texts = ["c", "bb", "aaaa", "ab"]
    stack.verifier.plan.tokens = lambda submit: [*stack.tokenizer.encode(texts[submit.sequence_id % 4]), 2]

    def mean(text: str) -> float:
        values = [made_up_logprobs(token_id, 0).logprob for token_id in stack.tokenizer.encode(text)]
        return sum(values) / len(values)

    means = {text: mean(text) for text in texts}
    assert len(set(means.values())) == 4
    ranked = sorted(texts, key=lambda text: -means[text])
    body = (await stack.complete(n=2, best_of=4)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, ranked[0]), (1, ranked[1])]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == sum(len(text) + 1 for text in texts)
    both = (await stack.complete(prompt=["x", "y"], n=1, best_of=4)).json()
    assert [(choice["index"], choice["text"]) for choice in both["choices"]] == [(0, ranked[0]), (1, ranked[0])]


async def test_an_empty_text_is_never_the_best(stack: Stack) -> None:
    texts = ["", "ccc"]
    stack.verifier.plan.tokens = lambda submit: [*stack.tokenizer.encode(texts[submit.sequence_id % 2]), 2]
    assert await stack.text(best_of=2) == "ccc"


async def test_one_failure_ends_all_choices(stack: Stack) -> None:
    stack.says("abcdefgh", ends=False)
    stack.verifier.plan.round_s = 0.002
    original = stack.verifier.plan.tokens
    stack.verifier.plan.fail_after = 30
    stack.verifier.plan.tokens = lambda submit: original(submit)
    response = await stack.complete(n=3, max_tokens=200)
    check_error(response, 500, "internal_error")
    await asyncio.sleep(0.05)
    assert stack.engine.num_live == 0
    assert stack.sample("jetspec_requests_total", finished_reason="error") == 1
    stream = await stack.stream(n=3, max_tokens=200)
    assert stream.events[-1]["error"]["code"] == "internal_error"
    assert sum("error" in event for event in stream.events) == 1
    assert stream.finish_reasons == []


async def test_a_stop_string_ends_one_choice_and_not_the_others(stack: Stack) -> None:
    stack.verifier.plan.round_s = 0.002
    texts = ["ab STOP cd" + "e" * 100, "f" * 60]
    stack.verifier.plan.tokens = lambda submit: [*stack.tokenizer.encode(texts[submit.sequence_id % 2]), 2]
    body = (await stack.complete(n=2, stop=" STOP", max_tokens=100)).json()
    assert [choice["text"] for choice in body["choices"]] == ["ab", "f" * 60]
    assert [choice["stop_reason"] for choice in body["choices"]] == [" STOP", None]
    await asyncio.sleep(0.02)
    assert stack.verifier.aborted == [0]


async def test_limits_of_one_request(make_stack: StackFactory) -> None:
    async with make_stack(max_n=3, max_num_prompts=4, max_num_choices=6) as stack:
        check_error(await stack.complete(n=4), 400, param="n")
        check_error(await stack.chat(n=4), 400, param="n")
        check_error(await stack.complete(n=1, best_of=4), 400, param="best_of")
        check_error(await stack.complete(prompt=["a"] * 5), 400, param="prompt")
        check_error(await stack.complete(prompt=["a"] * 4, n=2), 400, param="n")
        assert stack.verifier.submitted == []
        assert (await stack.complete(prompt=["a"] * 3, n=2)).status_code == 200
    async with make_stack(max_total_prompt_tokens=20, max_total_new_tokens=64) as stack:
        check_error(await stack.complete(prompt=["x" * 11, "y" * 10]), 400, param="prompt")
        check_error(await stack.complete(n=5), 400, param="max_tokens")  # sixteen each, where nothing is said
        assert (await stack.complete(prompt=["x" * 10, "y" * 10])).status_code == 200


async def test_a_request_that_could_never_run_is_refused_and_one_that_may_later_is_told_to_wait(
    make_stack: StackFactory,
) -> None:
    async with make_stack(max_num_seqs=1, max_num_queued_reqs=2) as stack:
        check_error(await stack.complete(n=4), 400, param="n")
        stack.says("abc", ends=False)
        stack.verifier.plan.round_s = 0.02
        running = asyncio.create_task(stack.complete(max_tokens=60, n=2))
        while stack.engine.num_live < 2:
            await asyncio.sleep(0.001)
        check_error(await stack.complete(n=2), 429, "rate_limit_exceeded")
        assert len(stack.verifier.submitted) == 2, "all sequences of a request are taken, or none"
        assert (await running).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_takes_all_its_choices_along(stack: Stack, stream: bool) -> None:
    stack.says("abcdefgh", ends=False)
    stack.verifier.plan.round_s = 0.01
    for _ in range(20):
        task = asyncio.create_task(stack.complete(n=4, max_tokens=400, stream=stream))
        while stack.engine.num_live < 4:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while stack.engine.num_live:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.1)
    assert sorted(stack.verifier.aborted) == list(range(80))
    stack.verifier.plan.round_s = 0.0
    assert await stack.text(max_tokens=8) == "abcdefgh"
