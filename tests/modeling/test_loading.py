"""Whatever is wrong with a model folder is told by name; nothing broken, foreign or half-copied is served."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling.architecture import UnsupportedModel, architecture_from_config
from modeling.runtime import model_fingerprint
from modeling.target import Target, load_target, read_checkpoint
from tests.modeling.tiny_models import edit_config, save_reference

CPU = torch.device("cpu")
Loader = Callable[[Path], Target]


def load_whole(folder: Path) -> Target:
    return load_target(folder, torch.float32, CPU)


def load_top(folder: Path) -> Target:
    return load_target(folder, torch.float32, CPU, 3)


loaders = pytest.mark.parametrize("load", [load_whole, load_top])


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


@loaders
def test_shards_load_like_one_file(tmp_path: Path, load: Loader) -> None:
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    save_reference(whole)
    save_reference(sharded, max_shard_size="200KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    expected = load(whole).state_dict()
    for name, tensor in load(sharded).state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save_reference(tmp_path, max_shard_size="200KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(UnsupportedModel, match=f"{lost.name} is missing"):
        load_whole(tmp_path)


def test_index_without_a_map_is_named(tmp_path: Path) -> None:
    save_reference(tmp_path, max_shard_size="200KB")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"index\.json lacks 'weight_map'"):
        read_checkpoint(tmp_path)


@loaders
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.up_proj.weight",
        "model.layers.4.self_attn.k_proj.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_missing_tensor_is_named(tmp_path: Path, load: Loader, name: str) -> None:
    save_reference(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(UnsupportedModel, match=name.removeprefix("model.").replace(".", r"\.")):
        load(tmp_path)


@loaders
@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("model.layers.3.mlp.down_proj.weight", r"layers\.3\.mlp\.down_proj\.weight"),
        ("model.layers.3.self_attn.v_proj.weight", r"layers\.3\.self_attn\.\{q,k,v\}_proj\.weight"),
        ("model.layers.3.input_layernorm.weight", r"layers\.3\.input_layernorm\.weight"),
        ("model.embed_tokens.weight", r"embed_tokens\.weight"),
        ("model.norm.weight", r"norm\.weight"),
        ("lm_head.weight", r"lm_head\.weight"),
    ],
)
@pytest.mark.parametrize("kept", ["first", "all but one"])
def test_wrong_shape_is_named(tmp_path: Path, load: Loader, name: str, named: str, kept: str) -> None:
    """A single row or element would spread over the whole parameter if it were merely copied."""
    save_reference(tmp_path)

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:1] if kept == "first" else tensors[name][:-1]

    change_tensors(tmp_path, cut)
    with pytest.raises(UnsupportedModel, match=named) as caught:
        load(tmp_path)
    assert "expected" in str(caught.value)


@loaders
def test_truncated_file_is_named(tmp_path: Path, load: Loader) -> None:
    save_reference(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors is not a readable safetensors file"):
        load(tmp_path)


@loaders
def test_empty_folder(tmp_path: Path, load: Loader) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json is missing"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\x00\xff"])
def test_broken_config_is_named(tmp_path: Path, text: str) -> None:
    save_reference(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        load_whole(tmp_path)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    save_reference(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors is missing"):
        load_whole(tmp_path)


@pytest.mark.parametrize(
    "field", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
def test_missing_config_field_is_named(tmp_path: Path, field: str) -> None:
    save_reference(tmp_path)
    edit_config(tmp_path, **{field: None})
    with pytest.raises(UnsupportedModel, match=field):
        load_whole(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "gpt2"),
        ("model_type", None),
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("mlp_bias", True),
    ],
)
def test_unsupported_config_is_named(tmp_path: Path, field: str, value: object) -> None:
    save_reference(tmp_path)
    edit_config(tmp_path, **{field: value})
    with pytest.raises(UnsupportedModel, match=field):
        load_whole(tmp_path)


def test_config_field_of_another_kind_is_named(tmp_path: Path) -> None:
    save_reference(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for field, value in (("vocab_size", "many"), ("intermediate_size", None), ("hidden_size", [64])):
        with pytest.raises(UnsupportedModel, match=field):
            architecture_from_config(config | {field: value})


def test_unknown_rope_type_is_named(tmp_path: Path) -> None:
    from modeling.target import TargetRunner

    save_reference(tmp_path)
    edit_config(tmp_path, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(UnsupportedModel, match="dynamic"):
        TargetRunner(load_whole(tmp_path), (1,), 64)


@loaders
def test_config_of_another_size_does_not_load(tmp_path: Path, load: Loader) -> None:
    save_reference(tmp_path)
    edit_config(tmp_path, vocab_size=212)
    with pytest.raises(UnsupportedModel, match=r"embed_tokens\.weight has shape .*expected \(212, 72\)"):
        load(tmp_path)


@loaders
def test_output_bias_is_refused_not_dropped(tmp_path: Path, load: Loader) -> None:
    """Llama and Qwen3 configs with attention_bias also put a bias on o_proj, which our layer does not have."""
    save_reference(tmp_path)
    edit_config(tmp_path, attention_bias=True)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for index in range(5):
            for part, width in (("q", 72), ("k", 24), ("v", 24), ("o", 72)):
                tensors[f"model.layers.{index}.self_attn.{part}_proj.bias"] = torch.ones(width)

    change_tensors(tmp_path, add)
    with pytest.raises(UnsupportedModel, match=r"o_proj\.bias"):
        load(tmp_path)


def test_older_rope_fields_are_read() -> None:
    """Configs from before transformers 5 carry rope_theta and rope_scaling at the top."""
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 50,
        "rope_theta": 500000.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    rope = architecture_from_config(config).rope
    assert (rope["rope_type"], rope["rope_theta"], rope["factor"]) == ("linear", 500000.0, 2.0)
    assert architecture_from_config(config | {"rope_scaling": None}).rope["rope_type"] == "default"


def test_fingerprint_tells_checkpoints_apart(tmp_path: Path) -> None:
    save_reference(tmp_path)
    before = model_fingerprint(tmp_path)
    assert model_fingerprint(tmp_path) == before

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] += 1

    change_tensors(tmp_path, change)
    changed = model_fingerprint(tmp_path)
    edit_config(tmp_path, rms_norm_eps=1e-4)
    assert len({before, changed, model_fingerprint(tmp_path)}) == 3
