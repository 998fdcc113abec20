"""Bytes and spellings of single tokens, for byte-level vocabularies and for those with byte fallback."""

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as FastTokenizer

from server.spelling import TokenSpelling
from server.tokenizer import Tokenizer


def test_bytes_of_a_byte_level_vocabulary(tokenizer: Tokenizer) -> None:
    text = "a é 👩‍🚀\n\ufffd"
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.spelling.bytes_of(token_id) for token_id in ids) == text.encode()
    spelled = [tokenizer.spelling.spelling_of(token_id) for token_id in ids]
    assert spelled[:3] == ["a", " ", "bytes:\\xc3"]
    assert not any("\ufffd" in item for item in spelled)


def test_every_byte_has_a_spelling_of_its_own(tokenizer: Tokenizer) -> None:
    spelled = [tokenizer.spelling.spelling_of(token_id) for token_id in range(tokenizer.vocab_size)]
    assert len(set(spelled)) == tokenizer.vocab_size


def test_special_tokens_and_unused_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.spelling.spelling_of(2) == "<|im_end|>"
    assert tokenizer.spelling.spelling_of(100_000) == "token_id:100000"
    assert tokenizer.spelling.bytes_of(100_000) == b""


@pytest.fixture
def fallback_vocabulary() -> FastTokenizer:
    """A vocabulary in the manner of Llama 2: words with a mark for the space before them, and single bytes."""
    words = ["<unk>", "▁", "a", "▁the", "é", "s"]
    vocab = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = FastTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def test_byte_fallback(fallback_vocabulary: FastTokenizer) -> None:
    spelling = TokenSpelling(fallback_vocabulary)
    token_id = fallback_vocabulary.token_to_id
    assert spelling.bytes_of(token_id("▁the")) == b" the"
    assert spelling.bytes_of(token_id("é")) == "é".encode()
    assert spelling.bytes_of(token_id("<0xF0>")) == b"\xf0"
    assert spelling.spelling_of(token_id("<0xF0>")) == "bytes:\\xf0"
    assert spelling.spelling_of(token_id("<0x41>")) == "A"
    assert spelling.spelling_of(token_id("<s>")) == "<s>"
