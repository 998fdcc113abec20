"""LangChain: sends null for what it does not set, and prompts as lists."""

from typing import Any

import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.clients.servers import Server


@pytest.fixture
def options(server: Server) -> dict[str, Any]:
    return {
        "model": "demo",
        "base_url": server.base_url,
        "api_key": "EMPTY",
        "temperature": 0,
        "max_tokens": 10,
        "max_retries": 0,
    }


def test_completions(options: dict[str, Any]) -> None:
    model = OpenAI(**options)
    text = model.invoke("The capital of France is")
    assert "Paris" in text
    assert "".join(model.stream("The capital of France is")) == text
    answer = model.generate(["The capital of France is", "One, two, three,"])
    assert answer.generations[0][0].text == text
    assert answer.llm_output is not None
    assert answer.llm_output["token_usage"]["completion_tokens"] == 20


def test_chat(options: dict[str, Any]) -> None:
    model = ChatOpenAI(**options, stream_usage=True)
    whole = model.invoke([HumanMessage("Say hello.")])
    assert whole.content and whole.usage_metadata is not None
    joined = None
    for chunk in model.stream([HumanMessage("Say hello.")]):
        joined = chunk if joined is None else joined + chunk
    assert joined is not None and joined.content == whole.content
    assert joined.usage_metadata is not None
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    batch = model.batch(["Say hello.", "Say hello."])
    assert [answer.content for answer in batch] == [whole.content] * 2


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12, pattern="^[A-Z][a-z]+$")
    is_capital: bool


def test_structured_output(options: dict[str, Any]) -> None:
    model = ChatOpenAI(**{**options, "max_tokens": 60}).with_structured_output(City, method="json_schema")
    assert isinstance(model.invoke("Paris is the capital of France. Name the city."), City)


def test_a_prompt_that_is_too_long_is_recognised(options: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
        ChatOpenAI(**options).invoke("word " * 2000)
    assert refused.value.code == "context_length_exceeded"
