"""Selection rules on recorded rounds: each measured on prompts it was not fitted on."""

from functools import cache

import pytest
import torch

from decoding.calibration import Calibration
from decoding.observation import ObservedRound
from decoding.rules import SCORE_RULES, ScoreRule, fan_out_holds, fan_out_sizes, fit_fan_out, outcome_rank
from evaluation.records import ObservedAt, Unit
from evaluation.rounds import CACHE_SIZES
from evaluation.selection import SelectionRow, compare_rules, fit_calibration

GREEDY, SAMPLED = Unit("words", 0.0), Unit("words", 1.0)
BUDGET = 4
NAMES = dict(zip(SCORE_RULES, ("served (calibrated)", "uncalibrated", "draft-model"), strict=True))


def random_rounds(seed: int, count: int = 12, width: int = 24) -> list[ObservedRound]:
    """Rounds whose ends follow the decoder's word more often than not."""
    generator = torch.Generator().manual_seed(seed)
    rounds = []
    for _ in range(count):
        log_p = (2.0 * torch.randn(BUDGET, width, generator=generator)).log_softmax(-1)
        drafts = log_p[:-1].argmax(dim=1).tolist()
        num_accepted = int(torch.randint(BUDGET, (1,), generator=generator))
        weights = log_p[num_accepted].exp().clone()
        if num_accepted < BUDGET - 1:
            weights[drafts[num_accepted]] = 0.0
        anchor = int(torch.multinomial(weights, 1, generator=generator))
        candidates = [torch.randperm(width, generator=generator).tolist() for _ in drafts]
        confidences = torch.rand(BUDGET - 1, generator=generator)
        rounds.append(ObservedRound(log_p, drafts, confidences, num_accepted, anchor, [], candidates))
    return rounds


@cache
def observed() -> list[ObservedAt]:
    return [
        ObservedAt(unit, prompt, item)
        for unit in (GREEDY, SAMPLED)
        for prompt in range(4)
        for item in random_rounds(10 * prompt + int(unit.temperature))
    ]


@pytest.fixture(scope="module")
def rows() -> dict[tuple[float, str], SelectionRow]:
    return {(row.temperature, row.rule): row for row in compare_rules(observed(), BUDGET, None)}


def halves(parity: int) -> tuple[list[ObservedRound], list[ObservedAt]]:
    items = observed()
    return [i.round for i in items if i.prompt % 2 != parity], [i for i in items if i.prompt % 2 == parity]


@pytest.mark.parametrize("rule", SCORE_RULES)
def test_score_rules_equal_a_plain_count(rows: dict[tuple[float, str], SelectionRow], rule: ScoreRule) -> None:
    ranks = []
    for parity in (0, 1):
        fitted_on, measured_on = halves(parity)
        calibration = fit_calibration(fitted_on)
        ranks += [outcome_rank(i.round, rule, calibration) for i in measured_on if i.unit == GREEDY]
    row = rows[0.0, NAMES[rule]]
    assert row.num_rounds == len(ranks) == 48
    for size in CACHE_SIZES:
        hits = sum(rank is not None and rank < size for rank in ranks)
        assert row.hit_rate[str(size)] == pytest.approx(hits / 48)


def test_fan_outs_equal_a_plain_count(rows: dict[tuple[float, str], SelectionRow]) -> None:
    for size in CACHE_SIZES:
        hits = 0
        for parity in (0, 1):
            fitted_on, measured_on = halves(parity)
            fit = fit_fan_out(fitted_on, "draft")
            assert fit is not None
            sizes = fan_out_sizes(fit, BUDGET - 1, size)
            hits += sum(fan_out_holds(i.round, sizes, "draft") for i in measured_on if i.unit == SAMPLED)
        row = rows[1.0, "geometric fan-out, draft anchors"]
        assert row.hit_rate[str(size)] == pytest.approx(hits / 48)


def test_anchors_of_the_decoder_beat_made_up_ones(rows: dict[tuple[float, str], SelectionRow]) -> None:
    """The drafts' candidates here are random permutations; the outcomes were drawn from the decoder."""
    for temperature in (0.0, 1.0):
        decoder, draft = (
            rows[temperature, f"geometric fan-out, {who} anchors"].hit_rate for who in ("decoder", "draft")
        )
        assert all(decoder[str(size)] > draft[str(size)] for size in (4, 8, 16))


def test_a_given_calibration_is_what_is_served() -> None:
    """One that only believes in full acceptance hits where all drafts were accepted, and nowhere else."""
    certain = Calibration((0.0, 0.0, 0.0, 0.0, 0.0, 40.0), 1.0, None)
    rows = {(row.temperature, row.rule): row for row in compare_rules(observed(), BUDGET, certain)}
    items = [i.round for i in observed() if i.unit == GREEDY]
    served = rows[0.0, "served (calibrated)"].hit_rate["16"]
    assert served <= sum(item.num_accepted == BUDGET - 1 for item in items) / len(items)
    assert rows[0.0, "calibrated on this run"].hit_rate["16"] > served


def test_one_prompt_is_too_few() -> None:
    assert compare_rules([ObservedAt(GREEDY, 0, item) for item in random_rounds(1)], BUDGET, None) == []
