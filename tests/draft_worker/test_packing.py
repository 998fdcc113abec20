"""What a packed row sees: its own slots, the foresight rows up to its k, the verified prefix, and nothing else."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from draft_worker import refinement
from draft_worker.foresight import foresee, predict
from draft_worker.packing import pack_foresight, pack_outcomes
from draft_worker.refinement import Drafts, begin, refine, refresh
from draft_worker.sequence import DraftSequence
from tests.tiny.models import DraftKind, TinyModels, drafted_sequence, successors, true_rows

GAMMA = 4
TOKENS = [11, 58, 37, 60, 2, 99]
ACCEPTED, ANCHORS = [0, 4, 2, 4], [3, 50, 127, 51]


def make_sequence(models: TinyModels, kind: DraftKind = "trained", num_draft_tokens: int = GAMMA) -> DraftSequence:
    """A sequence with its foresight rows in place."""
    sequence = drafted_sequence(
        models.networks(kind), true_rows(models.runner(), TOKENS), TOKENS, num_draft_tokens=num_draft_tokens
    )
    foresee(sequence, [TOKENS[-1], *successors(TOKENS[-1], num_draft_tokens)], with_refresh=True)
    return sequence


def drafts_with(
    sequence: DraftSequence, accepted: Sequence[int], anchors: Sequence[int], inputs: Tensor, num_draft_tokens: int
) -> Drafts:
    """Rows whose slots after the anchor hold given tokens [rows, γ]; no pass has run."""
    num_slots = sequence.networks.config.num_slots(num_draft_tokens)
    return Drafts(
        packing=pack_outcomes(sequence, accepted, num_slots, sequence.networks.config.causal),
        anchors=torch.tensor(anchors),
        token_ids=inputs.clone(),
        confidences=torch.zeros(inputs.shape),
        num_frozen=torch.zeros(len(anchors), dtype=torch.long),
    )


@pytest.mark.parametrize("kind", ["trained", "random", "bidirectional"])
def test_a_row_does_not_depend_on_its_company(models: TinyModels, kind: DraftKind) -> None:
    sequence = make_sequence(models, kind)
    inputs = torch.randint(128, (4, GAMMA), generator=torch.Generator().manual_seed(2))

    def run(rows: list[int]) -> Drafts:
        drafts = drafts_with(sequence, [ACCEPTED[r] for r in rows], [ANCHORS[r] for r in rows], inputs[rows], GAMMA)
        refine(sequence, drafts)
        refresh(sequence, drafts)
        refine(sequence, drafts)
        return drafts

    together = run([0, 1, 2, 3])
    for row in range(4):
        alone = run([row])
        assert alone.token_ids[0].tolist() == together.token_ids[row].tolist()
        assert alone.num_frozen[0] == together.num_frozen[row]
        torch.testing.assert_close(alone.confidences[0], together.confidences[row], rtol=1e-4, atol=1e-5)


def spoil_foresight_rows(sequence: DraftSequence, first: int, stop: int) -> None:
    memory = sequence.memory
    assert memory.adapter is not None
    for cache in (memory.draft, memory.adapter, memory.decoder):
        cache.key[:, :, first:stop] = 50.0
        cache.value[:, :, first:stop] = -50.0


def row_states(sequence: DraftSequence, num_accepted: int) -> tuple[Tensor, Tensor]:
    """Confidences of J0 and foresight over one outcome's row."""
    drafts = drafts_with(sequence, [num_accepted], [77], torch.full((1, GAMMA), 12), GAMMA)
    refine(sequence, drafts)
    slots = torch.cat((drafts.anchors, torch.full((GAMMA - 1,), 12)))
    return drafts.confidences, predict(sequence, drafts.packing, slots).logits.log_softmax(-1)


@pytest.mark.parametrize("num_accepted", [0, 2, 3])
def test_a_row_sees_the_foresight_rows_up_to_k_and_no_more(models: TinyModels, num_accepted: int) -> None:
    sequence = make_sequence(models)
    before = row_states(sequence, num_accepted)
    spoil_foresight_rows(sequence, num_accepted + 1, GAMMA + 1)
    for old, new in zip(before, row_states(sequence, num_accepted), strict=True):
        assert torch.equal(old, new)
    spoil_foresight_rows(sequence, num_accepted, num_accepted + 1)  # k + 1 rows: the anchor's own is one of them
    for old, new in zip(before, row_states(sequence, num_accepted), strict=True):
        assert not torch.allclose(old, new, atol=1e-2)


def spoil(sequence: DraftSequence, first: int, stop: int) -> None:
    memory = sequence.memory
    assert memory.adapter is not None
    for cache in (memory.draft, memory.adapter, memory.decoder):
        cache.key[:, :, cache.num_scratch + first : cache.num_scratch + stop] = 50.0
        cache.value[:, :, cache.num_scratch + first : cache.num_scratch + stop] = -50.0


def fallback_state(sequence: DraftSequence) -> Tensor:
    drafts = drafts_with(sequence, [-1], [TOKENS[-1]], torch.full((1, GAMMA), 12), GAMMA)
    refine(sequence, drafts)
    return drafts.confidences


def foresight_state(sequence: DraftSequence) -> Tensor:
    return foresee(sequence, [TOKENS[-1], 1, 2, 3, 4], with_refresh=True).log_p


def outcome_state(sequence: DraftSequence) -> Tensor:
    return row_states(sequence, 1)[0]


@pytest.mark.parametrize("state", [fallback_state, foresight_state, outcome_state])
def test_the_prefix_is_masked_to_n(models: TinyModels, state: Callable[[DraftSequence], Tensor]) -> None:
    sequence = make_sequence(models)
    n = sequence.num_rows
    before = state(sequence)
    spoil(sequence, n, n + 20)  # the anchor's row does not exist yet
    assert torch.equal(before, state(sequence))
    spoil(sequence, n - 1, n)
    assert not torch.allclose(before, state(sequence), atol=1e-3)


def test_the_fallback_row_sees_no_foresight(models: TinyModels) -> None:
    sequence = make_sequence(models)
    before = fallback_state(sequence)
    spoil_foresight_rows(sequence, 0, GAMMA + 1)
    assert torch.equal(before, fallback_state(sequence))


def test_positions_start_at_the_anchor(models: TinyModels) -> None:
    sequence = make_sequence(models)
    n = sequence.num_rows
    assert n == len(TOKENS) - 1
    assert pack_foresight(sequence, 3).positions.tolist() == [n, n + 1, n + 2]
    assert pack_outcomes(sequence, [-1], 2, True).positions.tolist() == [n, n + 1]
    assert pack_outcomes(sequence, [0, 2], 2, True).positions.tolist() == [n + 1, n + 2, n + 3, n + 4]


@pytest.mark.parametrize(("kind", "is_causal"), [("trained", True), ("random", True), ("bidirectional", False)])
def test_first_slots_when_the_block_grows(models: TinyModels, kind: DraftKind, is_causal: bool) -> None:
    inputs = torch.randint(128, (2, 7), generator=torch.Generator().manual_seed(4))
    confidences = []
    for num_draft_tokens in (3, 7):
        sequence = drafted_sequence(
            models.networks(kind), true_rows(models.runner(), TOKENS), TOKENS, num_draft_tokens=7
        )
        foresee(sequence, [TOKENS[-1], *successors(TOKENS[-1], 7)], with_refresh=False)
        drafts = drafts_with(sequence, [1, 3], [9, 8], inputs[:, :num_draft_tokens], num_draft_tokens)
        refine(sequence, drafts)
        confidences.append(drafts.confidences[:, :3])
    assert torch.allclose(confidences[0], confidences[1], rtol=1e-4, atol=1e-6) == is_causal


def test_noise_comes_from_the_verified_tokens(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = make_sequence(models)
    monkeypatch.setattr(refinement, "refine", lambda sequence, drafts: None)
    drafts = begin(sequence, [0] * 8, [3] * 8, GAMMA, torch.Generator().manual_seed(0))
    noise = set(drafts.token_ids.flatten().tolist())
    assert noise <= set(TOKENS)
    assert noise == set(TOKENS)  # 32 draws with replacement from 6 tokens
    sequence.token_ids = [42]
    drafts = begin(sequence, [-1], [42], GAMMA, torch.Generator().manual_seed(0))
    assert set(drafts.token_ids.flatten().tolist()) == {42}


def test_foresight_predicts_the_anchor_and_every_draft_at_temperature_one(models: TinyModels) -> None:
    sequence = make_sequence(models)
    foresight = foresee(sequence, [TOKENS[-1], *successors(TOKENS[-1], GAMMA)], with_refresh=False)
    assert foresight.taps.shape[:2] == (GAMMA + 1, 2)
    assert foresight.log_p.shape == (GAMMA + 1, 128)
    torch.testing.assert_close(foresight.log_p.exp().sum(-1), torch.ones(GAMMA + 1))


def test_the_decoder_is_the_targets_own_top(models: TinyModels) -> None:
    """On true states instead of predicted ones the decoder gives the target's own distribution, at temperature 1."""
    networks = models.networks("trained")
    rows = true_rows(models.runner(), TOKENS)
    sequence = drafted_sequence(networks, rows, TOKENS)
    packing = pack_foresight(sequence, 1)
    rotary = networks.rotary.at(packing.positions)
    hidden = rows.taps[-1:, -1]
    mask = packing.mask(networks.target.group_size, networks.dtype)
    hidden = networks.stacks.decoder.run(hidden, rotary, mask, sequence.memory.decoder, packing.first_row).hidden
    expected = rows.logits[-1:].log_softmax(-1)
    torch.testing.assert_close(networks.decoder.logits(hidden).log_softmax(-1), expected, rtol=1e-4, atol=1e-4)


def test_slot_conventions_differ(models: TinyModels) -> None:
    """A shifted model read as an in-place one is a token behind, the symptom of trap 1."""
    sequence = make_sequence(models, "trained")
    rule = successors(50, GAMMA)
    drafts = drafts_with(sequence, [1], [50], torch.tensor([rule]), GAMMA)
    assert drafts.packing.num_slots == GAMMA
    refine(sequence, drafts)
    assert drafts.token_ids[0].tolist() == rule
    in_place = make_sequence(models, "random")
    assert drafts_with(in_place, [1], [50], torch.tensor([rule]), GAMMA).packing.num_slots == GAMMA + 1
