"""Rounds against a recorded text, by hand."""

import pytest

from evaluation.rounds import (
    CheckedReplacement,
    Ending,
    Following,
    Replacement,
    ReplayedRound,
    Tally,
    checked_replacements,
    sizes_that_hold,
    verify,
)

CUT = Following((5, 6, 7, 8, 9), ends=False)
ENDED = Following((5, 6, 7), ends=True)


@pytest.mark.parametrize(
    ("drafts", "following", "expected"),
    [
        ((1, 6, 7, 8), CUT, Ending(0, 1, 4, 5)),  # an adversary: the bonus token alone
        ((5, 6, 1, 8), CUT, Ending(2, 3, 4, 7)),
        ((5, 6, 7, 8), CUT, Ending(4, 5, 4, 9)),  # an oracle: γ + 1
        ((5, 1), ENDED, Ending(1, 2, 2, 6)),
        ((5, 6), ENDED, Ending(2, 3, 2, None)),  # the bonus token is the stop token
        ((5, 1, 7, 0), ENDED, Ending(1, 2, 3, 6)),  # the fourth draft has nothing to be compared with
        ((5, 6, 7, 0), ENDED, Ending(3, 3, 3, None)),  # the stop token was drafted: no bonus
        ((5, 6, 7, 8, 9), CUT, None),  # all that is recorded was accepted: more might have been
        ((5, 6, 7, 8, 9, 1), CUT, None),
    ],
)
def test_a_round_by_hand(drafts: tuple[int, ...], following: Following, expected: Ending | None) -> None:
    assert verify(drafts, following) == expected


def test_replacements_are_judged_as_far_as_verification_went() -> None:
    following = Following((5, 6, 7, 8, 9), ends=False)
    written = (Replacement(2, before=4, after=6), Replacement(3, before=7, after=1), Replacement(4, before=8, after=3))
    ending = verify((5, 6, 1, 3), following)
    assert ending is not None
    right, wrong = CheckedReplacement(True, False), CheckedReplacement(False, True)
    assert checked_replacements(written, ending, following) == (right, wrong)  # the fourth was never reached


def test_sizes_that_hold() -> None:
    assert sizes_that_hold(0) == {1, 2, 4, 8, 16}
    assert sizes_that_hold(4) == {8, 16}
    assert sizes_that_hold(16) == sizes_that_hold(None) == frozenset()


def test_a_tally_by_hand() -> None:
    rounds = [
        ReplayedRound(Ending(0, 1, 4, 5), False, sizes_that_hold(0)),
        ReplayedRound(Ending(4, 5, 4, 9), True, sizes_that_hold(3), (CheckedReplacement(True, False),)),
        ReplayedRound(Ending(2, 3, 4, 7), True, sizes_that_hold(None), (CheckedReplacement(False, True),)),
        ReplayedRound(Ending(1, 1, 1, None), True),  # the last of a text: its outcome needs no next block
    ]
    tally = Tally.of(rounds)
    assert tally.tau == 10 / 4
    assert tally.hit_rate == pytest.approx({"1": 1 / 3, "2": 1 / 3, "4": 2 / 3, "8": 2 / 3, "16": 2 / 3})
    assert tally.acceptance == pytest.approx([3 / 4, 2 / 3, 1 / 3, 1 / 3])
    assert (tally.num_replaced, tally.num_replaced_right, tally.num_replaced_needlessly) == (2, 1, 1)
    parts = Tally.of(rounds[:1])
    parts += Tally.of(rounds[1:])
    assert parts == tally
    assert Tally().tau == 0.0 and Tally().hit_rate == {}
