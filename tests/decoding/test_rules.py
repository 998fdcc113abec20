"""Rules that choose outcomes, replayed on rounds small enough to rank by hand."""

import itertools
import math
import random

import pytest
import torch

from decoding.calibration import Calibration
from decoding.observation import ObservedRound, RoundOutcome, compact_round
from decoding.rules import (
    FanOutFit,
    ScoreRule,
    anchor_rank,
    fan_out_holds,
    fan_out_sizes,
    fit_fan_out,
    outcome_rank,
)

UNCALIBRATED = Calibration.uncalibrated()


def test_the_uncalibrated_rule_ranks_by_equation_6() -> None:
    """Two slots, five columns: by hand, (0, 2) is first, (1, 0) second; column 4 ends the text and is no outcome."""
    log_p = torch.tensor([[0.05, 0.3, 0.4, 0.05, 0.2], [0.5, 0.1, 0.2, 0.1, 0.1]]).log()

    def rank(num_accepted: int, column: int) -> int | None:
        observed = ObservedRound(log_p, [1], torch.tensor([0.3]), num_accepted, column, [4])
        return outcome_rank(observed, "uncalibrated", UNCALIBRATED, 16)

    assert rank(0, 2) == 0  # 0.4
    assert rank(1, 0) == 1  # 0.3 * 0.5
    assert rank(1, 2) == 2  # 0.3 * 0.2
    assert rank(0, 1) is None  # the draft itself
    assert rank(0, 4) is None
    assert rank(0, -1) is None


def test_the_draft_model_rule_takes_the_drafts_own_probabilities() -> None:
    log_p = torch.tensor([[0.1, 0.8, 0.1], [0.4, 0.3, 0.3]]).log()
    calibration = Calibration((0.0, 1.0, 0.0, 0.0, 0.0, 0.0), 1.0, None)

    def rank(rule: ScoreRule, confidence: float) -> int | None:
        observed = ObservedRound(log_p, [1], torch.tensor([confidence]), 0, 0, [])
        return outcome_rank(observed, rule, calibration, 16)

    assert rank("served", 0.01) == rank("served", 0.99) == 3  # the decoder believes in the draft
    assert rank("draft-model", 0.01) == 0
    assert rank("draft-model", 0.99) == 3


def random_round(source: random.Random, num_drafts: int = 3, width: int = 12) -> ObservedRound:
    generator = torch.Generator().manual_seed(source.randrange(1 << 30))
    log_p = (2.0 * torch.randn(num_drafts + 1, width, generator=generator)).log_softmax(-1)
    drafts = [source.randrange(width) for _ in range(num_drafts)]
    num_accepted = source.randrange(num_drafts + 1)
    anchors = [column for column in range(width) if column not in drafts[num_accepted : num_accepted + 1]]
    outcome = RoundOutcome(num_accepted, source.choice(anchors), [0])
    candidates = torch.stack([torch.randperm(width, generator=generator) for _ in range(num_drafts)])
    return compact_round(log_p, drafts, torch.rand(num_drafts, generator=generator), outcome, candidates)


@pytest.mark.parametrize("rule", ["uncalibrated", "draft-model", "served"])
def test_every_score_rule_equals_a_plain_computation(rule: ScoreRule) -> None:
    source = random.Random(4)
    calibration = Calibration((0.0, 0.7, 0.0, 0.0, 0.0, 0.3), 1.4, None)
    for _ in range(30):
        observed = random_round(source)
        p = observed.log_p.double().exp().tolist()
        scores: dict[tuple[int, int], float] = {}
        for k, row in enumerate(p):
            anchors = {a: q for a, q in enumerate(row) if a not in observed.draft_columns[k : k + 1]}
            reach, stay = 1.0, 1.0
            for i, draft in enumerate(observed.draft_columns):
                pi = p[i][draft]
                if rule == "draft-model":
                    pi = float(observed.confidences[i])
                elif rule == "served":
                    pi = 1 / (1 + math.exp(-(0.7 * math.log(pi / (1 - pi)) + 0.3)))
                if i < k:
                    reach *= pi
                elif i == k:
                    stay = 1 - pi
            beta = 1.0 if rule == "uncalibrated" else calibration.anchor_temperature
            total = sum(q ** (1 / beta) for q in anchors.values())
            for a, q in anchors.items():
                weight = q if rule == "uncalibrated" else stay * q ** (1 / beta) / total
                scores[(k, a)] = reach * weight
        order = sorted((o for o in scores if o[1] not in observed.excluded_columns), key=lambda o: -scores[o])
        happened = (observed.num_accepted, observed.anchor_column)
        expected = order.index(happened) if happened in order[:16] else None
        assert outcome_rank(observed, rule, calibration, 16) == expected


def test_a_fixed_fan_out_takes_each_lengths_first_anchors() -> None:
    log_p = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.3, 0.1, 0.2, 0.4]]).log()

    def observed(num_accepted: int, column: int) -> ObservedRound:
        return ObservedRound(log_p, [1], torch.tensor([0.5]), num_accepted, column, [], [[3, 1, 0, 2]])

    # The draft (column 1) is struck; at length 1 all drafts are accepted and the decoder proposes for both.
    assert [anchor_rank(observed(0, a), "decoder") for a in (2, 3, 0, 1)] == [1, 2, 3, None]
    assert [anchor_rank(observed(0, a), "draft") for a in (3, 0, 2, 1)] == [1, 2, 3, None]
    assert [anchor_rank(observed(1, a), "draft") for a in (3, 0, 2, 1)] == [1, 2, 3, 4]
    assert fan_out_holds(observed(0, 3), (1, 1), "draft")
    assert not fan_out_holds(observed(0, 3), (1, 1), "decoder")
    assert fan_out_holds(observed(0, 3), (2, 0), "decoder")
    assert not fan_out_holds(observed(1, 3), (2, 0), "decoder")


def test_a_round_without_the_drafts_anchors_says_so() -> None:
    observed = ObservedRound(torch.zeros(2, 3), [1], torch.tensor([0.5]), 0, 0, [])
    with pytest.raises(ValueError, match="not recorded"):
        anchor_rank(observed, "draft")


def test_fan_out_sizes_spend_the_cache_and_favour_likely_lengths() -> None:
    for rate, decay, size in itertools.product((0.3, 0.8), (0.5, 2.0), (1, 2, 4, 8, 16)):
        sizes = fan_out_sizes(FanOutFit(rate, decay), 4, size)
        assert sum(sizes) == size
        assert list(sizes[:-1]) == sorted(sizes[:-1], reverse=True)


def test_the_fan_out_is_fitted_to_where_rounds_end() -> None:
    source = random.Random(1)
    rounds = [random_round(source) for _ in range(60)]
    fit = fit_fan_out(rounds, "decoder")
    assert fit is not None
    tested = sum(min(r.num_accepted + 1, 3) for r in rounds)
    assert fit.acceptance_rate == pytest.approx((sum(r.num_accepted for r in rounds) + 0.5) / (tested + 1))
    assert fit_fan_out([], "decoder") is None
    always_first = [ObservedRound(torch.tensor([[0.0, -1.0], [0.0, -1.0]]), [1], torch.ones(1), 0, 0, [])] * 5
    assert fit_fan_out(always_first, "decoder") is None
