"""The target: the model whose output is served, run over blocks of rows against its static caches.

Every row's result depends on its own prefix only: no kernel choice, mask or bucket may differ between one-row and block
decoding beyond what `modeling.invariance` has checked on this machine, so the text is the same in both modes, bit
for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling.architecture import Architecture, UnsupportedModel, architecture_from_config, read_json
from modeling.cache import KeyMask, KeyValueCache, bucket
from modeling.draft_model import read_tensors
from modeling.kernels.packed import Weight, can_pack, linear, pack
from modeling.layers import DecoderLayer, RotaryTable, fill_parameter, load_layer, rms_norm

KEY_BUCKET = 256


@dataclass(frozen=True)
class TargetBlock:
    """Rows of one sequence: `token_ids` at positions start.. ; keys before `start` are in `cache`."""

    cache: KeyValueCache
    start: int
    token_ids: Sequence[int]


@dataclass(frozen=True)
class TargetRows:
    """What the target says of a block's rows: logits [rows, vocab], tapped states [rows, taps, hidden].

    `hidden` [rows, hidden] is what the last layer gave, for `TargetRunner.logits`.
    """

    logits: Tensor
    taps: Tensor
    hidden: Tensor


class Target(nn.Module):
    """Embedding, decoder layers, final norm and head. Layers below `first_layer` are absent (a drafter's target)."""

    def __init__(
        self,
        architecture: Architecture,
        dtype: torch.dtype = torch.float32,
        first_layer: int = 0,
        *,
        initialise: bool = True,
    ) -> None:
        """`initialise` False leaves the matrices unset, for a loader that fills all of them."""
        super().__init__()
        self.architecture = architecture
        width = architecture.hidden_size
        self.embedding = nn.Parameter(torch.empty(architecture.vocab_size, width, dtype=dtype))
        self.layers = nn.ModuleList(
            nn.Identity() if index < first_layer else DecoderLayer(architecture, dtype, initialise=initialise)
            for index in range(architecture.num_layers)
        )
        self.norm = nn.Parameter(torch.ones(width, dtype=dtype))
        if architecture.tied_embeddings:
            self.head = self.embedding
        else:
            self.head = nn.Parameter(torch.empty(architecture.vocab_size, width, dtype=dtype))
        if initialise:
            nn.init.normal_(self.embedding, std=0.02)
            nn.init.normal_(self.head, std=0.02)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def layer(self, index: int) -> DecoderLayer:
        layer = self.layers[index]
        assert isinstance(layer, DecoderLayer)
        return layer


class TargetRunner:
    """Runs a frozen target over blocks of several sequences, with taps and fixed-shape masks; packs its layers."""

    def __init__(self, target: Target, tap_layers: Sequence[int], num_positions: int) -> None:
        self.target = target
        self._layers = tuple(target.layer(index) for index in range(target.architecture.num_layers))
        for layer in self._layers:
            layer.pack()
        self.tap_layers = tuple(tap_layers)
        self._taps = {layer: index for index, layer in enumerate(self.tap_layers)}
        self.num_positions = -(-num_positions // KEY_BUCKET) * KEY_BUCKET  # so that no key bucket is cut short
        self.head: Weight = pack(target.head) if can_pack(target.head) else target.head
        self.rotary = RotaryTable(target.architecture, self.num_positions, target.dtype, target.device)

    def new_cache(self) -> KeyValueCache:
        target = self.target
        return KeyValueCache(
            target.architecture, target.architecture.num_layers, self.num_positions, target.dtype, target.device
        )

    @torch.inference_mode()
    def forward(self, blocks: Sequence[TargetBlock], *, last_row_only: bool = False) -> TargetRows:
        """One pass over all rows of all blocks; keys and values of the rows are written to each block's cache.

        `last_row_only` computes logits of the very last row only (prefill of one sequence).
        """
        target = self.target
        shape = target.architecture
        token_ids = torch.tensor([token for block in blocks for token in block.token_ids], device=target.device)
        positions = torch.cat([torch.arange(b.start, b.start + len(b.token_ids), device=target.device) for b in blocks])
        rotary = self.rotary.at(positions)
        masks = [self._mask(block) for block in blocks]
        hidden = F.embedding(token_ids, target.embedding)
        taps = torch.empty(
            len(token_ids), len(self.tap_layers), shape.hidden_size, dtype=target.dtype, device=target.device
        )
        for index, layer in enumerate(self._layers):
            heads = layer.project(hidden, rotary)
            outputs, row = [], 0
            for block, mask in zip(blocks, masks, strict=True):
                stop = row + len(block.token_ids)
                own = heads if len(blocks) == 1 else heads[row:stop]
                block.cache.write(index, block.start, own)
                outputs.append(block.cache.attend(index, own.query, mask))
                row = stop
            hidden = layer.finish(hidden, outputs[0] if len(outputs) == 1 else torch.cat(outputs))
            if index in self._taps:
                taps[:, self._taps[index]] = hidden
        return TargetRows(self.logits(hidden[-1:] if last_row_only else hidden), taps, hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab] of rows [rows, hidden] of the last layer."""
        target = self.target
        return linear(rms_norm(hidden, target.norm, target.architecture.rms_eps), self.head)

    def _mask(self, block: TargetBlock) -> KeyMask:
        rows = torch.arange(block.start, block.start + len(block.token_ids), device=self.target.device)
        num_keys = bucket(block.start + len(block.token_ids), KEY_BUCKET, self.num_positions)
        visible = torch.arange(num_keys, device=self.target.device)[None, :] <= rows[:, None]
        return KeyMask(visible, self.target.architecture.group_size, self.target.dtype)


def _outer_parameters(target: Target) -> list[tuple[nn.Parameter, str]]:
    """What is not in a layer, with its published name."""
    outer = [(target.embedding, "embed_tokens.weight"), (target.norm, "norm.weight")]
    return outer if target.architecture.tied_embeddings else [*outer, (target.head, "lm_head.weight")]


def read_architecture(folder: Path) -> Architecture:
    """Architecture of a model folder; raises `UnsupportedModel`."""
    return architecture_from_config(read_json(folder / "config.json"))


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, sharded or not."""
    index_file = folder / "model.safetensors.index.json"
    if index_file.exists():
        weight_map = read_json(index_file).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UnsupportedModel(f"{index_file} lacks 'weight_map'")
        names = sorted(set(weight_map.values()))
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors |= read_tensors(folder / name)
        return tensors
    return read_tensors(folder / "model.safetensors")


def load_target(folder: Path, dtype: torch.dtype, device: torch.device, first_layer: int = 0) -> Target:
    """Load a target from safetensors, or of its layers only those from `first_layer` on.

    Raises `UnsupportedModel` saying what does not fit.
    """
    architecture = read_architecture(folder)
    tensors = {name.removeprefix("model."): tensor for name, tensor in read_checkpoint(folder).items()}
    target = Target(architecture, dtype, first_layer, initialise=False)
    try:
        for index in range(first_layer, architecture.num_layers):
            load_layer(target.layer(index), tensors, f"layers.{index}.")
        for parameter, name in _outer_parameters(target):
            fill_parameter(parameter, tensors[name], name)
    except KeyError as error:
        raise UnsupportedModel(f"{folder} lacks the tensor {error.args[0]!r}") from error
    except (RuntimeError, ValueError) as error:
        raise UnsupportedModel(f"{folder} does not fit its config.json: {error}") from error
    return target.to(device).requires_grad_(False).eval()
