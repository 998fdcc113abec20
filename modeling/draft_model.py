"""The draft model: a few Qwen3-style layers that read the target's tapped states as context and propose a block.

Published checkpoint format (z-lab/dflash, hao-ai-lab/JetSpec): `config.json` with `dflash_config`, `model.safetensors`.
A folder whose `config.json` names a `backbone` (a folder, relative to it) holds only a head for that draft model.
Context feature = RMSNorm(fc(taps)); its keys and values come from each layer's own projections, then k-norm and RoPE,
without the layer's input norm (facts.md 1.1). Embedding and head are the target's and are passed in.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from modeling.architecture import (
    Architecture,
    UnsupportedModel,
    architecture_from_config,
    config_fields,
    read_json,
)
from modeling.heads import CorrectionHead, HeadConfig, head_config_from_json, load_head, with_head
from modeling.kernels.int8 import Quantization
from modeling.kernels.packed import PackedWeight, can_pack, linear, pack_parameters, unpacked
from modeling.layers import DecoderLayer, Heads, Rotary, fill_parameter, layer_tensors, load_layer, rms_norm

Slots = Literal["in_place", "shifted"]
Inputs = Literal["mask", "tokens"]


@dataclass(frozen=True)
class DraftConfig:
    """What a draft model's `config.json` says. `block_size` counts the slots of a training block, anchor included."""

    architecture: Architecture
    tap_layers: tuple[int, ...]
    block_size: int
    num_target_layers: int
    causal: bool = True
    slots: Slots = "in_place"
    inputs: Inputs = "mask"
    mask_token_id: int | None = None

    def num_slots(self, num_draft_tokens: int) -> int:
        """Slots of a packed row that yield `num_draft_tokens` drafts: an in-place block wastes the anchor's slot."""
        return num_draft_tokens if self.slots == "shifted" else num_draft_tokens + 1


def tap_layers_for(num_draft_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Evenly spaced taps from layer 1 to layer L-3 (design.md section 7)."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + index * step) for index in range(num_draft_layers))


def draft_config_from_json(config: dict[str, Any]) -> DraftConfig:
    """Read a published config; missing jetspec fields mean a released DFlash model (bidirectional, mask, in place)."""
    is_dspark = any("DSpark" in str(name) for name in config.get("architectures") or ())
    extra = config if is_dspark and "dflash_config" not in config else config.get("dflash_config")
    if not isinstance(extra, dict) or "target_layer_ids" not in extra:
        raise UnsupportedModel("config.json of the draft model lacks dflash_config.target_layer_ids")
    if any(kind == "sliding_attention" for kind in config.get("layer_types") or ()):
        raise UnsupportedModel("draft models with sliding-window layers are not supported")
    is_shifted = is_dspark or extra.get("shift_label")  # as released DSpark and Domino checkpoints say it
    slots, inputs = extra.get("slots", "shifted" if is_shifted else "in_place"), extra.get("inputs", "mask")
    mask_token_id = extra.get("mask_token_id", config.get("mask_token_id"))
    if slots not in ("in_place", "shifted") or inputs not in ("mask", "tokens"):
        raise UnsupportedModel(f"dflash_config: slots {slots!r} or inputs {inputs!r} is not known")
    if inputs == "mask" and mask_token_id is None:
        raise UnsupportedModel("dflash_config.mask_token_id is needed with mask inputs")
    block_size = config.get("block_size") or extra.get("block_size") or 16
    return DraftConfig(
        architecture=architecture_from_config(config, qk_norm=True),
        tap_layers=tuple(int(layer) for layer in extra["target_layer_ids"]),
        block_size=int(block_size),
        num_target_layers=int(config.get("num_target_layers", 0)),
        causal=bool(extra.get("causal_head", extra.get("causal", config.get("is_causal")))),
        slots=slots,
        inputs=inputs,
        mask_token_id=mask_token_id,
    )


def read_draft_config(folder: Path) -> DraftConfig:
    """Config of a draft model's folder, or of the one its head belongs to; raises `UnsupportedModel`."""
    fields = read_json(folder / "config.json")
    if "backbone" in fields:
        fields = read_json(_backbone_folder(folder, fields) / "config.json")
    return draft_config_from_json(fields)


def draft_config_to_json(config: DraftConfig) -> dict[str, Any]:
    """The inverse of `draft_config_from_json`, in the published layout."""
    shape = config.architecture
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **config_fields(shape),
        "rope_theta": shape.rope["rope_theta"],
        "rope_scaling": None if shape.rope["rope_type"] == "default" else shape.rope,
        "attention_dropout": 0.0,
        "torch_dtype": "bfloat16",
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "target_layer_ids": list(config.tap_layers),
            "causal_head": config.causal,
            "slots": config.slots,
            "inputs": config.inputs,
            "mask_token_id": config.mask_token_id,
        },
    }


class DraftModel(nn.Module):
    """fc and hidden_norm fuse the taps; `layers` and `norm` turn block rows into rows for the target's head."""

    fc: nn.Parameter | PackedWeight

    def __init__(self, config: DraftConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        shape = config.architecture
        width = shape.hidden_size
        self.fc = nn.Parameter(torch.empty(width, len(config.tap_layers) * width, dtype=dtype))
        nn.init.normal_(unpacked(self.fc), std=0.02)
        self.hidden_norm = nn.Parameter(torch.ones(width, dtype=dtype))
        self.layers = nn.ModuleList(DecoderLayer(shape, dtype) for _ in range(shape.num_layers))
        self.norm = nn.Parameter(torch.ones(width, dtype=dtype))

    def pack(self, quantization: Quantization = "none") -> None:
        """Freeze the model for inference in the layout of the row-independent kernel, where there is one."""
        for layer in self.decoder_layers():
            layer.pack(quantization)
        if isinstance(self.fc, nn.Parameter) and can_pack(self.fc):
            pack_parameters(self, ("fc",), quantization)

    def decoder_layers(self) -> Iterable[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer

    def feature(self, taps: Tensor) -> Tensor:
        """Context feature [..., hidden] of tapped states [..., taps, hidden]."""
        fused = linear(taps.flatten(-2), self.fc)
        return rms_norm(fused, self.hidden_norm, self.config.architecture.rms_eps)

    def context(self, layer: DecoderLayer, feature: Tensor, rotary: Rotary) -> Heads:
        """A layer's keys and values for context features [..., rows, hidden]."""
        return layer.context(feature, rotary, normalise=False)

    def final(self, hidden: Tensor) -> Tensor:
        """Final norm; its rows go to the head."""
        return rms_norm(hidden, self.norm, self.config.architecture.rms_eps)


def draft_model_tensors(model: DraftModel) -> dict[str, Tensor]:
    """Tensors under published names."""
    named = {
        "fc.weight": unpacked(model.fc).data,
        "hidden_norm.weight": model.hidden_norm.data,
        "norm.weight": model.norm.data,
    }
    for index, layer in enumerate(model.decoder_layers()):
        named |= layer_tensors(layer, f"layers.{index}.")
    return named


@dataclass(frozen=True)
class LoadedDraft:
    """A draft model, its draft vocabulary (None: the full one), and the head that corrects its slots, if it has one."""

    model: DraftModel
    token_ids: Tensor | None
    head: CorrectionHead | None = None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; raises `UnsupportedModel` naming it when it is missing, broken or truncated."""
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise UnsupportedModel(f"{path} is missing") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} is not a readable safetensors file: {error}") from error


def load_draft_model(folder: Path, dtype: torch.dtype, device: torch.device) -> LoadedDraft:
    """Load a released or own draft model without remote code; raises `UnsupportedModel` saying what does not fit.

    An optional tensor `d2t` (speculators' convention: target id = draft id + d2t[draft id]) trims the head.
    """
    fields = read_json(folder / "config.json")
    if "backbone" in fields:
        return _load_head_on_backbone(folder, fields, dtype, device)
    config = draft_config_from_json(fields)
    tensors = read_tensors(folder / "model.safetensors")
    model = DraftModel(config, dtype)
    try:
        for index, layer in enumerate(model.decoder_layers()):
            load_layer(layer, tensors, f"layers.{index}.")
        for parameter, name in (
            (unpacked(model.fc), "fc.weight"),
            (model.hidden_norm, "hidden_norm.weight"),
            (model.norm, "norm.weight"),
        ):
            fill_parameter(parameter, tensors[name], name)
    except KeyError as error:
        raise UnsupportedModel(f"{folder}/model.safetensors lacks {error.args[0]!r}") from error
    except (RuntimeError, ValueError) as error:
        raise UnsupportedModel(f"{folder}/model.safetensors does not fit its config.json: {error}") from error
    head_config = head_config_from_json(fields)
    head = None if head_config is None else _read_head(folder, head_config, tensors, config, dtype, device)
    return LoadedDraft(model.to(device).requires_grad_(False).eval(), _token_ids(tensors), head)


def _load_head_on_backbone(
    folder: Path, fields: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> LoadedDraft:
    """A folder that holds only a head, with the draft model that it names."""
    backbone = _backbone_folder(folder, fields)
    head_config = head_config_from_json(fields)
    if head_config is None:
        raise UnsupportedModel(f"{folder}/config.json names a backbone but no head (markov_rank or projector_type)")
    loaded = load_draft_model(backbone, dtype, device)
    tensors = read_tensors(folder / "model.safetensors")
    own = _token_ids(tensors)
    if own is not None and (loaded.token_ids is None or not torch.equal(own, loaded.token_ids)):
        raise UnsupportedModel(f"{folder} is for a backbone with another draft vocabulary than {backbone.resolve()}")
    head = _read_head(folder, head_config, tensors, loaded.model.config, dtype, device)
    return LoadedDraft(loaded.model, loaded.token_ids, head)


def _backbone_folder(folder: Path, fields: dict[str, Any]) -> Path:
    """The draft model that a head's `config.json` names; raises `UnsupportedModel` where there is none."""
    name = fields["backbone"]
    if not isinstance(name, str) or not name or Path(name).is_absolute():
        raise UnsupportedModel(f"{folder}/config.json: backbone {name!r} is not a folder relative to this one")
    backbone = folder / name
    if not (backbone / "config.json").is_file():
        raise UnsupportedModel(f"{folder}/config.json: backbone {name!r}: {backbone.resolve()} holds no draft model")
    if "backbone" in read_json(backbone / "config.json"):
        raise UnsupportedModel(f"{folder}/config.json: backbone {name!r} is itself only a head")
    return backbone


def _read_head(
    folder: Path,
    config: HeadConfig,
    tensors: dict[str, Tensor],
    draft: DraftConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> CorrectionHead:
    try:
        head = load_head(config, tensors, draft.architecture.hidden_size, dtype)
    except KeyError as error:
        raise UnsupportedModel(f"{folder}/model.safetensors lacks {error.args[0]!r}") from error
    except ValueError as error:
        raise UnsupportedModel(f"{folder}/model.safetensors does not fit its config.json: {error}") from error
    return head.to(device).requires_grad_(False).eval()


def _token_ids(tensors: dict[str, Tensor]) -> Tensor | None:
    """The draft vocabulary that a checkpoint's `d2t` offsets name; None without them."""
    offsets = tensors.get("d2t")
    return None if offsets is None else torch.arange(offsets.numel()) + offsets.long()


def head_checkpoint_config(head: HeadConfig, backbone: str) -> dict[str, Any]:
    """`config.json` of a folder that holds only a head; `backbone` is the draft model's folder, relative to it."""
    return with_head({"architectures": ["DFlashDraftModel"], "backbone": backbone}, head)


def check_draft_fits(config: DraftConfig, target: Architecture) -> None:
    """Raise `UnsupportedModel` naming the first field in which the draft model and the target differ."""
    shape = config.architecture
    pairs = {
        "hidden_size": (shape.hidden_size, target.hidden_size),
        "vocab_size": (shape.vocab_size, target.vocab_size),
        "num_target_layers": (config.num_target_layers or target.num_layers, target.num_layers),
    }
    for name, (mine, theirs) in pairs.items():
        if mine != theirs:
            raise UnsupportedModel(f"draft model is for another target: {name} is {mine}, the target's is {theirs}")
    if not config.tap_layers or list(config.tap_layers) != sorted(set(config.tap_layers)):
        raise UnsupportedModel(f"draft model taps layers {list(config.tap_layers)}: they must rise")
    if config.tap_layers[-1] >= target.num_layers - 1:
        raise UnsupportedModel(
            f"draft model taps layer {config.tap_layers[-1]} of a target with {target.num_layers} layers"
        )
