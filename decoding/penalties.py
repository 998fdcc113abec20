"""Logit bias and the penalties on tokens that a text already holds, as vLLM defines them.

Bias first: a number a token. Then the repetition penalty r, on every token of the prompt or of the generated text: a
positive logit is divided by r, another multiplied. Then, on generated tokens only, frequency · count + presence is
subtracted. The state moves token by token, so each row of a block can be seen by its own prefix; a row costs a few
passes over the vocabulary, whatever the text's length. Knows nothing of rows, blocks and stop tokens.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenControls:
    """Bias and penalties of one request. `logit_bias` holds (token id, bias); a token named twice gets the sum."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.presence_penalty) and math.isfinite(self.frequency_penalty)):
            raise ValueError("presence_penalty and frequency_penalty must be finite")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise ValueError(f"repetition_penalty must be finite and positive, got {self.repetition_penalty}")
        if not all(token_id >= 0 and math.isfinite(bias) for token_id, bias in self.logit_bias):
            raise ValueError("logit_bias must give finite numbers to token ids of at least 0")

    @property
    def counts_generated(self) -> bool:
        """Whether it matters how often a token was generated."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_neutral(self) -> bool:
        """Whether every row stays as it is."""
        return not self.logit_bias and not self.counts_generated and self.repetition_penalty == 1.0


NO_CONTROLS = TokenControls()


class PenaltyState:
    """What bias and penalties do to the next token of one text; advanced by every generated token."""

    def __init__(
        self, controls: TokenControls, prompt_token_ids: Sequence[int], vocab_size: int, device: torch.device
    ) -> None:
        """All token ids must be below `vocab_size`; IndexError otherwise."""
        self._controls = controls
        self._counts: Counter[int] = Counter()
        self._bias = _bias_of(controls, vocab_size, device)
        self._subtracted = torch.zeros(vocab_size, device=device) if controls.counts_generated else None
        self._seen: Tensor | None = None
        if controls.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[torch.tensor(sorted(set(prompt_token_ids)), dtype=torch.long, device=device)] = True

    def apply(self, row: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
        """The logits after bias and penalties, a new float32 row. A logit of -inf stays."""
        edited = row.to(torch.float32)
        if self._bias is not None:
            edited = edited + self._bias
        if self._seen is not None:
            factor = self._controls.repetition_penalty
            penalised = torch.where(edited > 0.0, edited / factor, edited * factor)
            edited = torch.where(self._seen, penalised, edited)
        if self._subtracted is not None:
            edited = edited - self._subtracted
        return edited

    def advance(self, token_id: int) -> None:
        """Take a generated token over."""
        if self._seen is not None:
            self._seen[token_id] = True
        if self._subtracted is not None:
            self._counts[token_id] += 1
            controls = self._controls
            # From the count, not added up: the penalty does not depend on how the text was reached.
            self._subtracted[token_id] = controls.presence_penalty + controls.frequency_penalty * self._counts[token_id]


def _bias_of(controls: TokenControls, vocab_size: int, device: torch.device) -> Tensor | None:
    if not controls.logit_bias:
        return None
    bias = torch.zeros(vocab_size)
    for token_id, value in controls.logit_bias:
        bias[token_id] += value
    return bias.to(device)
