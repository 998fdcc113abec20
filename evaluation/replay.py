"""Replays speculative rounds on a recorded text: which drafts the target would accept, and which outcomes a cache
would hold.

Verification needs no target here: a draft is accepted exactly when it is the recorded token. Rows of a packed batch are
independent, so of the outcomes a cache holds only the realised one is drafted, which makes B = 16 cost what B = 1 does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decoding.calibration import Calibration
from decoding.outcomes import OutcomeTable
from decoding.plan import PassPlan
from decoding.uniforms import noise_generator
from draft_worker.block import DraftBlock
from draft_worker.foresight import foresee
from draft_worker.networks import DraftNetworks
from draft_worker.refinement import begin, refine, refresh
from draft_worker.round import REFRESH_SLOTS, DraftRound, SelectionRule, blocks_of, fallback_block
from draft_worker.sequence import DraftSequence, new_memory
from evaluation.texts import TargetText

NOT_RANKED = 1 << 30


@dataclass(frozen=True)
class ReplayedRound:
    """One round: drafts accepted, whether the block came from the cache, and the rank of this round's realised outcome.

    rank counts from 0 among the selectable outcomes, `NOT_RANKED` where the outcome was not among the candidates.
    """

    num_accepted: int
    was_hit: bool
    rank: int


@dataclass(frozen=True)
class ReplaySettings:
    """What is replayed. `foresight`: draft the next block from predicted states on a hit; else always from true
    ones."""

    plan: PassPlan
    num_draft_tokens: int
    calibration: Calibration | None
    stop_token_ids: frozenset[int]
    foresight: bool = True
    refresh_slots: int = REFRESH_SLOTS


class Replay:
    """Runs rounds over one text."""

    def __init__(self, networks: DraftNetworks, text: TargetText, settings: ReplaySettings) -> None:
        self._networks = networks
        self._text = text
        self._settings = settings
        num_positions = len(text.token_ids) + 2 * settings.num_draft_tokens + 4
        memory = new_memory(networks, num_positions, settings.num_draft_tokens, 1)
        self._sequence = DraftSequence(networks, memory, list(text.prompt_token_ids))
        self._generator = noise_generator(0, 0)

    def run(self) -> list[ReplayedRound]:
        """All rounds whose block lies within the text; the last, cut one is left out."""
        tokens, settings = self._text.token_ids, self._settings
        sequence = self._sequence
        self._install(len(self._text.prompt_token_ids))
        sequence.token_ids.append(tokens[sequence.num_rows])
        block, was_hit = self._true_block(), False
        rounds: list[ReplayedRound] = []
        while True:
            wanted = tokens[sequence.num_rows + 1 : sequence.num_rows + 1 + settings.num_draft_tokens + 1]
            if len(wanted) <= settings.num_draft_tokens:
                return rounds
            accepted = 0
            while accepted < settings.num_draft_tokens and block.token_ids[accepted] == wanted[accepted]:
                accepted += 1
            anchor = wanted[accepted]
            rank, next_block = self._anticipate(block, accepted, anchor)
            rounds.append(ReplayedRound(accepted, was_hit, rank))
            self._install(sequence.num_rows + accepted + 1)
            sequence.token_ids += wanted[: accepted + 1]
            was_hit = next_block is not None
            block = self._true_block() if next_block is None else next_block

    def _install(self, stop: int) -> None:
        start = self._sequence.num_rows
        self._sequence.install(self._text.taps[start:stop], self._text.decoder_kv[start:stop])

    def _anticipate(self, block: DraftBlock, accepted: int, anchor: int) -> tuple[int, DraftBlock | None]:
        """Rank of the realised outcome, and its pre-drafted block if the cache would have held it."""
        settings, networks = self._settings, self._networks
        if networks.adapter is None:
            return NOT_RANKED, None
        rule = SelectionRule(settings.calibration, None, settings.stop_token_ids)
        round_ = DraftRound(self._sequence, block, settings.plan, rule, self._generator)
        foresight = foresee(
            self._sequence,
            [self._sequence.token_ids[-1], *block.token_ids],
            with_refresh=settings.plan.num_refreshes > 0,
        )
        rank = rank_of(round_.score(foresight), accepted, networks.head.column(anchor), self._excluded())
        if not settings.foresight or rank >= settings.plan.cache_size:
            return rank, None
        return rank, self._drafted(accepted, anchor)

    def _excluded(self) -> list[int]:
        return [c for c in self._networks.to_columns(sorted(self._settings.stop_token_ids)) if c >= 0]

    def _drafted(self, accepted: int, anchor: int) -> DraftBlock:
        settings = self._settings
        drafts = begin(self._sequence, [accepted], [anchor], settings.num_draft_tokens, self._generator)
        for number in range(settings.plan.num_passes):
            if number < settings.plan.num_refreshes:
                refresh(self._sequence, drafts, (number + 1) * settings.refresh_slots)
            refine(self._sequence, drafts)
        return blocks_of(drafts)[0]

    def _true_block(self) -> DraftBlock:
        """From true states: the fallback block (J0), or with `foresight` off the whole plan."""
        settings = self._settings
        if settings.foresight:
            return fallback_block(self._sequence, settings.num_draft_tokens, self._generator)
        return self._drafted(-1, self._sequence.token_ids[-1])


def rank_of(table: OutcomeTable, accepted: int, column: int, excluded: Sequence[int]) -> int:
    """Place of an outcome among the selectable ones, best first."""
    keep = (
        ~torch.isin(table.column, torch.tensor(excluded, dtype=torch.long))
        if excluded
        else torch.ones_like(table.column, dtype=torch.bool)
    )
    num_accepted, columns = table.num_accepted[keep], table.column[keep]
    found = ((num_accepted == accepted) & (columns == column)).nonzero()
    return int(found[0]) if len(found) else NOT_RANKED
