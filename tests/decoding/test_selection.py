import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.fanout import allocate
from decoding.outcomes import OutcomeTable, top_outcomes
from decoding.selection import select


def make_table(*rows: tuple[int, int, float]) -> OutcomeTable:
    num_accepted, column, score = zip(*rows, strict=True)
    return OutcomeTable(torch.tensor(num_accepted), torch.tensor(column), torch.tensor(score, dtype=torch.float64))


def pairs(table: OutcomeTable) -> list[tuple[int, int]]:
    return list(zip(table.num_accepted.tolist(), table.column.tolist(), strict=True))


TABLE = make_table((0, 5, -3.0), (2, 7, -0.5), (1, 7, -1.0), (2, 6, -0.5), (0, 1, -math.inf))


def test_the_best_scores_are_taken_in_order_and_equals_keep_the_order_of_the_table() -> None:
    assert pairs(select(TABLE, 3, [])) == [(2, 7), (2, 6), (1, 7)]


def test_fewer_outcomes_than_slots_are_all_taken_but_never_an_impossible_one() -> None:
    assert pairs(select(TABLE, 10, [])) == [(2, 7), (2, 6), (1, 7), (0, 5)]


def test_an_anchor_that_ends_the_text_is_excluded_and_its_slot_goes_to_the_next() -> None:
    assert pairs(select(TABLE, 2, {7, 99})) == [(2, 6), (0, 5)]


def test_the_threshold_includes_its_own_value() -> None:
    assert pairs(select(TABLE, 10, [], threshold=-1.0)) == [(2, 7), (2, 6), (1, 7)]


def test_an_empty_selection_is_an_empty_table() -> None:
    assert len(select(TABLE, 10, [5, 6, 7])) == 0
    assert len(select(TABLE, 0, [])) == 0


@given(st.integers(0, 2**31), st.integers(1, 12), st.floats(0.2, 0.95), st.floats(0.3, 3.0))
@settings(max_examples=40, deadline=None)
def test_selection_is_at_least_as_good_as_any_fixed_fan_out(seed: int, budget: int, alpha: float, rho: float) -> None:
    """Proposition 2(b) with a perfect decoder."""
    gamma, width = 4, 20
    logits = 2 * torch.randn(gamma + 1, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    table = top_outcomes(torch.log_softmax(logits, 1), [0, 1, 2, 3])
    selected_mass = float(select(table, budget, []).score.exp().sum())
    fixed_mass = 0.0
    for num_accepted, num_anchors in enumerate(allocate(alpha, rho, gamma, budget)):
        fixed_mass += float(table.score[table.num_accepted == num_accepted][:num_anchors].exp().sum())
    assert selected_mass >= fixed_mass - 1e-12
