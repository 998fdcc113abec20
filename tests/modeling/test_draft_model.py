"""Draft models in the published format: round trip, released configs, a reference output, and errors that name the
fault."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modeling.architecture import UnsupportedModel
from modeling.draft_model import (
    DraftConfig,
    DraftModel,
    check_draft_fits,
    draft_config_from_json,
    draft_config_to_json,
    draft_model_tensors,
    load_draft_model,
    read_tensors,
    tap_layers_for,
)
from modeling.layers import RotaryTable, block_layer, grouped_mask
from tests.modeling.tiny_models import VOCAB_SIZE, edit_config, relative_error, tiny_architecture

CPU = torch.device("cpu")
TRIAL = Path(__file__).parents[2].parent / "shared" / "trials" / "draft-shifted-3l"
CONFIG = DraftConfig(
    tiny_architecture(), tap_layers=(1, 3, 5), block_size=8, num_target_layers=9, slots="shifted", inputs="tokens"
)

# What z-lab writes for a Qwen3 drafter (field by field, sizes made small).
RELEASED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 209, "target_layer_ids": [1, 3, 5]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 72,
    "initializer_range": 0.02,
    "intermediate_size": 100,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 9,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}


def make_draft(config: DraftConfig = CONFIG) -> DraftModel:
    torch.manual_seed(0)
    model = DraftModel(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def save_draft(folder: Path, model: DraftModel, config: dict[str, Any] | None = None, **extra: Tensor) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or draft_config_to_json(model.config)))
    save_file(draft_model_tensors(model) | extra, folder / "model.safetensors")


def run_draft(model: DraftModel, taps: Tensor, block: Tensor, visible: Tensor) -> Tensor:
    """Rows after the final norm; the block stands right behind the context. visible [block, context + block]."""
    num_context, num_rows = taps.shape[0], block.shape[0]
    shape = model.config.architecture
    table = RotaryTable(shape, num_context + num_rows, torch.float32, CPU)
    mask = grouped_mask(visible, shape.group_size, torch.float32)
    feature, hidden = model.feature(taps), block
    for layer in model.decoder_layers():
        context = model.context(layer, feature, table.span(0, num_context))
        hidden = block_layer(layer, hidden, table.span(num_context, num_context + num_rows), context, mask)
    return model.final(hidden)


def causal_visibility(num_context: int, num_rows: int) -> Tensor:
    return torch.cat(
        [torch.ones(num_rows, num_context, dtype=torch.bool), torch.ones(num_rows, num_rows, dtype=torch.bool).tril()],
        1,
    )


@pytest.mark.parametrize(
    ("num_target_layers", "expected"),
    [
        (36, (1, 9, 17, 25, 33)),
        (64, (1, 16, 31, 46, 61)),
        (28, (1, 7, 13, 19, 25)),
        (32, (1, 8, 15, 22, 29)),
        (40, (1, 10, 19, 28, 37)),
        (48, (1, 12, 23, 34, 45)),
        (30, (1, 8, 14, 20, 27)),
    ],
)
def test_taps_of_published_drafters(num_target_layers: int, expected: tuple[int, ...]) -> None:
    assert tap_layers_for(5, num_target_layers) == expected
    assert tap_layers_for(1, num_target_layers) == (num_target_layers // 2,)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, slots="in_place", inputs="mask", mask_token_id=0, causal=False),
        replace(CONFIG, architecture=tiny_architecture(tied_embeddings=True, attention_bias=True)),
        replace(
            CONFIG,
            architecture=tiny_architecture(rope={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
        ),
    ],
)
def test_round_trip(tmp_path: Path, config: DraftConfig) -> None:
    model = make_draft(config)
    save_draft(tmp_path, model)
    loaded = load_draft_model(tmp_path, torch.float32, CPU)
    assert loaded.model.config == config
    assert loaded.token_ids is None
    assert {name for name, parameter in loaded.model.named_parameters() if parameter.requires_grad} == set()
    expected = model.state_dict()
    assert set(expected) == set(loaded.model.state_dict())
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_published_tensor_names() -> None:
    layer = [f"self_attn.{part}_proj.weight" for part in "qkvo"] + [f"self_attn.{part}_norm.weight" for part in "qk"]
    layer += [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    layer += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.{index}.{name}" for index in range(2) for name in layer}
    tensors = draft_model_tensors(make_draft())
    assert set(tensors) == expected
    assert tensors["fc.weight"].shape == (72, 3 * 72)


def test_released_config_is_bidirectional_masked_and_in_place(tmp_path: Path) -> None:
    model = make_draft()
    save_draft(tmp_path, model, RELEASED)
    loaded = load_draft_model(tmp_path, torch.float32, CPU).model
    assert loaded.config == DraftConfig(
        architecture=replace(tiny_architecture(), rope={"rope_type": "default", "rope_theta": 10000}),
        tap_layers=(1, 3, 5),
        block_size=16,
        num_target_layers=9,
        causal=False,
        slots="in_place",
        inputs="mask",
        mask_token_id=209,
    )
    assert loaded.config.num_slots(15) == 16
    assert replace(loaded.config, slots="shifted").num_slots(15) == 15
    check_draft_fits(loaded.config, tiny_architecture(num_layers=9, qk_norm=False))


def test_variants_of_the_published_fields() -> None:
    def parsed(extra: dict[str, Any], **changes: Any) -> DraftConfig:
        fields = {"mask_token_id": 209, "target_layer_ids": [1, 3, 5], **extra}
        return draft_config_from_json(RELEASED | {"dflash_config": fields} | changes)

    assert parsed({"causal_head": True}).causal  # JetSpec
    assert parsed({"causal": True}).causal  # NeMo
    assert parsed({}, is_causal=True).causal  # z-lab's newer configs
    assert not parsed({}, is_causal=False).causal
    assert parsed({"mask_token_id": 0}).mask_token_id == 0
    top_level = {"target_layer_ids": [1]}
    assert draft_config_from_json(RELEASED | {"dflash_config": top_level, "mask_token_id": 7}).mask_token_id == 7
    inside = parsed({"block_size": 8}, block_size=None)
    assert inside.block_size == 8


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dflash_config": None}, r"dflash_config\.target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 1}}, r"dflash_config\.target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id"),
        ({"dflash_config": {"target_layer_ids": [1], "mask_token_id": 1, "slots": "sideways"}}, "sideways"),
        ({"dflash_config": {"target_layer_ids": [1], "mask_token_id": 1, "inputs": "pixels"}}, "pixels"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding"),
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_config_faults_are_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    save_draft(tmp_path, make_draft(), RELEASED)
    edit_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=named):
        load_draft_model(tmp_path, torch.float32, CPU)


Change = Callable[[dict[str, Tensor]], Any]
WEIGHT_FAULTS: list[tuple[Change, str]] = [
    (lambda t: t.pop("fc.weight"), r"lacks 'fc\.weight'"),
    (lambda t: t.pop("norm.weight"), r"lacks 'norm\.weight'"),
    (lambda t: t.pop("layers.1.self_attn.k_norm.weight"), r"lacks 'layers\.1\.self_attn\.k_norm\.weight'"),
    (
        lambda t: t.update({"fc.weight": t["fc.weight"][:, :72]}),
        r"fc\.weight has shape \(72, 72\), expected \(72, 216\)",
    ),
    (lambda t: t.update({"hidden_norm.weight": t["hidden_norm.weight"][:1]}), r"hidden_norm\.weight has shape \(1,\)"),
    (lambda t: t.update({"norm.weight": t["norm.weight"][:1]}), r"norm\.weight has shape \(1,\)"),
    (
        lambda t: t.update({"layers.0.mlp.down_proj.weight": t["layers.0.mlp.down_proj.weight"].t()}),
        r"layers\.0\.mlp\.down_proj\.weight has shape \(100, 72\)",
    ),
]


@pytest.mark.parametrize(("change", "named"), WEIGHT_FAULTS)
def test_weight_faults_are_named(tmp_path: Path, change: Change, named: str) -> None:
    save_draft(tmp_path, make_draft())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    with pytest.raises(UnsupportedModel, match=named):
        load_draft_model(tmp_path, torch.float32, CPU)


def test_truncated_weights_are_named(tmp_path: Path) -> None:
    save_draft(tmp_path, make_draft())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors is not a readable"):
        load_draft_model(tmp_path, torch.float32, CPU)


def test_trimmed_vocabulary_comes_with_the_weights(tmp_path: Path) -> None:
    kept = torch.tensor([0, 3, 4, 90, 210])
    save_draft(tmp_path, make_draft(), d2t=kept - torch.arange(5))
    loaded = load_draft_model(tmp_path, torch.float32, CPU)
    assert loaded.token_ids is not None
    assert torch.equal(loaded.token_ids, kept)


@pytest.mark.parametrize(
    ("config", "target", "named"),
    [
        (CONFIG, {"hidden_size": 80}, "hidden_size is 72, the target's is 80"),
        (CONFIG, {"vocab_size": 500}, "vocab_size is 211, the target's is 500"),
        (CONFIG, {"num_layers": 12}, "num_target_layers is 9, the target's is 12"),
        (replace(CONFIG, tap_layers=(1, 3, 8)), {}, "layer 8 of a target with 9"),
        (replace(CONFIG, tap_layers=(3, 1)), {}, "must rise"),
        (replace(CONFIG, tap_layers=()), {}, "must rise"),
    ],
)
def test_draft_for_another_target_is_named(config: DraftConfig, target: dict[str, Any], named: str) -> None:
    fields = {"num_layers": 9, "qk_norm": False} | target
    with pytest.raises(UnsupportedModel, match=named):
        check_draft_fits(config, tiny_architecture(**fields))
    check_draft_fits(CONFIG, tiny_architecture(num_layers=9, qk_norm=False))


def test_causal_block_reads_no_later_slot_and_its_context_only_through_taps() -> None:
    model = make_draft().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    taps, block = torch.randn(10, 3, 72, generator=generator), torch.randn(6, 72, generator=generator)
    visible = causal_visibility(10, 6)
    before = run_draft(model, taps, block, visible)
    changed = block.clone()
    changed[4] += 1
    after = run_draft(model, taps, changed, visible)
    assert torch.equal(after[:4], before[:4])
    assert relative_error(after[4:], before[4:]) > 1e-3
    other_taps = taps.clone()
    other_taps[2, 1] += 1
    assert relative_error(run_draft(model, other_taps, block, visible), before) > 1e-4
    hidden_row = visible.clone()
    hidden_row[:, 2] = False
    assert torch.allclose(
        run_draft(model, other_taps, block, hidden_row), run_draft(model, taps, block, hidden_row), atol=1e-6
    )


def test_gradients_reach_every_parameter() -> None:
    model = make_draft()
    run_draft(model, torch.randn(4, 3, 72), torch.randn(3, 72), causal_visibility(4, 3)).square().sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without == []


@pytest.mark.skipif(not TRIAL.is_dir(), reason="the trial weights are not on this machine")
def test_reference_output_is_reproduced() -> None:
    model = load_draft_model(TRIAL, torch.float32, CPU).model
    assert (model.config.slots, model.config.inputs, model.config.causal) == ("shifted", "tokens", True)
    reference = {name: t.float() for name, t in read_tensors(TRIAL / "reference.safetensors").items()}
    taps, block = reference["taps"], reference["block_embeddings"]
    visible = causal_visibility(taps.shape[0], block.shape[0])
    expected = reference["hidden"]
    assert relative_error(run_draft(model, taps, block, visible), expected) < 1e-4
    model.pack()
    with torch.inference_mode():
        assert relative_error(run_draft(model, taps, block, visible), expected) < 1e-4
