"""Prompts cut and shown again, with tokenizers that put tokens around a text or spaces into it."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from server.detokenizer import IncrementalDecoder
from server.prompts import Prompt, context_of, echo_of
from server.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def marking(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that begins every text with a token of its own."""
    folder = tmp_path_factory.mktemp("marking")
    fast = FastTokenizer.from_file(str(model_folder / "tokenizer.json"))
    fast.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def spacing(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose decoder drops the space at the start of a text, and which falls back to bytes."""
    folder = tmp_path_factory.mktemp("spacing")
    words = ["<unk>", "▁", "▁is", "▁Paris", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    fast = FastTokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    return Tokenizer.load(folder)


def test_tokens_of_the_tokenizer_s_own_are_marked(marking: Tokenizer) -> None:
    encoded = marking.encode_marked("a<|im_end|>b")
    assert (encoded.token_ids[0], encoded.token_ids[2]) == (0, 2)
    assert encoded.added == {0}
    assert marking.encode_marked("<|endoftext|>a", add_special_tokens=False).added == frozenset()


@pytest.mark.parametrize("with_offsets", [False, True])
def test_echo_shows_what_was_given(marking: Tokenizer, with_offsets: bool) -> None:
    encoded = marking.encode_marked("a<|im_end|>日b")
    prompt = Prompt(encoded.token_ids, encoded.added)
    echo = echo_of(prompt, marking, shows_added=False, with_offsets=with_offsets)
    assert echo.text == "a<|im_end|>日b"
    assert echo.offsets == ([0, 0, 1, 11, 11, 11, 12] if with_offsets else None)
    echo = echo_of(prompt, marking, shows_added=True, with_offsets=with_offsets)
    assert echo.text == "<|endoftext|>a<|im_end|>日b"


def test_the_last_tokens_keep_their_marks(marking: Tokenizer) -> None:
    encoded = marking.encode_marked("abc")
    prompt = Prompt(encoded.token_ids, encoded.added)
    assert prompt.last(4) == prompt.last(10) == prompt
    assert prompt.last(2) == Prompt(encoded.token_ids[-2:], frozenset())
    shifted = Prompt([5, 6, 0, 7], frozenset({2})).last(2)
    assert shifted == Prompt([0, 7], frozenset({0}))


def test_a_completion_keeps_the_space_before_its_first_word(spacing: Tokenizer) -> None:
    prompt = Prompt([2])  # " is"
    context = context_of(prompt, spacing, is_echoed=False, skips_special=True)
    decoder = IncrementalDecoder(spacing.decode, context)
    assert decoder.push(3) + decoder.flush() == " Paris"
    alone = IncrementalDecoder(spacing.decode)
    assert alone.push(3) == "Paris"


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_characters_that_the_prompt_left_open(spacing: Tokenizer, num_bytes: int) -> None:
    """With byte fallback a part of a character decodes to one replacement per byte, the whole to one character."""
    ids = [5 + byte for byte in "🚀".encode()]
    prompt = Prompt([2, *ids[:num_bytes]])
    echoed = echo_of(prompt, spacing, shows_added=False, with_offsets=False).text
    context = context_of(prompt, spacing, is_echoed=True, skips_special=True)
    decoder = IncrementalDecoder(spacing.decode, context)
    rest = [decoder.push(token_id) for token_id in [*ids[num_bytes:], 3]]
    assert echoed + "".join(rest) + decoder.flush() == "is🚀 Paris"
    fresh = IncrementalDecoder(spacing.decode, context_of(prompt, spacing, is_echoed=False, skips_special=True))
    text = "".join(fresh.push(token_id) for token_id in [*ids[num_bytes:], 3]) + fresh.flush()
    assert text == "\ufffd" * (4 - num_bytes) + " Paris"


def test_spaces_between_special_tokens(tokenizer: Tokenizer, spacing: Tokenizer) -> None:
    assert not tokenizer.puts_spaces_between_special_tokens
    assert not spacing.puts_spaces_between_special_tokens
