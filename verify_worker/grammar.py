"""Grammars by the llguidance library: compiled beside the loop, kept, and followed token by token.

Knows what a request may ask for (`protocol.fields.Grammar`) and how the library says it; nothing of rows and blocks.
"""

import json
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Bool
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from decoding.editing import TokenGrammar
from protocol.fields import (
    ChoiceGrammar,
    Grammar,
    JsonObjectGrammar,
    JsonSchemaGrammar,
    LarkGrammar,
    RegexGrammar,
)
from verify_worker.vocabulary import Vocabulary

MAX_KEPT_GRAMMARS = 32
MAX_MESSAGE_CHARACTERS = 500


class GrammarError(Exception):
    """A grammar that cannot be compiled, or that became too complex while it was followed."""


class Matcher(TokenGrammar):
    """One text's place in its grammar."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, device: torch.device) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._device = device
        self._allowed: Tensor | None = None

    def copy(self) -> "Matcher":
        """The same place, for another text."""
        return Matcher(self._matcher.deep_copy(), self._vocabulary, self._device)

    def allowed(self) -> Bool[Tensor, " vocab"]:
        """As `TokenGrammar.allowed`; raises `GrammarError`."""
        if self._allowed is None:
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            self._check()
            mask = np.zeros(self._vocabulary.size, dtype=bool)
            mask[: len(bits)] = bits[: self._vocabulary.size]
            mask[list(self._vocabulary.end_token_ids)] = False
            self._allowed = torch.from_numpy(mask).to(self._device)
        return self._allowed

    def may_end(self) -> bool:
        """As `TokenGrammar.may_end`; raises `GrammarError`."""
        accepting = self._matcher.is_accepting()
        self._check()
        return accepting

    def is_complete(self) -> bool:
        """As `TokenGrammar.is_complete`; raises `GrammarError`. The mask it looks at is the next row's."""
        return self.may_end() and not bool(self.allowed().any())

    def advance(self, token_id: int) -> None:
        """As `TokenGrammar.advance`; raises `GrammarError`."""
        self._allowed = None
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_shorten(self._matcher.get_error()))


class GrammarCompiler:
    """Compiles in a thread of its own, so that rounds of other sequences go on, and keeps the latest grammars.

    The library's view of the tokenizer is built for the first grammar; that holds up all threads, for a second or two
    with a large vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, Matcher] = OrderedDict()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def start(self, grammar: Grammar) -> "Future[Matcher]":
        """Begin to compile; the result is to be copied for each text, the error is a `GrammarError`."""
        return self._executor.submit(self.compile, grammar)

    def compile(self, grammar: Grammar) -> Matcher:
        """A grammar at its start; raises `GrammarError`."""
        key = grammar.model_dump_json()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        matcher = LLMatcher(self._load_tokenizer(), _library_grammar(grammar), log_level=0)
        if matcher.is_error():
            raise GrammarError(_shorten(matcher.get_error()))
        self._kept[key] = Matcher(matcher, self._vocabulary, self._device)
        if len(self._kept) > MAX_KEPT_GRAMMARS:
            self._kept.popitem(last=False)
        return self._kept[key]

    def close(self) -> None:
        """Compile nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _load_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            path = self._vocabulary.tokenizer_file
            if path is None:
                raise GrammarError("the model has no tokenizer.json, which grammars need")
            try:
                self._tokenizer = LLTokenizer(str(path), eos_token=list(self._vocabulary.end_token_ids) or None)
            except ValueError as error:
                raise GrammarError(f"the model's tokenizer cannot be used with grammars: {error}") from None
        return self._tokenizer


def _library_grammar(grammar: Grammar) -> str:
    """The grammar in the library's own notation; faults show when it is compiled."""
    match grammar:
        case JsonSchemaGrammar(schema_text=text):
            return _from_schema(text)
        case JsonObjectGrammar():
            return _from_schema('{"type": "object"}')
        case RegexGrammar(pattern=pattern):
            return LLMatcher.grammar_from_regex(pattern)
        case LarkGrammar(grammar_text=text):
            return LLMatcher.grammar_from_lark(text)
        case ChoiceGrammar(choices=choices):
            quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices)
            return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))


def _from_schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is not valid JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise GrammarError("the schema must be an object or a boolean")
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def _shorten(message: str) -> str:
    """The complaint itself: the library appends the parser's state, some of it the user's text."""
    return message.partition("\n<state>")[0].strip()[:MAX_MESSAGE_CHARACTERS]
