"""Equation 6 and Proposition 1."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.acceptance import accept
from decoding.outcomes import (
    ABSENT,
    PROBABILITY_FLOOR,
    OutcomeTable,
    draft_log_probabilities,
    outcome_log_probabilities,
    top_outcomes,
)
from decoding.sampling import SamplingParameters, processed_probabilities

VOCAB = 4
DRAFTS = [2, 0, 3]


def random_log_p(num_slots: int, width: int, seed: int) -> torch.Tensor:
    logits = 2 * torch.randn(num_slots, width, generator=torch.Generator().manual_seed(seed))
    return torch.log_softmax(logits.to(torch.float64), 1)


def as_dictionary(table: OutcomeTable) -> dict[tuple[int, int], float]:
    keys = zip(table.num_accepted.tolist(), table.column.tolist(), strict=True)
    return dict(zip(keys, table.score.tolist(), strict=True))


def test_the_worked_example_of_the_paper() -> None:
    # γ = 2; columns d1, d2, b: the target gives d1 0.8, then d2 0.5 and b 0.3.
    log_p = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.5, 0.3], [0.4, 0.4, 0.2]]).log()
    probabilities = outcome_log_probabilities(log_p, [0, 1]).exp()
    assert float(probabilities[1, 2]) == pytest.approx(0.24)
    assert float(probabilities[2, 1]) == pytest.approx(0.8 * 0.5 * 0.4)
    assert float(probabilities[0, 0]) == 0.0
    assert float(probabilities[1, 1]) == 0.0


class PrefixTarget:
    """Independent random logits after every prefix of a small vocabulary."""

    def __init__(self, parameters: SamplingParameters) -> None:
        generator = torch.Generator().manual_seed(11)
        prefixes = [prefix for n in range(len(DRAFTS) + 1) for prefix in itertools.product(range(VOCAB), repeat=n)]
        self.logits = {prefix: 1.5 * torch.randn(VOCAB, generator=generator) for prefix in prefixes}
        self.law = {prefix: processed_probabilities(row, parameters) for prefix, row in self.logits.items()}

    def draft_prefixes(self) -> list[tuple[int, ...]]:
        return [tuple(DRAFTS[:k]) for k in range(len(DRAFTS) + 1)]


@pytest.mark.parametrize(
    "parameters",
    [
        SamplingParameters(temperature=0.4),
        SamplingParameters(temperature=1.0),
        SamplingParameters(temperature=1.7),
        SamplingParameters(temperature=1.0, top_k=3),
        SamplingParameters(temperature=0.0),
    ],
)
def test_proposition_1_by_enumerating_every_text_the_target_can_draw(parameters: SamplingParameters) -> None:
    target = PrefixTarget(parameters)
    enumerated = torch.zeros(len(DRAFTS) + 1, VOCAB, dtype=torch.float64)
    for drawn in itertools.product(range(VOCAB), repeat=len(DRAFTS) + 1):
        matches = [token == draft for token, draft in zip(drawn, DRAFTS, strict=False)]
        num_accepted = len(DRAFTS) if all(matches) else matches.index(False)
        probability = math.prod(float(target.law[drawn[:i]][drawn[i]]) for i in range(len(drawn)))
        enumerated[num_accepted, drawn[num_accepted]] += probability
    perfect_decoder = torch.stack([target.law[prefix] for prefix in target.draft_prefixes()]).log()
    scored = outcome_log_probabilities(perfect_decoder, DRAFTS).exp()
    assert torch.allclose(scored, enumerated, rtol=1e-10, atol=1e-12)
    assert float(scored.sum()) == pytest.approx(1.0)


def test_proposition_1_holds_for_the_acceptance_rule_itself() -> None:
    num_trials = 3000
    target = PrefixTarget(SamplingParameters())
    rows = torch.stack([target.logits[prefix] for prefix in target.draft_prefixes()])
    expected = outcome_log_probabilities(torch.log_softmax(rows, 1), DRAFTS).exp() * num_trials
    counts = Counter(accept(rows, DRAFTS, SamplingParameters(seed=seed), 100) for seed in range(num_trials))
    observed = torch.zeros_like(expected)
    for outcome, count in counts.items():
        observed[outcome.num_accepted, outcome.anchor] = count
    possible = expected > 0
    assert float(observed[~possible].sum()) == 0
    chi_square = float(((observed - expected)[possible] ** 2 / expected[possible]).sum())
    assert int(possible.sum()) == 13
    assert chi_square < 32.9  # 12 degrees of freedom, p = 0.001


@given(st.integers(0, 2**31), st.integers(0, 5), st.integers(2, 40))
@settings(max_examples=40, deadline=None)
def test_outcomes_are_a_distribution_when_every_draft_has_a_column(seed: int, gamma: int, width: int) -> None:
    columns = [(seed + 7 * i) % width for i in range(gamma)]
    scores = outcome_log_probabilities(random_log_p(gamma + 1, width, seed), columns)
    assert float(scores.exp().sum()) == pytest.approx(1.0)


def test_top_outcomes_are_the_full_table_sorted_when_the_limit_covers_it() -> None:
    log_p = random_log_p(4, 9, seed=3)
    full = outcome_log_probabilities(log_p, [1, 2, 3])
    table = top_outcomes(log_p, [1, 2, 3])
    assert len(table) == 4 * 9 - 3
    assert table.score.tolist() == sorted(table.score.tolist(), reverse=True)
    for (num_accepted, column), score in as_dictionary(table).items():
        assert score == pytest.approx(float(full[num_accepted, column]))


def test_the_limit_counts_the_likeliest_of_a_row_its_own_draft_among_them() -> None:
    log_p = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]]).log()
    table = top_outcomes(log_p, [0], limit_per_row=2)
    assert set(as_dictionary(table)) == {(0, 1), (1, 3), (1, 2)}


def test_equal_scores_are_ordered_by_rank_then_length_then_column() -> None:
    log_p = torch.full((2, 4), 0.25).log()
    log_p[0] = torch.tensor([1.0, 0.25, 0.25, 0.25]).log()  # p̂_1 = 1 makes both rows' scores equal
    table = top_outcomes(log_p, [0])
    pairs = list(zip(table.num_accepted.tolist(), table.column.tolist(), strict=True))
    assert pairs == [(1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]


def test_an_impossible_draft_leaves_no_outcome_behind_it() -> None:
    log_p = torch.tensor([[0.0, 1.0, 0.0], [0.2, 0.3, 0.5]]).log()
    assert as_dictionary(top_outcomes(log_p, [0])) == {(0, 1): 0.0}


def test_an_absent_draft_counts_as_unlikely_not_as_impossible() -> None:
    log_p = random_log_p(2, 5, seed=4)
    assert float(draft_log_probabilities(log_p, [ABSENT])[0]) == pytest.approx(math.log(PROBABILITY_FLOOR))
    scores = outcome_log_probabilities(log_p, [ABSENT])
    assert torch.equal(scores[0], log_p[0])
    assert torch.allclose(scores[1], log_p[1] + math.log(PROBABILITY_FLOOR))


def test_bfloat16_scores_are_accumulated_in_float64() -> None:
    log_p = random_log_p(16, 20, seed=5).to(torch.bfloat16)
    table = top_outcomes(log_p, [3] * 15)
    assert table.score.dtype == torch.float64
    expected = log_p.to(torch.float64)[:15, 3].sum() + log_p.to(torch.float64)[15, 7]
    assert as_dictionary(table)[(15, 7)] == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("columns", [[0], [0, 5], [0, -2]])
def test_drafts_that_do_not_fit_the_rows_are_refused(columns: list[int]) -> None:
    with pytest.raises(ValueError, match="draft"):
        top_outcomes(random_log_p(3, 5, seed=6), columns)
