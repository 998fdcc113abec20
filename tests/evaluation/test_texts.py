"""Recorded texts are what a server answers, with the target's true states."""

from pathlib import Path

import pytest
import torch

from decoding.loops import is_loop
from evaluation.conversations import Writer
from evaluation.prompts import load_prompts
from modeling.chat import load_chat_format
from tests.evaluation.recorded import FIRST_DECODER_LAYER, PROMPTS, recorded
from tests.tiny.engine import Engine, Job
from tests.tiny.models import TAP_LAYERS, TinyModels, true_rows


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_recorded_text_is_the_served_one_with_its_true_states(models: TinyModels, temperature: float) -> None:
    texts = recorded(models, temperature)
    with Engine(models) as engine:
        jobs = [Job(prompt=prompt, max_tokens=24, temperature=temperature) for prompt in PROMPTS]
        served = [engine.plain(job).token_ids for job in jobs]
    for text, expected in zip(texts, served, strict=True):
        assert text.response_token_ids == expected[: len(text.response_token_ids)]
        assert len(text.response_token_ids) == 24 or is_loop(expected)
        rows = true_rows(models.runner(), text.token_ids[:-1])
        torch.testing.assert_close(text.taps, rows.taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(text.decoder_kv, rows.decoder_kv, rtol=1e-4, atol=1e-4)


def test_a_stop_token_ends_the_text_and_is_no_part_of_the_response(models: TinyModels) -> None:
    free = recorded(models, 0.0)[0]
    stop = free.response_token_ids[5]
    bound = recorded(models, 0.0, frozenset({stop}))[0]
    length = free.response_token_ids.index(stop)
    assert bound.response_token_ids == free.response_token_ids[:length]
    assert bound.stop_token_id == stop and bound.drawn_token_ids[-1] == stop
    assert len(bound.taps) == len(bound.token_ids) - 1
    assert free.stop_token_id is None and free.drawn_token_ids == free.token_ids


def test_what_follows_an_anchor(models: TinyModels) -> None:
    text = recorded(models, 0.0)[0]
    tokens, last = text.drawn_token_ids, len(text.drawn_token_ids) - 1
    assert text.following(6, 3).token_ids == tokens[7:11]
    assert text.following(last - 2, 3).token_ids == tokens[-2:]
    assert not text.following(last - 2, 3).ends  # it was cut by the limit
    stop = tokens[12]
    bound = recorded(models, 0.0, frozenset({stop}))[0]
    last = len(bound.drawn_token_ids) - 1
    assert bound.following(last - 4, 3).token_ids[-1] == stop and bound.following(last - 4, 3).ends
    assert not bound.following(last - 5, 3).ends  # four tokens that do not reach the end


def test_states_of_some_of_the_recorded_layers(models: TinyModels) -> None:
    text = recorded(models, 0.0)[0]
    rows = text.states(TAP_LAYERS[1:], [FIRST_DECODER_LAYER + 1], 2, 5)
    torch.testing.assert_close(rows.taps, text.taps[2:5, 1:])
    torch.testing.assert_close(rows.decoder_kv, text.decoder_kv[2:5, 1:2])
    assert text.states((), (), 2, 5).taps.shape[:2] == (3, 0)


def writer(folders: TinyModels, target_folder: Path, max_prompt_tokens: int = 100) -> Writer:
    chat = load_chat_format(target_folder)
    return Writer(folders.runner(), chat, FIRST_DECODER_LAYER, max_tokens=10, max_prompt_tokens=max_prompt_tokens)


def test_a_second_turn_continues_the_targets_own_answer(
    folders: TinyModels, target_folder: Path, prompts_folder: Path
) -> None:
    prompts = load_prompts("talk", prompts_folder, 2)
    for conversation in writer(folders, target_folder).write(prompts, 1.0, first_number=4):
        first, second = conversation.texts
        user = [int(word[1:]) for word in conversation.prompt.turns[1].split()]
        answer = first.response_token_ids
        assert second.prompt_token_ids == [*first.prompt_token_ids[:-1], 7, *answer, 1, *user, 2]
    assert [conversation.number for conversation in writer(folders, target_folder).write(prompts, 1.0, 4)] == [4, 5]


def test_a_prompts_text_does_not_depend_on_its_company(
    folders: TinyModels, target_folder: Path, prompts_folder: Path
) -> None:
    prompts = load_prompts("words", prompts_folder, 3)
    together = writer(folders, target_folder).write(prompts, 1.0)
    alone = writer(folders, target_folder).write(prompts[2:], 1.0, first_number=2)
    assert alone[0].texts[0].token_ids == together[2].texts[0].token_ids


def test_a_turn_whose_prompt_is_too_long_is_left_out(
    folders: TinyModels, target_folder: Path, prompts_folder: Path
) -> None:
    short = writer(folders, target_folder, max_prompt_tokens=8)
    lengths = {len(c.texts) for c in short.write(load_prompts("talk", prompts_folder, 4), 0.0)}
    assert lengths == {1}
