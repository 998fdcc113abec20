"""The endpoints. Each reads a body, asks the state for what serves it, and renders the result; nothing is decided here
about tokens, text or workers."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.answer import Answer
from server.build import git_commit, package_version
from server.engine import EngineDead, EngineError, EngineUnavailable, QueueFull
from server.errors import (
    CLIENT_CLOSED_REQUEST,
    ApiError,
    from_engine,
    invalid,
    json_response,
    unavailable,
    wrong_media_type,
)
from server.metrics import CONTENT_TYPE
from server.openai_types import ChatBody, CompletionBody, DetokenizeBody, RequestBody, TokenizeBody, parse
from server.preparation import (
    Prepared,
    chat_prompt,
    check_token_ids,
    prepare_chat,
    prepare_completion,
    text_prompt,
)
from server.rendering import AnswerFormat, Content
from server.state import ServerState, Serving
from server.streaming import ClientDisconnected, EventStream, run_while_connected
from server.strict_json import check_json

BodyT = TypeVar("BodyT", bound=RequestBody)
PROBE_LIMIT_S = 10.0


def create_router(state: ServerState) -> APIRouter:
    """All endpoints, bound to one state."""
    router = APIRouter()
    _add_generation(router, state)
    _add_tokens(router, state)
    _add_models(router, state)
    _add_operations(router, state)
    return router


def _body_schema(kind: type[RequestBody]) -> dict[str, Any]:
    """The request body's place in /openapi.json: bodies are parsed by hand, so FastAPI cannot see them."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def _read(request: Request, kind: type[BodyT], state: ServerState) -> BodyT:
    """The checked body of a request. Raises `ApiError`: 415 for what is not declared as JSON, 408 for a client that
    stops sending, 400 for what it says."""
    media_type, *parameters = (part.strip().lower() for part in request.headers.get("content-type", "").split(";"))
    # Declared by the client on purpose: a web page of another origin can send any text, but not this type.
    if media_type != "application/json":
        raise wrong_media_type("The body must be JSON, sent with 'Content-Type: application/json'.")
    charsets = [
        value.strip('"') for name, _, value in (part.partition("=") for part in parameters) if name == "charset"
    ]
    if any(charset not in ("utf-8", "utf8", "us-ascii") for charset in charsets):
        raise wrong_media_type("JSON is UTF-8; other encodings are not read.")
    try:
        async with asyncio.timeout(state.config.request_read_timeout):
            data = await request.body()
    except TimeoutError:
        limit_s = state.config.request_read_timeout
        message = f"The body did not arrive within {limit_s:g} s."
        raise ApiError(408, message, "request_timeout", headers={"Connection": "close"}) from None
    check_json(data)
    return parse(kind, data, state.unknown_fields)


def _add_generation(router: APIRouter, state: ServerState) -> None:
    @router.post("/v1/completions", openapi_extra=_body_schema(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue a prompt."""
        arrived_at = time.perf_counter()
        serving = state.serving()
        body = await _read(request, CompletionBody, state)
        prepared = await prepare_completion(body, serving, state.seeds)
        run = _GenerationRun(state, serving, prepared, "completion", arrived_at)
        return await run.respond(request, body.stream is True)

    @router.post("/v1/chat/completions", openapi_extra=_body_schema(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        arrived_at = time.perf_counter()
        serving = state.serving()
        body = await _read(request, ChatBody, state)
        prepared = await prepare_chat(body, serving, state.seeds)
        run = _GenerationRun(state, serving, prepared, "chat", arrived_at)
        return await run.respond(request, body.stream is True)


class _GenerationRun:
    """One checked request on its way to a response, whole or streamed."""

    def __init__(self, state: ServerState, serving: Serving, prepared: Prepared, kind: Any, arrived_at: float) -> None:
        self._state = state
        self._serving = serving
        self._prepared = prepared
        self._arrived_at = arrived_at
        self._format = AnswerFormat(
            kind=kind,
            model=prepared.model_name,
            prompt_token_ids=prepared.generation.prompt_token_ids,
            include_usage=prepared.include_usage,
            continuous_usage=prepared.continuous_usage,
            return_token_ids=prepared.return_token_ids,
        )

    async def respond(self, request: Request, is_stream: bool) -> Response:
        """The response; a client that leaves ends the generation in either form."""
        if is_stream:
            return EventStream(self._chunks(), self._state.metrics.disconnects.inc)
        try:
            return json_response(await run_while_connected(request.receive, self.whole()))
        except ClientDisconnected:
            self._state.metrics.disconnects.inc()
            return Response(status_code=CLIENT_CLOSED_REQUEST)

    def _answer(self) -> Answer:
        prepared = self._prepared
        return Answer(self._serving.engine, self._state.metrics, prepared.generation, prepared.text, self._arrived_at)

    async def whole(self) -> Content:
        """The answer in one piece; raises `ApiError`."""
        texts: list[str] = []
        token_ids: list[int] = []
        try:
            async with self._answer() as answer:
                async for piece in answer.pieces():
                    texts.append(piece.text)
                    token_ids += piece.token_ids
            assert answer.ending is not None
            return self._format.whole("".join(texts), token_ids, answer.ending, answer.usage)
        except EngineError as error:
            raise self._refusal(error) from None

    async def _chunks(self) -> AsyncIterator[Content]:
        try:
            async with self._answer() as answer:
                opening = self._format.opening(answer.usage)
                async for piece in answer.pieces():
                    if opening is not None:
                        yield opening
                        opening = None
                    if piece.text or (piece.token_ids and self._prepared.return_token_ids):
                        yield self._format.piece(piece.text, piece.token_ids, answer.usage)
            assert answer.ending is not None
            yield self._format.closing(answer.ending, answer.usage)
            if self._prepared.include_usage:
                yield self._format.usage_chunk(answer.usage)
        except EngineError as error:
            raise self._refusal(error) from None

    def _refusal(self, error: EngineError) -> ApiError:
        rejections = self._state.metrics.rejections
        if isinstance(error, QueueFull):
            rejections.labels("queue_full").inc()
        elif isinstance(error, EngineUnavailable):
            rejections.labels("unavailable").inc()
        elif isinstance(error, EngineDead) and self._state.is_draining:
            return unavailable("The server is shutting down.", closing=True)
        return from_engine(error)


def _add_tokens(router: APIRouter, state: ServerState) -> None:
    @router.post("/tokenize", openapi_extra=_body_schema(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """The token ids of a prompt or of a conversation."""
        serving = state.serving()
        body = await _read(request, TokenizeBody, state)
        serving.check_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either a prompt or messages")
        if body.messages is not None:
            tokens = await chat_prompt(body.messages, body.add_generation_prompt, None, serving)
        else:
            tokens = await text_prompt(body.prompt or "", body.add_special_tokens, serving)
        tokenizer = serving.model.tokenizer
        spellings = [tokenizer.token_of(token) for token in tokens] if body.return_token_strs else None
        answer = {"count": len(tokens), "max_model_len": serving.max_model_len, "tokens": tokens}
        return json_response({**answer, "token_strs": spellings})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """The tokenizer's configuration and chat template."""
        return json_response(state.serving().model.tokenizer.description)

    @router.post("/detokenize", openapi_extra=_body_schema(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        serving = state.serving()
        body = await _read(request, DetokenizeBody, state)
        serving.check_name(body.model)
        check_token_ids("tokens", body.tokens, serving)
        return json_response({"prompt": serving.model.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _add_models(router: APIRouter, state: ServerState) -> None:
    def describe(serving: Serving, name: str) -> Content:
        return {
            "id": name,
            "object": "model",
            "created": state.created,
            "owned_by": "jetspec",
            "root": serving.model.root,
            "parent": None,
            "max_model_len": serving.max_model_len,
            "permission": [],
        }

    @router.get("/v1/models")
    async def models() -> Response:
        """The names requests may ask for."""
        serving = state.serving()
        return json_response({"object": "list", "data": [describe(serving, name) for name in serving.model.names]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One model."""
        serving = state.serving()
        return json_response(describe(serving, serving.check_name(name)))


def _add_operations(router: APIRouter, state: ServerState) -> None:
    def health_response(is_good: Callable[[str], bool], **more: object) -> Response:
        status = state.health
        content = {"status": status, "drafter_up": state.metrics.is_drafter_up, "draining": state.is_draining, **more}
        return json_response(content, 200 if is_good(status) else 503)

    def is_working(status: str) -> bool:
        return status in ("ok", "degraded")

    async def health(deep: bool = False) -> Response:
        """Whether work goes forward: 503 when the verifier is loading, dead or stuck; without a drafter, degraded.

        With `?deep=1` a token is generated: the answer is 503 unless it comes within ten seconds. A full queue is no
        failure, and the watchdog sees to it that it moves.
        """
        if not deep or not is_working(state.health) or state.is_draining:
            return health_response(is_working)
        outcome = await _probe(state)
        return health_response(lambda status: is_working(status) and outcome in ("ok", "busy"), probe=outcome)

    async def ready() -> Response:
        """Whether new requests are taken."""
        return health_response(lambda status: is_working(status) and not state.is_draining)

    router.add_api_route("/health", health, methods=["GET"])
    router.add_api_route("/ping", health, methods=["GET", "POST"], include_in_schema=False)
    router.add_api_route("/ready", ready, methods=["GET"])

    @router.get("/version")
    async def show_version() -> Response:
        """The version of this server, and of the weights it serves; answered in every state of the server."""
        weights = () if state.model is None else state.model.weights
        models = {item.role: {"name": item.name, "revision": item.revision} for item in weights}
        return json_response({"version": package_version(), "git_commit": git_commit(), "models": models})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics; answered in every state of the server."""
        if state.engine is not None:
            state.metrics.last_progress.labels("verifier").set(state.engine.seconds_since_progress)
        return Response(state.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def _probe(state: ServerState) -> str:
    """Generate one token as any client would: `ok`, `busy` for a full queue, else what went wrong."""
    body = CompletionBody(prompt=[0], max_tokens=1, temperature=0.0)
    try:
        async with asyncio.timeout(PROBE_LIMIT_S):
            serving = state.serving()
            prepared = await prepare_completion(body, serving, state.seeds)
            await _GenerationRun(state, serving, prepared, "completion", time.perf_counter()).whole()
    except TimeoutError:
        return f"no token within {PROBE_LIMIT_S:g} s"
    except ApiError as error:
        return "busy" if error.status == 429 else error.message
    return "ok"
