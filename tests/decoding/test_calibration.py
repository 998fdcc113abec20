"""Equation 8: features, scores and the three fits."""

import json
import math

import pytest
import torch

from decoding.calibration import (
    NUM_FEATURES,
    Calibration,
    InvalidCalibration,
    RoundRecord,
    Weights,
    calibrated_scores,
    conformal_threshold,
    features,
    fit,
    fit_anchor_temperature,
    fit_weights,
    observe_round,
    realised_score,
)
from decoding.outcomes import ABSENT, PROBABILITY_FLOOR, OutcomeTable, outcome_log_probabilities

LOG_P = torch.tensor([[0.8, 0.1, 0.06, 0.04], [0.3, 0.2, 0.1, 0.4], [0.25, 0.25, 0.4, 0.1]], dtype=torch.float64).log()
DRAFTS = [0, 1]
CONFIDENCES = torch.tensor([0.9, 0.5])
TRUE_WEIGHTS: Weights = (0.5, 0.8, 0.6, -0.4, -0.7, 0.3)


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def as_dictionary(table: OutcomeTable) -> dict[tuple[int, int], float]:
    keys = zip(table.num_accepted.tolist(), table.column.tolist(), strict=True)
    return dict(zip(keys, table.score.tolist(), strict=True))


def test_the_features_of_a_block_by_hand() -> None:
    expected = [
        [logit(0.9), logit(0.8), 1.0, logit(0.1 / 0.2), 0.0, 1.0],
        [0.0, logit(0.2), 0.0, logit(0.4 / 0.8), 1 / 14, 1.0],
    ]
    assert torch.allclose(features(LOG_P, DRAFTS, CONFIDENCES), torch.tensor(expected, dtype=torch.float64), atol=1e-6)


def test_certain_and_impossible_probabilities_have_bounded_logits() -> None:
    log_p = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]).log()
    rows = features(log_p, [0, 0], torch.tensor([1.0, 0.0]))
    bound = logit(1 - PROBABILITY_FLOOR)
    assert bool(torch.isfinite(rows).all())
    assert rows[0, :4].tolist() == pytest.approx([bound, bound, 1.0, -bound])
    assert rows[1, :4].tolist() == pytest.approx([-bound, -bound, 0.0, bound])


def test_a_draft_that_ties_with_the_decoders_top_token_counts_as_its_top_token() -> None:
    log_p = torch.tensor([[0.4, 0.4, 0.2], [0.4, 0.4, 0.2]]).log()
    for column in (0, 1):
        row = features(log_p, [column], torch.tensor([0.5]))[0]
        assert float(row[2]) == 1.0
        assert float(row[3]) == pytest.approx(logit(0.4 / 0.6), abs=1e-6)


def test_an_absent_draft_has_the_features_of_an_unlikely_one() -> None:
    row = features(LOG_P[:2], [ABSENT], torch.tensor([0.5]))[0]
    assert float(row[1]) == pytest.approx(logit(PROBABILITY_FLOOR))
    assert float(row[2]) == 0.0
    assert float(row[3]) == pytest.approx(logit(0.8), abs=1e-4)


def test_one_confidence_per_draft_is_required() -> None:
    with pytest.raises(ValueError, match="confidences"):
        features(LOG_P, DRAFTS, torch.tensor([0.5]))


def test_the_uncalibrated_rule_is_equation_6() -> None:
    expected = outcome_log_probabilities(LOG_P, DRAFTS)
    table = as_dictionary(calibrated_scores(LOG_P, DRAFTS, CONFIDENCES, Calibration.uncalibrated()))
    assert len(table) == 3 * 4 - 2
    for (num_accepted, column), score in table.items():
        assert score == pytest.approx(float(expected[num_accepted, column]), abs=1e-9)


def test_calibrated_scores_are_a_distribution_at_any_weights() -> None:
    table = calibrated_scores(LOG_P, DRAFTS, CONFIDENCES, Calibration(TRUE_WEIGHTS, 1.7, None))
    assert float(table.score.exp().sum()) == pytest.approx(1.0)
    assert table.score.tolist() == sorted(table.score.tolist(), reverse=True)


def test_the_score_of_one_outcome_by_hand() -> None:
    calibration = Calibration(TRUE_WEIGHTS, 2.0, None)
    phi = features(LOG_P, DRAFTS, CONFIDENCES) @ torch.tensor(TRUE_WEIGHTS, dtype=torch.float64)
    accepted = torch.sigmoid(phi)
    length = float(accepted[0] * (1 - accepted[1]))
    anchor = math.sqrt(0.4) / (math.sqrt(0.3) + math.sqrt(0.1) + math.sqrt(0.4))  # d_2, column 1, removed
    table = as_dictionary(calibrated_scores(LOG_P, DRAFTS, CONFIDENCES, calibration))
    assert math.exp(table[(1, 3)]) == pytest.approx(length * anchor)


def test_a_block_without_drafts_has_one_length() -> None:
    table = calibrated_scores(LOG_P[2:], [], torch.zeros(0), Calibration(TRUE_WEIGHTS, 1.0, None))
    assert table.num_accepted.tolist() == [0] * 4
    assert float(table.score[0].exp()) == pytest.approx(0.4)


def test_an_impossible_row_is_dropped_not_scored_as_nan() -> None:
    log_p = torch.tensor([[1.0, 0.0], [0.5, 0.5]]).log()
    table = calibrated_scores(log_p, [0], torch.tensor([0.5]), Calibration.uncalibrated())
    assert table.num_accepted.tolist() == [1, 1]


# --- records


@pytest.mark.parametrize(("num_accepted", "anchor"), [(0, 2), (1, 3), (2, 1)])
def test_the_realised_score_is_the_score_the_round_served(num_accepted: int, anchor: int) -> None:
    record = observe_round(LOG_P, DRAFTS, CONFIDENCES, num_accepted, anchor)
    served = as_dictionary(calibrated_scores(LOG_P, DRAFTS, CONFIDENCES, Calibration(TRUE_WEIGHTS, 1.4, None)))
    assert realised_score(record, TRUE_WEIGHTS, 1.4) == pytest.approx(served[(num_accepted, anchor)])


def test_an_anchor_that_was_no_candidate_is_recorded_as_such() -> None:
    record = observe_round(LOG_P, DRAFTS, CONFIDENCES, 1, ABSENT)
    assert record.anchor_index is None
    assert realised_score(record, TRUE_WEIGHTS, 1.0) == -math.inf


# --- fits


def simulate(num_rounds: int, temperature: float, seed: int) -> list[RoundRecord]:
    """Rounds of 7 drafts that follow equation 8 exactly."""
    generator = torch.Generator().manual_seed(seed)
    records = []
    for _ in range(num_rounds):
        inputs = torch.randn(7, NUM_FEATURES, generator=generator, dtype=torch.float64)
        inputs[:, 2] = (inputs[:, 2] > 0).to(torch.float64)
        inputs[:, 4] = torch.arange(7) / 14
        inputs[:, 5] = 1.0
        accepted = torch.sigmoid(inputs @ torch.tensor(TRUE_WEIGHTS, dtype=torch.float64))
        passed = torch.rand(7, generator=generator, dtype=torch.float64) < accepted
        num_accepted = 7 if bool(passed.all()) else passed.tolist().index(False)
        log_p = torch.log_softmax(2 * torch.randn(12, generator=generator, dtype=torch.float64), 0)
        anchor = int(torch.multinomial((log_p / temperature).softmax(0), 1, generator=generator))
        rows = tuple((a, b, c, d, e, f) for a, b, c, d, e, f in inputs.tolist())
        records.append(RoundRecord(rows, num_accepted, tuple(log_p.tolist()), anchor))
    return records


def test_the_weights_that_made_the_rounds_are_recovered() -> None:
    weights = fit_weights(simulate(4000, 1.0, seed=1))
    assert weights == pytest.approx(TRUE_WEIGHTS, abs=0.3)
    assert weights[:4] == pytest.approx(TRUE_WEIGHTS[:4], abs=0.12)


def test_rows_behind_the_first_rejection_teach_nothing() -> None:
    records = simulate(200, 1.0, seed=2)
    blank: Weights = (9.0, 9.0, 9.0, 9.0, 9.0, 9.0)
    blanked = [
        RoundRecord(
            tuple(row if index <= record.num_accepted else blank for index, row in enumerate(record.features)),
            record.num_accepted,
            record.anchor_log_probabilities,
            record.anchor_index,
        )
        for record in records
    ]
    assert fit_weights(blanked) == fit_weights(records)


def test_the_fit_is_a_stationary_point_of_the_likelihood() -> None:
    records = simulate(300, 1.0, seed=3)
    weights = torch.tensor(fit_weights(records), dtype=torch.float64)
    gradient = torch.zeros(NUM_FEATURES, dtype=torch.float64)
    for record in records:
        for index, row in enumerate(record.features[: record.num_accepted + 1]):
            phi = torch.tensor(row, dtype=torch.float64)
            gradient += phi * (torch.sigmoid(phi @ weights) - float(index < record.num_accepted))
    assert float(gradient.abs().max()) < 0.01  # what the small ridge leaves


def test_separable_rounds_give_finite_weights() -> None:
    good: Weights = (5.0, 5.0, 1.0, -5.0, 0.0, 1.0)
    bad: Weights = (-5.0, -5.0, 0.0, 5.0, 0.1, 1.0)
    weights = fit_weights([RoundRecord((good, bad), 1, (0.0,), 0)] * 50)
    assert all(math.isfinite(weight) for weight in weights)
    assert weights[0] > 0


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.8])
def test_the_anchor_temperature_that_made_the_rounds_is_recovered(temperature: float) -> None:
    assert fit_anchor_temperature(simulate(3000, temperature, seed=4)) == pytest.approx(temperature, rel=0.1)


def test_groups_of_different_sizes_do_not_disturb_the_anchor_temperature() -> None:
    records = simulate(500, 1.3, seed=5)
    single = RoundRecord((), 0, (-0.5,), 0)  # one candidate: no information on β
    assert fit_anchor_temperature([*records, single]) == pytest.approx(fit_anchor_temperature(records), rel=1e-4)


def test_without_a_realised_candidate_the_anchor_temperature_stays_neutral() -> None:
    assert fit_anchor_temperature([RoundRecord((), 0, (-1.0, -2.0), None)]) == 1.0


def test_nothing_to_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to fit"):
        fit([RoundRecord((), 0, (-1.0,), 0)])


def test_the_threshold_is_the_conformal_order_statistic() -> None:
    # Nine scores at 80 %: rank floor(10 * 0.2) = 2 from below.
    scores = [-float(index) for index in range(1, 10)]
    assert conformal_threshold(scores, 0.8) == -8.0
    assert conformal_threshold(scores, 0.9) == -9.0
    assert conformal_threshold(scores, 0.95) is None
    assert conformal_threshold([*scores[:-1], -math.inf], 0.9) is None


def test_the_threshold_keeps_its_promise_on_fresh_rounds() -> None:
    calibration = fit(simulate(1500, 1.2, seed=6), target_rate=0.85)
    assert calibration.threshold is not None
    fresh = [
        realised_score(record, calibration.weights, calibration.anchor_temperature)
        for record in simulate(1500, 1.2, seed=7)
    ]
    coverage = sum(score >= calibration.threshold for score in fresh) / len(fresh)
    assert 0.82 < coverage < 0.88


# --- storage


def test_a_calibration_survives_its_file() -> None:
    for threshold in (None, -7.25):
        calibration = Calibration(TRUE_WEIGHTS, 1.37, threshold)
        assert Calibration.from_json(calibration.to_json()) == calibration


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": [1.0] * 5}, "weights"),
        ({"weights": [1.0] * 5 + ["x"]}, "weights"),
        ({"weights": [1.0] * 5 + [math.nan]}, "weights"),
        ({"weights": [1.0] * 5 + [10**400]}, "weights"),
        ({"anchor_temperature": 0.0}, "anchor_temperature"),
        ({"anchor_temperature": True}, "anchor_temperature"),
        ({"threshold": math.inf}, "threshold"),
        ({"surprise": 1}, "fields"),
    ],
)
def test_a_bad_file_is_refused_by_field(change: dict[str, object], message: str) -> None:
    fields = json.loads(Calibration.uncalibrated().to_json()) | change
    with pytest.raises(InvalidCalibration, match=message):
        Calibration.from_json(json.dumps(fields))


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense"])
def test_what_is_not_a_calibration_is_refused(text: str) -> None:
    with pytest.raises(InvalidCalibration):
        Calibration.from_json(text)
