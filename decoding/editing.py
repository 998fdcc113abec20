"""What a request's rules make of a row of logits before it is drawn from, row after row of one text.

The order is vLLM's: what the grammar and `min_tokens` forbid, logit bias, penalties; then, in `decoding.sampling`,
temperature, top-k, top-p and min-p (vLLM filters by min-p first). Every row is seen by its own prefix: `edit` looks at
all tokens given to `advance`, and `advance` is given drawn tokens only, never a draft that was not drawn. So nothing is
ever taken back, and speculation cannot show. Knows nothing of blocks, of positions and of how a grammar is written.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from decoding.penalties import NO_CONTROLS, PenaltyState, TokenControls


class TokenGrammar(ABC):
    """Which tokens may come next so that the text can still become one of a language."""

    @abstractmethod
    def allowed(self) -> Bool[Tensor, " vocab"]:
        """The tokens that may follow as text; ends of the text are not among them."""

    @abstractmethod
    def may_end(self) -> bool:
        """Whether the text is one of the language as it stands."""

    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the text may end and nothing can follow."""

    @abstractmethod
    def advance(self, token_id: int) -> None:
        """Take over an allowed token."""


@dataclass(frozen=True, slots=True)
class TextRules:
    """What one request forbids and favours.

    `vocab_size` counts the tokenizer's ids: a target may have more rows in its head, and none of those is ever drawn.
    Before `min_tokens` tokens no stop token is drawn, unless the grammar allows nothing else. A stop token may be drawn
    where the grammar lets the text end, and where it allows that token as text.
    """

    vocab_size: int
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    controls: TokenControls = NO_CONTROLS


class RowEditor:
    """The state of one text that its rules need."""

    def __init__(
        self,
        rules: TextRules,
        prompt_token_ids: Sequence[int],
        device: torch.device,
        grammar: TokenGrammar | None = None,
    ) -> None:
        """Prompt, stop and biased token ids must be below the rules' `vocab_size`; IndexError otherwise."""
        self._rules = rules
        self._grammar = grammar
        self._num_generated = 0
        self._stops = torch.zeros(rules.vocab_size, dtype=torch.bool, device=device)
        self._stops[torch.tensor(sorted(rules.stop_token_ids), dtype=torch.long, device=device)] = True
        self._penalties: PenaltyState | None = None
        if not rules.controls.is_neutral:
            self._penalties = PenaltyState(rules.controls, prompt_token_ids, rules.vocab_size, device)

    @property
    def is_complete(self) -> bool:
        """Whether the grammar lets nothing follow."""
        return self._grammar is not None and self._grammar.is_complete()

    def edit(self, row: Float[Tensor, " width"]) -> Float[Tensor, " vocab"]:
        """The row to draw the next token from, of the tokenizer's ids only; -inf where a token is forbidden.

        Raises what the grammar raises when it cannot go on.
        """
        row = row[: self._rules.vocab_size]
        forbidden = self._forbidden()
        if forbidden is not None:
            row = row.masked_fill(forbidden, float("-inf"))
        return row if self._penalties is None else self._penalties.apply(row)

    def advance(self, token_id: int) -> bool:
        """Take a drawn token over; whether the text goes on after it."""
        self._num_generated += 1
        if token_id in self._rules.stop_token_ids:
            return False
        if self._penalties is not None:
            self._penalties.advance(token_id)
        if self._grammar is not None:
            self._grammar.advance(token_id)
        return not self.is_complete

    def _forbidden(self) -> Tensor | None:
        """Tokens that may not be drawn next: [vocab], or None when all may."""
        is_early = self._num_generated < self._rules.min_tokens
        if self._grammar is None:
            return self._stops if is_early else None
        forbidden = ~self._grammar.allowed()
        if self._grammar.may_end():
            forbidden = forbidden & ~self._stops
        if is_early and not bool((forbidden | self._stops).all()):
            forbidden = forbidden | self._stops
        return forbidden
