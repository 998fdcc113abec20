"""Tiny random models on disk, so that tests go through the loaders: targets, draft models, adapters.

The targets are random networks around a known rule: the head of token `successor(v)` points where the embedding of `v`
points, so the text follows the rule most of the time and the layers make it stray. That gives drafts that are often
right
without training: a shifted draft model with small layers proposes the rule, an in-place one is always a token behind.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from draft_worker.networks import DraftNetworks, load_networks
from draft_worker.sequence import DraftSequence, new_memory
from modeling.adapter import Adapter, AdapterConfig, adapter_config_to_json, adapter_tensors
from modeling.architecture import Architecture, architecture_from_config
from modeling.autoregressive import CausalStack, shared_config_to_json, stack_tensors
from modeling.decoder import decoder_layer_ids
from modeling.draft_model import (
    DraftConfig,
    DraftModel,
    draft_config_to_json,
    draft_model_tensors,
    head_checkpoint_config,
    tap_layers_for,
)
from modeling.heads import CorrectionHead, GruConfig, GruHead, MarkovConfig, MarkovHead
from modeling.kernels.int8 import Quantization
from modeling.kernels.packed import unpacked
from modeling.layers import layer_tensors
from modeling.target import Target, TargetBlock, TargetRunner, load_target
from tests.tiny.tokenizer import write_tokenizer

TargetKind = Literal["llama", "qwen2", "qwen3"]
HeadKind = Literal["markov", "gru"]
DraftKind = Literal["trained", "random", "bidirectional", "causal_mask", "shifted_bidirectional", "shifted_causal_mask"]

VOCAB_SIZE = 128
NUM_LAYERS = 6
MASK_TOKEN_ID = 5
CPU = torch.device("cpu")
TAP_LAYERS = tap_layers_for(2, NUM_LAYERS)


def successor(token_id: int) -> int:
    """The token that most often follows."""
    return (5 * token_id + 3) % VOCAB_SIZE


def target_config(kind: TargetKind) -> dict[str, Any]:
    """`config.json` of a tiny target."""
    return {
        "architectures": [
            {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
        ],
        "model_type": kind,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "attention_bias": kind == "qwen2",
        "use_sliding_window": False,
    }


def randomise(module: nn.Module, generator: torch.Generator, scale: float) -> None:
    """Fill matrices and biases with normal numbers, norms with numbers around one."""
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.dim() == 1 and bool((parameter == 1).all())
        parameter.data.copy_(1.0 + 0.1 * noise if is_norm else scale * noise)


def make_target(kind: TargetKind, seed: int = 0) -> Target:
    """A random target that follows `successor` most of the time."""
    generator = torch.Generator().manual_seed(seed)
    architecture = architecture_from_config(target_config(kind))
    target = Target(architecture)
    randomise(target, generator, 0.115)
    embedding = torch.randn(VOCAB_SIZE, architecture.hidden_size, generator=generator)
    target.embedding.data.copy_(embedding)
    followers = torch.tensor([successor(token_id) for token_id in range(VOCAB_SIZE)])
    target.head.data[followers] = 0.3 * embedding
    return target.requires_grad_(False)


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A model folder as they are published."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def target_tensors(target: Target) -> dict[str, Tensor]:
    """Tensors under published names."""
    named = {
        "model.embed_tokens.weight": target.embedding.data,
        "model.norm.weight": target.norm.data,
        "lm_head.weight": target.head.data,
    }
    for index in range(target.architecture.num_layers):
        named |= layer_tensors(target.layer(index), f"model.layers.{index}.")
    return named


def make_draft_model(kind: DraftKind, target: Architecture, seed: int = 1) -> DraftModel:
    """A two-layer draft model. `trained` is often right; `random` seldom; `bidirectional` reads masks, as released
    DFlash models do, `causal_mask` as released JetSpec models; a shifted one is right about its first draft."""
    reads_masks = kind not in ("trained", "random")
    is_shifted = kind in ("trained", "shifted_bidirectional", "shifted_causal_mask")
    architecture = replace(target, num_layers=2, qk_norm=True, attention_bias=False)
    config = DraftConfig(
        architecture=architecture,
        tap_layers=TAP_LAYERS,
        block_size=8,
        num_target_layers=target.num_layers,
        causal=kind not in ("bidirectional", "shifted_bidirectional"),
        slots="shifted" if is_shifted else "in_place",
        inputs="mask" if reads_masks else "tokens",
        mask_token_id=MASK_TOKEN_ID if reads_masks else None,
    )
    model = DraftModel(config)
    randomise(model, torch.Generator().manual_seed(seed), 0.03 if is_shifted else 0.2)
    return model


def make_adapter(target: Architecture, seed: int = 2, scale: float = 0.03) -> Adapter:
    """An adapter with two layers for the lowest tap and one for the other; small layers keep the token's direction."""
    adapter = Adapter(AdapterConfig(replace(target, num_layers=3), TAP_LAYERS, (2, 1)))
    randomise(adapter, torch.Generator().manual_seed(seed), scale)
    return adapter


def make_head(kind: HeadKind, target: Target, seed: int = 3) -> CorrectionHead:
    """A Markov head that knows `successor`, which makes a backbone right that only knows its anchor; a random GRU
    head."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "gru":
        gru = GruHead(GruConfig(24, 16), VOCAB_SIZE, target.architecture.hidden_size)
        randomise(gru, generator, 0.3)
        return gru
    markov = MarkovHead(MarkovConfig(target.architecture.hidden_size), VOCAB_SIZE, VOCAB_SIZE)
    markov.first.data.copy_(target.embedding)
    unpacked(markov.second).data.copy_(3.0 * target.head)  # more than what a mask slot says
    return markov


def make_drafter(target: Target, seed: int = 4) -> CausalStack:
    """One small layer that leaves the token's direction alone: with the target's head it follows `successor`."""
    stack = CausalStack.unset(replace(target.architecture, num_layers=1))
    randomise(stack, torch.Generator().manual_seed(seed), 0.03)
    return stack


@dataclass
class TinyModels:
    """Folders of tiny models, written when first asked for."""

    root: Path
    folders: dict[str, Path] = field(default_factory=dict)

    def target(self, kind: TargetKind = "llama") -> Path:
        """Folder of a target."""
        return self._once(f"target-{kind}", lambda path: write_folder(path, target_config(kind), self._target_of(kind)))

    def draft(self, kind: DraftKind = "trained", target: TargetKind = "llama") -> Path:
        """Folder of a draft model."""

        def write(path: Path) -> Path:
            model = make_draft_model(kind, architecture_from_config(target_config(target)))
            return write_folder(path, draft_config_to_json(model.config), draft_model_tensors(model))

        return self._once(f"draft-{kind}-{target}", write)

    def adapter(self, target: TargetKind = "llama") -> Path:
        """Folder of an adapter."""

        def write(path: Path) -> Path:
            adapter = make_adapter(architecture_from_config(target_config(target)))
            return write_folder(path, adapter_config_to_json(adapter.config), adapter_tensors(adapter))

        return self._once(f"adapter-{target}", write)

    def tokenizer(self, size: int = VOCAB_SIZE) -> Path:
        """Folder of a tokenizer whose last id ends a text."""
        return self._once(f"tokenizer-{size}", lambda path: write_tokenizer(path, size))

    def head(self, kind: HeadKind, backbone: DraftKind = "shifted_bidirectional", target: TargetKind = "llama") -> Path:
        """Folder of a head on a draft model, which lies beside it."""
        draft = self.draft(backbone, target)

        def write(path: Path) -> Path:
            head = make_head(kind, make_target(target))
            return write_folder(path, head_checkpoint_config(head.config, f"../{draft.name}"), head.tensors())

        return self._once(f"head-{kind}-{backbone}-{target}", write)

    def drafter(self, target: TargetKind = "llama") -> Path:
        """Folder of an autoregressive drafter on the target's embedding and head."""

        def write(path: Path) -> Path:
            stack = make_drafter(make_target(target))
            return write_folder(path, shared_config_to_json(stack.architecture), stack_tensors(stack))

        return self._once(f"drafter-{target}", write)

    def runner(
        self,
        kind: TargetKind = "llama",
        dtype: torch.dtype = torch.float32,
        num_positions: int = 256,
        tap_layers: tuple[int, ...] = TAP_LAYERS,
    ) -> TargetRunner:
        """A loaded target with taps."""
        return TargetRunner(load_target(self.target(kind), dtype, CPU), tap_layers, num_positions)

    def networks(
        self,
        draft: DraftKind = "trained",
        target: TargetKind = "llama",
        dtype: torch.dtype = torch.float32,
        num_positions: int = 256,
        *,
        with_adapter: bool = True,
        quantization: Quantization = "none",
    ) -> DraftNetworks:
        """What a drafter runs, loaded."""
        adapter = self.adapter(target) if with_adapter else None
        folders = self.target(target), self.draft(draft, target), adapter
        return load_networks(*folders, dtype, CPU, num_positions, quantization)

    def _target_of(self, kind: TargetKind) -> dict[str, Tensor]:
        return target_tensors(make_target(kind))

    def _once(self, name: str, write: Callable[[Path], Path]) -> Path:
        if name not in self.folders:
            self.folders[name] = write(self.root / name)
        return self.folders[name]


@dataclass(frozen=True)
class TrueRows:
    """What the target knows of a text: logits [rows, vocab], taps [rows, taps, hidden], decoder rows [rows, layers,
    2, ...]."""

    logits: Tensor
    taps: Tensor
    decoder_kv: Tensor


def true_rows(runner: TargetRunner, token_ids: list[int]) -> TrueRows:
    """The whole text in one clean pass."""
    cache = runner.new_cache()
    rows = runner.forward([TargetBlock(cache, 0, token_ids)])
    first = decoder_layer_ids(TAP_LAYERS[-1], NUM_LAYERS)[0]
    pair = torch.stack((cache.key[first:, :, : len(token_ids)], cache.value[first:, :, : len(token_ids)]), dim=1)
    return TrueRows(rows.logits, rows.taps, pair.permute(3, 0, 1, 2, 4))


def drafted_sequence(
    networks: DraftNetworks, rows: TrueRows, token_ids: list[int], *, num_draft_tokens: int = 4, max_cache_size: int = 8
) -> DraftSequence:
    """A drafter's sequence whose anchor is the last of `token_ids`, with the true rows of all others installed."""
    memory = new_memory(networks, 256, num_draft_tokens, max_cache_size)
    sequence = DraftSequence(networks, memory, token_ids)
    n = len(token_ids) - 1
    sequence.install(rows.taps[:n], rows.decoder_kv[:n])
    return sequence


def successors(token_id: int, count: int) -> list[int]:
    """The next tokens by the rule."""
    tokens = []
    for _ in range(count):
        token_id = successor(token_id)
        tokens.append(token_id)
    return tokens
