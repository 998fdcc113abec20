"""The target's side of a round: run blocks of several sequences, draw every row's token, say how each block ended.

What goes wrong with one sequence (logits that are no numbers, a grammar that gives up, memory that runs out) is its own
verdict, never an exception: the others go on.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from decoding.acceptance import Outcome, accept
from decoding.logprobs import TokenReport, report_tokens
from decoding.sampling import DegenerateDistribution
from modeling.invariance import RowPolicy
from modeling.target import TargetBlock, TargetRows, TargetRunner
from verify_worker.grammar import GrammarError
from verify_worker.sequence import NO_TIMES, Sequence

MAX_LOGIT_ROWS = 64
"""Prompt rows whose logits are held at once: a large prefill chunk times a wide head would be gigabytes."""


@dataclass(frozen=True)
class Verification:
    """How one block ended.

    `taps` [k+1, taps, hidden] are the true tapped rows of the anchor and the accepted drafts; `reports`, where asked
    for, one for each accepted draft and the bonus token.
    """

    outcome: Outcome
    taps: Tensor
    reports: list[TokenReport] | None = None


@dataclass(frozen=True)
class Failure:
    """Why a sequence cannot go on; `parameter` names the field of the request that is to blame."""

    code: Literal["invalid_request", "internal_error", "overloaded"]
    message: str
    parameter: str | None = None


Verdict = Verification | Failure
Result = TypeVar("Result")


@dataclass(frozen=True)
class PrefilledRows:
    """A chunk of a prompt: its tapped rows [rows, taps, hidden]; where asked for, reports on the tokens behind them."""

    taps: Tensor
    reports: list[TokenReport]


class Verifier:
    """Runs blocks in shapes whose rows do not depend on their company (`RowPolicy`)."""

    def __init__(self, runner: TargetRunner, policy: RowPolicy, first_decoder_layer: int) -> None:
        self._runner = runner
        self._policy = policy
        self._first_decoder_layer = first_decoder_layer

    def prefill(self, sequence: Sequence, chunk: int) -> PrefilledRows | Failure:
        """Run the next chunk of the prompt and leave its last logits."""
        prompt = sequence.request.prompt_token_ids
        start, stop = sequence.num_rows, min(sequence.num_rows + chunk, len(prompt))

        def run() -> PrefilledRows:
            block = TargetBlock(sequence.cache, start, prompt[start:stop])
            rows = self._runner.forward([block], last_row_only=True)
            self._last_rows = TargetRows(rows.logits, rows.taps[-1:], rows.hidden[-1:])
            return PrefilledRows(rows.taps, list(self._prompt_reports(sequence, rows.hidden, start)))

        result = guarded(run)
        sequence.num_rows = stop
        return result

    def first_token(self, sequence: Sequence) -> Verdict:
        """Draw the first token from the prompt's last row."""
        return self._judge(sequence, self._last_rows, sequence.num_prompt_tokens)

    def verify(self, sequences: Rows[Sequence]) -> list[Verdict]:
        """One verification of each sequence's block, batched as far as rows stay independent."""
        blocks = [self._block(sequence) for sequence in sequences]
        verdicts: list[Verdict] = []
        for group in self._policy.groups([len(block.token_ids) for block in blocks]):
            verdicts += self._verify_group([sequences[index] for index in group], [blocks[index] for index in group])
        return verdicts

    def decoder_rows(self, sequence: Sequence, start: int, stop: int) -> Tensor:
        """Keys and values of the layers above the deepest tap: [rows, layers, 2, kv_heads, dim]."""
        layers = slice(self._first_decoder_layer, None)
        pair = torch.stack(
            (sequence.cache.key[layers, :, start:stop], sequence.cache.value[layers, :, start:stop]), dim=1
        )
        return pair.permute(3, 0, 1, 2, 4)

    def _block(self, sequence: Sequence) -> TargetBlock:
        tokens = [sequence.anchor, *sequence.drafts]
        padding = self._policy.padding(len(tokens))
        return TargetBlock(sequence.cache, sequence.num_rows, tokens + [sequence.anchor] * padding)

    def _verify_group(self, sequences: Rows[Sequence], blocks: Rows[TargetBlock]) -> list[Verdict]:
        rows = guarded(lambda: self._runner.forward(blocks))
        if isinstance(rows, Failure):
            if len(blocks) == 1:
                return [rows]
            # Alone each needs less, and its rows come out the same: only one that does not fit alone has to end.
            pairs = zip(sequences, blocks, strict=True)
            return [verdict for pair in pairs for verdict in self._verify_group([pair[0]], [pair[1]])]
        verdicts: list[Verdict] = []
        first = 0
        for sequence, block in zip(sequences, blocks, strict=True):
            own = slice(first, first + len(block.token_ids))
            own_rows = TargetRows(rows.logits[own], rows.taps[own], rows.hidden[own])
            verdicts.append(self._judge(sequence, own_rows, sequence.num_rows + 1))
            first = own.stop
        return verdicts

    def _judge(self, sequence: Sequence, rows: TargetRows, first_position: int) -> Verdict:
        """Draw from rows, the first of which gives the token at `first_position`, as far as the drafts are right."""
        request, drafts = sequence.request, sequence.drafts

        def run() -> Verification:
            outcome = accept(rows.logits, drafts, request.sampling, first_position, sequence.editor)
            count = outcome.num_accepted + 1
            reports = None
            if request.num_logprobs is not None:
                token_ids = [*drafts[: outcome.num_accepted], outcome.anchor]
                reports = self._report(sequence, rows.logits[:count], token_ids, request.num_logprobs)
            return Verification(outcome, rows.taps[:count], reports)

        return guarded(run)

    def _prompt_reports(self, sequence: Sequence, hidden: Tensor, start: int) -> Iterator[TokenReport]:
        """Reports on the prompt tokens behind the rows `hidden` of the positions from `start` on."""
        count = sequence.request.num_prompt_logprobs
        if count is None:
            return
        followers = sequence.request.prompt_token_ids[start + 1 : start + 1 + hidden.shape[0]]
        for first in range(0, len(followers), MAX_LOGIT_ROWS):
            token_ids = followers[first : first + MAX_LOGIT_ROWS]
            logits = self._runner.logits(hidden[first : first + len(token_ids)])
            yield from self._report(sequence, logits, token_ids, count)

    def _report(self, sequence: Sequence, logits: Tensor, token_ids: Rows[int], count: int) -> list[TokenReport]:
        return report_tokens(logits, token_ids, count, sequence.request.rules.vocab_size)


def guarded(run: Callable[[], Result]) -> Result | Failure:
    """What `run` returns, or why one sequence has to end; any other error is a fault of this program and goes on."""
    try:
        return run()
    except DegenerateDistribution as error:
        return Failure("internal_error", f"the target gave no usable distribution: {error}")
    except GrammarError as error:
        return Failure("invalid_request", f"the grammar cannot be followed further: {error}", "grammar")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return Failure("overloaded", "the target's device has not enough memory for this request")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU, whose allocator of torch raises a bare RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def without_drafts(sequence: Sequence) -> None:
    """Let the next round be an autoregressive step."""
    sequence.drafts = []
    sequence.source = "autoregressive"
    sequence.block_times = NO_TIMES
