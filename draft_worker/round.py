"""One round of one sequence on the drafter's side: from the block under verification to the blocks prepared for its
endings.

`steps()` is the round as a story, cut where the worker may look at its inbox. Knows no messages and no clock.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decoding.calibration import Calibration, calibrated_scores
from decoding.outcomes import OutcomeTable, top_outcomes
from decoding.plan import PassPlan
from decoding.pooling import pooled_outlook
from decoding.selection import select
from draft_worker.block import DraftBlock, PreparedBlock, find_block
from draft_worker.foresight import Foresight, foresee
from draft_worker.left_to_right import corrected_block
from draft_worker.refinement import Drafts, begin, refine, refresh
from draft_worker.sequence import DraftSequence

CANDIDATES_PER_ROW = 32
REFRESH_SLOTS = 4
"""Slots that each refresh of a round looks further ahead: the first disagreement is hardly ever later."""


@dataclass(frozen=True)
class SelectionRule:
    """How outcomes are scored and chosen. Without a calibration the decoder's own probabilities rank them (equation
    6)."""

    calibration: Calibration | None
    threshold: float | None
    excluded_token_ids: frozenset[int]


@dataclass
class DraftRound:
    """The work of one round. `prepared` always holds the best finished version; `version` counts them."""

    sequence: DraftSequence
    block: DraftBlock
    plan: PassPlan
    rule: SelectionRule
    generator: torch.Generator
    refresh_slots: int = REFRESH_SLOTS
    prepared: list[PreparedBlock] = field(default_factory=list)
    version: int = 0
    outcomes: list[tuple[int, int]] = field(default_factory=list)
    foresight: Foresight | None = None

    def steps(self) -> Iterator[str]:
        """Yields the name of each phase just before it runs; after `draft` and every `refine` a new version is
        ready."""
        yield "foresight"
        self.foresight = foresee(
            self.sequence,
            [self.sequence.token_ids[-1], *self.block.token_ids],
            with_refresh=self.plan.num_refreshes > 0,
        )
        self.outcomes = self._select(self.foresight)
        if not self.outcomes:
            return
        yield "draft"
        drafts = begin(
            self.sequence,
            [num_accepted for num_accepted, _ in self.outcomes],
            [anchor for _, anchor in self.outcomes],
            len(self.block.token_ids),
            self.generator,
        )
        self._publish(drafts)
        for number in range(self.plan.num_passes):
            if number < self.plan.num_refreshes:
                yield "refresh"
                refresh(self.sequence, drafts, (number + 1) * self.refresh_slots)
            yield "refine"
            refine(self.sequence, drafts)
            self._publish(drafts)

    def find(self, num_accepted: int, anchor: int) -> DraftBlock | None:
        """The best finished block for an outcome."""
        return find_block(self.prepared, num_accepted, anchor)

    def is_begun(self, num_accepted: int, anchor: int) -> bool:
        """Never: a first version takes one pass, as does the fallback block, which sees true states."""
        return False

    def finish(self, num_accepted: int, anchor: int) -> DraftBlock:
        """Only finished blocks are of use."""
        raise AssertionError("no outcome is ever begun")

    def outlook(self, foresight: Foresight) -> Tensor:
        """Log-probabilities [γ+1, W] of the token after each row of the block under verification."""
        return pooled_outlook(foresight.log_p, self.block.logits)

    def score(self, foresight: Foresight) -> OutcomeTable:
        """All candidate outcomes, best first (equation 6, or the calibrated score of equation 8)."""
        columns = self.sequence.networks.to_columns(self.block.token_ids)
        log_p = self.outlook(foresight)
        if self.rule.calibration is None:
            return top_outcomes(log_p, columns, CANDIDATES_PER_ROW)
        confidences = torch.tensor(self.block.confidences, device=log_p.device)
        return calibrated_scores(log_p, columns, confidences, self.rule.calibration, CANDIDATES_PER_ROW)

    def _select(self, foresight: Foresight) -> list[tuple[int, int]]:
        networks = self.sequence.networks
        excluded = [c for c in networks.to_columns(sorted(self.rule.excluded_token_ids)) if c >= 0]
        table = self.score(foresight)
        ends = [k for k, token_id in enumerate(self.block.token_ids) if token_id in self.rule.excluded_token_ids]
        if ends:  # accepting a draft that ends the text leaves no next block to prepare
            table = table.take((table.num_accepted <= ends[0]).nonzero().flatten())
        chosen = select(table, self.plan.cache_size, excluded, self.rule.threshold)
        anchors = networks.to_token_ids(chosen.column).tolist()
        return list(zip(chosen.num_accepted.tolist(), anchors, strict=True))

    def _publish(self, drafts: Drafts) -> None:
        self.prepared = [
            PreparedBlock(num_accepted, anchor, block)
            for (num_accepted, anchor), block in zip(self.outcomes, blocks_of(drafts), strict=True)
        ]
        self.version += 1


def blocks_of(drafts: Drafts) -> list[DraftBlock]:
    """The rows of a packed batch as plain values."""
    tokens, confidences = drafts.token_ids.tolist(), drafts.confidences.tolist()
    logits = [None] * len(tokens) if drafts.logits is None else list(drafts.logits)
    return [DraftBlock(tuple(t), tuple(c), row) for t, c, row in zip(tokens, confidences, logits, strict=True)]


def fallback_block(sequence: DraftSequence, num_draft_tokens: int, generator: torch.Generator) -> DraftBlock:
    """The block of a miss, from true states for the verified anchor: one pass, and the head's steps if there is one."""
    anchor = sequence.token_ids[-1]
    if sequence.networks.corrector is not None:
        return corrected_block(sequence, sequence.networks.corrector, anchor, num_draft_tokens, generator)
    return blocks_of(begin(sequence, [-1], [anchor], num_draft_tokens, generator))[0]
