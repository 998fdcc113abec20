"""When a generated text has begun to repeat itself, the point where evaluation and corpus writing stop."""

from collections.abc import Sequence

MAX_PERIOD = 40
MIN_REPEATS = 3
MIN_LOOP_TOKENS = 24


def is_loop(token_ids: Sequence[int]) -> bool:
    """Whether a text's end repeats with a period of up to 40, at least three times and over 24 tokens."""
    for period in range(1, MAX_PERIOD + 1):
        span = max(MIN_REPEATS * period, MIN_LOOP_TOKENS)
        if span > len(token_ids):
            continue
        if token_ids[-span:-period] == token_ids[len(token_ids) - span + period :]:
            return True
    return False
