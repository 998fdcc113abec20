"""A round of the packed, cached code gives the drafts of the un-packed reference written from the design."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from decoding.plan import PassPlan
from decoding.pooling import DRAFT_SHARE
from draft_worker.block import DraftBlock
from draft_worker.foresight import foresee
from draft_worker.refinement import Drafts, begin, refine, refresh
from draft_worker.round import DraftRound, SelectionRule, blocks_of, fallback_block
from draft_worker.sequence import DraftSequence
from tests.draft_worker.reference import Reference
from tests.tiny.models import (
    MASK_TOKEN_ID,
    VOCAB_SIZE,
    DraftKind,
    TargetKind,
    TinyModels,
    drafted_sequence,
    successors,
    true_rows,
)

GAMMA = 4
PROMPT = [(7 * index + 3) % VOCAB_SIZE for index in range(70)]  # longer than one key bucket


def noise_of(sequence: DraftSequence, rows: int, generator: torch.Generator) -> list[list[int]]:
    """The noise that `begin` draws from a generator in this state."""
    if sequence.networks.config.inputs == "mask":
        return [[MASK_TOKEN_ID] * GAMMA] * rows
    drawn = torch.randint(len(sequence.token_ids), (rows, GAMMA), generator=generator)
    noise: list[list[int]] = torch.tensor(sequence.token_ids)[drawn].tolist()
    return noise


def tokens_of(drafts: Drafts) -> list[list[int]]:
    rows: list[list[int]] = drafts.token_ids.tolist()
    return rows


@pytest.mark.parametrize("target", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["trained", "random", "bidirectional"])
@pytest.mark.parametrize("length", [1, 2, 9, 70])
def test_round(models: TinyModels, target: TargetKind, kind: DraftKind, length: int) -> None:
    token_ids = PROMPT[:length]
    networks = models.networks(kind, target)
    rows = true_rows(models.runner(target), token_ids)
    sequence = drafted_sequence(networks, rows, token_ids, num_draft_tokens=GAMMA)
    reference = Reference(networks, rows, token_ids)
    block = [token_ids[-1], *successors(token_ids[-1], GAMMA)]

    foresight = foresee(sequence, block, with_refresh=True)
    expected = reference.foresee(block, len(token_ids) - 1)
    torch.testing.assert_close(foresight.taps, expected.taps, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(foresight.log_p, expected.log_p, rtol=1e-4, atol=1e-3)

    accepted, anchors = [0, 4, 2, 4, 1], [3, 50, 127, 51, 0]
    generator = torch.Generator().manual_seed(3)
    noise = noise_of(sequence, len(anchors), generator)
    drafts = begin(sequence, accepted, anchors, GAMMA, torch.Generator().manual_seed(3))
    prepared = [
        reference.prepare(expected, k, anchor, n) for k, anchor, n in zip(accepted, anchors, noise, strict=True)
    ]
    assert tokens_of(drafts) == [row.initial for row in prepared]
    refresh(sequence, drafts)
    assert tokens_of(drafts) == [row.refreshed for row in prepared]
    assert drafts.num_frozen.tolist() == [row.first for row in prepared]
    if kind == "bidirectional":
        return  # a block that sees ahead has no context rows inside: passes after the refresh are for causal drafts
    refine(sequence, drafts)
    assert tokens_of(drafts) == [row.final for row in prepared]


@pytest.mark.parametrize("kind", ["trained", "random", "bidirectional"])
@pytest.mark.parametrize("length", [1, 9])
def test_fallback_block(models: TinyModels, kind: DraftKind, length: int) -> None:
    token_ids = PROMPT[:length]
    networks = models.networks(kind)
    rows = true_rows(models.runner(), token_ids)
    sequence = drafted_sequence(networks, rows, token_ids, num_draft_tokens=GAMMA)
    noise = noise_of(sequence, 1, torch.Generator().manual_seed(8))[0]
    block = fallback_block(sequence, GAMMA, torch.Generator().manual_seed(8))
    assert list(block.token_ids) == Reference(networks, rows, token_ids).fallback(noise)


def outcomes_by_equation_6(log_p: torch.Tensor, drafts: Sequence[int], count: int, stops: set[int]) -> list[list[int]]:
    """The most probable outcomes by enumeration."""
    probabilities = log_p.double().exp()
    scored = []
    for k in range(len(drafts) + 1):
        reach = 1.0
        for i in range(k):
            reach *= float(probabilities[i, drafts[i]])
        for anchor in range(VOCAB_SIZE):
            if anchor in stops or (k < len(drafts) and anchor == drafts[k]):
                continue
            scored.append((reach * float(probabilities[k, anchor]), [k, anchor]))
    return [outcome for _, outcome in sorted(scored, reverse=True)[:count]]


def test_whole_round_selects_and_drafts_as_the_reference(models: TinyModels) -> None:
    token_ids = PROMPT[:12]
    networks = models.networks("trained")
    rows = true_rows(models.runner(), token_ids)
    sequence = drafted_sequence(networks, rows, token_ids, num_draft_tokens=GAMMA)
    reference = Reference(networks, rows, token_ids)
    drafts = [*successors(token_ids[-1], 2), 9, 10]
    block = reference.foresee([token_ids[-1], *drafts], len(token_ids) - 1)
    unrestricted = outcomes_by_equation_6(block.log_p, drafts, 4, set())
    stops = {unrestricted[1][1]}
    expected = outcomes_by_equation_6(block.log_p, drafts, 4, stops)
    assert expected != unrestricted

    rule = SelectionRule(None, None, frozenset(stops))
    round_ = DraftRound(
        sequence,
        DraftBlock(tuple(drafts), (0.5,) * GAMMA),
        PassPlan(1, 1, 4),
        rule,
        torch.Generator().manual_seed(5),
    )
    versions = [(phase, round_.version) for phase in round_.steps()]
    assert versions == [("foresight", 0), ("draft", 0), ("refresh", 1), ("refine", 1)]
    assert round_.version == 2
    assert [list(outcome) for outcome in round_.outcomes] == expected
    noise = noise_of(sequence, 4, torch.Generator().manual_seed(5))
    for entry, (k, anchor), row_noise in zip(round_.prepared, expected, noise, strict=True):
        assert (entry.num_accepted, entry.anchor) == (k, anchor)
        assert list(entry.block.token_ids) == reference.prepare(block, k, anchor, row_noise).final
        found = round_.find(k, anchor)
        assert found is not None and found.token_ids == entry.block.token_ids
    assert round_.find(GAMMA, next(iter(stops))) is None


def test_outcomes_are_scored_by_the_decoder_and_the_draft_model_together(models: TinyModels) -> None:
    token_ids = PROMPT[:12]
    networks = models.networks("trained")
    rows = true_rows(models.runner(), token_ids)
    sequence = drafted_sequence(networks, rows, token_ids, num_draft_tokens=GAMMA)
    first = begin(sequence, [-1], [token_ids[-1]], GAMMA, torch.Generator().manual_seed(2))
    (drafted,) = blocks_of(first)
    assert drafted.logits is not None and drafted.logits.shape == (GAMMA, VOCAB_SIZE)
    assert drafted.logits.argmax(-1).tolist() == list(drafted.token_ids)
    log_p = Reference(networks, rows, token_ids).foresee([token_ids[-1], *drafted.token_ids], len(token_ids) - 1).log_p
    pooled = log_p.clone()
    pooled[:GAMMA] = (log_p[:GAMMA] + DRAFT_SHARE * drafted.logits).log_softmax(-1)
    outcomes = []
    for logits, expected in ((drafted.logits, pooled), (None, log_p)):
        block = replace(drafted, logits=logits)
        rule = SelectionRule(None, None, frozenset())
        round_ = DraftRound(sequence, block, PassPlan(0, 0, 6), rule, torch.Generator())
        list(round_.steps())
        assert [list(outcome) for outcome in round_.outcomes] == outcomes_by_equation_6(
            expected, drafted.token_ids, 6, set()
        )
        outcomes.append(round_.outcomes)
    assert outcomes[0] != outcomes[1]


def test_no_outcome_is_a_draft_token_that_would_have_been_accepted(models: TinyModels) -> None:
    token_ids = PROMPT[:6]
    networks = models.networks("trained")
    sequence = drafted_sequence(networks, true_rows(models.runner(), token_ids), token_ids, num_draft_tokens=GAMMA)
    drafts = tuple(successors(token_ids[-1], GAMMA))
    round_ = DraftRound(
        sequence,
        DraftBlock(drafts, (0.5,) * GAMMA),
        PassPlan(0, 0, 8),
        SelectionRule(None, None, frozenset()),
        torch.Generator(),
    )
    list(round_.steps())
    assert len(round_.outcomes) == 8
    assert all(anchor != drafts[k] for k, anchor in round_.outcomes if k < GAMMA)
    # Full acceptance has anchors of its own, the draft's continuation above all.
    assert (GAMMA, successors(token_ids[-1], GAMMA + 1)[-1]) in round_.outcomes
