"""Training of SSD's drafter: a small causal language model that learns the target's distribution of every next token.

It reads token ids only. Embedding and head are the target's and stay as they are. It does not know rounds.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling.architecture import Architecture
from modeling.autoregressive import CausalStack, shared_config_to_json, stack_tensors
from modeling.layers import DecoderLayer, RotaryTable, grouped_mask, load_layer
from modeling.target import Target, read_checkpoint
from modeling.vocabulary import DraftHead
from training.blocks import gather_rows, random_anchors
from training.corpus import Batch, CorpusSequence, StateStore, batches, full_layer
from training.draft import DraftReport
from training.loop import write_folder
from training.losses import forward_kl

START_NORM_SCALE = 0.2
"""The target's norm makes sharp logits of states that all its layers worked on. A few layers start out wrong: with a
fifth of it they start unsure instead, at a KL of 5.7 instead of 15 on the demo target (its first two layers)."""


@dataclass(frozen=True)
class AutoregressiveRun:
    """Everything a forward pass needs. `num_drafts`: tokens a block is examined for."""

    stack: CausalStack
    target: Target
    head: DraftHead
    rotary: RotaryTable
    num_drafts: int


def new_stack(target: Architecture, num_layers: int) -> CausalStack:
    """Layers of the target's shape, not trained."""
    shape = replace(target, num_layers=num_layers)
    return CausalStack(
        shape, (DecoderLayer(shape) for _ in range(num_layers)), nn.Parameter(torch.ones(shape.hidden_size))
    )


def start_from_target(
    stack: CausalStack, folder: Path, sources: Sequence[int], norm_scale: float = START_NORM_SCALE
) -> None:
    """Copy target layers, and the final norm times `norm_scale`."""
    tensors = {name.removeprefix("model."): tensor.float() for name, tensor in read_checkpoint(folder).items()}
    for layer, source in zip(stack.decoder_layers(), sources, strict=True):
        load_layer(layer, tensors, f"layers.{source}.")
    stack.norm.data.copy_(norm_scale * tensors["norm.weight"])


def text_hidden(run: AutoregressiveRun, batch: Batch) -> Tensor:
    """Normed rows [b, L, hidden] of whole texts."""
    length = batch.token_ids.shape[1]
    shape = run.stack.architecture
    causal = torch.ones(length, length, dtype=torch.bool, device=batch.token_ids.device).tril()
    hidden = F.embedding(batch.token_ids, run.target.embedding)
    mask, rotary = grouped_mask(causal, shape.group_size, hidden.dtype), run.rotary.span(0, length)
    for layer in run.stack.decoder_layers():
        hidden = full_layer(layer, hidden, rotary, mask)
    return run.stack.final(hidden)


def autoregressive_loss(run: AutoregressiveRun, batch: Batch) -> Tensor:
    """Forward KL from the target's distribution, mean over the rows that predict a response's tokens."""
    row = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)[None, :]
    prompts = torch.tensor(batch.prompt_lens, device=row.device)[:, None]
    lengths = torch.tensor(batch.lengths, device=row.device)[:, None]
    keep = (row >= prompts - 1) & (row < lengths - 1)
    teacher = run.head.logits(batch.last[keep])
    return forward_kl(run.head.logits(text_hidden(run, batch)[keep]), teacher)


@torch.no_grad()
def evaluate_autoregressive(
    run: AutoregressiveRun, store: StateStore, held_out: Sequence[CorpusSequence]
) -> DraftReport:
    """Draft `num_drafts` tokens at random anchors of greedy responses, as draft models are examined.

    Up to the first wrong draft a drafter reads the true text, and what follows it does not count: one pass over the
    text says how far each block goes.
    """
    generator = np.random.default_rng(7)
    greedy = [sequence for sequence in held_out if sequence.temperature == 0] or held_out
    committed, count = 0.0, 0
    for group in batches(greedy, 2500, np.random.default_rng(3)):
        batch = store.batch(group, run.target.device)
        anchors, valid = random_anchors(batch, 24, generator)
        next_tokens = run.head.token_ids[run.head.logits(text_hidden(run, batch)).argmax(-1)]
        before = anchors[:, :, None] + torch.arange(run.num_drafts, device=anchors.device)
        lengths = torch.tensor(batch.lengths, device=anchors.device)[:, None, None]
        is_whole = valid & (before + 1 < lengths).all(-1)
        last = batch.token_ids.shape[1] - 1
        drafts = gather_rows(next_tokens, before.clamp(max=last).flatten(1))
        wanted = gather_rows(batch.token_ids, (before + 1).clamp(max=last).flatten(1))
        right = (drafts == wanted).view_as(before).long().cumprod(-1).sum(-1)
        committed += float((1 + right)[is_whole].sum())
        count += int(is_whole.sum())
    return DraftReport([committed / max(count, 1)])


def text_batches(
    store: StateStore, sequences: Sequence[CorpusSequence], num_tokens: int, seed: int, device: torch.device
) -> Iterator[tuple[Batch]]:
    """Endless epochs of batches."""
    generator = np.random.default_rng(seed)
    while True:
        for group in batches(sequences, num_tokens, generator):
            yield (store.batch(group, device),)


def save_autoregressive(stack: CausalStack, token_ids: Tensor | None, folder: Path) -> None:
    """Write the served form: layers and norm in bf16, embedding and head named as the target's."""
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in stack_tensors(stack).items()}
    if token_ids is not None:
        tensors["d2t"] = token_ids.cpu().long() - torch.arange(token_ids.numel())
    config = json.dumps(shared_config_to_json(stack.architecture), indent=1)
    write_folder(folder, {"config.json": config, "model.safetensors": tensors})
