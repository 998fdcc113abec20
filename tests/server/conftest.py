"""The server over a fake verifier in the same event loop."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from protocol.memory_channel import AsyncMemoryChannel, memory_pair
from protocol.messages import FRONTEND_MESSAGES
from server.app import create_app
from server.build import Weights
from server.config import ServeConfig
from server.engine import Engine
from server.keys import load_keys
from server.metrics import Metrics
from server.state import ServedModel, ServerState
from server.tokenizer import Tokenizer
from tests.server.fakes import NUM_DRAFT_TOKENS, FakeVerifier, Plan, make_model_folder
from tests.server.server_process import FAKES, ProcessFactory, ServerProcess, serve_process

RUN_ID = "0" * 32


@dataclass
class Stack:
    """Everything a test may want to look at or to break."""

    app: FastAPI
    client: httpx.AsyncClient
    state: ServerState
    engine: Engine
    metrics: Metrics
    verifier: FakeVerifier
    tokenizer: Tokenizer

    def says(self, text: str, *, ends: bool = True) -> None:
        """From now on every sequence is this text, then the end of the turn (or the text over and over)."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        tokens = [*ids, 2, *ids * 20] if ends else ids * 200
        self.verifier.plan.tokens = lambda submit: tokens

    async def complete(self, **body: object) -> httpx.Response:
        """POST /v1/completions."""
        return await self.client.post("/v1/completions", json={"prompt": "hi", "temperature": 0, **body})

    async def chat(self, text: str = "hi", **body: object) -> httpx.Response:
        """POST /v1/chat/completions with one message, unless messages are given."""
        messages = [{"role": "user", "content": text}]
        return await self.client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **body})

    async def text(self, **body: object) -> str:
        """The text of a completion that must succeed."""
        response = await self.complete(**body)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text

    async def stream(self, **body: object) -> "Stream":
        """A streamed completion, parsed."""
        response = await self.complete(**body, stream=True)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return Stream(response.text)

    def sample(self, name: str, **labels: str) -> float:
        """The value of a metric; a missing one fails the test."""
        value = self.metrics.registry.get_sample_value(name, labels)
        assert value is not None, (name, labels)
        return value


@dataclass
class Stream:
    """The events of a stream."""

    raw: str
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        blocks = self.raw.split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""], self.raw[-200:]
        self.events = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]

    @property
    def text(self) -> str:
        """All text of completions, put together."""
        return "".join(choice["text"] for choice in self.choices())

    def choices(self, index: int | None = None) -> list[dict[str, Any]]:
        """The parts of every choice, or of one, in order."""
        parts = [choice for event in self.events for choice in event.get("choices", [])]
        return [part for part in parts if index is None or part["index"] == index]

    def logprobs(self, index: int = 0) -> dict[str, list[Any]]:
        """The lists of a choice's log-probabilities, put together; an error where a chunk has none."""
        joined: dict[str, list[Any]] = {}
        for part in self.choices(index):
            for name, values in (part["logprobs"] or {}).items():
                joined.setdefault(name, []).extend(values or [])
        return joined

    @property
    def finish_reasons(self) -> list[str]:
        """Every finish reason given."""
        reasons = [choice["finish_reason"] for event in self.events for choice in event.get("choices", [])]
        return [reason for reason in reasons if reason is not None]


StackFactory = Callable[..., AbstractAsyncContextManager[Stack]]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


@pytest.fixture
def make_stack(tokenizer: Tokenizer) -> StackFactory:
    @asynccontextmanager
    async def make(**settings: Any) -> AsyncIterator[Stack]:
        config = ServeConfig(**settings)
        metrics = Metrics(NUM_DRAFT_TOKENS)
        ours, theirs = memory_pair(RUN_ID, FRONTEND_MESSAGES)
        engine = Engine(
            AsyncMemoryChannel(ours),
            metrics,
            max_num_seqs=config.max_num_seqs,
            max_num_queued=config.max_num_queued_reqs,
            watchdog_timeout_s=config.watchdog_timeout,
        )
        verifier = FakeVerifier(AsyncMemoryChannel(theirs), Plan(tokens=lambda submit: []))
        await engine.start()
        running = asyncio.create_task(verifier.run())
        await engine.wait_until_ready(10.0)
        model = ServedModel(("demo", "real/name"), tokenizer, "tiny", (Weights("target", "tiny", "sha256-0"),))
        state = ServerState(config, metrics, model, engine, True, keys=load_keys(config))
        metrics.set_drafter_up(True)
        app = create_app(state)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        headers = {"Content-Type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers) as client:
            stack = Stack(app, client, state, engine, metrics, verifier, tokenizer)
            stack.says("A short answer.")
            try:
                yield stack
            finally:
                await engine.stop()
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                ours.close()
                theirs.close()

    return make


@pytest.fixture
async def stack(make_stack: StackFactory) -> AsyncIterator[Stack]:
    async with make_stack() as made:
        yield made


@pytest.fixture
def start(model_folder: Path) -> ProcessFactory:
    """Starts server processes with fake workers, whose behaviour variables set (see fake_worker.py)."""

    def start_server(
        *flags: str, certificate: Path | None = None, **environment: str
    ) -> AbstractAsyncContextManager[ServerProcess]:
        weights = () if "ar" in flags else ("--draft-model", str(model_folder), "--adapter", str(model_folder))
        arguments = ("--model", str(model_folder), *weights, *flags)
        return serve_process(FAKES, *arguments, certificate=certificate, **environment)

    return start_server
