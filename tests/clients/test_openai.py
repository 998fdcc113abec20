"""OpenAI's own client: completions, chat, streams, usage, errors, retries, and clients that leave."""

import threading
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.clients.servers import Server, scripted_server

PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Say hello."}],
    "temperature": 0,
    "max_tokens": 12,
}


def connect(server: Server, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="EMPTY", **options)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return connect(server, max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    assert "demo" in [model.id for model in client.models.list()]
    assert client.models.retrieve("demo").object == "model"


def test_completion_stream_and_plain_decoding_agree(client: openai.OpenAI) -> None:
    whole = client.completions.create(**GREEDY)
    plain = client.completions.create(**GREEDY, extra_body={"speculative": False})
    chunks = list(client.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    assert "Paris" in whole.choices[0].text
    assert whole.choices[0].text == plain.choices[0].text
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert chunks[-1].usage.total_tokens == whole.usage.prompt_tokens + 12
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"


def test_choices_with_seeds_stops_and_log_probabilities(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {**GREEDY, "temperature": 1.0, "seed": 3, "max_tokens": 6, "logprobs": 2}
    answer = client.completions.create(**body, n=2)
    again = client.completions.create(**body, n=2)
    assert [choice.text for choice in answer.choices] == [choice.text for choice in again.choices]
    assert answer.choices[0].text != answer.choices[1].text
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.top_logprobs is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert all(len(top) >= 2 for top in logprobs.top_logprobs)
    stop = answer.choices[0].text[-4:]
    stopped = client.completions.create(**body, stop=[stop])
    assert stopped.choices[0].text == answer.choices[0].text.partition(stop)[0]
    assert stopped.choices[0].finish_reason == "stop"


def test_chat_and_its_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=1)
    text = whole.choices[0].message.content
    assert text and whole.usage is not None and whole.choices[0].logprobs is not None
    assert whole.usage.completion_tokens_details is not None
    accepted = whole.usage.completion_tokens_details.accepted_prediction_tokens
    assert accepted is not None and 0 <= accepted <= whole.usage.completion_tokens
    content = whole.choices[0].logprobs.content
    assert content is not None and "".join(item.token for item in content).startswith(text)
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


class Answer(BaseModel):
    """What a structured answer must be."""

    colour: Literal["red", "green", "blue"]
    is_warm: bool


def test_structured_answers(client: openai.OpenAI) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "What colour is the sky?"}], "max_tokens": 60}
    parsed = client.chat.completions.parse(**body, response_format=Answer).choices[0].message.parsed
    assert isinstance(parsed, Answer)


def test_errors_have_classes_codes_and_ids(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(**{**GREEDY, "model": "other"})
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(**{**GREEDY, "prompt": "word " * 2000})
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**{**CHAT, "temperature": 3.0})
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="demo", input="text")


def test_raw_responses_carry_the_request_id(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        **{**GREEDY, "max_tokens": 1}, extra_headers={"X-Request-Id": "a-1"}
    )
    assert raw.headers["x-request-id"] == "a-1"
    assert raw.parse().choices[0].finish_reason == "length"


def test_a_stream_that_is_closed_ends_its_request(server: Server, client: openai.OpenAI) -> None:
    server.wait_for_rest()
    stream = client.completions.create(**{**GREEDY, "max_tokens": 400}, stream=True)
    next(iter(stream))
    server.wait_until(lambda samples: samples["jetspec_num_requests_running"] == 1)
    before = server.samples()["jetspec_client_disconnects_total"]
    stream.close()
    server.wait_for_rest()
    server.wait_until(lambda samples: samples["jetspec_client_disconnects_total"] == before + 1)


def test_a_full_queue_is_tried_again(tmp_path: Path) -> None:
    """The client waits as long as the server tells it to, and gets its answer in the end."""
    with scripted_server(tmp_path, "--max-num-seqs", "1", "--max-num-queued-reqs", "1", FAKE_ROUND_S="0.1") as scripted:
        body: dict[str, Any] = {"model": tmp_path.name, "prompt": "hi", "max_tokens": 20, "temperature": 0}
        patient, impatient = connect(scripted, max_retries=50), connect(scripted, max_retries=0)
        long = {**body, "max_tokens": 300}  # 75 rounds, longer than the first refusals take
        runners = [threading.Thread(target=patient.completions.create, kwargs=long) for _ in range(2)]
        for runner in runners:
            runner.start()
        while sum(scripted.samples()[f"jetspec_num_requests_{name}"] for name in ("running", "waiting")) < 2:
            assert any(runner.is_alive() for runner in runners)
        with pytest.raises(openai.RateLimitError) as refused:
            impatient.completions.create(**body)
        assert refused.value.code == "rate_limit_exceeded"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert patient.completions.create(**body).choices[0].text == "abcdefgh" * 2 + "abcd"
        for runner in runners:
            runner.join()


def test_a_failure_in_mid_stream_is_raised(tmp_path: Path) -> None:
    """S27: the text so far arrives, then an exception; not a text that looks finished."""
    with scripted_server(tmp_path, FAKE_DIE_AFTER="20", FAKE_ROUND_S="0.02") as scripted:
        client = connect(scripted, max_retries=0)
        stream = client.completions.create(model=tmp_path.name, prompt="hi", max_tokens=200, stream=True)
        with pytest.raises(openai.APIError) as failed:
            assert not [chunk for chunk in stream if chunk.choices[0].finish_reason]
        assert failed.value.code == "service_unavailable"
