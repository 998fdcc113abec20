"""Stop strings wherever they fall: in a committed block, at the limit, across tokens, or never complete."""

import pytest

from tests.server.conftest import Stack

TEXT = "0123456789abcdef"


@pytest.mark.parametrize("block", [1, 3, 4, 8])
async def test_a_stop_string_anywhere_in_a_block(stack: Stack, block: int) -> None:
    """S02 and S04: a block is never looked at as a whole, nor at its end alone."""
    stack.says(TEXT)
    stack.verifier.plan.block = block
    for start in range(0, len(TEXT), 2):
        for length in (1, 3):
            stop = TEXT[start : start + length]
            for speculative in (True, False):
                body = {"max_tokens": 64, "stop": [stop, "never"], "speculative": speculative}
                choice = (await stack.complete(**body)).json()["choices"][0]
                assert (choice["text"], choice["finish_reason"]) == (TEXT[:start], "stop")
                stream = await stack.stream(**body)
                assert (stream.text, stream.finish_reasons) == (TEXT[:start], ["stop"])


@pytest.mark.parametrize("block", [1, 4, 8])
async def test_a_stop_and_the_limit_at_any_distance(stack: Stack, block: int) -> None:
    """S03: a stop that is complete within the limit is a stop, whatever the block that holds both."""
    stack.says(TEXT, ends=False)
    stack.verifier.plan.block = block
    for last in range(2, 12):
        stop = TEXT[last - 2 : last]
        for max_tokens in (last - 1, last, last + 1):
            choice = (await stack.complete(max_tokens=max_tokens, stop=stop)).json()["choices"][0]
            stream = await stack.stream(max_tokens=max_tokens, stop=stop)
            is_stopped = max_tokens >= last
            expected = TEXT[: last - 2] if is_stopped else TEXT[:max_tokens]
            assert (choice["text"], choice["finish_reason"]) == (expected, "stop" if is_stopped else "length")
            assert (stream.text, stream.finish_reasons) == (expected, ["stop" if is_stopped else "length"])


@pytest.mark.parametrize("block", [1, 4, 8])
async def test_what_is_held_back_for_a_stop_is_shown_at_the_end(stack: Stack, block: int) -> None:
    """S01: every ending of the text is also the beginning of a stop that never completes."""
    stack.says(TEXT)
    stack.verifier.plan.block = block
    for length in range(1, 8):
        stream = await stack.stream(max_tokens=64, stop=TEXT[-length:] + "ZZZ")
        assert (stream.text, stream.finish_reasons) == (TEXT, ["stop"])
