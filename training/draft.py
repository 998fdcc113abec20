"""Training of the draft model (equation 9): forward KL from the target's distribution at every slot.

A block's inputs are the anchor, m true tokens, then noise drawn from the sequence's own tokens before the anchor; m is
drawn per block from a schedule. Blocks of several anchors share one packed pass.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.draft_model import DraftConfig, DraftModel, draft_config_to_json, draft_model_tensors
from modeling.kernels.packed import unpacked
from modeling.layers import RotaryTable, block_layer, load_layer
from modeling.target import Target, read_checkpoint
from modeling.vocabulary import DraftHead
from training.blocks import Blocks, gather_rows, make_blocks, random_anchors
from training.corpus import Batch, CorpusSequence, StateStore, batches
from training.foreseen import StatePredictor, foresee
from training.loop import write_folder
from training.losses import forward_kl, reach_weights

PrefixSchedule = Literal["half_zero", "geometric", "noise"]
SlotWeights = Literal["uniform", "reach"]
REACH_FLOOR = 0.1


@dataclass(frozen=True)
class DraftRun:
    """Everything a forward pass needs. `predictor`: blocks read states as it predicts them; None: true ones."""

    model: DraftModel
    target: Target
    head: DraftHead
    rotary: RotaryTable
    num_slots: int
    num_anchors: int
    schedule: PrefixSchedule
    slot_weights: SlotWeights = "uniform"
    predictor: StatePredictor | None = None


def clean_lengths(schedule: PrefixSchedule, count: int, num_slots: int, generator: np.random.Generator) -> np.ndarray:
    """Clean-prefix lengths m in [0, num_slots-1] of `count` blocks: tokens after the anchor that are true.

    half_zero: half the blocks all noise, the rest uniform. geometric: Pr(m) ~ 0.8^m. noise: always 0, the control.
    """
    if schedule == "noise":
        return np.zeros(count, dtype=np.int64)
    if schedule == "geometric":
        weights = 0.8 ** np.arange(num_slots)
        return generator.choice(num_slots, size=count, p=weights / weights.sum())
    uniform = generator.integers(1, num_slots, size=count) if num_slots > 1 else np.zeros(count, dtype=np.int64)
    return np.where(generator.random(count) < 0.5, 0, uniform)


def noised_inputs(run: DraftRun, batch: Batch, blocks: Blocks, clean: Tensor, generator: np.random.Generator) -> Tensor:
    """Block inputs [b, rows]: true tokens up to slot m, then noise from the tokens before the anchor, or masks."""
    true = torch.gather(batch.token_ids, 1, blocks.positions)
    num_slots = blocks.num_slots
    anchor = blocks.anchors.repeat_interleave(num_slots, dim=1)
    mask_token_id = run.model.config.mask_token_id
    if run.model.config.inputs == "mask":
        assert mask_token_id is not None, "a config with mask inputs names the mask"
        noise = torch.full_like(true, mask_token_id)
    else:
        draws = torch.from_numpy(generator.random(anchor.shape)).to(anchor.device)
        noise = torch.gather(batch.token_ids, 1, (draws * anchor).long().clamp(max=batch.token_ids.shape[1] - 1))
    slot = torch.arange(num_slots, device=anchor.device).repeat(blocks.anchors.shape[1])
    keep = slot[None, :] <= clean.repeat_interleave(num_slots, dim=1)
    return torch.where(keep, true, noise)


def block_hidden(run: DraftRun, batch: Batch, blocks: Blocks, inputs: Tensor) -> Tensor:
    """Normed rows [b, rows, hidden] of the draft model over all blocks."""
    context_rotary = run.rotary.span(0, batch.token_ids.shape[1])
    feature = run.model.feature(batch.taps)
    if blocks.foreseen is not None:
        b, length, _ = feature.shape
        true = torch.arange(length, device=feature.device).expand(b, -1)
        context_rotary = run.rotary.at(torch.cat((true, blocks.foreseen.positions), dim=1))
        feature = torch.cat((feature, run.model.feature(blocks.foreseen.taps)), dim=1)
    hidden = F.embedding(inputs, run.target.embedding)
    rotary = run.rotary.at(blocks.positions)
    for layer in run.model.decoder_layers():
        hidden = block_layer(layer, hidden, rotary, run.model.context(layer, feature, context_rotary), blocks.mask)
    return run.model.final(hidden)


def draft_loss(run: DraftRun, batch: Batch, blocks: Blocks, generator: np.random.Generator) -> Tensor:
    """Forward KL over the draft vocabulary, mean over the slots whose teacher row exists, weighted as the run says."""
    b, n = blocks.anchors.shape
    clean = (
        torch.from_numpy(clean_lengths(run.schedule, b * n, run.num_slots, generator)).view(b, n).to(batch.taps.device)
    )
    hidden = block_hidden(run, batch, blocks, noised_inputs(run, batch, blocks, clean, generator))
    slots = draft_slots(run.model.config, batch, blocks)
    keep = blocks.valid.view(b, n, -1)[:, :, slots.first :]
    teacher = run.head.logits(gather_rows(batch.last, slots.before.flatten(1))[keep.flatten(1)])
    logits = run.head.logits(hidden.view(b, n, run.num_slots, -1)[:, :, slots.first :][keep])
    if run.slot_weights == "uniform":
        return forward_kl(logits, teacher)
    reach = reach_weights(text_probability(run, batch, slots, keep, logits), clean, REACH_FLOOR)
    weights = reach.where(keep, 0)
    # Every block counts the same: one with a long true prefix reaches more slots, and would drown those without.
    return forward_kl(logits, teacher, (weights / weights.sum(-1, keepdim=True).clamp(min=1e-9))[keep])


@dataclass(frozen=True)
class DraftSlots:
    """The slots of blocks that draft, from slot `first` on: D in each.

    before [b, N, D]: position of the token before each draft, whose row is the teacher. has_token [b, N, D]: the block
    is no padding and the text goes on to the token that the draft stands for.
    """

    first: int
    before: Tensor
    has_token: Tensor

    def text(self, batch: Batch) -> Tensor:
        """The text's tokens [b, N, D] that the drafts stand for; any token where the text does not go on."""
        after = (self.before + 1).clamp(max=batch.token_ids.shape[1] - 1)
        return gather_rows(batch.token_ids, after.flatten(1)).view_as(after)


def draft_slots(config: DraftConfig, batch: Batch, blocks: Blocks) -> DraftSlots:
    """Shifted, every slot drafts; in place, the anchor's has no use, and slot i is taught by the row before it."""
    first = 0 if config.slots == "shifted" else 1
    device = blocks.anchors.device
    before = blocks.anchors[:, :, None] + torch.arange(blocks.num_slots - first, device=device)
    lengths = torch.tensor(batch.lengths, device=device)[:, None, None]
    is_block = blocks.valid.view(*blocks.anchors.shape, -1)[:, :, :1]
    return DraftSlots(first, before.clamp(max=batch.token_ids.shape[1] - 1), (before + 1 < lengths) & is_block)


@torch.no_grad()
def text_probability(run: DraftRun, batch: Batch, slots: DraftSlots, keep: Tensor, logits: Tensor) -> Tensor:
    """Probability [b, N, D] that the drafter gives to the text's token after each slot; logits [rows, W] of the slots
    where `keep` [b, N, D]. 0 elsewhere, and for tokens that the draft vocabulary lacks."""
    columns = run.head.columns[slots.text(batch)][keep]
    probability = F.cross_entropy(logits.float(), columns.clamp(min=0), reduction="none").neg().exp()
    result = torch.zeros(keep.shape, device=logits.device)
    result[keep] = probability.where(columns >= 0, 0)
    return result


@dataclass(frozen=True)
class DraftReport:
    """Tokens a round on held-out greedy text after J = 0, 1, 2, 3 passes, bonus included.

    tau: from true states. foreseen: where the last states before an anchor are predicted, if the run has a predictor.
    """

    tau: list[float]
    foreseen: list[float] | None = None

    def line(self) -> str:
        line = "tau " + self._by_passes(self.tau)
        return line if self.foreseen is None else f"{line}; from predicted states {self._by_passes(self.foreseen)}"

    @staticmethod
    def _by_passes(tau: Sequence[float]) -> str:
        return " ".join(f"J{passes} {value:.3f}" for passes, value in enumerate(tau))


@dataclass(frozen=True)
class HeldOutBlocks:
    """Blocks at random anchors of held-out text, and the tokens [b, N, D] that their drafts should be.

    is_whole [b, N]: the text goes on to the last draft; only such blocks count.
    """

    batch: Batch
    blocks: Blocks
    slots: DraftSlots
    wanted: Tensor
    is_whole: Tensor

    def num_committed(self, drafts: Tensor) -> float:
        """Tokens that rounds with these drafts [b, N, D] commit, bonus included, summed over whole blocks."""
        right = (drafts == self.wanted).long().cumprod(-1).sum(-1)
        return float((1 + right)[self.is_whole].sum())


def held_out_blocks(
    config: DraftConfig,
    num_slots: int,
    store: StateStore,
    held_out: Sequence[CorpusSequence],
    device: torch.device,
    predictor: StatePredictor | None = None,
) -> Iterator[HeldOutBlocks]:
    """The same blocks every time, of greedy responses where there are some; with a predictor the last states before
    an anchor are predicted."""
    generator = np.random.default_rng(7)
    greedy = [sequence for sequence in held_out if sequence.temperature == 0] or held_out
    for group in batches(greedy, 2500, np.random.default_rng(3)):
        batch = store.batch(group, device)
        anchors, valid = random_anchors(batch, 24, generator)
        foreseen = None
        if predictor is not None:
            foreseen = foresee(predictor, batch, anchors, np.random.default_rng(9), share=1.0)
        group_size = config.architecture.group_size
        blocks = make_blocks(batch, anchors, valid, num_slots, group_size, causal=config.causal, foreseen=foreseen)
        slots = draft_slots(config, batch, blocks)
        yield HeldOutBlocks(batch, blocks, slots, slots.text(batch), slots.has_token.all(-1))


@torch.no_grad()
def evaluate_draft(
    run: DraftRun, store: StateStore, held_out: Sequence[CorpusSequence], max_passes: int = 3
) -> DraftReport:
    """Draft at random anchors of greedy responses and count how far each draft follows the target's text."""
    tau = _held_out_tau(run, store, held_out, max_passes, None)
    if run.predictor is None:
        return DraftReport(tau)
    return DraftReport(tau, _held_out_tau(run, store, held_out, max_passes, run.predictor))


def _held_out_tau(
    run: DraftRun,
    store: StateStore,
    held_out: Sequence[CorpusSequence],
    max_passes: int,
    predictor: StatePredictor | None,
) -> list[float]:
    generator = np.random.default_rng(7)
    committed = [0.0] * (max_passes + 1)
    count = 0
    for case in held_out_blocks(run.model.config, run.num_slots, store, held_out, run.target.device, predictor):
        b, n, _ = case.wanted.shape
        zero = torch.zeros(b, n, dtype=torch.long, device=run.target.device)
        inputs = noised_inputs(run, case.batch, case.blocks, zero, generator).view(b, n, run.num_slots)
        for passes in range(max_passes + 1):
            hidden = block_hidden(run, case.batch, case.blocks, inputs.view(b, -1))
            logits = run.head.logits(hidden.view(b, n, run.num_slots, -1)[:, :, case.slots.first :])
            drafts = run.head.token_ids[logits.argmax(-1)]
            committed[passes] += case.num_committed(drafts)
            inputs = torch.cat((inputs[:, :, :1], drafts[:, :, : run.num_slots - 1]), dim=-1)
        count += int(case.is_whole.sum())
    return [total / max(count, 1) for total in committed]


def draft_batches(
    run: DraftRun, store: StateStore, sequences: Sequence[CorpusSequence], num_tokens: int, seed: int
) -> Iterator[tuple[Batch, Blocks]]:
    """Endless epochs of batches with fresh random anchors."""
    generator = np.random.default_rng(seed)
    while True:
        for group in batches(sequences, num_tokens, generator):
            batch = store.batch(group, run.target.device)
            anchors, valid = random_anchors(batch, run.num_anchors, generator)
            shape, slots = run.model.config, run.num_slots
            group_size = shape.architecture.group_size
            foreseen = None if run.predictor is None else foresee(run.predictor, batch, anchors, generator)
            blocks = make_blocks(batch, anchors, valid, slots, group_size, causal=shape.causal, foreseen=foreseen)
            yield batch, blocks


def start_from_target(model: DraftModel, folder: Path, sources: Sequence[int]) -> None:
    """Copy target layers into the draft model, and let fc pass the deepest tap through.

    Context features skip a layer's input norm, so the target's norm weights are folded into q, k, v (and gate, up).
    """
    tensors = {name.removeprefix("model."): tensor.float() for name, tensor in read_checkpoint(folder).items()}
    kept = model.config.architecture
    for layer, source in zip(model.decoder_layers(), sources, strict=True):
        prefix = f"layers.{source}."
        filled = dict(tensors)
        for name in ("q", "k", "v"):
            key = f"{prefix}self_attn.{name}_proj.weight"
            filled[key] = tensors[key] * tensors[f"{prefix}input_layernorm.weight"]
        for name in ("gate", "up"):
            key = f"{prefix}mlp.{name}_proj.weight"
            filled[key] = tensors[key] * tensors[f"{prefix}post_attention_layernorm.weight"]
        filled[f"{prefix}input_layernorm.weight"] = torch.ones(kept.hidden_size)
        filled[f"{prefix}post_attention_layernorm.weight"] = torch.ones(kept.hidden_size)
        for name in ("q_norm", "k_norm"):
            filled.setdefault(f"{prefix}self_attn.{name}.weight", torch.ones(kept.head_dim))
        load_layer(layer, filled, prefix)
    fc = unpacked(model.fc).data
    fc.zero_()
    fc[:, -kept.hidden_size :] = torch.eye(kept.hidden_size)


def save_draft(model: DraftModel, token_ids: Tensor | None, folder: Path) -> None:
    """Write the served form: published layout, bf16; a trimmed vocabulary as `d2t` offsets."""
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in draft_model_tensors(model).items()}
    if token_ids is not None:
        tensors["d2t"] = token_ids.cpu().long() - torch.arange(token_ids.numel())
    write_folder(
        folder, {"config.json": json.dumps(draft_config_to_json(model.config), indent=1), "model.safetensors": tensors}
    )
