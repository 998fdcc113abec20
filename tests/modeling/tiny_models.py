"""Tiny random models of each supported kind, made and written by transformers: the reference our own code is held
to."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from modeling.architecture import Architecture
from modeling.target import TargetBlock, TargetRows, TargetRunner

VOCAB_SIZE = 211
NUM_LAYERS = 5
TAP_LAYERS = (1, 2)

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = ("llama", "llama-tied", "llama3-rope", "qwen2", "qwen3")


def make_reference(kind: str) -> PreTrainedModel:
    """A random fp32 model of a kind, with norms and biases away from their neutral values."""
    torch.manual_seed(KINDS.index(kind))
    model: PreTrainedModel
    match kind:
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=12))
        case "llama-tied":
            model = LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=12, tie_word_embeddings=True))
        case "llama3-rope":
            model = LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=12, rope_parameters=LLAMA3_ROPE))
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
        case _:
            model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_()
    model.train(False)
    return model


def save_reference(folder: Path, kind: str = "llama", max_shard_size: str = "1GB") -> PreTrainedModel:
    """Write a random model into a folder in the published format."""
    model = make_reference(kind)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of a folder's `config.json`; None takes a field away."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def tiny_architecture(**changes: Any) -> Architecture:
    """A shape for modules that are built without a published config."""
    fields: dict[str, Any] = {
        "hidden_size": 72,
        "intermediate_size": 100,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 12,
        "vocab_size": VOCAB_SIZE,
        "rms_eps": 1e-6,
        "max_positions": 512,
        "attention_bias": False,
        "qk_norm": True,
        "tied_embeddings": False,
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return Architecture(**(fields | changes))


def random_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()
    return tokens


def run_pieces(runner: TargetRunner, token_ids: list[int], pieces: list[int]) -> TargetRows:
    """Run a text through one new cache in pieces of given sizes."""
    cache = runner.new_cache()
    rows: list[TargetRows] = []
    start = 0
    for size in pieces:
        rows.append(runner.forward([TargetBlock(cache, start, token_ids[start : start + size])]))
        start += size
    assert start == len(token_ids), "the pieces cover the text"
    return TargetRows(*(torch.cat(parts) for parts in zip(*((r.logits, r.taps, r.hidden) for r in rows), strict=True)))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    difference = (actual.double() - expected.double()).norm() / expected.double().norm()
    return float(difference)
