"""The draft model: a few Qwen3-style layers that read the target's tapped states as context and propose a block.

Published checkpoint format (z-lab/dflash, hao-ai-lab/JetSpec): `config.json` with `dflash_config`, `model.safetensors`.
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
    extra = config.get("dflash_config")
    if not isinstance(extra, dict) or "target_layer_ids" not in extra:
        raise UnsupportedModel("config.json of the draft model lacks dflash_config.target_layer_ids")
    if any(kind == "sliding_attention" for kind in config.get("layer_types") or ()):
        raise UnsupportedModel("draft models with sliding-window layers are not supported")
    slots, inputs = extra.get("slots", "in_place"), extra.get("inputs", "mask")
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

    def pack(self) -> None:
        """Freeze the model for inference in the layout of the row-independent kernel, where there is one."""
        for layer in self.decoder_layers():
            layer.pack()
        if isinstance(self.fc, nn.Parameter) and can_pack(self.fc):
            pack_parameters(self, ("fc",))

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
    """A draft model and its draft vocabulary (None: the full one)."""

    model: DraftModel
    token_ids: Tensor | None


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
    config = draft_config_from_json(read_json(folder / "config.json"))
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
    offsets = tensors.get("d2t")
    token_ids = None if offsets is None else torch.arange(offsets.numel()) + offsets.long()
    return LoadedDraft(model.to(device).requires_grad_(False).eval(), token_ids)


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
