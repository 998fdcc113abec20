"""Blocks for several outcomes and plans at one place, each pass computed once: J0 serves every plan, J1 every plan that
goes on from it, and all rows of a stage share one packed batch.

The passes are the drafter's own (`draft_worker.refinement`). Knows no texts and no acceptance.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draft_worker.block import DraftBlock
from draft_worker.packing import Packing, pack_outcomes
from draft_worker.refinement import Drafts, opened, refine, refresh
from draft_worker.round import blocks_of
from draft_worker.sequence import DraftSequence
from evaluation.rounds import Replacement

Refresh = Literal["none", "alone", "replace"]
"""What precedes a Jacobi pass: nothing; a context refresh; a context refresh with anchor replacement (as served)."""

MAX_ROWS = 12
"""Rows of a packed batch, hence the size of the scratch memory."""

_KINDS = 3


@dataclass(frozen=True)
class Demand:
    """A block that is wanted: for the outcome (num_accepted, anchor), or for the verified anchor itself (-1)."""

    num_accepted: int
    anchor: int
    num_passes: int
    refresh: Refresh


@dataclass(frozen=True)
class RefinedBlock:
    """Drafts after some passes, what the decoder wrote on the way, and each draft's likeliest columns if asked for."""

    block: DraftBlock
    replacements: tuple[Replacement, ...] = ()
    candidates: Tensor | None = None

    def first(self, num_draft_tokens: int) -> DraftBlock:
        """The block of a smaller budget: with a causal draft model later slots change nothing in earlier ones."""
        block = self.block
        logits = None if block.logits is None else block.logits[:num_draft_tokens]
        return DraftBlock(block.token_ids[:num_draft_tokens], block.confidences[:num_draft_tokens], logits)


@dataclass(frozen=True)
class DraftingOptions:
    """Sizes. `noise` gives the generator for a block whose anchor stands at a position."""

    num_draft_tokens: int
    refresh_slots: int
    num_candidates: int
    noise: Callable[[int], torch.Generator]


@dataclass(frozen=True)
class _Line:
    """A row that is refined: the outcome it belongs to, by its row in J0, what precedes its passes, and how many."""

    root: int
    refresh: Refresh
    num_passes: int


@dataclass(frozen=True)
class _Rows:
    """Drafts in the making, and the drafts that each row's outcome accepts."""

    drafts: Drafts
    num_accepted: list[int]

    def take(self, sequence: DraftSequence, rows: Sequence[int]) -> "_Rows":
        """Copies of some rows, packed anew; the rows themselves where all are wanted as they stand."""
        drafts = self.drafts
        if list(rows) == list(range(len(self.num_accepted))):
            return self
        num_accepted, index = [self.num_accepted[row] for row in rows], torch.tensor(rows)
        feature = drafts.feature
        if feature is not None:
            shape = drafts.packing.num_rows, drafts.packing.num_slots
            feature = feature.unflatten(0, shape)[index].flatten(0, 1)
        packing = _packed(sequence, num_accepted, drafts.packing.num_slots)
        return _Rows(
            Drafts(
                packing=packing,
                anchors=drafts.anchors[index],
                token_ids=drafts.token_ids[index],
                confidences=drafts.confidences[index],
                num_frozen=drafts.num_frozen[index],
                feature=feature,
                num_candidates=drafts.num_candidates,
                candidates=None if drafts.candidates is None else drafts.candidates[index],
                logits=None if drafts.logits is None else drafts.logits[index],
            ),
            num_accepted,
        )

    def put(self, rows: Sequence[int], drafts: Drafts) -> None:
        """Write back what a refresh changed in some rows."""
        mine, index = self.drafts, torch.tensor(rows)
        mine.token_ids[index] = drafts.token_ids
        mine.confidences[index] = drafts.confidences
        mine.num_frozen[index] = drafts.num_frozen
        assert drafts.feature is not None, "a refresh leaves its features"
        shape = mine.packing.num_rows, mine.packing.num_slots
        if mine.feature is None:
            mine.feature = drafts.feature.new_zeros(shape[0] * shape[1], drafts.feature.shape[-1])
        mine.feature.unflatten(0, shape)[index] = drafts.feature.unflatten(0, (len(rows), shape[1]))


@torch.inference_mode()
def draft_blocks(
    sequence: DraftSequence, demands: Collection[Demand], options: DraftingOptions
) -> dict[Demand, RefinedBlock]:
    """All blocks that are wanted at the sequence's place; reads the shared foresight rows, which must be there."""
    found: dict[Demand, RefinedBlock] = {}
    outcomes = sorted({(demand.num_accepted, demand.anchor) for demand in demands})
    for start in range(0, len(outcomes), MAX_ROWS // _KINDS):
        chosen = outcomes[start : start + MAX_ROWS // _KINDS]
        wanted = [demand for demand in demands if (demand.num_accepted, demand.anchor) in chosen]
        found |= _draft_outcomes(sequence, chosen, wanted, options)
    return found


def _draft_outcomes(
    sequence: DraftSequence,
    outcomes: Sequence[tuple[int, int]],
    demands: Sequence[Demand],
    options: DraftingOptions,
) -> dict[Demand, RefinedBlock]:
    drafts = _initial(sequence, outcomes, options)
    versions = {(root, "none", 0): block for root, block in enumerate(_refined(drafts, [()] * len(outcomes)))}
    depths: dict[tuple[int, Refresh], int] = {}
    for demand in demands:
        row = outcomes.index((demand.num_accepted, demand.anchor)), demand.refresh
        depths[row] = max(depths.get(row, 0), demand.num_passes)
    lines = [_Line(root, kind, depth) for (root, kind), depth in depths.items() if depth > 0]
    lines.sort(key=lambda line: -line.num_passes)
    rows = _Rows(drafts, [num_accepted for num_accepted, _ in outcomes])
    if lines:
        rows = rows.take(sequence, [line.root for line in lines])
    written: list[tuple[Replacement, ...]] = [()] * len(lines)
    for number in range(1, lines[0].num_passes + 1 if lines else 1):
        going = [line for line in lines if line.num_passes >= number]
        rows = rows.take(sequence, list(range(len(going))))
        new = _refresh(sequence, rows, [line.refresh for line in going], number * options.refresh_slots)
        written = [before + after for before, after in zip(written[: len(going)], new, strict=True)]
        refine(sequence, rows.drafts)
        for line, block in zip(going, _refined(rows.drafts, written), strict=True):
            versions[line.root, line.refresh, number] = block
    return {
        demand: versions[
            outcomes.index((demand.num_accepted, demand.anchor)),
            demand.refresh if demand.num_passes else "none",
            demand.num_passes,
        ]
        for demand in demands
    }


def _initial(sequence: DraftSequence, outcomes: Sequence[tuple[int, int]], options: DraftingOptions) -> Drafts:
    """J0 of all outcomes. The noise of each depends on its place alone, not on what is drafted beside it."""
    rows = [
        opened(
            sequence,
            [num_accepted],
            [anchor],
            options.num_draft_tokens,
            options.noise(sequence.num_rows + num_accepted + 1),
        )
        for num_accepted, anchor in outcomes
    ]
    num_accepted = [row for row, _ in outcomes]
    drafts = Drafts(
        packing=_packed(sequence, num_accepted, sequence.networks.config.num_slots(options.num_draft_tokens)),
        anchors=torch.cat([row.anchors for row in rows]),
        token_ids=torch.cat([row.token_ids for row in rows]),
        confidences=torch.cat([row.confidences for row in rows]),
        num_frozen=torch.cat([row.num_frozen for row in rows]),
        num_candidates=options.num_candidates,
    )
    refine(sequence, drafts)
    return drafts


def _packed(sequence: DraftSequence, num_accepted: Sequence[int], num_slots: int) -> Packing:
    return pack_outcomes(sequence, num_accepted, num_slots, sequence.networks.config.causal)


def _refresh(
    sequence: DraftSequence, rows: _Rows, kinds: Sequence[Refresh], max_slots: int
) -> list[tuple[Replacement, ...]]:
    """A context refresh of the rows that want one; returns what was written into each row.

    Without anchor replacement nothing is written: the drafts that the decoder agrees with become context with their
    refreshed features, and the last of them is the anchor of the next pass, which redrafts from the first disagreement.
    """
    chosen = [row for row, kind in enumerate(kinds) if kind != "none"]
    replacements: list[tuple[Replacement, ...]] = [()] * len(kinds)
    if not chosen:
        return replacements
    part = rows.take(sequence, chosen).drafts
    tokens, confidences, num_frozen = part.token_ids.clone(), part.confidences.clone(), part.num_frozen
    refresh(sequence, part, max_slots)
    is_alone = torch.tensor([kinds[row] == "alone" for row in chosen], device=part.token_ids.device)
    is_undone = is_alone & (part.token_ids != tokens).any(dim=1)
    part.token_ids = torch.where(is_undone[:, None], tokens, part.token_ids)
    part.confidences = torch.where(is_undone[:, None], confidences, part.confidences)
    part.num_frozen = torch.maximum(torch.where(is_undone, part.num_frozen - 1, part.num_frozen), num_frozen)
    for row, before, after in zip(chosen, tokens.tolist(), part.token_ids.tolist(), strict=True):
        replacements[row] = tuple(
            Replacement(number, old, new)
            for number, (old, new) in enumerate(zip(before, after, strict=True), start=1)
            if old != new
        )
    if part is not rows.drafts:
        rows.put(chosen, part)
    return replacements


def _refined(drafts: Drafts, written: Sequence[tuple[Replacement, ...]]) -> list[RefinedBlock]:
    candidates = [None] * len(written) if drafts.candidates is None else list(drafts.candidates)
    return [RefinedBlock(*parts) for parts in zip(blocks_of(drafts), written, candidates, strict=True)]


@torch.inference_mode()
def lay_copies(sequence: DraftSequence, last_taps: Tensor, num_rows: int) -> None:
    """In place of foresight: the last verified state [taps, hidden], copied to the draft model's foresight rows."""
    networks, memory = sequence.networks, sequence.memory
    feature = networks.model.feature(last_taps).expand(num_rows, -1).contiguous()
    rotary = networks.draft_rotary.span(sequence.num_rows, sequence.num_rows + num_rows)
    networks.stacks.draft.lay_scratch(feature, rotary, memory.draft, 0)
