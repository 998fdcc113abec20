"""A small causal language model that drafts token by token from token ids alone (SSD's drafter, facts.md 1.5).

Two forms on disk: an ordinary causal LM folder with its own embedding and head, or our own, whose `config.json` says
`"shared_embedding": true` and which takes both from the target, the head trimmed where a tensor `d2t` says so. Its
cache is static; rows of tokens that are not verified go to the scratch area, so that several continuations can be
drafted side by side. Which row sees which is the caller's: this module does not know rounds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling.architecture import Architecture, UnsupportedModel, architecture_from_config, config_fields, read_json
from modeling.cache import KeyMask, KeyValueCache, bucket
from modeling.draft_model import read_tensors
from modeling.kernels.int8 import Quantization
from modeling.layers import DecoderLayer, RotaryTable, fill_parameter, layer_tensors, load_layer, rms_norm
from modeling.stack import LayerStack, StackedLayer
from modeling.target import Target, load_target, read_architecture
from modeling.vocabulary import DraftHead

KEY_BUCKET = 64


class CausalStack(nn.Module):
    """Decoder layers and a final norm, without embedding and head."""

    def __init__(self, architecture: Architecture, layers: Iterable[DecoderLayer], norm: nn.Parameter) -> None:
        super().__init__()
        self.architecture = architecture
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    @classmethod
    def unset(cls, architecture: Architecture, dtype: torch.dtype = torch.float32) -> "CausalStack":
        """A stack whose matrices a loader has yet to fill."""
        layers = [DecoderLayer(architecture, dtype, initialise=False) for _ in range(architecture.num_layers)]
        return cls(architecture, layers, nn.Parameter(torch.ones(architecture.hidden_size, dtype=dtype)))

    def decoder_layers(self) -> Iterable[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer

    def final(self, hidden: Tensor) -> Tensor:
        """Final norm; its rows go to the head."""
        return rms_norm(hidden, self.norm, self.architecture.rms_eps)

    def pack(self, quantization: Quantization = "none") -> None:
        """Freeze the layers for inference in the layout of the row-independent kernel, where there is one."""
        for layer in self.decoder_layers():
            layer.pack(quantization)


@dataclass(frozen=True)
class AutoregressiveModel:
    """A drafter's layers with an embedding [vocab, hidden] and head rows [vocab, hidden], its own or the target's.

    token_ids [W]: the tokens it proposes; None: all.
    """

    stack: CausalStack
    embedding: Tensor
    head: Tensor
    token_ids: Tensor | None
    is_shared: bool


class AutoregressiveRunner:
    """Runs a frozen drafter over rows of a static cache; packs its layers."""

    def __init__(self, model: AutoregressiveModel, num_positions: int, quantization: Quantization = "none") -> None:
        self._stack = model.stack
        self._stack.pack(quantization)
        self._layers = tuple(self._stack.decoder_layers())
        self._packed_rows = LayerStack([StackedLayer(layer) for layer in self._layers], normalise_context=True)
        self._embedding = model.embedding
        self.head = DraftHead(model.head, model.token_ids, packed=True, quantization=quantization)
        self.num_positions = num_positions
        self.rotary = RotaryTable(self.architecture, num_positions, self.dtype, self.device)

    @property
    def architecture(self) -> Architecture:
        return self._stack.architecture

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def new_cache(self, num_scratch: int) -> KeyValueCache:
        """A cache whose scratch area holds `num_scratch` rows that are not verified."""
        shape = self.architecture
        return KeyValueCache(shape, shape.num_layers, self.num_positions, self.dtype, self.device, num_scratch)

    def num_keys(self, num_rows: int) -> int:
        """Verified keys a pass looks at: the length rounded up, so that few shapes occur."""
        return bucket(num_rows, KEY_BUCKET, self.num_positions)

    @torch.inference_mode()
    def extend(self, cache: KeyValueCache, start: int, token_ids: Sequence[int]) -> Tensor:
        """Verified tokens at positions start.. behind those before: logits [W] after the last one."""
        positions = torch.arange(start, start + len(token_ids), device=self.device)
        num_keys = self.num_keys(start + len(token_ids))
        verified = torch.arange(num_keys, device=self.device)[None, :] <= positions[:, None]
        hidden = torch.zeros(len(token_ids), cache.num_scratch, dtype=torch.bool, device=self.device)
        mask = KeyMask(torch.cat((hidden, verified), dim=1), self.architecture.group_size, self.dtype)
        rows = self._run_verified(cache, torch.tensor(token_ids, device=self.device), positions, mask, start)
        return self.head.logits(rows[-1:])[0]

    @torch.inference_mode()
    def branch(
        self, cache: KeyValueCache, first_row: int, token_ids: Tensor, positions: Tensor, visible: Tensor
    ) -> Tensor:
        """Tokens [R] that are not verified, at any positions [R], into scratch rows first_row..: logits [R, W].

        visible [R, scratch + num_keys(n)]: the keys each row sees, scratch rows first; a row must see its own.
        """
        mask = KeyMask(visible, self.architecture.group_size, self.dtype)
        hidden = F.embedding(token_ids, self._embedding)
        run = self._packed_rows.run(hidden, self.rotary.at(positions), mask, cache, first_row)
        return self.head.logits(self._stack.final(run.hidden))

    def _run_verified(
        self, cache: KeyValueCache, token_ids: Tensor, positions: Tensor, mask: KeyMask, start: int
    ) -> Tensor:
        """Normed rows [R, hidden] of tokens whose keys and values go to the positions from `start` on."""
        rotary = self.rotary.at(positions)
        hidden = F.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            heads = layer.project(hidden, rotary)
            cache.write(index, start, heads)
            hidden = layer.finish(hidden, cache.attend(index, heads.query, mask))
        return self._stack.final(hidden)


def stack_tensors(stack: CausalStack) -> dict[str, Tensor]:
    """Tensors under published names."""
    named = {"model.norm.weight": stack.norm.data}
    for index, layer in enumerate(stack.decoder_layers()):
        named |= layer_tensors(layer, f"model.layers.{index}.")
    return named


def shared_config_to_json(architecture: Architecture) -> dict[str, Any]:
    """`config.json` of a drafter that takes embedding and head from the target."""
    kind = "qwen3" if architecture.qk_norm else ("qwen2" if architecture.attention_bias else "llama")
    return {
        "architectures": ["SharedEmbeddingCausalLM"],
        "model_type": kind,
        **config_fields(architecture),
        "rope_parameters": architecture.rope,
        "torch_dtype": "bfloat16",
        "shared_embedding": True,
    }


def load_autoregressive(
    folder: Path, target_folder: Path, dtype: torch.dtype, device: torch.device
) -> AutoregressiveModel:
    """Load a drafter of either form for a target; raises `UnsupportedModel` naming what does not fit."""
    config = read_json(folder / "config.json")
    architecture = architecture_from_config(config)
    theirs = read_architecture(target_folder)
    _check_field("vocab_size", architecture.vocab_size, theirs.vocab_size)
    if not config.get("shared_embedding"):
        _check_tokenizers(folder, target_folder)
        return _from_target(load_target(folder, dtype, device))
    _check_field("hidden_size", architecture.hidden_size, theirs.hidden_size)
    tensors = {
        name.removeprefix("model."): tensor for name, tensor in read_tensors(folder / "model.safetensors").items()
    }
    stack = CausalStack.unset(architecture, dtype)
    try:
        for index, layer in enumerate(stack.decoder_layers()):
            load_layer(layer, tensors, f"layers.{index}.")
        fill_parameter(stack.norm, tensors["norm.weight"], "norm.weight")
    except KeyError as error:
        raise UnsupportedModel(f"{folder}/model.safetensors lacks {error.args[0]!r}") from error
    except (RuntimeError, ValueError) as error:
        raise UnsupportedModel(f"{folder}/model.safetensors does not fit its config.json: {error}") from error
    target = load_target(target_folder, dtype, device, first_layer=theirs.num_layers)
    offsets = tensors.get("d2t")
    token_ids = None if offsets is None else torch.arange(offsets.numel()) + offsets.long()
    stack = stack.to(device).requires_grad_(False).eval()
    return AutoregressiveModel(stack, target.embedding, target.head, token_ids, is_shared=True)


def _from_target(model: Target) -> AutoregressiveModel:
    """An ordinary causal LM as a drafter; it shares the loaded model's tensors."""
    layers = [model.layer(index) for index in range(model.architecture.num_layers)]
    stack = CausalStack(model.architecture, layers, model.norm).eval()
    return AutoregressiveModel(stack, model.embedding, model.head, None, is_shared=False)


def _check_field(name: str, mine: int, theirs: int) -> None:
    if mine != theirs:
        raise UnsupportedModel(f"the drafter is for another target: {name} is {mine}, the target's is {theirs}")


def _check_tokenizers(folder: Path, target_folder: Path) -> None:
    """Two models can share drafts only if every id is the same token in both; names the first that is not."""
    mine, theirs = _vocabulary(folder), _vocabulary(target_folder)
    if mine is None or theirs is None:
        return
    for token_id in sorted(mine.keys() | theirs.keys()):
        if mine.get(token_id) != theirs.get(token_id):
            raise UnsupportedModel(
                f"the drafter has another tokenizer: token {token_id} is {mine.get(token_id)!r}, "
                f"the target's is {theirs.get(token_id)!r}"
            )


def _vocabulary(folder: Path) -> dict[int, str] | None:
    """Tokens by id of a folder's `tokenizer.json`; None where there is none, or none of a kind we can compare."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    content = read_json(path)
    tokens = (content.get("model") or {}).get("vocab")
    if not isinstance(tokens, dict):  # a unigram model lists its pieces in order
        tokens = {piece[0]: index for index, piece in enumerate(tokens or ())}
    found = {index: token for token, index in tokens.items()}
    return found | {added["id"]: added["content"] for added in content.get("added_tokens") or ()}
