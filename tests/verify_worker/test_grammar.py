"""Grammars compiled by the library and followed token by token, over a tiny tokenizer."""

import json

import pytest
import torch
from tokenizers import Tokenizer

from protocol.fields import (
    ChoiceGrammar,
    Grammar,
    JsonObjectGrammar,
    JsonSchemaGrammar,
    LarkGrammar,
    RegexGrammar,
)
from tests.tiny.models import VOCAB_SIZE, TinyModels
from verify_worker.grammar import MAX_KEPT_GRAMMARS, GrammarCompiler, GrammarError, Matcher
from verify_worker.vocabulary import Vocabulary, read_vocabulary

CPU = torch.device("cpu")
BOOLEAN = JsonSchemaGrammar(
    schema_text=json.dumps(
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    )
)


class Tools:
    """A compiler and the tokenizer it is for."""

    def __init__(self, models: TinyModels, size: int = VOCAB_SIZE) -> None:
        folder = models.tokenizer(size)
        self.vocabulary = read_vocabulary(folder, VOCAB_SIZE)
        self.compiler = GrammarCompiler(self.vocabulary, CPU)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def follow(self, grammar: Grammar, text: str) -> Matcher:
        """The place after a text, every token of which must be allowed."""
        matcher = self.compiler.compile(grammar).copy()
        for token_id in self.tokenizer.encode(text).ids:
            assert bool(matcher.allowed()[token_id]), text
            matcher.advance(token_id)
        return matcher

    def next_pieces(self, matcher: Matcher) -> set[str]:
        return {self.tokenizer.decode([index]) for index in matcher.allowed().nonzero().flatten().tolist()}


@pytest.fixture(scope="module")
def tools(models: TinyModels) -> Tools:
    return Tools(models)


@pytest.mark.parametrize(
    ("grammar", "whole", "partial"),
    [
        (BOOLEAN, '{"a": true}', '{"a": tr'),
        (JsonObjectGrammar(), '{"b": [12, null, "x"]}', '{"b": ['),
        (RegexGrammar(pattern="[ab]{2}"), "ab", "a"),
        (LarkGrammar(grammar_text='start: "x" "yz"'), "xyz", "xy"),
        (ChoiceGrammar(choices=['say "no"', "yes"]), 'say "no"', 'say "'),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_a_text_of_the_grammar_is_complete_and_its_beginning_is_not(
    tools: Tools, grammar: Grammar, whole: str, partial: str
) -> None:
    assert tools.follow(grammar, whole).is_complete()
    place = tools.follow(grammar, partial)
    assert not place.may_end() and not place.is_complete() and bool(place.allowed().any())


def test_a_text_may_end_where_it_may_also_go_on(tools: Tools) -> None:
    place = tools.follow(RegexGrammar(pattern="a+"), "aa")
    assert place.may_end() and not place.is_complete()
    assert tools.next_pieces(place) == {"a"}  # an end of the text is no text


def test_only_what_the_schema_allows_follows(tools: Tools) -> None:
    assert tools.next_pieces(tools.follow(BOOLEAN, "")) == {"{", '{"'}
    assert tools.next_pieces(tools.follow(BOOLEAN, '{"a":')) == {"t", "tr", "true", "f", " ", "\n"}


def test_copies_go_their_own_ways(tools: Tools) -> None:
    start = tools.compiler.compile(ChoiceGrammar(choices=["ab", "cb"]))
    first, second = start.copy(), start.copy()
    first.advance(tools.tokenizer.encode("a").ids[0])
    assert tools.next_pieces(second) == {"a", "c"}
    assert tools.next_pieces(first) == {"b"}


def test_a_tokenizer_smaller_than_the_head(models: TinyModels) -> None:
    tools = Tools(models, 100)
    place = tools.follow(BOOLEAN, '{"a":')
    assert place.allowed().shape == (100,)
    assert not bool(place.allowed()[99])  # its end of text


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (JsonSchemaGrammar(schema_text="{"), "not valid JSON"),
        (JsonSchemaGrammar(schema_text='{"a":' + "[" * 20_000), "not valid JSON"),
        (JsonSchemaGrammar(schema_text="[1]"), "must be an object"),
        (JsonSchemaGrammar(schema_text='{"type": "object"}, "x": {}'), "not valid JSON"),
        (JsonSchemaGrammar(schema_text='{"type": "objekt"}'), "objekt"),
        (JsonSchemaGrammar(schema_text='{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (JsonSchemaGrammar(schema_text='{"$ref": "file:///etc/passwd"}'), "fetch"),
        (JsonSchemaGrammar(schema_text="false"), "Unsatisfiable"),
        (RegexGrammar(pattern="(a"), "unclosed group"),
        (RegexGrammar(pattern="(?=a)b"), "look-around"),
        (LarkGrammar(grammar_text="start: nothing"), "nothing"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_says_why(tools: Tools, grammar: Grammar, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        tools.compiler.compile(grammar)
    assert isinstance(tools.compiler.start(grammar).exception(10), GrammarError)


def test_a_token_that_is_not_allowed_kills_this_matcher_only(tools: Tools) -> None:
    place = tools.follow(BOOLEAN, "{")
    with pytest.raises(GrammarError) as caught:
        place.advance(tools.tokenizer.encode("z").ids[0])
    assert "<state>" not in str(caught.value)
    with pytest.raises(GrammarError):
        place.may_end()
    assert tools.follow(BOOLEAN, '{"a": true}').is_complete()


def test_grammars_are_kept_up_to_a_number(tools: Tools) -> None:
    first = tools.compiler.compile(RegexGrammar(pattern="x{1}"))
    assert tools.compiler.compile(RegexGrammar(pattern="x{1}")) is first
    for count in range(2, MAX_KEPT_GRAMMARS + 2):
        tools.compiler.compile(RegexGrammar(pattern=f"x{{{count}}}"))
    assert tools.compiler.compile(RegexGrammar(pattern="x{1}")) is not first


def test_without_a_tokenizer_there_are_no_grammars() -> None:
    with pytest.raises(GrammarError, match=r"no tokenizer\.json"):
        GrammarCompiler(Vocabulary(VOCAB_SIZE), CPU).compile(BOOLEAN)
