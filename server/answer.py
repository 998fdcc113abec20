"""One request from its submission to its ending: its sequences run side by side, and everything is counted once.

Knows nothing of HTTP: a response is made of the pieces and of what the choices hold at the end.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from protocol.messages import Finished, PromptLogprobs, RoundResult
from server.choice import Choice, Opening, Piece, RoundCounts, TextOptions
from server.engine import Engine, EngineError, Generation, GenerationRequest, RequestFailed, SequenceEvent
from server.metrics import FinishLabel, Metrics, TokenLabel


@dataclass(frozen=True)
class Usage:
    """Token counts of a request; `num_generated_tokens` includes the tokens that ended texts."""

    num_prompt_tokens: int
    num_generated_tokens: int
    num_accepted_drafts: int
    num_rejected_drafts: int


@dataclass(frozen=True)
class Plan:
    """What a request generates: its sequences, the token count of its prompts, and how tokens become text.

    Without `needs_engine` there is nothing to compute: the sequences end at once.
    """

    requests: list[GenerationRequest]
    openings: list[Opening]
    num_prompt_tokens: int
    text: TextOptions
    needs_engine: bool = True


@dataclass(frozen=True)
class Timeline:
    """When a request got where, by `time.perf_counter`; None where it never came.

    Of several sequences the one that was read first counts: it was admitted to a slot, and its prompt was read with the
    first token at `prefilled_at`.
    """

    submitted_at: float
    admitted_at: float | None
    prefilled_at: float | None
    ended_at: float


@dataclass(frozen=True)
class Outcome:
    """How a request that reached the engine ended; `finish_reasons` has one entry a sequence."""

    finish: FinishLabel
    finish_reasons: list[str]
    usage: Usage
    counts: RoundCounts
    timeline: Timeline


@dataclass
class _Arrivals:
    """When the tokens of one sequence came."""

    first_at: float | None = None
    last_at: float = 0.0


class Answer:
    """The answer to one request. Enter it to submit the request; leaving it early aborts what still runs."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        plan: Plan,
        arrived_at: float,
        on_end: Callable[[Outcome], None] | None = None,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._plan = plan
        self._arrived_at = arrived_at
        self._on_end = on_end
        self._submitted_at = arrived_at
        self._admitted_at: float | None = None
        self._prefilled_at: float | None = None
        self._generation: Generation | None = None
        self.choices = [
            Choice(index, request, plan.text, opening)
            for index, (request, opening) in enumerate(zip(plan.requests, plan.openings, strict=True))
        ]
        self._arrivals = [_Arrivals() for _ in self.choices]

    async def __aenter__(self) -> Self:
        self._submitted_at = time.perf_counter()
        self._generation = self._engine.submit(*(self._plan.requests if self._plan.needs_engine else ()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._generation is not None
        self._generation.close()
        if self.is_complete:
            for choice, arrivals in zip(self.choices, self._arrivals, strict=True):
                self._observe_token_time(choice, arrivals)
        outcome = self._outcome(self._finish_label(error))
        elapsed_s = outcome.timeline.ended_at - self._arrived_at
        self._metrics.request_ended(outcome.finish, outcome.usage.num_generated_tokens, elapsed_s)
        if self._on_end is not None:
            self._on_end(outcome)

    @property
    def is_complete(self) -> bool:
        """Whether every text has ended by itself."""
        return all(choice.ending is not None for choice in self.choices)

    @property
    def usage(self) -> Usage:
        """Counts so far, over all sequences; a prompt counts once, however many sequences continue it."""
        num_accepted = sum(choice.num_accepted for choice in self.choices)
        return Usage(
            num_prompt_tokens=self._plan.num_prompt_tokens,
            num_generated_tokens=sum(choice.num_tokens for choice in self.choices),
            num_accepted_drafts=num_accepted,
            num_rejected_drafts=sum(choice.num_drafts for choice in self.choices) - num_accepted,
        )

    @property
    def counts(self) -> RoundCounts:
        """Rounds so far, over all sequences."""
        total = RoundCounts()
        for choice in self.choices:
            total.merge(choice.counts)
        return total

    async def pieces(self) -> AsyncIterator[Piece]:
        """The texts as they become certain, a piece a round; the last one of a text says so. Raises `EngineError`."""
        assert self._generation is not None
        if not self._plan.needs_engine:
            for choice in self.choices:
                yield choice.end_without_tokens()
            return
        async for item in self._generation:
            piece = self._absorb(item)
            if piece is not None:
                if piece.ending is not None:
                    self._generation.end(item.index)
                yield piece

    def _absorb(self, item: SequenceEvent) -> Piece | None:
        choice = self.choices[item.index]
        match item.event:
            case PromptLogprobs():
                choice.prompt_logprobs += item.event.entries
                return None
            case Finished():
                if item.event.reason == "abort":
                    raise RequestFailed("internal_error", "the verifier gave the request up")
                return choice.finish(item.event)
            case RoundResult():
                self._note_prefill(item.event)
                piece = choice.absorb(item.event)
                if piece.report is not None:
                    self._count_tokens(item.index, piece.report.label, len(piece.token_ids))
                return piece

    def _finish_label(self, error: BaseException | None) -> FinishLabel:
        """One ending for the request; one text cut short by the limit makes it `length`."""
        if not self.is_complete:
            return "error" if isinstance(error, EngineError) else "abort"
        reasons = {choice.ending.reason for choice in self.choices if choice.ending is not None}
        return "length" if "length" in reasons else "stop"

    def _outcome(self, finish: FinishLabel) -> Outcome:
        return Outcome(
            finish=finish,
            finish_reasons=[finish if choice.ending is None else choice.ending.reason for choice in self.choices],
            usage=self.usage,
            counts=self.counts,
            timeline=Timeline(self._submitted_at, self._admitted_at, self._prefilled_at, time.perf_counter()),
        )

    def _note_prefill(self, result: RoundResult) -> None:
        if self._prefilled_at is None:
            self._prefilled_at = time.perf_counter()
            if result.queue_s is not None:
                self._admitted_at = min(self._submitted_at + result.queue_s, self._prefilled_at)

    def _count_tokens(self, index: int, label: TokenLabel, num_tokens: int) -> None:
        self._metrics.tokens_committed(label, num_tokens)
        if num_tokens == 0:
            return
        now = time.perf_counter()
        arrivals = self._arrivals[index]
        if all(other.first_at is None for other in self._arrivals):
            self._metrics.time_to_first_token.observe(now - self._arrived_at)
        if arrivals.first_at is None:
            arrivals.first_at = now
        else:
            self._metrics.tokens_arrived(num_tokens, now - arrivals.last_at)
        arrivals.last_at = now

    def _observe_token_time(self, choice: Choice, arrivals: _Arrivals) -> None:
        if arrivals.first_at is not None and choice.num_tokens > 1:
            elapsed_s = arrivals.last_at - arrivals.first_at
            self._metrics.time_per_output_token.observe(elapsed_s / (choice.num_tokens - 1))


def best_of_each(choices: Sequence[Choice], num_candidates: int, num_kept: int) -> list[int]:
    """Places of the best `num_kept` of every `num_candidates` neighbours, best first, by mean log-probability."""
    kept: list[int] = []
    for start in range(0, len(choices), num_candidates):
        candidates = range(start, start + num_candidates)
        if num_kept < num_candidates:
            kept += sorted(candidates, key=lambda index: -choices[index].mean_logprob)[:num_kept]
        else:
            kept += candidates
    return kept
