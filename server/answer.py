"""One request from its submission to its ending: tokens become text one at a time, and everything is counted once.

Per committed token, in order: detokenise, stop string, usage. (The verifier has already applied stop ids, `min_tokens`
and `max_tokens`, token by token.) Knows nothing of HTTP: a response is made of the pieces and the ending.
"""

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from protocol.messages import Finished, RoundResult
from server.detokenizer import IncrementalDecoder, StopScanner
from server.engine import Engine, EngineError, Generation, GenerationRequest, RequestFailed
from server.metrics import FinishLabel, Metrics, OutcomeLabels


@dataclass(frozen=True)
class Usage:
    """Token counts of a request; `completion_tokens` includes the token that ended the text."""

    num_prompt_tokens: int
    num_generated_tokens: int
    num_accepted_drafts: int
    num_rejected_drafts: int


@dataclass(frozen=True)
class Piece:
    """Text that is certain, with the tokens consumed since the piece before."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Ending:
    """Why a text ended; `stop_reason` is the stop string or the stop token id asked for, if one did it."""

    reason: Literal["stop", "length"]
    stop_reason: str | int | None


@dataclass(frozen=True)
class TextOptions:
    """How a request's tokens become text."""

    decode: Callable[[list[int]], str]
    stops: list[str]
    include_stop: bool
    eos_token_ids: tuple[int, ...]


class Answer:
    """The answer to one request. Enter it to submit the request; leaving it early aborts what still runs."""

    def __init__(
        self, engine: Engine, metrics: Metrics, request: GenerationRequest, options: TextOptions, arrived_at: float
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._request = request
        self._options = options
        self._arrived_at = arrived_at
        self._decoder = IncrementalDecoder(lambda token_ids: options.decode(list(token_ids)))
        self._scanner = StopScanner(options.stops, options.include_stop)
        self._labels = OutcomeLabels()
        self._num_tokens = 0
        self._num_accepted = 0
        self._num_drafts = 0
        self._first_token_at: float | None = None
        self._last_token_at = 0.0
        self._generation: Generation | None = None
        self.ending: Ending | None = None

    async def __aenter__(self) -> Self:
        self._generation = self._engine.submit(self._request)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._generation is not None
        self._generation.close()
        reason: FinishLabel = "error" if isinstance(error, EngineError) else "abort"
        if self.ending is not None:
            reason = self.ending.reason
            self._observe_token_time()
        self._metrics.request_ended(reason, self._num_tokens, time.perf_counter() - self._arrived_at)

    @property
    def usage(self) -> Usage:
        """Counts so far."""
        return Usage(
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_generated_tokens=self._num_tokens,
            num_accepted_drafts=self._num_accepted,
            num_rejected_drafts=self._num_drafts - self._num_accepted,
        )

    async def pieces(self) -> AsyncIterator[Piece]:
        """The text as it becomes certain, a piece a round at most; afterwards `ending` is set. Raises `EngineError`."""
        assert self._generation is not None
        async for event in self._generation:
            if isinstance(event, Finished):
                yield self._finish(event)
                return
            piece = self._absorb(event)
            if piece.text or piece.token_ids:
                yield piece
            if self.ending is not None:
                self._generation.close()
                return

    def _absorb(self, result: RoundResult) -> Piece:
        """The tokens of one round, one at a time, up to the one that completes a stop string."""
        label = self._labels.of(result)
        self._num_drafts += result.num_drafts
        text = ""
        num_consumed = 0
        for token_id in result.token_ids:
            num_consumed += 1
            self._num_tokens += 1
            new_text = self._decoder.push(token_id)
            is_early = self._num_tokens <= self._request.min_tokens
            scanned = self._scanner.skip(new_text) if is_early else self._scanner.push(new_text)
            text += scanned.text
            if scanned.stop is not None:
                self.ending = Ending("stop", scanned.stop)
                break
        self._num_accepted += min(result.num_accepted, num_consumed)  # what a cut left out is no part of the text
        self._metrics.tokens_committed(label, num_consumed)
        self._observe_arrival(num_consumed)
        return Piece(text, result.token_ids[:num_consumed])

    def _finish(self, message: Finished) -> Piece:
        """The verifier ended the text: give out what was held back, in which a stop string may still be complete."""
        if message.reason == "abort":
            raise RequestFailed("internal_error", "the verifier gave the request up")
        self._num_tokens += message.stop_token_id is not None
        scanned = self._scanner.push(self._decoder.flush())
        if scanned.stop is not None:
            self.ending = Ending("stop", scanned.stop)
            return Piece(scanned.text, [])
        is_eos = message.stop_token_id in self._options.eos_token_ids
        self.ending = Ending(message.reason, None if is_eos else message.stop_token_id)
        return Piece(scanned.text + self._scanner.flush(), [])

    def _observe_arrival(self, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        now = time.perf_counter()
        if self._first_token_at is None:
            self._first_token_at = now
            self._metrics.time_to_first_token.observe(now - self._arrived_at)
        else:
            self._metrics.tokens_arrived(num_tokens, now - self._last_token_at)
        self._last_token_at = now

    def _observe_token_time(self) -> None:
        if self._first_token_at is not None and self._num_tokens > 1:
            elapsed_s = self._last_token_at - self._first_token_at
            self._metrics.time_per_output_token.observe(elapsed_s / (self._num_tokens - 1))
