"""Where a text begins to repeat itself."""

import pytest

from decoding.loops import is_loop, loop_onset


def test_a_loop_needs_three_rounds_and_some_length() -> None:
    assert is_loop([1, 2, 3] + [7, 8] * 12)
    assert not is_loop([7, 8] * 11)
    assert not is_loop(list(range(60)))


@pytest.mark.parametrize("num_rounds", [12, 13, 30])
def test_the_onset_is_where_the_second_round_starts(num_rounds: int) -> None:
    assert loop_onset([1, 2, 3] + [7, 8] * num_rounds) == 5


def test_a_round_that_began_before_is_found_from_its_first_token() -> None:
    """The tail repeats with period 3; the token before its first full round already belongs to it."""
    assert loop_onset([5, 9] + [7, 8, 9] * 9) == 1 + 3
    assert loop_onset(list(range(60))) is None
    assert loop_onset([4] * 24) == 1
