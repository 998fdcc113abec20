"""Replayed rounds on recorded texts: the text is the served one, and the counts are what a server would have seen."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from decoding.loops import is_loop
from decoding.outcomes import OutcomeTable
from decoding.plan import PassPlan
from decoding.sampling import SamplingParameters
from evaluation.acceptance import hit_rate, tokens_per_round
from evaluation.replay import NOT_RANKED, Replay, ReplayedRound, ReplaySettings, rank_of
from evaluation.texts import TargetText, write_texts
from modeling.decoder import decoder_layer_ids
from tests.tiny.engine import Engine, Job
from tests.tiny.models import NUM_LAYERS, TAP_LAYERS, TinyModels, true_rows

GAMMA = 4
SETTINGS = ReplaySettings(PassPlan(1, 1, 4), GAMMA, None, frozenset())
PROMPTS = ((1, 2, 3, 9, 17), (40, 41), (100,))


def recorded(models: TinyModels, temperature: float, stops: frozenset[int] = frozenset()) -> list[TargetText]:
    sampling = SamplingParameters(temperature=temperature, seed=7)
    first = decoder_layer_ids(TAP_LAYERS[-1], NUM_LAYERS)[0]
    return write_texts(models.runner(), [list(p) for p in PROMPTS], sampling, 20, stops, first, batch_size=2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_recorded_text_is_the_served_one_with_its_true_states(models: TinyModels, temperature: float) -> None:
    texts = recorded(models, temperature)
    with Engine(models) as engine:
        served = [engine.plain(Job(prompt=p, max_tokens=20, temperature=temperature)).token_ids for p in PROMPTS]
    for text, expected in zip(texts, served, strict=True):
        assert text.response_token_ids == expected[: len(text.response_token_ids)]
        assert len(text.response_token_ids) == 20 or is_loop(text.response_token_ids)
        rows = true_rows(models.runner(), text.token_ids[:-1])
        torch.testing.assert_close(text.taps, rows.taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(text.decoder_kv, rows.decoder_kv, rtol=1e-4, atol=1e-4)


def test_a_stop_token_is_no_part_of_the_response(models: TinyModels) -> None:
    free = recorded(models, 0.0)[0]
    stop = free.response_token_ids[5]
    bound = recorded(models, 0.0, frozenset({stop}))[0]
    assert bound.response_token_ids == free.response_token_ids[: free.response_token_ids.index(stop)]
    assert len(bound.taps) == len(bound.token_ids) - 1


@pytest.mark.parametrize("foresight", [True, False])
def test_rounds_follow_each_other_through_the_text(models: TinyModels, foresight: bool) -> None:
    networks = models.networks("trained")
    settings = replace(SETTINGS, foresight=foresight)
    rounds = [Replay(networks, text, settings).run() for text in recorded(models, 1.0)]
    for text, of_text in zip(recorded(models, 1.0), rounds, strict=True):
        # The prefill's token comes first; the last block that does not fit into the text is left out.
        left = len(text.response_token_ids) - 1 - sum(r.num_accepted + 1 for r in of_text)
        assert of_text and 0 <= left <= GAMMA
        assert not of_text[0].was_hit
        for before, after in pairwise(of_text):
            assert after.was_hit == (foresight and before.rank < SETTINGS.plan.cache_size)
    assert any(r.num_accepted for of_text in rounds for r in of_text)


def test_the_rank_of_an_outcome_leaves_out_what_ends_the_text() -> None:
    table = OutcomeTable(torch.tensor([0, 1, 1, 2]), torch.tensor([5, 9, 5, 5]), torch.tensor([-1.0, -2.0, -3.0, -4.0]))
    assert rank_of(table, 1, 5, []) == 2
    assert rank_of(table, 1, 5, [9]) == 1
    assert rank_of(table, 0, 9, []) == NOT_RANKED


def test_means() -> None:
    rounds = [ReplayedRound(0, False, 0), ReplayedRound(4, True, 3), ReplayedRound(2, True, NOT_RANKED)]
    assert tokens_per_round(rounds) == 3.0
    assert [hit_rate(rounds, size) for size in (1, 4, 16)] == pytest.approx([1 / 3, 2 / 3, 2 / 3])


def test_loops() -> None:
    assert is_loop([1, 2, 3] + [7, 8] * 12)
    assert not is_loop([7, 8] * 11)
    assert not is_loop(list(range(60)))
