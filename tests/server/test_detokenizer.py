"""Text from tokens: nothing lost, nothing shown too early, the same for every grouping."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.detokenizer import IncrementalDecoder, StopScanner
from server.tokenizer import Tokenizer


def decode_bytes(token_ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(token_ids).decode("utf-8", "replace")


def decode_words(token_ids: Sequence[int]) -> str:
    """A tokenizer that drops the leading space of a text, as SentencePiece ones do."""
    return "".join(f" w{token_id}" if token_id else "" for token_id in token_ids)[1:]


@given(st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_pieces_add_up_to_the_text_without_partial_characters(text: str) -> None:
    decoder = IncrementalDecoder(decode_bytes)
    pieces = [decoder.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert decoder.flush() == ""


@given(st.binary(max_size=300))
@settings(max_examples=60, deadline=None)
def test_any_bytes_add_up_to_the_whole_decoding(data: bytes) -> None:
    decoder = IncrementalDecoder(decode_bytes)
    shown = "".join(decoder.push(byte) for byte in data) + decoder.flush()
    assert shown == decode_bytes(list(data))


def test_long_binary_output_keeps_the_window_short() -> None:
    longest = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode_bytes(token_ids)

    decoder = IncrementalDecoder(decode)
    data = [0x80] * 2000
    shown = "".join(decoder.push(byte) for byte in data) + decoder.flush()
    assert shown == decode_bytes(data)
    assert longest < 100


def test_a_character_spread_over_tokens_comes_whole() -> None:
    decoder = IncrementalDecoder(decode_bytes)
    assert [decoder.push(byte) for byte in "a日b".encode()] == ["a", "", "", "日", "b"]


def test_leading_spaces_survive_tokens_without_text() -> None:
    decoder = IncrementalDecoder(decode_words)
    token_ids = [1, 2, 0, 0, 3, 0, 4]
    assert "".join(decoder.push(token_id) for token_id in token_ids) == "w1 w2 w3 w4" == decode_words(token_ids)


def test_with_the_tokenizers_library(tokenizer: Tokenizer) -> None:
    text = "naïve 👩‍🚀 日本語\n\n  x"
    decoder = IncrementalDecoder(tokenizer.decode)
    assert "".join(decoder.push(token_id) for token_id in tokenizer.encode(text)) == text


def cut_at_first_stop(text: str, stops: list[str]) -> str:
    """What the scanner must do, said simply: read character by character until some stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_scanner_does_not_depend_on_the_grouping(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    shown = ""
    for piece in pieces:
        scanned = scanner.push(piece)
        shown += scanned.text
        if scanned.stop is not None:
            break
    else:
        shown += scanner.flush()
    assert shown == cut_at_first_stop("".join(pieces), stops)


def test_scanner_never_shows_what_may_become_a_stop() -> None:
    scanner = StopScanner(["abc"])
    assert [scanner.push(character).text for character in "xababd"] == ["x", "", "", "ab", "", "abd"]


@pytest.mark.parametrize(("include", "expected"), [(False, "x"), (True, "xabc")])
def test_scanner_can_include_the_stop(include: bool, expected: str) -> None:
    scanned = StopScanner(["abc", "bcd"], include).push("xabcd")
    assert (scanned.text, scanned.stop) == (expected, "abc")
