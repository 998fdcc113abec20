"""One sequence of an answer: committed tokens become text one at a time, whatever rounds they came in.

Per token, in order: detokenise, stop string, usage. (The verifier has already applied stop ids, `min_tokens` and
`max_tokens`, token by token.) Knows nothing of HTTP and of the engine: rounds go in, pieces come out.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from protocol.fields import TokenLogprobs
from protocol.messages import Finished, RoundResult
from server.detokenizer import IncrementalDecoder, StopScanner
from server.engine import GenerationRequest
from server.metrics import OutcomeLabels, TokenLabel


@dataclass(frozen=True)
class TextOptions:
    """How the tokens of a request's sequences become text.

    With `is_prompt_only` nothing is generated: the sequence ends as soon as its prompt has been read.
    """

    decode: Callable[[list[int]], str]
    stops: list[str]
    include_stop: bool
    eos_token_ids: tuple[int, ...]
    is_prompt_only: bool = False


@dataclass(frozen=True)
class Opening:
    """What stands before a sequence's text: the last prompt tokens, and the length of the prompt if it is echoed."""

    context_token_ids: list[int] = field(default_factory=list)
    num_echoed_characters: int = 0


@dataclass(frozen=True)
class Ending:
    """Why a text ended; `stop_reason` is the stop string or the stop token id asked for, if one did it."""

    reason: Literal["stop", "length"]
    stop_reason: str | int | None


@dataclass(frozen=True)
class LogprobEntry:
    """A token, where its text begins (in characters, an echoed prompt included), and what the target says of it.

    `values` is None for the first token of a prompt only. A token that is a part of a character begins with it.
    """

    token_id: int
    text_offset: int
    values: TokenLogprobs | None


@dataclass(frozen=True)
class RoundToken:
    """One token of a round; `text` is what became certain with it, before any stop string is cut off."""

    token_id: int
    text: str
    is_draft: bool


@dataclass(frozen=True)
class RoundReport:
    """What one round did, its outcome as the metrics count it, and the tokens of it that are part of the text."""

    result: RoundResult
    label: TokenLabel
    tokens: list[RoundToken]


@dataclass(frozen=True)
class Piece:
    """Text that is certain, with the tokens consumed since the piece before and the round that brought them.

    `logprobs` go with the text: those of a text that may still be cut off are held back with it. `ending` is set on
    the last piece of a sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[LogprobEntry]
    report: RoundReport | None
    ending: Ending | None


@dataclass
class RoundCounts:
    """Sums over the rounds of one or more sequences."""

    by_label: dict[TokenLabel, int] = field(default_factory=dict)
    num_verified: int = 0
    verify_s: float = 0.0
    exposed_s: float = 0.0

    def add(self, result: RoundResult, label: TokenLabel) -> None:
        """Count one round; a prefill is none."""
        if label == "prefill":
            return
        self.by_label[label] = self.by_label.get(label, 0) + 1
        self.num_verified += result.num_accepted + 1
        self.verify_s += result.verify_s
        self.exposed_s += result.exposed_s

    def merge(self, other: "RoundCounts") -> None:
        """Add the counts of another sequence."""
        for label, number in other.by_label.items():
            self.by_label[label] = self.by_label.get(label, 0) + number
        self.num_verified += other.num_verified
        self.verify_s += other.verify_s
        self.exposed_s += other.exposed_s


class Choice:
    """One sequence on its way to a text."""

    def __init__(self, index: int, request: GenerationRequest, options: TextOptions, opening: Opening) -> None:
        self._index = index
        self._request = request
        self._options = options
        self._decoder = IncrementalDecoder(lambda ids: options.decode(list(ids)), opening.context_token_ids)
        self._scanner = StopScanner(options.stops, options.include_stop)
        self._labels = OutcomeLabels()
        self._num_certain = opening.num_echoed_characters  # characters the decoder has given
        self._num_shown = opening.num_echoed_characters  # characters that were given out
        self._held: deque[LogprobEntry] = deque()
        self._logprob_sum = 0.0
        self._num_scored = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.counts = RoundCounts()
        self.num_tokens = 0
        self.num_accepted = 0
        self.num_drafts = 0
        self.ending: Ending | None = None

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens; an empty text ranks last."""
        return self._logprob_sum / self._num_scored if self._num_scored else float("-inf")

    def absorb(self, result: RoundResult) -> Piece:
        """The tokens of one round, one at a time, up to the one that completes a stop string."""
        label = self._labels.of(result)
        self.counts.add(result, label)
        if self._options.is_prompt_only:
            return self.end_without_tokens()
        self.num_drafts += result.num_drafts
        tokens: list[RoundToken] = []
        text = ""
        for position, token_id in enumerate(result.token_ids):
            offset = self._num_certain
            new_text = self._push(token_id)
            tokens.append(RoundToken(token_id, new_text, position < result.num_accepted))
            if result.logprobs is not None:
                values = result.logprobs[position]
                self._logprob_sum += values.logprob
                self._num_scored += 1
                self._held.append(LogprobEntry(token_id, offset, values))
            is_early = self.num_tokens <= self._request.min_tokens
            scanned = self._scanner.skip(new_text) if is_early else self._scanner.push(new_text)
            text += scanned.text
            if scanned.stop is not None:
                self.ending = Ending("stop", scanned.stop)
                break
        self.num_accepted += min(result.num_accepted, len(tokens))  # what a cut left out is no part of the text
        return self._piece(text, tokens, RoundReport(result, label, tokens))

    def finish(self, message: Finished) -> Piece:
        """The verifier ended the text: give out what was held back, in which a stop string may still be complete."""
        if self._options.is_prompt_only:
            return self.end_without_tokens()
        shown_stop = ""
        if message.stop_token_id is not None:
            self.num_tokens += 1
            if self._options.include_stop:
                shown_stop = self._decoder.push(message.stop_token_id)
        rest = shown_stop + self._decoder.flush()
        self._num_certain += len(rest)
        scanned = self._scanner.push(rest)
        if scanned.stop is not None:
            self.ending = Ending("stop", scanned.stop)
            return self._piece(scanned.text, [], None)
        assert message.reason != "abort"
        is_eos = message.stop_token_id in self._options.eos_token_ids
        self.ending = Ending(message.reason, None if is_eos else message.stop_token_id)
        return self._piece(scanned.text + self._scanner.flush(), [], None)

    def end_without_tokens(self) -> Piece:
        """End a sequence that generates nothing; a character that the prompt left open is shown as it is."""
        self.ending = Ending("length", None)
        return self._piece(self._decoder.flush(), [], None)

    def _push(self, token_id: int) -> str:
        self.num_tokens += 1
        text = self._decoder.push(token_id)
        self._num_certain += len(text)
        return text

    def _piece(self, text: str, tokens: list[RoundToken], report: RoundReport | None) -> Piece:
        self._num_shown += len(text)
        token_ids = [token.token_id for token in tokens]
        return Piece(self._index, text, token_ids, self._released(), report, self.ending)

    def _released(self) -> list[LogprobEntry]:
        """Entries whose text was given out; those of a text that a stop string cut off are dropped."""
        is_cut = self.ending is not None and self.ending.stop_reason in self._options.stops
        is_all_shown = self._num_shown == self._num_certain and not is_cut
        released: list[LogprobEntry] = []
        while self._held and (is_all_shown or self._held[0].text_offset < self._num_shown):
            released.append(self._held.popleft())
        return released
