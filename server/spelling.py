"""What single tokens look like: their bytes, and a text for them that is never a broken character.

A token of a byte-level vocabulary may be a part of a character only. Such a token is written as `bytes:\\xf0\\x9f`, as
OpenAI's interface does, so that different tokens keep different spellings. Knows nothing of texts and of requests.
"""

import re
from functools import lru_cache

from tokenizers import Tokenizer as FastTokenizer

from server.detokenizer import REPLACEMENT

REMEMBERED_TOKENS = 1 << 16
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
LETTER = "a"


def _byte_alphabet() -> dict[str, int]:
    """What stands for bytes in byte-level vocabularies: printable characters themselves, others from 256 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


class TokenSpelling:
    """Bytes and spellings of the tokens of one vocabulary."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        ids: list[int] = tokenizer.encode(LETTER, add_special_tokens=False).ids
        self._context = ids[-1:]
        self._num_context_characters = len(self._decode(self._context))
        self.bytes_of = lru_cache(REMEMBERED_TOKENS)(self._bytes_of)
        self.spelling_of = lru_cache(REMEMBERED_TOKENS)(self._spelling_of)

    def _spelling_of(self, token_id: int) -> str:
        """The token's text; `bytes:` and escapes for a part of a character; its id where the vocabulary has none."""
        data = self.bytes_of(token_id)
        if not data:
            return f"token_id:{token_id}"
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes_of(self, token_id: int) -> bytes:
        """What the token adds to a text; empty for an id without a token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        # Behind a letter, because decoders drop a space at the start of a text.
        text = self._decode([*self._context, token_id])[self._num_context_characters :]
        if REPLACEMENT not in text:
            return text.encode()
        byte = BYTE_TOKEN.fullmatch(token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        if all(character in BYTE_OF_CHARACTER for character in token):
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        return text.encode()

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text
