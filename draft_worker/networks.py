"""The networks a drafter runs, loaded and checked against each other. Knows no sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.adapter import Adapter, check_adapter_fits, load_adapter
from modeling.architecture import Architecture
from modeling.decoder import Decoder
from modeling.draft_model import DraftConfig, DraftModel, check_draft_fits, load_draft_model
from modeling.heads import CorrectionHead, SlotCorrector
from modeling.kernels.int8 import Quantization
from modeling.layers import RotaryTable
from modeling.stack import LayerStack, StackedLayer
from modeling.target import Target, load_target, read_architecture
from modeling.vocabulary import DraftHead


@dataclass(frozen=True)
class DraftStacks:
    """The layers of draft model, adapter (None: no foresight) and decoder as packed rows run through them."""

    draft: LayerStack
    adapter: LayerStack | None
    decoder: LayerStack


@dataclass(frozen=True)
class DraftNetworks:
    """Draft model, adapter and decoder, with the target's embedding and the drafting head.

    Without an adapter (None) there is no foresight, and the decoder has no layers. `corrector` is the head that
    fixes a block's drafts from left to right, None where the draft model drafts them alone.
    """

    model: DraftModel
    adapter: Adapter | None
    decoder: Decoder
    stacks: DraftStacks
    embedding: Tensor
    head: DraftHead
    rotary: RotaryTable  # of the target, the adapter and the decoder
    draft_rotary: RotaryTable
    target: Architecture
    num_positions: int
    corrector: SlotCorrector | None = None

    @property
    def config(self) -> DraftConfig:
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [..., hidden] of token ids."""
        return F.embedding(token_ids, self.embedding)

    def to_token_ids(self, columns: Tensor) -> Tensor:
        """Token ids of head columns."""
        return self.head.token_ids[columns]

    def to_columns(self, token_ids: Sequence[int]) -> list[int]:
        """Head columns of token ids, -1 where the draft vocabulary lacks one."""
        return [self.head.column(token_id) for token_id in token_ids]


def first_decoder_layer(config: DraftConfig, target: Architecture, *, has_adapter: bool) -> int:
    """The target's layers from here on are the decoder's; without an adapter none are."""
    return config.tap_layers[-1] + 1 if has_adapter else target.num_layers


def assemble(
    target: Target,
    model: DraftModel,
    token_ids: Tensor | None,
    adapter: Adapter | None,
    num_positions: int,
    quantization: Quantization = "none",
    correction: CorrectionHead | None = None,
) -> DraftNetworks:
    """Put loaded parts together and freeze them for inference; `target` needs its embedding, head and norm, and with an
    adapter the layers above the deepest tap. These are packed: quantised, the target verifies no more.

    Raises `UnsupportedModel` naming what does not fit.
    """
    shape = target.architecture
    check_draft_fits(model.config, shape)
    if adapter is not None:
        check_adapter_fits(adapter.config, model.config.tap_layers, shape)
    head = DraftHead(target.head, token_ids, packed=True, quantization=quantization)
    first = first_decoder_layer(model.config, shape, has_adapter=adapter is not None)
    layers = tuple(target.layer(index) for index in range(first, shape.num_layers))
    for layer in layers:
        layer.pack(quantization)
    model.pack(quantization)
    if adapter is not None:
        adapter.pack(quantization)
    if correction is not None:
        correction.pack(quantization)
    adapter_stack = None if adapter is None else LayerStack(tuple(adapter.placed_layers()), normalise_context=True)
    stacks = DraftStacks(
        draft=LayerStack([StackedLayer(layer) for layer in model.decoder_layers()], normalise_context=False),
        adapter=adapter_stack,
        decoder=LayerStack([StackedLayer(layer) for layer in layers], normalise_context=True),
    )
    return DraftNetworks(
        model=model,
        adapter=adapter,
        decoder=Decoder(layers, first, target.norm, shape.rms_eps, head),
        stacks=stacks,
        embedding=target.embedding,
        head=head,
        rotary=RotaryTable(shape, num_positions, target.dtype, target.device),
        draft_rotary=RotaryTable(model.config.architecture, num_positions, target.dtype, target.device),
        target=shape,
        num_positions=num_positions,
        corrector=None if correction is None else SlotCorrector(correction, head, target.embedding),
    )


def load_networks(
    target_folder: Path,
    draft_folder: Path,
    adapter_folder: Path | None,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int,
    quantization: Quantization = "none",
) -> DraftNetworks:
    """Load everything a drafter needs; of the target only what it uses. Raises `UnsupportedModel`."""
    loaded = load_draft_model(draft_folder, dtype, device)
    shape = read_architecture(target_folder)
    check_draft_fits(loaded.model.config, shape)
    first = first_decoder_layer(loaded.model.config, shape, has_adapter=adapter_folder is not None)
    target = load_target(target_folder, dtype, device, first)
    adapter = None if adapter_folder is None else load_adapter(adapter_folder, dtype, device)
    return assemble(target, loaded.model, loaded.token_ids, adapter, num_positions, quantization, loaded.head)
