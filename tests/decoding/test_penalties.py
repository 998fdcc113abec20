"""Bias and penalties against their definition, written out token by token over the whole text."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoding.penalties import PenaltyState, TokenControls

VOCAB = 12
CPU = torch.device("cpu")
token_ids = st.integers(0, VOCAB - 1)
# Dictionaries: the types of what is built are checked at random places, and strategies may not use chance of their own.
controls = st.fixed_dictionaries(
    {
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 2.0]),
        "logit_bias": st.lists(st.tuples(token_ids, st.floats(-100, 100)), max_size=4).map(tuple),
    }
)


def row_for(seed: int) -> torch.Tensor:
    return 3.0 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def defined(row: torch.Tensor, wanted: TokenControls, prompt: list[int], generated: list[int]) -> list[float]:
    """The definition, in Python's own numbers."""
    edited = [float(value) for value in row]
    for token_id, bias in wanted.logit_bias:
        edited[token_id] += bias
    for token_id in set(prompt) | set(generated):
        factor = wanted.repetition_penalty
        edited[token_id] = edited[token_id] / factor if edited[token_id] > 0 else edited[token_id] * factor
    for token_id in set(generated):
        count = generated.count(token_id)
        edited[token_id] -= wanted.frequency_penalty * count + wanted.presence_penalty
    return edited


@given(fields=controls, prompt=st.lists(token_ids, max_size=6), generated=st.lists(token_ids, max_size=12))
def test_every_row_is_as_defined_for_its_own_prefix(
    fields: dict[str, Any], prompt: list[int], generated: list[int]
) -> None:
    wanted = TokenControls(**fields)
    state = PenaltyState(wanted, prompt, VOCAB, CPU)
    for index in range(len(generated) + 1):
        row = row_for(index)
        expected = defined(row, wanted, prompt, generated[:index])
        assert state.apply(row).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)
        if index < len(generated):
            state.advance(generated[index])


def test_a_row_is_left_as_it_was() -> None:
    row = row_for(0)
    before = row.clone()
    state = PenaltyState(TokenControls(repetition_penalty=2.0, logit_bias=((1, 5.0),)), [1, 2], VOCAB, CPU)
    state.apply(row)
    assert torch.equal(row, before)


def test_only_repetition_looks_at_the_prompt() -> None:
    row = torch.ones(VOCAB)
    counted = PenaltyState(TokenControls(presence_penalty=1.0, frequency_penalty=1.0), [3], VOCAB, CPU)
    repeated = PenaltyState(TokenControls(repetition_penalty=2.0), [3], VOCAB, CPU)
    assert counted.apply(row).tolist() == [1.0] * VOCAB
    assert repeated.apply(row).tolist() == [0.5 if token_id == 3 else 1.0 for token_id in range(VOCAB)]


def test_what_is_forbidden_stays_forbidden() -> None:
    row = torch.ones(VOCAB)
    row[3] = -math.inf
    wanted = TokenControls(-2.0, -2.0, 0.5, ((3, 100.0),))
    state = PenaltyState(wanted, [3], VOCAB, CPU)
    state.advance(3)
    assert state.apply(row)[3] == -math.inf


def test_a_half_precision_row_is_edited_in_single_precision() -> None:
    row = torch.ones(VOCAB, dtype=torch.bfloat16)
    state = PenaltyState(TokenControls(logit_bias=((0, 0.001),)), [], VOCAB, CPU)
    assert float(state.apply(row)[0]) == pytest.approx(1.001, abs=1e-6)  # bfloat16 has nothing between 1 and 1.008


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"repetition_penalty": 0.0},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((1, math.nan),)},
    ],
)
def test_controls_out_of_range_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"penalty|logit_bias"):
        TokenControls(**fields)  # type: ignore[arg-type]


def test_what_is_neutral() -> None:
    assert TokenControls().is_neutral
    assert not TokenControls(presence_penalty=0.1).is_neutral
    assert not TokenControls(frequency_penalty=-0.1).is_neutral
    assert not TokenControls(repetition_penalty=1.1).is_neutral
    assert not TokenControls(logit_bias=((0, 0.0),)).is_neutral
