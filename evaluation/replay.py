"""Replays speculative rounds on a recorded text, for many variants of a method at once.

All variants walk through the same text and come through many of the same places. What they ask for there depends on the
place alone: foresight on the drafts under verification, and the block for the realised outcome, whose context is the
true text. So each is computed once and shared, by plans, by sources of the context states, and, with a causal draft
model, by budgets too: a smaller block is the beginning of a larger one. Rows of a packed batch are independent, so of
the outcomes a cache holds only the realised one is drafted, which makes B = 16 cost what B = 1 does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from decoding.calibration import Calibration
from decoding.observation import ObservedRound, RoundOutcome, compact_round
from decoding.outcomes import ABSENT
from decoding.pooling import pooled_outlook
from decoding.rules import outcome_rank
from decoding.uniforms import noise_generator
from draft_worker.block import DraftBlock
from draft_worker.foresight import foresee_blocks
from draft_worker.networks import DraftNetworks
from draft_worker.round import REFRESH_SLOTS
from draft_worker.sequence import DraftSequence, new_memory
from evaluation.drafting import (
    MAX_ROWS,
    Demand,
    DraftingOptions,
    RefinedBlock,
    Refresh,
    draft_blocks,
    lay_copies,
)
from evaluation.rounds import Ending, ReplayedRound, checked_replacements, sizes_that_hold, verify
from evaluation.texts import TargetText

OFFLINE_CACHE_SIZE = 16
"""The paper's cache size in its offline tables."""

NUM_DRAFT_ANCHORS = 20
"""Of each slot: as many as the largest cache can hold, the draft itself, and some that would end the text."""

States = Literal["true", "served", "predicted", "copied"]
"""Where the context states of a block come from that stand between the last verified one and its anchor.

`true`: the target, drafting only after verification. `served`: foresight where the cache holds the outcome, else a
fallback block from true states. `predicted`: foresight, whether or not a cache would have held the outcome. `copied`:
the last verified state, again and again (the paper's lower bound, appendix A).
"""


@dataclass(frozen=True)
class Variant:
    """A way to draft: states, J passes, and what precedes each."""

    states: States
    num_passes: int
    refresh: Refresh = "none"

    @property
    def num_refreshes(self) -> int:
        return 0 if self.refresh == "none" else self.num_passes


@dataclass(frozen=True)
class Player:
    """A variant at one budget. `observed`: its rounds are kept for other selection rules."""

    variant: Variant
    num_draft_tokens: int
    observed: bool = False


@dataclass(frozen=True)
class ReplaySettings:
    """What does not differ between variants. `calibrations` by number of drafts; without one equation 6 ranks."""

    players: tuple[Player, ...]
    stop_token_ids: frozenset[int]
    calibrations: dict[int, Calibration] = field(default_factory=dict)
    cache_size: int = OFFLINE_CACHE_SIZE
    refresh_slots: int = REFRESH_SLOTS


@dataclass
class PlayedText:
    """What a player did with a text."""

    player: Player
    rounds: list[ReplayedRound] = field(default_factory=list)
    observed: list[ObservedRound] = field(default_factory=list)


@dataclass(eq=False)
class _Walk:
    """A player on its way. `block` None: to be drafted from true states when its place is reached."""

    played: PlayedText
    start: int
    block: RefinedBlock | None = None
    was_hit: bool = False
    is_over: bool = False

    @property
    def variant(self) -> Variant:
        return self.played.player.variant

    @property
    def num_draft_tokens(self) -> int:
        return self.played.player.num_draft_tokens

    def drafts(self) -> DraftBlock:
        assert self.block is not None, "the block is drafted before it is verified"
        return self.block.first(self.num_draft_tokens)


@dataclass(frozen=True)
class _Step:
    """A walk whose round ended with a next block to draft."""

    walk: _Walk
    ending: Ending
    anchor: int

    @property
    def drafts(self) -> tuple[int, ...]:
        """The block under verification at its full length."""
        assert self.walk.block is not None
        return self.walk.block.block.token_ids


class Replay:
    """Runs all players over one text. `noise_id` keys the noise of initial drafts, with the place of their anchor."""

    def __init__(self, networks: DraftNetworks, text: TargetText, settings: ReplaySettings, noise_id: int = 0) -> None:
        self._networks = networks
        self._text = text
        self._settings = settings
        self._tokens = text.drawn_token_ids
        self._num_draft_tokens = max(player.num_draft_tokens for player in settings.players)
        self._options = DraftingOptions(
            num_draft_tokens=self._num_draft_tokens,
            refresh_slots=settings.refresh_slots,
            num_candidates=NUM_DRAFT_ANCHORS if any(player.observed for player in settings.players) else 0,
            noise=lambda position: noise_generator(noise_id, position),
        )
        budgets = {player.num_draft_tokens for player in settings.players}
        assert networks.config.causal or len(budgets) == 1, "slots of a bidirectional block see all of it"
        self._layers = range(networks.decoder.first_layer, networks.target.num_layers)
        num_positions = len(self._tokens) + 2 * self._num_draft_tokens + 4
        memory = new_memory(networks, num_positions, self._num_draft_tokens, MAX_ROWS)
        self._sequence = DraftSequence(networks, memory, [])
        self._ends = [c for c in networks.to_columns(sorted(settings.stop_token_ids)) if c != ABSENT]

    def run(self) -> list[PlayedText]:
        """All rounds of all players, in the order of the settings."""
        first = len(self._text.prompt_token_ids)
        walks = [_Walk(PlayedText(player), first) for player in self._settings.players]
        going = walks
        while going := [walk for walk in going if not walk.is_over and walk.start + 1 < len(self._tokens)]:
            start = min(walk.start for walk in going)
            self._advance(start)
            self._rounds([walk for walk in going if walk.start == start])
        return [walk.played for walk in walks]

    def _advance(self, start: int) -> None:
        sequence = self._sequence
        rows = self._text.states(self._networks.config.tap_layers, self._layers, sequence.num_rows, start)
        sequence.install(rows.taps, rows.decoder_kv)
        sequence.token_ids = self._tokens[: start + 1]

    def _rounds(self, walks: Sequence[_Walk]) -> None:
        """One round of all players that stand at the sequence's anchor."""
        self._draft_from_true_states([walk for walk in walks if walk.block is None])
        steps = [step for walk in walks if (step := self._end_round(walk)) is not None]
        by_states: dict[States, list[_Step]] = {}
        for step in steps:
            by_states.setdefault(step.walk.variant.states, []).append(step)
        for step in by_states.get("true", []):
            self._go_on(step, None)
        self._foresee(by_states.get("served", []), by_states.get("predicted", []))
        self._copy(by_states.get("copied", []))

    def _draft_from_true_states(self, walks: Sequence[_Walk]) -> None:
        """Of players that draft after verification the whole plan, of others the fallback block of a miss: J0."""
        anchor = self._sequence.token_ids[-1]
        demands = [
            Demand(-1, anchor, walk.variant.num_passes, walk.variant.refresh)
            if walk.variant.states == "true"
            else Demand(-1, anchor, 0, "none")
            for walk in walks
        ]
        blocks = draft_blocks(self._sequence, set(demands), self._options)
        for walk, demand in zip(walks, demands, strict=True):
            walk.block = blocks[demand]

    def _end_round(self, walk: _Walk) -> _Step | None:
        following = self._text.following(walk.start, walk.num_draft_tokens)
        ending = verify(walk.drafts().token_ids, following)
        if ending is None:
            walk.is_over = True
            return None
        assert walk.block is not None
        replacements = checked_replacements(walk.block.replacements, ending, following)
        walk.played.rounds.append(ReplayedRound(ending, walk.was_hit, None, replacements))
        if ending.anchor is None:
            walk.is_over = True
            return None
        return _Step(walk, ending, ending.anchor)

    def _go_on(self, step: _Step, block: RefinedBlock | None) -> None:
        step.walk.start += step.ending.num_accepted + 1
        step.walk.block, step.walk.was_hit = block, block is not None

    def _copy(self, steps: Sequence[_Step]) -> None:
        if not steps:
            return
        last = self._sequence.num_rows - 1
        rows = self._text.states(self._networks.config.tap_layers, self._layers, last, last + 1)
        lay_copies(self._sequence, rows.taps[0], self._num_draft_tokens + 1)
        self._draft_next(steps)

    def _foresee(self, served: Sequence[_Step], predicted: Sequence[_Step]) -> None:
        """Foresight on every block under verification, then the blocks for how they ended.

        The shared foresight rows are those of the block of which most was accepted: they hold true tokens as far as any
        of the blocks to draft asks for. Only players with a cache ask how likely their outcome was.
        """
        steps = [*served, *predicted]
        if not steps:
            return
        deepest = max(steps, key=lambda step: step.ending.num_accepted)
        blocks = list(dict.fromkeys([deepest.drafts, *(step.drafts for step in served)]))
        log_p: dict[tuple[int, ...], torch.Tensor] = {}
        with_refresh = any(step.walk.variant.refresh != "none" for step in steps)
        most = self._sequence.memory.draft.num_scratch // (self._num_draft_tokens + 1)
        for start in reversed(range(0, len(blocks), most)):  # the deepest comes last, so that its rows stay
            chosen = blocks[start : start + most]
            asked = [[self._sequence.token_ids[-1], *drafts] for drafts in chosen]
            foresight = foresee_blocks(self._sequence, asked, with_refresh=with_refresh)
            log_p |= dict(zip(chosen, foresight.log_p.unflatten(0, (len(chosen), -1)), strict=True))
        hits = self._hits(served, log_p)
        for step in served:
            if step not in hits:
                self._go_on(step, None)
        self._draft_next([*hits, *predicted])

    def _draft_next(self, steps: Sequence[_Step]) -> None:
        demands = [
            Demand(step.ending.num_accepted, step.anchor, step.walk.variant.num_passes, step.walk.variant.refresh)
            for step in steps
        ]
        blocks = draft_blocks(self._sequence, set(demands), self._options)
        for step, demand in zip(steps, demands, strict=True):
            self._go_on(step, blocks[demand])

    def _hits(self, steps: Sequence[_Step], log_p: Mapping[tuple[int, ...], torch.Tensor]) -> list[_Step]:
        """The steps whose outcome the cache held; notes for each which caches would have."""
        known: dict[tuple[DraftBlock, int], int | None] = {}
        hits = []
        for step in steps:
            played, block = step.walk.played, step.walk.drafts()
            key = block, step.ending.num_accepted
            if key not in known or played.player.observed:
                known[key] = self._rank(step, log_p[step.drafts])
            rank = known[key]
            played.rounds[-1] = replace(played.rounds[-1], held_by=sizes_that_hold(rank))
            if rank is not None and rank < self._settings.cache_size:
                hits.append(step)
        return hits

    def _rank(self, step: _Step, log_p: torch.Tensor) -> int | None:
        """Place of the realised outcome among those the served rule may choose."""
        networks, walk = self._networks, step.walk
        gamma, block = walk.num_draft_tokens, walk.drafts()
        assert walk.block is not None
        candidates = walk.block.candidates
        observed = compact_round(
            pooled_outlook(log_p[: gamma + 1], block.logits),
            networks.to_columns(block.token_ids),
            torch.tensor(block.confidences),
            RoundOutcome(step.ending.num_accepted, networks.head.column(step.anchor), self._ends),
            candidates[:gamma] if walk.played.player.observed and candidates is not None else None,
        )
        if walk.played.player.observed:
            walk.played.observed.append(observed)
        calibration = self._settings.calibrations.get(gamma)
        ends = [k for k, token_id in enumerate(block.token_ids) if token_id in self._settings.stop_token_ids]
        return outcome_rank(
            observed,
            "uncalibrated" if calibration is None else "served",
            calibration or Calibration.uncalibrated(),
            max_accepted=ends[0] if ends else None,
        )
