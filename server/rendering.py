"""The shapes of answers in the OpenAI interface: completions and chat, whole and in chunks."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from protocol.fields import TokenLogprobs
from server.answer import Usage
from server.choice import Ending, LogprobEntry, Piece, RoundCounts, RoundReport
from server.logprobs import LogprobFormat
from server.metrics import ROUND_LABELS
from server.preparation import Prepared
from server.tokenizer import Tokenizer

Content = dict[str, Any]

MS_PER_S = 1000.0


@dataclass(frozen=True)
class WholeChoice:
    """Everything about one finished choice; `prompt` is its place among the request's prompts."""

    index: int
    prompt: int
    text: str
    token_ids: list[int]
    logprobs: list[LogprobEntry]
    prompt_logprobs: list[TokenLogprobs]
    ending: Ending


def usage_body(usage: Usage) -> Content:
    """The `usage` object; accepted drafts are part of the completion, rejected ones are not."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_generated_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.num_accepted_drafts,
            "rejected_prediction_tokens": usage.num_rejected_drafts,
        },
    }


def statistics_body(counts: RoundCounts, usage: Usage) -> Content:
    """The `jetspec` object: what speculation did for this request."""
    by_label = {label: counts.by_label.get(label, 0) for label in ROUND_LABELS}
    num_rounds = sum(by_label.values())
    num_predicted = by_label["hit"] + by_label["late_hit"] + by_label["miss"]
    return {
        "rounds": num_rounds,
        "hits": by_label["hit"],
        "late_hits": by_label["late_hit"],
        "misses": by_label["miss"],
        "first": by_label["first"],
        "autoregressive": by_label["autoregressive"],
        "hit_rate": by_label["hit"] / num_predicted if num_predicted else None,
        "acceptance_length": counts.num_verified / num_rounds if num_rounds else None,
        "draft_tokens": usage.num_accepted_drafts + usage.num_rejected_drafts,
        "accepted_tokens": usage.num_accepted_drafts,
        "verify_ms": _milliseconds(counts.verify_s),
        "exposed_ms": _milliseconds(counts.exposed_s),
    }


def round_body(report: RoundReport) -> Content:
    """The `jetspec_round` object of a chunk: one round and its tokens."""
    result = report.result
    return {
        "round": result.round,
        "outcome": report.label,
        "num_drafts": result.num_drafts,
        "num_accepted": result.num_accepted,
        "num_cached": result.num_cached,
        "verify_ms": _milliseconds(result.verify_s),
        "exposed_ms": _milliseconds(result.exposed_s),
        "draft_ms": _milliseconds(result.draft_s),
        "fallback_ms": _milliseconds(result.fallback_s),
        "transport_ms": _milliseconds(result.transport_s),
        "alone_because": result.alone_because,
        "tokens": [
            {"id": token.token_id, "text": token.text, "source": "draft" if token.is_draft else "bonus"}
            for token in report.tokens
        ],
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * MS_PER_S, 3)


@dataclass(frozen=True)
class AnswerFormat:
    """One response: its id, time and model, and which of the two interfaces it speaks."""

    kind: Literal["completion", "chat"]
    prepared: Prepared
    tokenizer: Tokenizer
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))
    identifier: str = field(default_factory=lambda: uuid.uuid4().hex)

    # --- whole answers

    def whole(self, choices: Sequence[WholeChoice], usage: Usage, counts: RoundCounts) -> Content:
        """The answer in one piece."""
        output = self.prepared.output
        body = self._head(is_chunk=False) | {"choices": [self._whole_choice(choice) for choice in choices]}
        if self.kind == "chat":
            if output.return_token_ids:
                body["prompt_token_ids"] = self.prepared.prompts[0].token_ids
            if output.num_prompt_logprobs is not None:
                body["prompt_logprobs"] = self._prompt_logprobs(choices[0], output.num_prompt_logprobs)
        body["usage"] = usage_body(usage)
        if output.statistics:
            body["jetspec"] = statistics_body(counts, usage)
        return body

    def _whole_choice(self, choice: WholeChoice) -> Content:
        output = self.prepared.output
        text, logprobs = choice.text, choice.logprobs
        if self.prepared.echoes is not None:
            text = self.prepared.echoes[choice.prompt].text + text
            logprobs = [*self.echoed_logprobs(choice.prompt, choice.prompt_logprobs), *logprobs]
        message = {"message": {"role": "assistant", "content": text}}
        body = self._choice(choice.index, {"text": text}, message, logprobs, choice.ending)
        if output.return_token_ids:
            body["token_ids"] = choice.token_ids
        if self.kind == "completion":
            if output.return_token_ids:
                body["prompt_token_ids"] = self.prepared.prompts[choice.prompt].token_ids
            if output.num_prompt_logprobs is not None:
                body["prompt_logprobs"] = self._prompt_logprobs(choice, output.num_prompt_logprobs)
        return body

    def _prompt_logprobs(self, choice: WholeChoice, num_top: int) -> list[Content | None]:
        return self._logprob_format(num_top).prompt(choice.prompt_logprobs)

    def echoed_logprobs(self, prompt: int, values: Sequence[TokenLogprobs]) -> list[LogprobEntry]:
        """The entries of an echoed prompt's tokens; nothing comes before the first, so it has no value."""
        echoes = self.prepared.echoes
        if echoes is None or echoes[prompt].offsets is None:
            return []
        token_ids, offsets = self.prepared.prompts[prompt].token_ids, echoes[prompt].offsets or []
        triples = zip(token_ids, offsets, [None, *values], strict=True)
        return [LogprobEntry(token_id, offset, value) for token_id, offset, value in triples]

    # --- chunks

    def opening(self, index: int, prompt_logprobs: Sequence[TokenLogprobs], usage: Usage) -> Content | None:
        """The chunk before any text of a choice, if there is something to say: the role, or the echoed prompt."""
        output = self.prepared.output
        prompt = index // output.num_choices
        if self.kind == "chat":
            choice = self._choice(index, {}, {"delta": {"role": "assistant", "content": ""}}, None, None)
            chunk = self._chunk([choice], usage)
            if output.return_token_ids:
                chunk["prompt_token_ids"] = self.prepared.prompts[0].token_ids
            return chunk
        echoes = self.prepared.echoes
        if echoes is None and not output.return_token_ids:
            return None
        text = echoes[prompt].text if echoes is not None else ""
        entries = self.echoed_logprobs(prompt, prompt_logprobs)
        choice = self._choice(index, {"text": text}, {}, entries or None, None)
        if output.return_token_ids:
            choice |= {"token_ids": [], "prompt_token_ids": self.prepared.prompts[prompt].token_ids}
        return self._chunk([choice], usage)

    def piece(self, piece: Piece, usage: Usage) -> Content | None:
        """A chunk of text, if the piece has anything that this request shows."""
        output = self.prepared.output
        shows_logprobs = output.num_logprobs is not None and bool(piece.logprobs)
        shows_token_ids = output.return_token_ids and bool(piece.token_ids)
        shows_round = output.rounds and piece.report is not None
        if not (piece.text or shows_logprobs or shows_token_ids or shows_round):
            return None
        delta = {"delta": {"content": piece.text}}
        choice = self._choice(piece.index, {"text": piece.text}, delta, piece.logprobs, None)
        if output.return_token_ids:
            choice["token_ids"] = piece.token_ids
        if output.rounds and piece.report is not None:
            choice["jetspec_round"] = round_body(piece.report)
        return self._chunk([choice], usage)

    def closing(self, index: int, ending: Ending, usage: Usage) -> Content:
        """The chunk that says why a text ended; it has no text of its own."""
        return self._chunk([self._choice(index, {"text": ""}, {"delta": {}}, None, ending)], usage)

    def usage_chunk(self, usage: Usage) -> Content:
        """The last chunk, without choices, for clients that asked for it."""
        return self._head(is_chunk=True) | {"choices": [], "usage": usage_body(usage)}

    # --- parts

    @property
    def response_id(self) -> str:
        """The `id` of the answer, the same in every chunk."""
        prefix = "cmpl-" if self.kind == "completion" else "chatcmpl-"
        return prefix + (self.prepared.request_id or self.identifier)

    def _head(self, is_chunk: bool) -> Content:
        name = "text_completion" if self.kind == "completion" else "chat.completion" + (".chunk" if is_chunk else "")
        return {
            "id": self.response_id,
            "object": name,
            "created": self.created,
            "model": self.prepared.model_name,
            "system_fingerprint": self.fingerprint,
        }

    def _choice(
        self,
        index: int,
        completion: Content,
        chat: Content,
        logprobs: Sequence[LogprobEntry] | None,
        ending: Ending | None,
    ) -> Content:
        return {
            "index": index,
            **(completion if self.kind == "completion" else chat),
            "logprobs": self._logprobs(logprobs),
            "finish_reason": None if ending is None else ending.reason,
            "stop_reason": None if ending is None else ending.stop_reason,
        }

    def _logprobs(self, entries: Sequence[LogprobEntry] | None) -> Content | None:
        num_top = self.prepared.output.num_logprobs
        if num_top is None or entries is None:
            return None
        shape = self._logprob_format(num_top)
        return shape.completion(entries) if self.kind == "completion" else shape.chat(entries)

    def _logprob_format(self, num_top: int) -> LogprobFormat:
        return LogprobFormat(self.tokenizer.spelling, num_top, self.prepared.output.tokens_as_ids)

    def _chunk(self, choices: list[Content], usage: Usage) -> Content:
        output = self.prepared.output
        chunk = self._head(is_chunk=True) | {"choices": choices}
        if output.include_usage:
            chunk["usage"] = usage_body(usage) if output.continuous_usage else None
        return chunk
