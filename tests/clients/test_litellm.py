"""LiteLLM: both APIs, streams, and its mapping of errors."""

from typing import Any

import litellm
import pytest

from tests.clients.servers import Server

MESSAGES = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def options(server: Server) -> dict[str, Any]:
    litellm.telemetry = False
    return {"api_base": server.base_url, "api_key": "EMPTY", "temperature": 0, "max_tokens": 8, "num_retries": 0}


def test_chat_and_its_stream(options: dict[str, Any]) -> None:
    whole = litellm.completion(model="openai/demo", messages=MESSAGES, **options)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens <= 8
    body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(model="openai/demo", messages=MESSAGES, **options, **body))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)] == [
        whole.usage.completion_tokens
    ]


def test_completion_with_echo_and_log_probabilities(options: dict[str, Any]) -> None:
    prompt = "The capital of France is"
    answer = litellm.text_completion(
        model="text-completion-openai/demo", prompt=prompt, echo=True, logprobs=1, **options
    )
    choice = answer.choices[0]
    assert choice.text.startswith(prompt) and "Paris" in choice.text
    assert len(choice.logprobs.tokens) == answer.usage.total_tokens
    assert choice.logprobs.token_logprobs[0] is None
    stream = litellm.text_completion(model="text-completion-openai/demo", prompt=prompt, stream=True, **options)
    assert prompt + "".join(chunk.choices[0].text or "" for chunk in stream) == choice.text


def test_errors(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/other", messages=MESSAGES, **options)
    long = [{"role": "user", "content": "word " * 2000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(model="openai/demo", messages=long, **options)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(model="openai/demo", messages=MESSAGES, **{**options, "temperature": 3.0})
