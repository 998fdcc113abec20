"""The endpoints. Each reads a body, asks the state for what serves it, and renders the result; nothing is decided here
about tokens, text or workers."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from server.build import git_commit, package_version
from server.errors import ApiError, invalid, json_response
from server.generation import GenerationRun, add_generation
from server.metrics import CONTENT_TYPE
from server.openai_types import CompletionBody, DetokenizeBody, TokenizeBody
from server.page import add_page
from server.parsing import body_schema
from server.preparation import prepare_completion
from server.prompts import chat_prompt, check_token_ids, text_prompt
from server.reading import read_body
from server.rendering import Content
from server.state import ServerState, Serving
from server.tracing import RequestTrace

PROBE_LIMIT_S = 10.0
UNWELL: dict[int | str, dict[str, Any]] = {503: {"description": "Not now", "content": {"application/json": {}}}}
"""What /openapi.json says of a probe that fails: the same body as of one that succeeds."""


def create_router(state: ServerState) -> APIRouter:
    """All endpoints, bound to one state."""
    router = APIRouter()
    add_generation(router, state)
    _add_tokens(router, state)
    _add_models(router, state)
    _add_operations(router, state)
    if not state.config.disable_page:
        add_page(router)
    return router


def _add_tokens(router: APIRouter, state: ServerState) -> None:
    @router.post("/tokenize", openapi_extra=body_schema(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """The token ids of a prompt or of a conversation."""
        serving = state.serving()
        body = await read_body(request, TokenizeBody, state)
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

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        serving = state.serving()
        body = await read_body(request, DetokenizeBody, state)
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

    router.add_api_route("/health", health, methods=["GET"], responses=UNWELL)
    router.add_api_route("/ping", health, methods=["GET", "POST"], include_in_schema=False)
    router.add_api_route("/ready", ready, methods=["GET"], responses=UNWELL)
    for path, answer in (("/health", health), ("/ping", health), ("/ready", ready)):
        router.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)

    @router.get("/version")
    async def show_version() -> Response:
        """The version of this server, and of the weights it serves; answered in every state of the server."""
        weights = () if state.model is None else state.model.weights
        models = {item.role: {"name": item.name, "revision": item.revision} for item in weights}
        return json_response({"version": package_version(), "git_commit": git_commit(), "models": models})

    @router.get("/metrics", response_class=PlainTextResponse)
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
            await GenerationRun(
                state, serving, prepared, "completion", time.perf_counter(), RequestTrace("text_completion")
            ).whole()
    except TimeoutError:
        return f"no token within {PROBE_LIMIT_S:g} s"
    except ApiError as error:
        return "busy" if error.status == 429 else error.message
    return "ok"
