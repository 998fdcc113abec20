"""Context refresh and anchor replacement, with a decoder that says what the test wants."""

import pytest
import torch
from torch import Tensor

from draft_worker import refinement
from draft_worker.foresight import PredictedRows, foresee, predict
from draft_worker.packing import Packing, pack_outcomes
from draft_worker.refinement import Drafts, refine, refresh
from draft_worker.sequence import DraftSequence
from tests.tiny.models import DraftKind, TinyModels, drafted_sequence, successors, true_rows

GAMMA = 4
TOKENS = [11, 58, 37, 60, 2, 99]


class ScriptedDecoder:
    """Stands in for `predict`: true adapter states, but the decoder's top token after slot i of row r is
    `says[r][i]`."""

    def __init__(self, says: list[list[int]]) -> None:
        self.says = says

    def __call__(self, sequence: DraftSequence, packing: Packing, token_ids: Tensor) -> PredictedRows:
        predicted = predict(sequence, packing, token_ids)
        logits = torch.zeros_like(predicted.logits).unflatten(0, (packing.num_rows, packing.num_slots))
        for row, tokens in enumerate(self.says):
            for slot, token_id in enumerate(tokens):
                logits[row, slot, token_id] = 7.096  # a probability of 0.9048 among 128
        return PredictedRows(predicted.taps, logits.flatten(0, 1))


def make_drafts(models: TinyModels, kind: DraftKind, rows: list[list[int]]) -> tuple[DraftSequence, Drafts]:
    sequence = drafted_sequence(models.networks(kind), true_rows(models.runner(), TOKENS), TOKENS)
    foresee(sequence, [TOKENS[-1], *successors(TOKENS[-1], GAMMA)], with_refresh=True)
    num_slots = sequence.networks.config.num_slots(GAMMA)
    drafts = Drafts(
        packing=pack_outcomes(sequence, [1] * len(rows), num_slots, True),
        anchors=torch.full((len(rows),), 70),
        token_ids=torch.tensor(rows),
        confidences=torch.full((len(rows), GAMMA), 0.25),
        num_frozen=torch.zeros(len(rows), dtype=torch.long),
    )
    return sequence, drafts


@pytest.mark.parametrize("kind", ["trained", "random"])
def test_the_first_disagreement_takes_the_decoders_token_and_freezes_what_is_before(
    models: TinyModels, kind: DraftKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]]
    sequence, drafts = make_drafts(models, kind, rows)
    says = [[10, 99, 98, 97], [20, 21, 22, 23], [90, 31, 32, 33]]  # slot 2, nowhere, slot 1
    monkeypatch.setattr(refinement, "predict", ScriptedDecoder(says))
    refresh(sequence, drafts)
    assert drafts.token_ids.tolist() == [[10, 99, 12, 13], [20, 21, 22, 23], [90, 31, 32, 33]]
    assert drafts.num_frozen.tolist() == [2, GAMMA + 1, 1]
    assert drafts.confidences[0, 1] == pytest.approx(0.9048, abs=1e-3)
    refine(sequence, drafts)
    assert drafts.token_ids[0, :2].tolist() == [10, 99]
    assert drafts.token_ids[1].tolist() == [20, 21, 22, 23]  # agreed everywhere: stays as it is
    assert drafts.token_ids[2, 0] == 90
    assert drafts.token_ids[0, 2:].tolist() != [12, 13]
    assert drafts.token_ids[2, 1:].tolist() != [31, 32, 33]
    if kind == "trained":  # the slot after the new anchor is drafted from the new anchor
        assert drafts.token_ids[0, 2] == successors(99, 1)[0]
        assert drafts.token_ids[2, 1] == successors(90, 1)[0]


def test_a_second_refresh_never_moves_the_frozen_prefix_back(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[10, 11, 12, 13], [20, 21, 22, 23]]
    sequence, drafts = make_drafts(models, "trained", rows)
    monkeypatch.setattr(refinement, "predict", ScriptedDecoder([[10, 99, 12, 13], [20, 21, 22, 23]]))
    refresh(sequence, drafts)
    assert drafts.num_frozen.tolist() == [2, GAMMA + 1]
    # Now it disagrees with slots that are frozen (1 and 2, and all of row 1) and with slot 4.
    monkeypatch.setattr(refinement, "predict", ScriptedDecoder([[55, 56, 12, 57], [1, 2, 3, 4]]))
    refresh(sequence, drafts)
    assert drafts.token_ids.tolist() == [[10, 99, 12, 57], [20, 21, 22, 23]]
    assert drafts.num_frozen.tolist() == [4, GAMMA + 1]


def test_frozen_slots_are_read_from_their_refreshed_states(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tokens no longer matter to a pass, their features do."""
    results = []
    for feature_scale, frozen_token in ((1.0, 10), (1.0, 44), (-3.0, 10)):
        sequence, drafts = make_drafts(models, "random", [[10, 11, 12, 13]])
        monkeypatch.setattr(refinement, "predict", ScriptedDecoder([[10, 11, 99, 0]]))
        refresh(sequence, drafts)
        assert drafts.num_frozen.tolist() == [3] and drafts.feature is not None
        drafts.feature = drafts.feature * feature_scale
        drafts.token_ids = torch.cat((torch.tensor([[frozen_token]]), drafts.token_ids[:, 1:]), dim=1)
        drafts.confidences = torch.zeros(1, GAMMA)
        refine(sequence, drafts)
        assert drafts.confidences[0, :3].tolist() == [0.0, 0.0, 0.0]
        results.append(drafts.confidences[0, 3].item())
    assert results[0] == results[1]
    assert results[0] != pytest.approx(results[2], rel=1e-3)


def test_every_jacobi_pass_settles_one_more_token(models: TinyModels) -> None:
    """With clean prefixes that are continued rightly the drafts become right from left to right."""
    sequence, drafts = make_drafts(models, "trained", [[1, 1, 1, 1]])
    rule = successors(70, GAMMA)
    for num_passes in range(1, GAMMA + 1):
        refine(sequence, drafts)
        assert drafts.token_ids[0, :num_passes].tolist() == rule[:num_passes]
