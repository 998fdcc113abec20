"""The adapter's folder format and its place between draft model and target."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modeling.adapter import (
    Adapter,
    AdapterConfig,
    adapter_config_to_json,
    adapter_tensors,
    check_adapter_fits,
    load_adapter,
)
from modeling.architecture import Architecture, UnsupportedModel
from modeling.layers import RotaryTable
from tests.modeling.tiny_models import relative_error, tiny_architecture

CPU = torch.device("cpu")
CONFIG = AdapterConfig(tiny_architecture(num_layers=9, qk_norm=False), (1, 3, 5), (1, 2, 1))


def make_adapter(config: AdapterConfig = CONFIG) -> Adapter:
    torch.manual_seed(0)
    adapter = Adapter(config)
    for name, parameter in adapter.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif "bias" in name:
            torch.nn.init.normal_(parameter)
    return adapter


def save_adapter(folder: Path, adapter: Adapter) -> None:
    (folder / "config.json").write_text(json.dumps(adapter_config_to_json(adapter.config)))
    save_file(adapter_tensors(adapter), folder / "model.safetensors")


@pytest.mark.parametrize(
    "architecture",
    [
        CONFIG.architecture,
        tiny_architecture(num_layers=9, qk_norm=True),
        tiny_architecture(num_layers=9, qk_norm=False, attention_bias=True, tied_embeddings=True),
    ],
)
def test_round_trip(tmp_path: Path, architecture: Architecture) -> None:
    adapter = make_adapter(replace(CONFIG, architecture=architecture))
    save_adapter(tmp_path, adapter)
    loaded = load_adapter(tmp_path, torch.float32, CPU)
    assert loaded.config == adapter.config
    expected = adapter.state_dict()
    assert set(loaded.state_dict()) == set(expected)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_layers_run_from_the_lowest_tap_to_the_deepest() -> None:
    adapter = make_adapter()
    assert [(placed.tap, placed.is_last) for placed in adapter.placed_layers()] == [
        (0, True),
        (1, False),
        (1, True),
        (2, True),
    ]
    assert adapter.num_layers == 4
    prefixes = {name.split("self_attn")[0] for name in adapter_tensors(adapter) if "self_attn" in name}
    assert prefixes == {"taps.0.layers.0.", "taps.1.layers.0.", "taps.1.layers.1.", "taps.2.layers.0."}


def test_context_comes_from_the_layers_own_tap() -> None:
    adapter = make_adapter().requires_grad_(False)
    rotary = RotaryTable(CONFIG.architecture, 8, torch.float32, CPU).span(0, 8)
    taps = torch.randn(8, 3, 72)
    other = taps.clone()
    other[:, 1] += 1
    changed = [
        not torch.equal(adapter.context(placed, taps, rotary).key, adapter.context(placed, other, rotary).key)
        for placed in adapter.placed_layers()
    ]
    assert changed == [False, True, True, False]


def test_packing_keeps_the_result() -> None:
    adapter = make_adapter().requires_grad_(False)
    rotary = RotaryTable(CONFIG.architecture, 8, torch.float32, CPU).span(0, 8)
    taps, hidden = torch.randn(8, 3, 72), torch.randn(8, 72)
    layers = list(adapter.placed_layers())
    before = [(adapter.context(p, taps, rotary), p.layer.project(hidden, rotary)) for p in layers]
    adapter.pack()
    adapter.pack()  # packing twice is packing once
    for placed, (context, heads) in zip(layers, before, strict=True):
        packed = adapter.context(placed, taps, rotary)
        assert relative_error(packed.key, context.key) < 1e-5
        assert relative_error(packed.value, context.value) < 1e-5
        assert relative_error(placed.layer.project(hidden, rotary).query, heads.query) < 1e-5


def test_faults_are_named(tmp_path: Path) -> None:
    adapter = make_adapter()
    save_adapter(tmp_path, adapter)
    tensors = adapter_tensors(adapter)
    lost = {name: tensor for name, tensor in tensors.items() if name != "taps.1.layers.1.mlp.up_proj.weight"}
    save_file(lost, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"lacks 'taps\.1\.layers\.1\.mlp\.up_proj\.weight'"):
        load_adapter(tmp_path, torch.float32, CPU)
    save_file(tensors | {"taps.0.layers.0.input_layernorm.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"taps\.0\.layers\.0\.input_layernorm\.weight has shape \(1,\)"):
        load_adapter(tmp_path, torch.float32, CPU)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors is missing"):
        load_adapter(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (None, "adapter_config"),
        ({"tap_layers": [1, 3]}, "layers_per_tap"),
        ({"tap_layers": [1, 3], "layers_per_tap": [1]}, "every tap"),
        ({"tap_layers": [1, 3], "layers_per_tap": [1, 0]}, "every tap"),
        ({"tap_layers": [], "layers_per_tap": []}, "every tap"),
    ],
)
def test_config_faults_are_named(tmp_path: Path, extra: object, named: str) -> None:
    save_adapter(tmp_path, make_adapter())
    config = adapter_config_to_json(CONFIG) | {"adapter_config": extra}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=named):
        load_adapter(tmp_path, torch.float32, CPU)


def test_adapter_for_other_taps_or_another_target_is_named() -> None:
    check_adapter_fits(CONFIG, (1, 3, 5), CONFIG.architecture)
    with pytest.raises(UnsupportedModel, match=r"\[1, 3, 5\].*\[1, 3, 6\]"):
        check_adapter_fits(CONFIG, (1, 3, 6), CONFIG.architecture)
    with pytest.raises(UnsupportedModel, match="hidden_size is 72, the target's is 80"):
        check_adapter_fits(CONFIG, (1, 3, 5), tiny_architecture(hidden_size=80))
