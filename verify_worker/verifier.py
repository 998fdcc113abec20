"""The target's side of a round: run blocks of several sequences, draw every row's token, say how each block ended."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.acceptance import Outcome, accept
from modeling.invariance import RowPolicy
from modeling.target import TargetBlock, TargetRunner
from verify_worker.sequence import Sequence


@dataclass(frozen=True)
class Verification:
    """How one block ended, with the true tapped rows [k+1, taps, hidden] of the anchor and the accepted drafts."""

    outcome: Outcome
    taps: Tensor


class Verifier:
    """Runs blocks in shapes whose rows do not depend on their company (`RowPolicy`)."""

    def __init__(self, runner: TargetRunner, policy: RowPolicy, first_decoder_layer: int) -> None:
        self._runner = runner
        self._policy = policy
        self._first_decoder_layer = first_decoder_layer

    def prefill(self, sequence: Sequence, chunk: int) -> Tensor:
        """Run the next chunk of the prompt; returns its tapped rows [rows, taps, hidden] and leaves the last logits."""
        prompt = sequence.request.prompt_token_ids
        stop = min(sequence.num_rows + chunk, len(prompt))
        block = TargetBlock(sequence.cache, sequence.num_rows, prompt[sequence.num_rows : stop])
        rows = self._runner.forward([block], last_row_only=True)
        sequence.num_rows = stop
        self._last_logits = rows.logits
        return rows.taps

    def first_token(self, sequence: Sequence) -> Outcome:
        """Draw the first token from the logits of the prompt's last row."""
        logits = self._allowed(sequence, self._last_logits)
        return accept(logits, [], sequence.request.sampling, sequence.num_prompt_tokens)

    def verify(self, sequences: Rows[Sequence]) -> list[Verification]:
        """One verification of each sequence's block, batched as far as rows stay independent."""
        blocks = [self._block(sequence) for sequence in sequences]
        verifications: list[Verification] = []
        for group in self._policy.groups([len(block.token_ids) for block in blocks]):
            rows = self._runner.forward([blocks[index] for index in group])
            first = 0
            for index in group:
                last = first + len(blocks[index].token_ids)
                verifications.append(self._judge(sequences[index], rows.logits[first:last], rows.taps[first:last]))
                first = last
        return verifications

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

    def _judge(self, sequence: Sequence, logits: Tensor, taps: Tensor) -> Verification:
        logits = self._allowed(sequence, logits)
        outcome = accept(logits, sequence.drafts, sequence.request.sampling, sequence.num_rows + 1)
        return Verification(outcome, taps[: outcome.num_accepted + 1])

    def _allowed(self, sequence: Sequence, logits: Tensor) -> Tensor:
        """Rows [rows, vocab] with the stop tokens struck out where the text would be shorter than `min_tokens`."""
        request = sequence.request
        num_struck = min(request.min_tokens - sequence.num_generated, logits.shape[0])
        if num_struck <= 0 or not request.stop_token_ids:
            return logits
        logits = logits.clone()
        logits[:num_struck, sorted(request.stop_token_ids)] = float("-inf")
        return logits


def without_drafts(sequence: Sequence) -> None:
    """Let the next round be an autoregressive step."""
    sequence.drafts = []
    sequence.source = "autoregressive"
