"""The HTTP interface over a real verifier and a real drafter: what clients see is exact under speculation, too."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from protocol.memory_channel import AsyncMemoryChannel
from server.app import create_app
from server.config import ServeConfig
from server.engine import Engine as FrontendEngine
from server.metrics import Metrics
from server.state import ServedModel, ServerState
from server.tokenizer import Tokenizer
from tests.server.conftest import Stream
from tests.tiny.engine import Engine, EngineOptions
from tests.tiny.models import TinyModels

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_DRAFT_TOKENS = 4
FLAT = {"94": -30, "95": -30, "100": -30}  # blanks, which a random target would write for ever
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "string", "maxLength": 5}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class Server:
    """A client of the application."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def complete(self, **body: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        response = await self.client.post("/v1/completions", json={"prompt": "abc", "temperature": 0, **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def stream(self, **body: Any) -> Stream:
        """A streamed completion."""
        body = {"prompt": "abc", "temperature": 0, "stream": True, **body}
        return Stream((await self.client.post("/v1/completions", json=body)).text)

    async def both(self, **body: Any) -> list[dict[str, Any]]:
        """The choices with speculation, which must be those without."""
        plain = await self.complete(**body, speculative=False)
        drafted = await self.complete(**body)
        assert drafted["choices"] == plain["choices"]
        choices: list[dict[str, Any]] = drafted["choices"]
        return choices


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(models: TinyModels) -> AsyncIterator[Server]:
    with Engine(models, options=EngineOptions(max_model_len=128)) as workers:
        workers.attach_real()
        metrics = Metrics(NUM_DRAFT_TOKENS)
        engine = FrontendEngine(
            AsyncMemoryChannel(workers.frontend), metrics, max_num_seqs=4, max_num_queued=60, watchdog_timeout_s=60.0
        )
        await engine.start()
        await engine.wait_until_ready(30.0)
        model = ServedModel(("tiny",), Tokenizer.load(models.tokenizer()), "tiny")
        state = ServerState(ServeConfig(max_num_queued_reqs=60), metrics, model, engine, True)
        transport = httpx.ASGITransport(create_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60.0) as client:
            try:
                yield Server(client)
            finally:
                await engine.stop()


async def test_sampling_parameters_act_and_are_exact(server: Server) -> None:
    base = (await server.both(max_tokens=40))[0]["text"]
    changes: list[dict[str, Any]] = [
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1.5},
        {"logit_bias": FLAT},
        {"temperature": 1.0, "seed": 3, "min_p": 0.01, "top_k": 50, "top_p": 0.99},
    ]
    for change in changes:
        assert (await server.both(max_tokens=40, **change))[0]["text"] != base, change


async def test_stops_cut_where_plain_text_does(server: Server) -> None:
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 40}
    text = (await server.both(**sampled))[0]["text"]
    for stop in (text[7:9], text[10:15], text[-3:] + "ZZZ", [text[20:22], text[12:16]]):
        choice = (await server.both(**sampled, stop=stop))[0]
        stops = [stop] if isinstance(stop, str) else stop
        ends = [text.find(item) for item in stops if item in text]
        assert choice["text"] == text[: min(ends, default=len(text))]
        stream = await server.stream(**sampled, stop=stop)
        assert stream.text == choice["text"]
        assert stream.finish_reasons == [choice["finish_reason"]]
    for limit in (9, 10):  # the stop string is complete with the tokens that the limit allows
        choice = (await server.both(**sampled | {"max_tokens": limit}, stop=text[7:9]))[0]
        assert (choice["text"], choice["finish_reason"]) == (text[: text.find(text[7:9])], "stop")


async def test_choices_and_prompts_do_not_depend_on_their_company(server: Server) -> None:
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 9, "max_tokens": 20, "logprobs": 2, "echo": True}
    many = await server.complete(prompt=["abc", "xyz"], n=3, **sampled)
    assert [choice["index"] for choice in many["choices"]] == list(range(6))
    assert len({choice["text"] for choice in many["choices"]}) == 6
    for place, prompt in ((0, "abc"), (3, "xyz")):
        alone = await server.complete(prompt=prompt, **sampled)
        assert alone["choices"][0] | {"index": place} == many["choices"][place]
    stream = await server.stream(prompt=["abc", "xyz"], n=3, **sampled)
    for choice in many["choices"]:
        parts = stream.choices(choice["index"])
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert stream.logprobs(choice["index"]) == choice["logprobs"]


async def test_best_of_is_the_best(server: Server) -> None:
    sampled: dict[str, Any] = {"temperature": 1.5, "seed": 1, "max_tokens": 12, "ignore_eos": True, "logprobs": 0}
    every = (await server.complete(n=5, **sampled))["choices"]

    def mean(choice: dict[str, Any]) -> float:
        values: list[float] = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values)

    ranked = sorted(every, key=mean, reverse=True)
    best = (await server.complete(n=2, best_of=5, **sampled))["choices"]
    assert [choice["text"] for choice in best] == [choice["text"] for choice in ranked[:2]]


async def test_a_text_scored_as_a_prompt_has_the_log_probabilities_it_was_written_with(server: Server) -> None:
    """What evaluation harnesses rely on: echo of a prompt gives the numbers of its generation."""
    ask: dict[str, Any] = {"logprobs": 3, "echo": True, "return_token_ids": True}
    written = (await server.both(temperature=1.0, seed=2, max_tokens=24, ignore_eos=True, **ask))[0]
    token_ids = [*written["prompt_token_ids"], *written["token_ids"]]
    for max_tokens in (0, 1):
        scored, other = await asyncio.gather(
            server.complete(prompt=[token_ids], max_tokens=max_tokens, **ask),
            server.complete(prompt="zzz", max_tokens=30),  # company must not matter
        )
        assert other["usage"]["completion_tokens"] > 0
        found, expected = scored["choices"][0]["logprobs"], written["logprobs"]
        num_tokens = len(token_ids)
        assert found["tokens"][:num_tokens] == expected["tokens"]
        assert found["text_offset"][:num_tokens] == expected["text_offset"]
        assert found["token_logprobs"][0] is None
        assert found["token_logprobs"][1:num_tokens] == pytest.approx(expected["token_logprobs"][1:], abs=1e-3)
        for ours, theirs in zip(found["top_logprobs"][1:num_tokens], expected["top_logprobs"][1:], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_structured_answers_are_valid(server: Server, temperature: float) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    body: dict[str, Any] = {"temperature": temperature, "seed": 4, "max_tokens": 80, "n": 3, "logit_bias": FLAT}
    for choice in await server.both(**body, response_format=wanted):
        assert choice["finish_reason"] == "stop"
        value = json.loads(choice["text"])
        assert set(value) == {"a", "b"}
        assert isinstance(value["a"], bool)
        assert isinstance(value["b"], str)
    for choice in await server.both(**body, structured_outputs={"choice": ["abc", "xyz"]}):
        assert choice["text"] in ("abc", "xyz")
    stream = await server.stream(**body, response_format=wanted)
    assert len(stream.finish_reasons) == 3
    for index in range(3):
        json.loads("".join(part["text"] for part in stream.choices(index)))


async def test_a_grammar_that_cannot_be_used_names_its_parameter(server: Server) -> None:
    for body in ({"structured_outputs": {"regex": "(?=a)b"}}, {"structured_outputs": {"grammar": "no grammar"}}):
        response = await server.client.post("/v1/completions", json={"prompt": "abc", **body})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "structured_outputs"
    assert (await server.complete(max_tokens=4))["usage"]["completion_tokens"] == 4
