"""When a generated text has begun to repeat itself, the point where evaluation and corpus writing stop."""

from collections.abc import Sequence

MAX_PERIOD = 40
MIN_REPEATS = 3
MIN_LOOP_TOKENS = 24


def is_loop(token_ids: Sequence[int]) -> bool:
    """Whether a text's end repeats with a period of up to 40, at least three times and over 24 tokens."""
    return _period(token_ids) is not None


def loop_onset(token_ids: Sequence[int]) -> int | None:
    """How many tokens stand before a text's end begins to repeat itself; None where it does not.

    The first time round is text like any other: the loop starts where the second time does.
    """
    period = _period(token_ids)
    if period is None:
        return None
    start = len(token_ids) - period
    while start > 0 and token_ids[start - 1] == token_ids[start - 1 + period]:
        start -= 1
    return start + period


def _period(token_ids: Sequence[int]) -> int | None:
    for period in range(1, MAX_PERIOD + 1):
        span = max(MIN_REPEATS * period, MIN_LOOP_TOKENS)
        if span > len(token_ids):
            continue
        if token_ids[-span:-period] == token_ids[len(token_ids) - span + period :]:
            return period
    return None
