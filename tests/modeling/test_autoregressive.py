"""The autoregressive drafter: same logits as the published implementation, several branches at once, loader checks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from modeling.architecture import UnsupportedModel, architecture_from_config, read_json
from modeling.autoregressive import (
    AutoregressiveRunner,
    CausalStack,
    load_autoregressive,
    shared_config_to_json,
    stack_tensors,
)
from modeling.cache import KeyValueCache
from modeling.target import Target, load_target
from tests.modeling.tiny_models import VOCAB_SIZE, edit_config, make_reference, random_tokens, save_reference

CPU = torch.device("cpu")


def reference_logits(kind: str, token_ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = make_reference(kind)(torch.tensor([token_ids])).logits[0]
    return logits


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def branch_mask(
    runner: AutoregressiveRunner, cache: KeyValueCache, num_verified: int, scratch_rows: list[list[int]]
) -> Tensor:
    """Rows that see the verified prefix and the listed scratch rows."""
    visible = torch.zeros(len(scratch_rows), cache.num_scratch + runner.num_keys(num_verified), dtype=torch.bool)
    visible[:, cache.num_scratch : cache.num_scratch + num_verified] = True
    for row, seen in enumerate(scratch_rows):
        visible[row, seen] = True
    return visible


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_verified_rows_and_branches_match_the_published_implementation(tmp_path: Path, kind: str) -> None:
    """Three continuations of one prefix, two tokens each, drafted side by side; then the prefix grows over them."""
    save_reference(tmp_path, kind)
    runner = AutoregressiveRunner(load_autoregressive(tmp_path, tmp_path, torch.float32, CPU), 256)
    cache = runner.new_cache(num_scratch=10)
    prefix = random_tokens(70)
    runner.extend(cache, 0, prefix[:40])
    last = runner.extend(cache, 40, prefix[40:])
    assert_close(last, reference_logits(kind, prefix)[-1])
    first, second = [3, 50, 120], [77, 8, 9]
    positions = torch.full((3,), 70)
    out = [
        runner.branch(cache, 2, torch.tensor(first), positions, branch_mask(runner, cache, 70, [[2], [3], [4]])),
        runner.branch(
            cache, 5, torch.tensor(second), positions + 1, branch_mask(runner, cache, 70, [[2, 5], [3, 6], [4, 7]])
        ),
    ]
    for index in range(3):
        expected = reference_logits(kind, [*prefix, first[index], second[index]])
        assert_close(out[0][index], expected[-2])
        assert_close(out[1][index], expected[-1])
    grown = runner.extend(cache, 70, [first[1], second[1]])
    assert_close(grown, out[1][1])


def test_unverified_rows_never_reach_the_verified_ones(tmp_path: Path) -> None:
    save_reference(tmp_path)
    runner = AutoregressiveRunner(load_autoregressive(tmp_path, tmp_path, torch.float32, CPU), 128)
    cache = runner.new_cache(num_scratch=4)
    runner.extend(cache, 0, random_tokens(9))
    before = cache.key[:, :, cache.num_scratch :].clone()
    runner.branch(cache, 0, torch.tensor([5, 6]), torch.tensor([9, 9]), branch_mask(runner, cache, 9, [[0], [1]]))
    assert torch.equal(cache.key[:, :, cache.num_scratch :], before)
    assert cache.key[:, :, :2].abs().sum() > 0
    with pytest.raises(AssertionError, match="scratch rows"):
        runner.branch(cache, 3, torch.tensor([5, 6]), torch.tensor([9, 9]), branch_mask(runner, cache, 9, [[3], [3]]))


def save_shared(folder: Path, target: Target, token_ids: Tensor | None = None) -> CausalStack:
    """A drafter of two of the target's layers, without embedding and head."""
    torch.manual_seed(1)
    architecture = replace(target.architecture, num_layers=2)
    stack = CausalStack(architecture, [target.layer(0), target.layer(4)], target.norm)
    tensors = {name: tensor.clone() for name, tensor in stack_tensors(stack).items()}
    if token_ids is not None:
        tensors["d2t"] = token_ids - torch.arange(token_ids.numel())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shared_config_to_json(architecture)))
    save_file(tensors, folder / "model.safetensors")
    return stack


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "llama3-rope", "qwen2", "qwen3"])
def test_a_shared_drafter_takes_embedding_and_head_from_the_target(tmp_path: Path, kind: str) -> None:
    save_reference(tmp_path / "target", kind)
    target = load_target(tmp_path / "target", torch.float32, CPU)
    kept = torch.arange(5, VOCAB_SIZE, 2)
    save_shared(tmp_path / "full", target)
    save_shared(tmp_path / "trimmed", target, kept)
    written = architecture_from_config(read_json(tmp_path / "full" / "config.json"))
    assert written == replace(target.architecture, num_layers=2)
    tokens = random_tokens(20)
    logits = []
    for name in ("full", "trimmed"):
        model = load_autoregressive(tmp_path / name, tmp_path / "target", torch.float32, CPU)
        assert model.is_shared
        assert torch.equal(model.embedding, target.embedding)
        runner = AutoregressiveRunner(model, 64)
        logits.append(runner.extend(runner.new_cache(0), 0, tokens))
    assert logits[0].shape == (VOCAB_SIZE,)
    torch.testing.assert_close(logits[1], logits[0][kept])


def test_a_drafter_for_another_target_is_named(tmp_path: Path) -> None:
    save_reference(tmp_path / "target")
    save_reference(tmp_path / "draft")
    target = load_target(tmp_path / "target", torch.float32, CPU)
    save_shared(tmp_path / "shared", target)
    edit_config(tmp_path / "draft", vocab_size=500)
    edit_config(tmp_path / "shared", hidden_size=80)
    with pytest.raises(UnsupportedModel, match=r"vocab_size is 500, the target's is 211"):
        load_autoregressive(tmp_path / "draft", tmp_path / "target", torch.float32, CPU)
    with pytest.raises(UnsupportedModel, match=r"hidden_size is 80, the target's is 72"):
        load_autoregressive(tmp_path / "shared", tmp_path / "target", torch.float32, CPU)


def test_another_tokenizer_is_named(tmp_path: Path) -> None:
    for name, word in (("target", "one"), ("draft", "two")):
        save_reference(tmp_path / name)
        content = {"model": {"vocab": {"zero": 0, word: 1}}, "added_tokens": [{"id": 2, "content": "<end>"}]}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedModel, match="token 1 is 'two', the target's is 'one'"):
        load_autoregressive(tmp_path / "draft", tmp_path / "target", torch.float32, CPU)
    load_autoregressive(tmp_path / "draft", tmp_path / "draft", torch.float32, CPU)


def test_broken_weights_are_named(tmp_path: Path) -> None:
    save_reference(tmp_path / "target")
    target = load_target(tmp_path / "target", torch.float32, CPU)
    stack = save_shared(tmp_path / "shared", target)
    tensors = {name: tensor.clone() for name, tensor in stack_tensors(stack).items()}
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "shared" / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"lacks 'layers\.1\.mlp\.down_proj\.weight'"):
        load_autoregressive(tmp_path / "shared", tmp_path / "target", torch.float32, CPU)
