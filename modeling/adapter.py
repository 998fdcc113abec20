"""The hidden-to-hidden adapter: predicts the target's tapped states of a block that has not been verified (equation 5).

One module of one or more target-style layers per tap, from the lowest to the deepest; each reads the prediction of
the one
below, the lowest reads token embeddings. Keys and values of verified positions come from the true states of the
module's
own tap, through the layers' own projections.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modeling.architecture import (
    Architecture,
    UnsupportedModel,
    architecture_from_config,
    config_fields,
    read_json,
)
from modeling.draft_model import read_tensors
from modeling.kernels.int8 import Quantization
from modeling.layers import DecoderLayer, Heads, Rotary, layer_tensors, load_layer
from modeling.stack import StackedLayer


@dataclass(frozen=True)
class AdapterConfig:
    """Taps of the target and how many layers predict each."""

    architecture: Architecture
    tap_layers: tuple[int, ...]
    layers_per_tap: tuple[int, ...]


class Adapter(nn.Module):
    """`stacks[t]` predicts tap t."""

    def __init__(self, config: AdapterConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.stacks = nn.ModuleList(
            nn.ModuleList(DecoderLayer(config.architecture, dtype) for _ in range(count))
            for count in config.layers_per_tap
        )

    def placed_layers(self) -> Iterable[StackedLayer]:
        """All layers in the order they run."""
        for tap, stack in enumerate(self.stacks):
            assert isinstance(stack, nn.ModuleList)
            for index, layer in enumerate(stack):
                assert isinstance(layer, DecoderLayer)
                yield StackedLayer(layer, tap, index == len(stack) - 1)

    def pack(self, quantization: Quantization = "none") -> None:
        """Freeze the adapter for inference in the layout of the row-independent kernel, where there is one."""
        for placed in self.placed_layers():
            placed.layer.pack(quantization)

    @property
    def num_layers(self) -> int:
        return sum(self.config.layers_per_tap)

    def context(self, placed: StackedLayer, taps: Tensor, rotary: Rotary) -> Heads:
        """Keys and values of a layer for states [..., rows, taps, hidden], true or predicted."""
        return placed.layer.context(taps[..., placed.tap, :], rotary, normalise=True)


def adapter_config_to_json(config: AdapterConfig) -> dict[str, Any]:
    """`config.json` of an adapter folder."""
    shape = config.architecture
    return {
        "architectures": ["JetSpecAdapter"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        **config_fields(shape),
        "rope_parameters": shape.rope,
        "adapter_config": {"tap_layers": list(config.tap_layers), "layers_per_tap": list(config.layers_per_tap)},
    }


def adapter_config_from_json(config: dict[str, Any]) -> AdapterConfig:
    extra = config.get("adapter_config")
    if not isinstance(extra, dict) or "tap_layers" not in extra or "layers_per_tap" not in extra:
        raise UnsupportedModel("config.json of the adapter lacks adapter_config.tap_layers or layers_per_tap")
    taps = tuple(int(layer) for layer in extra["tap_layers"])
    counts = tuple(int(count) for count in extra["layers_per_tap"])
    if len(taps) != len(counts) or min(counts, default=0) < 1:
        raise UnsupportedModel("adapter_config needs at least one layer for every tap")
    return AdapterConfig(architecture_from_config(config), taps, counts)


def adapter_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """Tensors named `taps.<tap>.layers.<index>.<published layer name>`."""
    named: dict[str, Tensor] = {}
    index = 0
    for placed in adapter.placed_layers():
        named |= layer_tensors(placed.layer, f"taps.{placed.tap}.layers.{index}.")
        index = 0 if placed.is_last else index + 1
    return named


def load_adapter(folder: Path, dtype: torch.dtype, device: torch.device) -> Adapter:
    """Load an adapter folder; raises `UnsupportedModel` saying what does not fit."""
    config = adapter_config_from_json(read_json(folder / "config.json"))
    tensors = read_tensors(folder / "model.safetensors")
    adapter = Adapter(config, dtype)
    index = 0
    try:
        for placed in adapter.placed_layers():
            load_layer(placed.layer, tensors, f"taps.{placed.tap}.layers.{index}.")
            index = 0 if placed.is_last else index + 1
    except KeyError as error:
        raise UnsupportedModel(f"{folder}/model.safetensors lacks {error.args[0]!r}") from error
    except (RuntimeError, ValueError) as error:
        raise UnsupportedModel(f"{folder}/model.safetensors does not fit its config.json: {error}") from error
    return adapter.to(device).requires_grad_(False).eval()


def check_adapter_fits(config: AdapterConfig, tap_layers: tuple[int, ...], target: Architecture) -> None:
    """Raise `UnsupportedModel` naming the first field in which adapter, draft model and target differ."""
    if config.tap_layers != tap_layers:
        raise UnsupportedModel(
            f"adapter predicts layers {list(config.tap_layers)}, the draft model reads {list(tap_layers)}"
        )
    if config.architecture.hidden_size != target.hidden_size:
        raise UnsupportedModel(
            f"adapter is for another target: hidden_size is {config.architecture.hidden_size}, "
            f"the target's is {target.hidden_size}"
        )
