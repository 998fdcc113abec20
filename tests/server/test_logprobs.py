"""Log-probabilities in all shapes, echoed prompts, and where tokens begin in a text."""

from typing import Any

import pytest

from tests.server.conftest import Stack, StackFactory, Stream
from tests.server.fakes import made_up_logprobs
from tests.server.test_errors import check_error

MIXED = "naïve 👩‍🚀 日本 ok"


def check_offsets(text: str, logprobs: dict[str, list[Any]]) -> None:
    """`text[offset:]` begins with the token; one that is a part of a character begins where the character does."""
    assert len({len(values) for values in logprobs.values()}) == 1
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if token.startswith("bytes:"):
            data = bytes(int(part, 16) for part in token.removeprefix("bytes:").split("\\x")[1:])
            assert data in text[offset].encode() or "\ufffd" in text[offset]
        else:
            assert text[offset:].startswith(token), (token, offset)


async def test_completion_shape(stack: Stack) -> None:
    stack.says("abc")
    choice = (await stack.complete(logprobs=2, max_tokens=10)).json()["choices"][0]
    ids = stack.tokenizer.encode("abc")
    expected = [made_up_logprobs(token_id, 2) for token_id in ids]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [item.logprob for item in expected]
    assert logprobs["text_offset"] == [0, 1, 2]
    for token, item, top in zip("abc", expected, logprobs["top_logprobs"], strict=True):
        spelled = {stack.tokenizer.spelling.spelling_of(other.token_id): other.logprob for other in item.top}
        assert top == spelled | {token: item.logprob}
    sizes = [len(top) for top in logprobs["top_logprobs"]]
    assert set(sizes) == {2, 3}, "the token itself is there, whether or not it is one of the likeliest"


async def test_zero_shows_the_tokens_alone(stack: Stack) -> None:
    stack.says("abc")
    logprobs = (await stack.complete(logprobs=0)).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [
        {"a": -0.5 * made_up_logprobs(stack.tokenizer.encode("a")[0], 0).rank},
        *logprobs["top_logprobs"][1:],
    ]
    assert all(len(top) == 1 for top in logprobs["top_logprobs"])
    assert stack.verifier.submitted[0].num_logprobs == 0


async def test_chat_shape(stack: Stack) -> None:
    stack.says("aé")
    body = (await stack.chat(logprobs=True, top_logprobs=3)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in content] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert bytes(byte for item in content for byte in item["bytes"]).decode() == "aé"
    for item, token_id in zip(content, stack.tokenizer.encode("aé"), strict=True):
        values = made_up_logprobs(token_id, 3)
        assert item["logprob"] == values.logprob
        assert [top["logprob"] for top in item["top_logprobs"]] == [top.logprob for top in values.top]
    assert (await stack.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    stream = Stream((await stack.chat(logprobs=True, top_logprobs=3, stream=True)).text)
    assert stream.logprobs()["content"] == content


@pytest.mark.parametrize("block", [1, 2, 5, 8])
@pytest.mark.parametrize("echo", [False, True])
async def test_offsets_in_whole_answers_and_streams(stack: Stack, block: int, echo: bool) -> None:
    stack.says(MIXED)
    stack.verifier.plan.block = block
    body: dict[str, Any] = {"prompt": "é 日 x", "max_tokens": 100, "logprobs": 2, "echo": echo}
    whole = (await stack.complete(**body)).json()["choices"][0]
    assert whole["text"] == ("é 日 x" if echo else "") + MIXED
    check_offsets(whole["text"], whole["logprobs"])
    stream = await stack.stream(**body)
    assert stream.text == whole["text"]
    assert stream.logprobs() == whole["logprobs"]
    num_tokens = len(stack.tokenizer.encode(MIXED)) + (len(stack.tokenizer.encode("é 日 x")) if echo else 0)
    assert len(whole["logprobs"]["tokens"]) == num_tokens


@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize("include", [False, True])
async def test_tokens_of_a_text_that_was_cut_off_are_not_shown(stack: Stack, block: int, include: bool) -> None:
    stack.says("one two three four")
    stack.verifier.plan.block = block
    body: dict[str, Any] = {"max_tokens": 100, "stop": "o thr", "logprobs": 0, "include_stop_str_in_output": include}
    whole = (await stack.complete(**body)).json()["choices"][0]
    assert "".join(whole["logprobs"]["tokens"]) == whole["text"] == ("one two thr" if include else "one tw")
    stream = await stack.stream(**body)
    assert (stream.text, stream.logprobs()) == (whole["text"], whole["logprobs"])
    for part in stream.choices():
        assert "".join((part["logprobs"] or {"tokens": []})["tokens"]) == part["text"], (
            "log-probabilities go with their text"
        )


async def test_tokens_held_back_for_a_stop_that_never_completes_are_shown_at_the_end(stack: Stack) -> None:
    stack.says("one two three")
    stream = await stack.stream(max_tokens=100, stop=["reeZZZ"], logprobs=1)
    assert "".join(stream.logprobs()["tokens"]) == stream.text == "one two three"


async def test_tokens_as_ids(stack: Stack) -> None:
    stack.says("ab")
    body: dict[str, Any] = {"logprobs": 2, "return_tokens_as_token_ids": True}
    logprobs = (await stack.complete(**body)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token_id}" for token_id in stack.tokenizer.encode("ab")]
    assert all(name.startswith("token_id:") for top in logprobs["top_logprobs"] for name in top)
    chat = (await stack.chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)).json()
    assert chat["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")


# --- echo


async def test_echo_without_logprobs(stack: Stack) -> None:
    ids = stack.tokenizer.encode("é <|im_start|>x")
    for prompt in ("é <|im_start|>x", ids):
        assert await stack.text(prompt=prompt, echo=True) == "é <|im_start|>xA short answer."
        assert (await stack.stream(prompt=prompt, echo=True)).text == "é <|im_start|>xA short answer."
    assert stack.verifier.submitted[0].num_prompt_logprobs is None


async def test_echo_alone_needs_no_engine(stack: Stack) -> None:
    body = (await stack.complete(prompt=["one", "two"], echo=True, max_tokens=0)).json()
    assert [choice["text"] for choice in body["choices"]] == ["one", "two"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * 2
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["prompt_tokens"] == 6
    stream = await stack.stream(prompt=["one", "two"], echo=True, max_tokens=0)
    assert [stream.choices(index)[0]["text"] for index in (0, 1)] == ["one", "two"]
    assert stream.finish_reasons == ["length"] * 2
    assert stack.verifier.submitted == []
    assert stack.sample("jetspec_requests_total", finished_reason="length") == 2


@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_what_evaluation_harnesses_send(stack: Stack, num_tokens: int) -> None:
    """Log-likelihoods: token ids, echo, logprobs, and no token or one. lm-eval reads `[context:-1]` of the lists."""
    stack.says("zz", ends=False)
    prompts = [stack.tokenizer.encode(text) for text in ("the cat sat", "a dog")]
    body: dict[str, Any] = {"prompt": prompts, "max_tokens": num_tokens, "logprobs": 1, "echo": True, "seed": 1234}
    answer = (await stack.complete(**body)).json()
    for choice, ids in zip(answer["choices"], prompts, strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(ids) + num_tokens
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        expected = [made_up_logprobs(token_id, 1) for token_id in ids[1:]]
        assert logprobs["token_logprobs"][1 : len(ids)] == [item.logprob for item in expected]
        for token, top, item in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], expected, strict=False):
            assert (max(top, key=top.__getitem__) == token) == (item.rank == 1)
        check_offsets(choice["text"], logprobs)
    assert answer["usage"]["completion_tokens"] == 2 * num_tokens
    assert stack.sample("jetspec_generation_tokens_total") == 2 * num_tokens
    assert (await stack.stream(**body)).logprobs(1) == answer["choices"][1]["logprobs"]
    assert stack.engine.num_live == 0


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
async def test_prompt_that_ends_inside_a_character(stack: Stack, num_tokens: int) -> None:
    """The text goes on inside the character; without echo the rest of it is no text of its own."""
    whole = stack.tokenizer.encode("x日")
    rest = stack.tokenizer.encode("日y")[-2:]  # the character's last byte, and a letter
    stack.verifier.plan.tokens = lambda submit: [*rest, 2, *rest * 10]
    body: dict[str, Any] = {"prompt": whole[:-1], "max_tokens": num_tokens, "echo": True}
    expected = {0: "x\ufffd", 1: "x日", 5: "x日y"}[num_tokens]
    assert await stack.text(**body) == (await stack.stream(**body)).text == expected
    with_logprobs = (await stack.complete(**body, logprobs=0)).json()["choices"][0]
    assert with_logprobs["text"] == expected
    if num_tokens:
        check_offsets(expected, with_logprobs["logprobs"])
        assert await stack.text(prompt=whole[:-1], max_tokens=num_tokens) == expected.replace("x日", "\ufffd")


async def test_echo_counts_for_every_choice(stack: Stack) -> None:
    body = (await stack.complete(prompt=["one ", "two "], n=2, echo=True)).json()
    assert [choice["text"] for choice in body["choices"]] == [
        f"{prompt} A short answer." for prompt in ("one", "one", "two", "two")
    ]


# --- prompt_logprobs


async def test_prompt_logprobs(stack: Stack) -> None:
    ids = stack.tokenizer.encode("abcd")
    choice = (await stack.complete(prompt="abcd", prompt_logprobs=2)).json()["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token_id, shown in zip(ids[1:], others, strict=True):
        values = made_up_logprobs(token_id, 2)
        assert shown[str(token_id)] == {
            "logprob": values.logprob,
            "rank": values.rank,
            "decoded_token": stack.tokenizer.decode([token_id]),
        }
        assert len(shown) == (2 if values.rank <= 2 else 3)
    assert choice["logprobs"] is None
    body = (await stack.chat(prompt_logprobs=0)).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert stack.verifier.submitted[-1].num_prompt_logprobs == 0


async def test_prompt_logprobs_need_no_completion(stack: Stack) -> None:
    body = (await stack.complete(prompt="abcd", prompt_logprobs=1, max_tokens=0)).json()
    assert len(body["choices"][0]["prompt_logprobs"]) == 4
    assert body["choices"][0]["text"] == ""
    assert body["usage"]["completion_tokens"] == 0


async def test_more_for_the_prompt_than_for_the_text(stack: Stack) -> None:
    body = (await stack.complete(prompt="abcd", prompt_logprobs=4, logprobs=1, echo=True)).json()
    choice = body["choices"][0]
    assert stack.verifier.submitted[0].num_prompt_logprobs == 4
    assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])
    assert all(len(shown) >= 4 for shown in choice["prompt_logprobs"][1:])


async def test_prompt_of_one_token(stack: Stack) -> None:
    choice = (await stack.complete(prompt=[70], echo=True, logprobs=1, prompt_logprobs=1)).json()["choices"][0]
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["token_logprobs"][0] is None


async def test_limits(make_stack: StackFactory) -> None:
    async with make_stack(max_logprobs=3) as stack:
        for wrong in (
            {"logprobs": 4},
            {"prompt_logprobs": 4},
            {"logprobs": -1},
            {"prompt_logprobs": 1, "stream": True},
        ):
            check_error(await stack.complete(**wrong), 400, param=next(iter(wrong)))
        check_error(await stack.complete(logprobs=True), 400, param="logprobs")
        check_error(await stack.chat(logprobs=True, top_logprobs=4), 400, param="top_logprobs")
        check_error(await stack.chat(top_logprobs=1), 400, param="top_logprobs")
        check_error(await stack.chat(logprobs=1), 400, param="logprobs")
        assert (await stack.complete(logprobs=3, prompt_logprobs=3)).status_code == 200
        assert (await stack.chat(logprobs=False, top_logprobs=0)).status_code == 200
