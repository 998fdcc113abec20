"""The numbers that shape a stack of decoder layers, read from a published `config.json`.

Covers the Llama, Qwen2 and Qwen3 kinds, which differ in two switches only: a bias on q, k, v (Qwen2) and a norm on the
heads of q and k (Qwen3). It does not know about weights.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")


class UnsupportedModel(ValueError):
    """The model cannot be served: its architecture, or a field of its config, is not one we implement."""


@dataclass(frozen=True)
class Architecture:
    """Shape of a decoder stack. Sizes in elements, `rms_eps` as in the config."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_eps: float
    max_positions: int
    attention_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    rope: dict[str, Any]

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object; raises `UnsupportedModel` naming the file when it is missing or broken."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UnsupportedModel(f"{path} is missing") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise UnsupportedModel(f"{path} holds {type(loaded).__name__}, not an object")
    return loaded


def architecture_from_config(config: dict[str, Any], *, qk_norm: bool | None = None) -> Architecture:
    """Read an `Architecture` from the fields of a `config.json`; `qk_norm` overrides what the model type implies."""
    kind = config.get("model_type")
    if kind not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedModel(f"model_type {kind!r} is not supported; supported: {', '.join(SUPPORTED_MODEL_TYPES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {config['hidden_act']!r} is not supported; only silu is")
    if config.get("use_sliding_window"):
        raise UnsupportedModel("use_sliding_window is not supported")
    if config.get("mlp_bias"):
        raise UnsupportedModel("mlp_bias is not supported")

    def number(name: str) -> int:
        value = config.get(name)
        if not isinstance(value, int):
            raise UnsupportedModel(f"config.json: {name} is {value!r}, not a whole number")
        return value

    hidden_size, num_heads = number("hidden_size"), number("num_attention_heads")
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    return Architecture(
        hidden_size=hidden_size,
        intermediate_size=number("intermediate_size"),
        num_layers=number("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or hidden_size // num_heads),
        vocab_size=number("vocab_size"),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_positions=int(config.get("max_position_embeddings", 2048)),
        attention_bias=bool(config.get("attention_bias", kind == "qwen2")),
        qk_norm=(kind == "qwen3") if qk_norm is None else qk_norm,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        rope=rope,
    )


def config_fields(architecture: Architecture) -> dict[str, Any]:
    """The fields of a published `config.json` that say the shape, all but the kind of RoPE."""
    return {
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.intermediate_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_kv_heads,
        "head_dim": architecture.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": architecture.rms_eps,
        "max_position_embeddings": architecture.max_positions,
        "vocab_size": architecture.vocab_size,
        "attention_bias": architecture.attention_bias,
        "tie_word_embeddings": architecture.tied_embeddings,
    }


def inverse_frequencies(architecture: Architecture) -> tuple[torch.Tensor, float]:
    """RoPE inverse frequencies [head_dim/2] and the factor on cos and sin; scaled kinds come from transformers."""
    kind = architecture.rope["rope_type"]
    theta = float(architecture.rope["rope_theta"])
    if kind == "default":
        exponents = torch.arange(0, architecture.head_dim, 2, dtype=torch.float32) / architecture.head_dim
        return 1.0 / (theta**exponents), 1.0
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS or kind in ("dynamic", "longrope"):
        raise UnsupportedModel(f"rope type {kind!r} is not supported")
    config = PretrainedConfig.from_dict(
        {
            "hidden_size": architecture.hidden_size,
            "num_attention_heads": architecture.num_heads,
            "head_dim": architecture.head_dim,
            "max_position_embeddings": architecture.max_positions,
            "rope_parameters": architecture.rope,
        }
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float(), float(scale)
