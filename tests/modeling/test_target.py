"""The target against transformers, in one piece, in pieces, with several sequences at once and after rejected rows."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from modeling.decoder import decoder_layer_ids, decoder_of
from modeling.layers import attend, grouped_mask
from modeling.target import TargetBlock, TargetRunner, load_target
from modeling.vocabulary import DraftHead
from tests.modeling.tiny_models import (
    KINDS,
    NUM_LAYERS,
    TAP_LAYERS,
    make_reference,
    random_tokens,
    relative_error,
    run_pieces,
    save_reference,
)

CPU = torch.device("cpu")
TOLERANCE = 2e-5


def expected_rows(model: PreTrainedModel, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        output = model(torch.tensor([token_ids]), output_hidden_states=True)
    taps = torch.stack([output.hidden_states[layer + 1][0] for layer in TAP_LAYERS], dim=1)
    return output.logits[0], taps


def load_runner(folder: Path, num_positions: int = 320) -> TargetRunner:
    return TargetRunner(load_target(folder, torch.float32, CPU), TAP_LAYERS, num_positions)


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_transformers(tmp_path: Path, kind: str) -> None:
    reference = save_reference(tmp_path, kind)
    runner = load_runner(tmp_path)
    token_ids = random_tokens(280)  # crosses a key bucket
    logits, taps = expected_rows(reference, token_ids)
    for pieces in ([280], [100, 100, 71, 1, 1, 7], [250, 9, 9, 9, 3]):
        rows = run_pieces(runner, token_ids, pieces)
        assert relative_error(rows.logits, logits) < TOLERANCE
        assert relative_error(rows.taps, taps) < TOLERANCE


def test_kinds_differ_in_what_they_are_meant_to_test(tmp_path: Path) -> None:
    """The scaled rope, the biases and the head norms change the result: a loader that drops them fails above."""
    scaled, plain = make_reference("llama3-rope"), make_reference("llama")
    plain.load_state_dict(scaled.state_dict())
    token_ids = random_tokens(280)
    assert relative_error(expected_rows(plain, token_ids)[0], expected_rows(scaled, token_ids)[0]) > 100 * TOLERANCE
    for kind, part in (("qwen2", "bias"), ("qwen3", "q_norm")):
        model = make_reference(kind)
        before = expected_rows(model, token_ids)[0]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if part in name:
                    parameter.fill_(1.0)
        assert relative_error(expected_rows(model, token_ids)[0], before) > 100 * TOLERANCE


@pytest.mark.parametrize("num_accepted", range(6))
def test_rejected_rows_leave_no_trace(tmp_path: Path, num_accepted: int) -> None:
    """A block of 1 + 5 rows is verified, `num_accepted` drafts stay, and decoding goes on over the rejected ones."""
    save_reference(tmp_path, "qwen3")
    runner = load_runner(tmp_path)
    prompt, block, rest = random_tokens(252, 1), random_tokens(6, 2), random_tokens(6, 3)
    cache = runner.new_cache()
    runner.forward([TargetBlock(cache, 0, prompt)])
    runner.forward([TargetBlock(cache, 252, block)])
    start = 252 + 1 + num_accepted
    after = runner.forward([TargetBlock(cache, start, rest)])
    fresh = run_pieces(runner, [*prompt, *block[: 1 + num_accepted], *rest], [start, len(rest)])
    assert relative_error(after.logits, fresh.logits[start:]) < TOLERANCE
    assert relative_error(after.taps, fresh.taps[start:]) < TOLERANCE


def test_sequences_of_one_pass_do_not_see_each_other(tmp_path: Path) -> None:
    save_reference(tmp_path, "llama")
    runner = load_runner(tmp_path)
    texts = [random_tokens(count, seed) for seed, count in enumerate((300, 7, 40))]
    caches = [runner.new_cache() for _ in texts]
    for cache, text in zip(caches, texts, strict=True):
        runner.forward([TargetBlock(cache, 0, text[:-4])])
    together = runner.forward(
        [TargetBlock(cache, len(text) - 4, text[-4:]) for cache, text in zip(caches, texts, strict=True)]
    )
    for index, text in enumerate(texts):
        alone = run_pieces(runner, text, [len(text)])
        assert relative_error(together.logits[4 * index : 4 * index + 4], alone.logits[-4:]) < TOLERANCE
        assert relative_error(together.taps[4 * index : 4 * index + 4], alone.taps[-4:]) < TOLERANCE


def test_last_row_only(tmp_path: Path) -> None:
    save_reference(tmp_path, "llama")
    runner = load_runner(tmp_path)
    token_ids = random_tokens(20)
    whole = run_pieces(runner, token_ids, [20])
    last = runner.forward([TargetBlock(runner.new_cache(), 0, token_ids)], last_row_only=True)
    assert last.logits.shape == (1, whole.logits.shape[1])
    assert relative_error(last.logits, whole.logits[-1:]) < TOLERANCE
    assert torch.equal(last.taps, whole.taps)


def test_cache_may_be_filled_to_its_end(tmp_path: Path) -> None:
    reference = save_reference(tmp_path, "llama")
    runner = load_runner(tmp_path, num_positions=270)  # the last bucket is cut at 270 keys
    token_ids = random_tokens(270)
    rows = run_pieces(runner, token_ids, [260, 9, 1])
    assert relative_error(rows.logits, expected_rows(reference, token_ids)[0]) < TOLERANCE


@pytest.mark.parametrize("kind", ["llama-tied", "qwen2"])
def test_decoder_and_partial_load_continue_from_the_deepest_tap(tmp_path: Path, kind: str) -> None:
    """The decoder on true states of the deepest tap gives the target's own logits, from a full and a partial load."""
    reference = save_reference(tmp_path, kind)
    runner = load_runner(tmp_path)
    token_ids = random_tokens(12)
    cache = runner.new_cache()
    rows = runner.forward([TargetBlock(cache, 0, token_ids)])
    layer_ids = decoder_layer_ids(TAP_LAYERS[-1], NUM_LAYERS)
    assert layer_ids == (3, 4)
    expected, _ = expected_rows(reference, token_ids)
    visible = torch.ones(12, 12, dtype=torch.bool).tril()
    for target in (
        load_target(tmp_path, torch.float32, CPU),
        load_target(tmp_path, torch.float32, CPU, layer_ids[0]),
    ):
        decoder = decoder_of(target, TAP_LAYERS[-1], DraftHead(target.head, None))
        assert decoder.first_layer == 3
        mask = grouped_mask(visible, target.architecture.group_size, torch.float32)
        hidden = rows.taps[:, -1]
        for index, layer in decoder.placed_layers():
            heads = layer.project(hidden, runner.rotary.span(0, 12))
            place = decoder.first_layer + index
            assert relative_error(heads.key, cache.keys(place, 12).transpose(0, 1)) < TOLERANCE
            keys, values = heads.key.transpose(0, 1), heads.value.transpose(0, 1)
            hidden = layer.finish(hidden, attend(heads.query, keys, values, mask))
        assert relative_error(decoder.logits(hidden), expected) < TOLERANCE


def test_partial_load_holds_no_memory_for_lower_layers(tmp_path: Path) -> None:
    save_reference(tmp_path)
    target = load_target(tmp_path, torch.float32, CPU, 3)
    held = [sum(parameter.numel() for parameter in layer.parameters()) for layer in target.layers]
    assert held[:3] == [0] * 3
    assert all(held[3:])
