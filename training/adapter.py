"""Training of the hidden-to-hidden adapter (equation 5), each module on the prediction of the one below it.

Loss: Smooth L1 on states scaled by each tap's root mean square, plus cosine distance, plus (a weight) the forward KL
from the target's next-token distribution to the one that the frozen decoder reads off the deepest prediction.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.adapter import Adapter, AdapterConfig, adapter_config_to_json, adapter_tensors
from modeling.decoder import Decoder
from modeling.layers import Heads, RotaryTable, block_layer, grouped_mask, load_layer
from modeling.target import Target, read_checkpoint
from modeling.vocabulary import DraftHead
from training.blocks import Blocks, gather_rows, make_blocks, tiled_anchors
from training.corpus import Batch, CorpusSequence, StateStore, batches, full_layer
from training.foreseen import predicted_states
from training.loop import write_folder
from training.losses import forward_kl


@dataclass(frozen=True)
class AdapterRun:
    """Everything a forward pass needs. `tap_scale` [taps, 1]: root mean square of each tap on the corpus."""

    adapter: Adapter
    decoder: Decoder
    target: Target
    head: DraftHead
    rotary: RotaryTable
    tap_scale: Tensor
    num_slots: int
    kl_weight: float


@dataclass(frozen=True)
class Prediction:
    """Predicted states [b, rows, taps, hidden] and decoder logits [b, rows, W]."""

    states: Tensor
    logits: Tensor


def initial_layers(tap_layers: Sequence[int], layers_per_tap: Sequence[int]) -> list[list[int]]:
    """Target layers that an adapter starts from: for each tap its own layer and the ones right below it."""
    return [list(range(tap - count + 1, tap + 1)) for tap, count in zip(tap_layers, layers_per_tap, strict=True)]


def start_from_target(adapter: Adapter, folder: Path) -> None:
    """Copy target layers into a new adapter."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in read_checkpoint(folder).items()}
    sources = [
        max(0, i) for stack in initial_layers(adapter.config.tap_layers, adapter.config.layers_per_tap) for i in stack
    ]
    for placed, source in zip(adapter.placed_layers(), sources, strict=True):
        load_layer(placed.layer, tensors, f"layers.{source}.")


def predict(run: AdapterRun, batch: Batch, blocks: Blocks) -> Prediction:
    """The adapter over all blocks, then the decoder on its deepest predictions."""
    states = predicted_states(run.adapter, run.target, run.rotary, batch, blocks)
    hidden, block_rotary = states[:, :, -1], run.rotary.at(blocks.positions)
    contexts = decoder_contexts(run, batch)
    for (_, layer), context in zip(run.decoder.placed_layers(), contexts, strict=True):
        hidden = block_layer(layer, hidden, block_rotary, context, blocks.mask)
    return Prediction(states, run.decoder.logits(hidden))


@torch.no_grad()
def decoder_contexts(run: AdapterRun, batch: Batch) -> list[Heads]:
    """Keys and values of the decoder's layers on the true states, [b, L, kv_heads, dim] each."""
    length = batch.token_ids.shape[1]
    rotary = run.rotary.span(0, length)
    causal = torch.ones(length, length, dtype=torch.bool, device=batch.taps.device).tril()
    mask = grouped_mask(causal, run.target.architecture.group_size, batch.taps.dtype)
    hidden, contexts = batch.taps[:, :, -1], []
    for index, layer in run.decoder.placed_layers():
        contexts.append(layer.context(hidden, rotary, normalise=True))
        if index + 1 < len(run.decoder.layers):
            hidden = full_layer(layer, hidden, rotary, mask)
    return contexts


def adapter_loss(run: AdapterRun, batch: Batch, blocks: Blocks) -> Tensor:
    """Mean loss over the valid rows."""
    prediction = predict(run, batch, blocks)
    truth = gather_rows(batch.taps, blocks.positions)[blocks.valid] / run.tap_scale
    mine = prediction.states[blocks.valid] / run.tap_scale
    regression = F.smooth_l1_loss(mine, truth, reduction="none").mean(-1).sum(-1).mean()
    cosine = (1 - F.cosine_similarity(mine.flatten(1), truth.flatten(1), dim=-1)).mean()
    loss = regression + cosine
    if run.kl_weight:
        teacher = run.head.logits(gather_rows(batch.last, blocks.positions)[blocks.valid])
        loss = loss + run.kl_weight * forward_kl(prediction.logits[blocks.valid], teacher)
    return loss


@dataclass(frozen=True)
class AdapterReport:
    """Held-out quality: top-1 agreement of decoder and target per slot, KL, and, per tap and slot, the share of the gap
    between copying the last verified state and the true state that the prediction closes.
    """

    agreement: list[float]
    kl: float
    gap_closed: list[list[float]]

    def line(self) -> str:
        slots = " ".join(f"{value:.3f}" for value in self.agreement)
        mean = sum(self.agreement) / len(self.agreement)
        taps = " ".join(f"{sum(by_slot) / len(by_slot):.2f}" for by_slot in self.gap_closed)
        return f"agreement {mean:.4f} [{slots}] kl {self.kl:.3f} gap closed [{taps}]"


@torch.no_grad()
def evaluate_adapter(run: AdapterRun, store: StateStore, held_out: Sequence[CorpusSequence]) -> AdapterReport:
    """Top-1 agreement with the target's full head, KL over the draft vocabulary, and 1 - error/copy error."""
    generator = np.random.default_rng(7)
    agree = torch.zeros(run.num_slots)
    seen = torch.zeros(run.num_slots)
    kl_sum = 0.0
    error = torch.zeros(run.num_slots, len(run.adapter.config.tap_layers))
    copied = torch.zeros_like(error)
    for group in batches(held_out, 2500, np.random.default_rng(3)):
        batch = store.batch(group, run.target.device)
        blocks = make_blocks(
            batch, *tiled_anchors(batch, run.num_slots, generator), run.num_slots, run.target.architecture.group_size
        )
        prediction = predict(run, batch, blocks)
        keep = blocks.valid
        last = gather_rows(batch.last, blocks.positions)[keep]
        top = F.linear(last, run.target.head).argmax(-1)
        mine = run.head.token_ids[prediction.logits[keep].argmax(-1)]
        slot = torch.arange(run.num_slots).repeat(keep.shape[1] // run.num_slots).expand(keep.shape[0], -1)[keep.cpu()]
        agree.index_add_(0, slot, (top == mine).float().cpu())
        seen.index_add_(0, slot, torch.ones(len(slot)))
        teacher = run.head.logits(last).float().log_softmax(-1)
        student = prediction.logits[keep].float().log_softmax(-1)
        kl_sum += float(F.kl_div(student, teacher, log_target=True, reduction="sum"))
        truth = gather_rows(batch.taps, blocks.positions)[keep] / run.tap_scale
        before = (blocks.anchors - 1).clamp(min=0).repeat_interleave(run.num_slots, dim=1)
        copy = gather_rows(batch.taps, before)[keep] / run.tap_scale
        error.index_add_(0, slot, (prediction.states[keep] / run.tap_scale - truth).square().mean(-1).cpu())
        copied.index_add_(0, slot, (copy - truth).square().mean(-1).cpu())
    closed = (1 - error / copied.clamp(min=1e-12)).T.tolist()
    return AdapterReport((agree / seen.clamp(min=1)).tolist(), kl_sum / float(seen.sum()), closed)


def adapter_batches(
    run: AdapterRun, store: StateStore, sequences: Sequence[CorpusSequence], num_tokens: int, seed: int
) -> Iterator[tuple[Batch, Blocks]]:
    """Endless epochs of batches with freshly placed blocks."""
    generator = np.random.default_rng(seed)
    while True:
        for group in batches(sequences, num_tokens, generator):
            batch = store.batch(group, run.target.device)
            anchors = tiled_anchors(batch, run.num_slots, generator)
            yield batch, make_blocks(batch, *anchors, run.num_slots, run.target.architecture.group_size)


def save_adapter(adapter: Adapter, folder: Path) -> None:
    """Write the served form: bf16, published layer names."""
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in adapter_tensors(adapter).items()}
    write_folder(
        folder,
        {"config.json": json.dumps(adapter_config_to_json(adapter.config), indent=1), "model.safetensors": tensors},
    )


def new_adapter(
    target_folder: Path, target: Target, tap_layers: tuple[int, ...], layers_per_tap: tuple[int, ...]
) -> Adapter:
    """A fresh adapter started from the target's layers."""
    adapter = Adapter(AdapterConfig(target.architecture, tap_layers, layers_per_tap))
    start_from_target(adapter, target_folder)
    return adapter


def measure_tap_scale(store: StateStore, sequences: Sequence[CorpusSequence], device: torch.device) -> Tensor:
    """Root mean square of each tap [taps, 1] over the responses, the first positions (attention sinks) left out."""
    total, count = torch.zeros(1, device=device), 0
    for group in batches(sequences, 2500, np.random.default_rng(5)):
        batch = store.batch(group, device)
        for row, (prompt, length) in enumerate(zip(batch.prompt_lens, batch.lengths, strict=True)):
            total = total + batch.taps[row, prompt:length].square().mean(-1).sum(0)
            count += length - prompt
    return (total / max(count, 1)).sqrt()[:, None]
