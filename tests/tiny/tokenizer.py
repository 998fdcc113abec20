"""A tiny byte-level tokenizer on disk: printable ASCII, newline, a few pieces of JSON, and an end of text."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models

CHARACTERS = [chr(code) for code in range(0x21, 0x7F)] + ["Ġ", "Ċ"]  # byte-level spellings of space and newline
PIECES = ('{"', '":', '",', '"}', 'Ġ"', "],", "},", "[{", "}]", "tr", "ue", "true", "nu", "ll", "null", "12", "00")


def write_tokenizer(folder: Path, size: int) -> Path:
    """A folder with a tokenizer of `size` ids, the last of which ends a text."""
    tokens = [*CHARACTERS, *PIECES]
    tokens += [f"{first}{second}" for first in "abc" for second in "defgh"]
    tokens = tokens[: size - 1]
    assert len(tokens) == size - 1, "not enough pieces"
    known = set(tokens)
    merges = [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    content = json.loads(tokenizer.to_str())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    end = {"id": size - 1, "content": "<end>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content |= {"pre_tokenizer": byte_level, "decoder": byte_level, "added_tokens": [end | flags]}
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": size - 1}), encoding="utf-8")
    return folder
