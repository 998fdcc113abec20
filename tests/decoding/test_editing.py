"""The rules of a request, row by row: what is forbidden, in which order, and that rejected drafts leave no trace."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.acceptance import Outcome, accept
from decoding.editing import RowEditor, TextRules, TokenGrammar
from decoding.penalties import TokenControls
from decoding.sampling import SamplingParameters, draw

VOCAB = 10
WIDTH = 13  # three ids have no text
STOPS = frozenset({8, 9})
CPU = torch.device("cpu")
GREEDY = SamplingParameters(temperature=0.0)


class Ascending(TokenGrammar):
    """Tokens 0 to 7 in ascending order; a text may end at an even token and is complete at `last`."""

    def __init__(self, last: int = 6) -> None:
        self.last = last
        self.taken: list[int] = []

    def allowed(self) -> torch.Tensor:
        ids = torch.arange(VOCAB)
        return (ids > (self.taken[-1] if self.taken else -1)) & (ids <= self.last)

    def may_end(self) -> bool:
        return bool(self.taken) and self.taken[-1] % 2 == 0

    def is_complete(self) -> bool:
        return self.may_end() and not bool(self.allowed().any())

    def advance(self, token_id: int) -> None:
        assert bool(self.allowed()[token_id]), "only allowed tokens are taken over"
        self.taken.append(token_id)


def editor_for(rules: TextRules, grammar: TokenGrammar | None = None, prompt: tuple[int, ...] = (1,)) -> RowEditor:
    return RowEditor(rules, prompt, CPU, grammar)


def permitted(editor: RowEditor) -> list[int]:
    """Token ids that a flat row leaves."""
    edited = editor.edit(torch.zeros(WIDTH))
    assert edited.shape == (VOCAB,)
    return (edited > -math.inf).nonzero().flatten().tolist()


def test_ids_without_a_text_are_never_drawn() -> None:
    row = torch.zeros(WIDTH)
    row[11] = 50.0
    editor = editor_for(TextRules(VOCAB))
    for seed in range(200):
        assert draw(editor.edit(row), SamplingParameters(temperature=2.0, seed=seed), 0) < VOCAB


def test_stop_tokens_come_after_min_tokens() -> None:
    editor = editor_for(TextRules(VOCAB, STOPS, min_tokens=2))
    assert permitted(editor) == list(range(8))
    assert editor.advance(0)
    assert permitted(editor) == list(range(8))
    assert editor.advance(0)
    assert permitted(editor) == list(range(10))
    assert not editor.advance(9)


def test_a_bias_does_not_permit_what_min_tokens_forbids() -> None:
    editor = editor_for(TextRules(VOCAB, STOPS, 1, TokenControls(logit_bias=((9, 100.0),))))
    assert permitted(editor) == list(range(8))


def test_a_grammar_says_what_follows_and_when_it_ends() -> None:
    editor = editor_for(TextRules(VOCAB, STOPS), Ascending())
    assert permitted(editor) == [0, 1, 2, 3, 4, 5, 6]
    editor.advance(3)
    assert permitted(editor) == [4, 5, 6]
    editor.advance(4)
    assert permitted(editor) == [5, 6, 8, 9]
    assert not editor.is_complete


def test_a_complete_grammar_ends_the_text_without_a_stop_token() -> None:
    editor = editor_for(TextRules(VOCAB), Ascending())
    assert not editor.advance(6)
    assert editor.is_complete


def test_min_tokens_yields_where_the_grammar_allows_nothing_else() -> None:
    grammar = Ascending(last=5)
    editor = editor_for(TextRules(VOCAB, STOPS, min_tokens=9), grammar)
    editor.advance(2)
    assert permitted(editor) == [3, 4, 5]  # the text could end, but may not yet
    grammar.last = 2
    assert permitted(editor) == [8, 9]


def test_a_stop_token_that_is_text_ends_the_text_wherever_it_may_stand() -> None:
    editor = editor_for(TextRules(VOCAB, frozenset({6})), Ascending())
    editor.advance(3)
    assert permitted(editor) == [4, 5, 6]
    editor.advance(5)
    assert permitted(editor) == [6]
    assert not editor.advance(6)


def test_only_rows_that_are_reached_are_edited() -> None:
    grammar = Ascending()
    rows = torch.zeros(4, WIDTH)
    rows[0, 2] = rows[1, 3] = 5.0
    rows[2:] = math.nan
    outcome = accept(rows, [2, 5, 6], GREEDY, 0, editor_for(TextRules(VOCAB, STOPS), grammar))
    assert outcome == Outcome(1, 3)
    assert grammar.taken == [2, 3]  # neither 5 nor 6


def test_the_end_of_a_text_ends_the_block() -> None:
    rows = torch.zeros(3, WIDTH)
    rows[0, 8] = 5.0
    rows[1:] = math.nan
    assert accept(rows, [8, 1], GREEDY, 0, editor_for(TextRules(VOCAB, STOPS))) == Outcome(0, 8)
    rows = torch.zeros(3, WIDTH)
    rows[0, 6] = 5.0
    rows[1:] = math.nan
    assert accept(rows, [6, 1], GREEDY, 0, editor_for(TextRules(VOCAB), Ascending())) == Outcome(0, 6)


class MarkovTarget:
    """A random target: the next token's logits depend on the last token and on the length."""

    def __init__(self, seed: int) -> None:
        self._table = 2.5 * torch.randn(7, WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))

    def logits(self, text: list[int]) -> torch.Tensor:
        return self._table[len(text) % 7, text[-1]]


def generate(
    target: MarkovTarget,
    rules: TextRules,
    parameters: SamplingParameters,
    with_grammar: bool,
    drafter: Callable[[list[int]], list[int]],
) -> list[int]:
    text, prompt_len = [1, 2], 2
    editor = RowEditor(rules, text, CPU, Ascending() if with_grammar else None)
    while len(text) < prompt_len + 30:
        drafts = drafter(text)
        rows = torch.stack([target.logits(text + drafts[:row]) for row in range(len(drafts) + 1)])
        outcome = accept(rows, drafts, parameters, len(text), editor)
        text += [*drafts[: outcome.num_accepted], outcome.anchor]
        if text[-1] in rules.stop_token_ids or editor.is_complete:
            return text
    return text[: prompt_len + 30]


# Dictionaries: the types of what is built are checked at random places, and strategies may not use chance of their own.
limits = st.fixed_dictionaries(
    {
        "stop_token_ids": st.frozensets(st.integers(0, VOCAB - 1), max_size=3),
        "min_tokens": st.integers(0, 12),
    }
)
controls = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, 0.7, -0.5]),
        "frequency_penalty": st.sampled_from([0.0, 1.5, -0.3]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "logit_bias": st.lists(st.tuples(st.integers(0, VOCAB - 1), st.floats(-9, 9)), max_size=3).map(tuple),
    }
)
samplings = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0]),
        "top_k": st.sampled_from([0, 4]),
        "top_p": st.sampled_from([1.0, 0.9]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "seed": st.integers(0, 99),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    limited=limits,
    controlled=controls,
    sampled=samplings,
    with_grammar=st.booleans(),
    quality=st.sampled_from([0.0, 0.6, 1.0]),
)
def test_speculative_text_equals_autoregressive_text(
    limited: dict[str, Any], controlled: dict[str, Any], sampled: dict[str, Any], with_grammar: bool, quality: float
) -> None:
    rules = TextRules(VOCAB, **limited, controls=TokenControls(**controlled))
    parameters = SamplingParameters(**sampled)
    target = MarkovTarget(seed=1)
    expected = generate(target, rules, parameters, with_grammar, lambda text: [])
    dice = random.Random(parameters.seed)

    def drafter(text: list[int]) -> list[int]:
        true_tokens = (expected + [0] * 8)[len(text) : len(text) + dice.randint(0, 7)]
        return [token if dice.random() < quality else dice.randrange(WIDTH) for token in true_tokens]

    assert generate(target, rules, parameters, with_grammar, drafter) == expected
    generated = expected[2:]
    stops = [index for index, token_id in enumerate(generated) if token_id in rules.stop_token_ids]
    assert stops in ([], [len(generated) - 1])
    assert not stops or with_grammar or len(generated) > rules.min_tokens
    assert max(generated) < VOCAB


@pytest.mark.parametrize("token_id", [VOCAB, VOCAB + 5])
def test_ids_beyond_the_vocabulary_are_refused(token_id: int) -> None:
    with pytest.raises(IndexError):
        editor_for(TextRules(VOCAB, frozenset({token_id})))
    with pytest.raises(IndexError):
        editor_for(TextRules(VOCAB, controls=TokenControls(logit_bias=((token_id, 1.0),))))
    with pytest.raises(IndexError):
        editor_for(TextRules(VOCAB, controls=TokenControls(repetition_penalty=2.0)), prompt=(token_id,))
