"""The two endpoints that generate text: from a request to its response, whole or streamed.

Nothing is decided here about tokens or text: a body is parsed, prepared and answered, and the answer is rendered. A
client that leaves, or a sequence that fails, ends everything the request runs.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.answer import Answer, best_of_each
from server.choice import Piece
from server.engine import EngineDead, EngineError, EngineUnavailable, QueueFull, RequestFailed
from server.errors import (
    CLIENT_CLOSED_REQUEST,
    ApiError,
    context_too_long,
    from_engine,
    invalid,
    json_response,
    unavailable,
)
from server.openai_types import ChatBody, CompletionBody
from server.parsing import body_schema
from server.preparation import Prepared, prepare_chat, prepare_completion
from server.reading import read_body
from server.rendering import AnswerFormat, Content, WholeChoice, statistics_body
from server.state import ServerState, Serving
from server.streaming import ClientDisconnected, EventStream, run_while_connected
from server.tracing import RequestTrace, trace_of

STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""What /openapi.json says of an answer beside its JSON form."""


def add_generation(router: APIRouter, state: ServerState) -> None:
    """Add /v1/completions and /v1/chat/completions."""

    @router.post("/v1/completions", openapi_extra=body_schema(CompletionBody), responses=STREAMED)
    async def completions(request: Request) -> Response:
        """Continue one or more prompts."""
        arrived_at = time.perf_counter()
        serving = state.serving()
        body = await read_body(request, CompletionBody, state)
        prepared = await prepare_completion(body, serving, state.seeds)
        trace = trace_of(request)
        run = GenerationRun(state, serving, prepared, "completion", arrived_at, trace)
        return await run.respond(request, body.stream is True)

    @router.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody), responses=STREAMED)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        arrived_at = time.perf_counter()
        serving = state.serving()
        body = await read_body(request, ChatBody, state)
        prepared = await prepare_chat(body, serving, state.seeds)
        trace = trace_of(request)
        run = GenerationRun(state, serving, prepared, "chat", arrived_at, trace)
        return await run.respond(request, body.stream is True)


class GenerationRun:
    """One checked request on its way to a response."""

    def __init__(
        self,
        state: ServerState,
        serving: Serving,
        prepared: Prepared,
        kind: Literal["completion", "chat"],
        arrived_at: float,
        trace: RequestTrace,
    ) -> None:
        self._state = state
        self._serving = serving
        self._prepared = prepared
        self._arrived_at = arrived_at
        self._trace = trace
        self._format = AnswerFormat(kind, prepared, serving.model.tokenizer, serving.fingerprint)

    async def respond(self, request: Request, is_stream: bool) -> Response:
        """The response; a client that leaves ends the generation in either form."""
        self._trace.prepared(self._prepared, self._format.response_id, is_stream)
        if is_stream:
            return EventStream(self._chunks(), self._state.metrics.disconnects.inc)
        try:
            content = await run_while_connected(request.receive, self.whole())
            return await asyncio.to_thread(json_response, content) if self._is_long else json_response(content)
        except ClientDisconnected:
            self._state.metrics.disconnects.inc()
            return Response(status_code=CLIENT_CLOSED_REQUEST)

    @property
    def _is_long(self) -> bool:
        """Log-probabilities of prompts may be many megabytes: other requests go on while they are written."""
        return self._prepared.plan.requests[0].num_prompt_logprobs is not None

    def _answer(self) -> Answer:
        engine, metrics, plan = self._serving.engine, self._state.metrics, self._prepared.plan
        return Answer(engine, metrics, plan, self._arrived_at, self._trace.answered)

    async def whole(self) -> Content:
        """The answer in one piece; raises `ApiError`."""
        pieces: list[list[Piece]] = [[] for _ in self._prepared.plan.requests]
        try:
            async with self._answer() as answer:
                async for piece in answer.pieces():
                    pieces[piece.index].append(piece)
        except EngineError as error:
            raise self._refusal(error) from None
        output = self._prepared.output
        kept = best_of_each(answer.choices, output.num_candidates, output.num_choices)
        choices = [self._put_together(answer, index, place, pieces[index]) for place, index in enumerate(kept)]
        if self._is_long:
            return await asyncio.to_thread(self._format.whole, choices, answer.usage, answer.counts)
        return self._format.whole(choices, answer.usage, answer.counts)

    def _put_together(self, answer: Answer, index: int, place: int, pieces: list[Piece]) -> WholeChoice:
        """The choice at `place` of the response, from the pieces of sequence `index`."""
        choice = answer.choices[index]
        assert choice.ending is not None
        return WholeChoice(
            index=place,
            prompt=index // self._prepared.output.num_candidates,
            text="".join(piece.text for piece in pieces),
            token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
            logprobs=[entry for piece in pieces for entry in piece.logprobs],
            prompt_logprobs=choice.prompt_logprobs,
            ending=choice.ending,
        )

    async def _chunks(self) -> AsyncIterator[Content]:
        output = self._prepared.output
        opened: set[int] = set()
        try:
            async with self._answer() as answer:
                async for piece in answer.pieces():
                    index, usage = piece.index, answer.usage
                    if index not in opened:
                        opened.add(index)
                        opening = self._format.opening(index, answer.choices[index].prompt_logprobs, usage)
                        if opening is not None:
                            yield opening
                    chunk = self._format.piece(piece, usage)
                    if chunk is not None:
                        yield chunk
                    if piece.ending is not None:
                        closing = self._format.closing(index, piece.ending, usage)
                        if output.statistics and answer.is_complete and not output.include_usage:
                            closing["jetspec"] = statistics_body(answer.counts, usage)
                        yield closing
            if output.include_usage:
                last = self._format.usage_chunk(answer.usage)
                if output.statistics:
                    last["jetspec"] = statistics_body(answer.counts, answer.usage)
                yield last
        except EngineError as error:
            raise self._refusal(error) from None

    def _refusal(self, error: EngineError) -> ApiError:
        refusal = self._as_api_error(error)
        self._trace.failed(refusal)
        return refusal

    def _as_api_error(self, error: EngineError) -> ApiError:
        rejections = self._state.metrics.rejections
        params = self._prepared.params
        if isinstance(error, QueueFull):
            rejections.labels("queue_full").inc()
        elif isinstance(error, EngineUnavailable):
            rejections.labels("unavailable").inc()
        elif isinstance(error, EngineDead) and self._state.is_draining:
            return unavailable("The server is shutting down.", closing=True)
        elif isinstance(error, RequestFailed) and error.code == "context_length_exceeded":
            return context_too_long(params["prompt_token_ids"], error.message)
        elif isinstance(error, RequestFailed) and error.code == "invalid_request" and error.parameter is not None:
            return invalid(params.get(error.parameter, error.parameter), error.message)
        return from_engine(error)
