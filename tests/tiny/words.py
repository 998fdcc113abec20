"""The files that make a tiny target's folder one that `--model` takes: a tokenizer, a chat template, an end of text."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from tests.tiny.models import VOCAB_SIZE


def add_word_tokenizer(folder: Path, template: str, end_id: int) -> None:
    """Token i is the word `ti`, and `end_id` ends a text."""
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCAB_SIZE)}, unk_token="t4"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end_id}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
