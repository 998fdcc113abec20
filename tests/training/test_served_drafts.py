"""What a training examines is what the drafter drafts: the served form of every draft model, loaded by its method."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from draft_worker.foresight import foresee
from draft_worker.loading import MethodFiles, MethodSettings, load_method
from draft_worker.methods import OpenedSequence
from draft_worker.networks import load_networks
from draft_worker.refinement import begin
from draft_worker.sequence import DraftSequence, new_memory
from modeling.adapter import load_adapter
from modeling.draft_model import Slots
from modeling.heads import GruConfig, HeadConfig, MarkovConfig, SlotCorrector
from modeling.layers import RotaryTable
from modeling.target import Target, TargetRunner
from modeling.vocabulary import DraftHead
from protocol.worker_config import DraftMethodName
from tests.tiny.models import VOCAB_SIZE, TinyModels, make_draft_model, true_rows
from tests.training.texts import CPU, States
from training.baselines import LabelRule, taught_blocks
from training.blocks import ForeseenRows, make_blocks
from training.corpus import Batch
from training.draft import DraftRun, block_hidden, noised_inputs, save_draft
from training.foreseen import predicted_states
from training.train_head import HeadRun, new_head, save_head

KEPT = torch.arange(3, VOCAB_SIZE)
NUM_DRAFTS = 4
HEADS: dict[DraftMethodName, HeadConfig] = {"dspark": MarkovConfig(6), "domino": GruConfig(10, 8)}


def make_run(target: Target, slots: Slots, causal: bool) -> DraftRun:
    """Networks in the numbers that are served: bf16 rounded, computed in fp32."""
    model = make_draft_model("bidirectional", target.architecture)
    num_slots = NUM_DRAFTS if slots == "shifted" else NUM_DRAFTS + 1
    model.config = replace(model.config, slots=slots, causal=causal, block_size=num_slots)
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    rotary = RotaryTable(model.config.architecture, 64, torch.float32, CPU)
    return DraftRun(model.requires_grad_(False), target, DraftHead(target.head, KEPT), rotary, num_slots, 1, "noise")


def make_corrector(run: DraftRun, name: DraftMethodName) -> SlotCorrector:
    torch.manual_seed(5)
    head = new_head(HEADS[name], KEPT.numel(), run.target.architecture.hidden_size).requires_grad_(False)
    for parameter in head.parameters():
        parameter.data.copy_(torch.randn_like(parameter).bfloat16())
    return SlotCorrector(head, run.head, run.target.embedding)


def examined_drafts(run: DraftRun, corrector: SlotCorrector | None, batch: Batch, anchor: int) -> list[int]:
    """Drafts of the block at an anchor by the training's own pass; a head reads the drafts before each slot."""
    blocks = make_blocks(
        batch, torch.tensor([[anchor]]), torch.tensor([[True]]), run.num_slots, 2, causal=run.model.config.causal
    )
    hidden = taught_blocks(run, batch, blocks, LabelRule("corpus", 1.0)).hidden
    logits = run.head.logits(hidden)
    if corrector is None:
        return [int(token) for token in run.head.token_ids[logits[0].argmax(-1)]]
    tokens = [int(batch.token_ids[0, anchor])]
    for index in range(NUM_DRAFTS):
        filler = [0] * (NUM_DRAFTS - len(tokens))
        corrected = corrector.correct_all(logits, hidden, torch.tensor([tokens[:NUM_DRAFTS] + filler]))
        tokens.append(int(run.head.token_ids[corrected[0, index].argmax()]))
    return tokens[1:]


@pytest.mark.parametrize("slots", get_args(Slots))
@pytest.mark.parametrize(
    ("name", "is_alone"),
    [("dflash", False), ("jetspec", False), ("dspark", False), ("dspark", True), ("domino", False), ("domino", True)],
)
def test_a_loaded_method_drafts_what_was_examined(
    states: States,
    target: Target,
    target_folder: Path,
    target_runner: TargetRunner,
    tmp_path: Path,
    slots: Slots,
    name: DraftMethodName,
    is_alone: bool,
) -> None:
    """`is_alone`: the head's folder names its backbone instead of holding it."""
    run = make_run(target, slots, causal=name == "jetspec")
    folder, corrector = tmp_path / name, None
    save_draft(run.model, KEPT, tmp_path / "backbone")
    if name in HEADS:
        corrector = make_corrector(run, name)
        save_head(HeadRun(run, corrector, corrector.head), KEPT, folder, tmp_path / "backbone" if is_alone else None)
    else:
        folder = tmp_path / "backbone"
    settings = MethodSettings(num_draft_tokens=NUM_DRAFTS, num_positions=64)
    method = load_method(name, MethodFiles(target_folder, folder), settings, torch.float32, CPU)
    drafted: list[int] = []
    for index in range(4):
        text = states.corpus.sequences[index]
        batch = states.store.batch([text], CPU)
        rows = true_rows(target_runner, text.token_ids.tolist())
        batch = replace(batch, taps=rows.taps[None])
        for anchor in (5, 8):
            sequence = method.open(OpenedSequence(1, 0, text.token_ids[: anchor + 1].tolist()))
            sequence.install(rows.taps[:anchor], rows.decoder_kv[:anchor, :0])
            block = sequence.fallback()
            assert list(block.token_ids) == examined_drafts(run, corrector, batch, anchor)
            drafted += block.token_ids
    assert len(set(drafted)) > 5, "the drafts differ, so that agreement means something"


def test_drafts_from_predicted_states_are_those_that_were_trained(
    states: States,
    target: Target,
    target_folder: Path,
    target_runner: TargetRunner,
    models_folder: TinyModels,
    tmp_path: Path,
) -> None:
    """The block for outcome (k, a): true states up to the block under verification, then k + 1 of the adapter's."""
    run = make_run(target, "shifted", causal=True)
    save_draft(run.model, KEPT, tmp_path / "draft")
    adapter = load_adapter(models_folder.adapter(), torch.float32, CPU)
    networks = load_networks(target_folder, tmp_path / "draft", models_folder.adapter(), torch.float32, CPU, 64)
    memory = new_memory(networks, 64, NUM_DRAFTS, 1)
    from_predicted: list[list[int]] = []
    from_true: list[list[int]] = []
    for index in range(4):
        text = states.corpus.sequences[index]
        tokens, start = text.token_ids.tolist(), 6
        rows = true_rows(target_runner, tokens)
        batch = replace(states.store.batch([text], CPU), taps=rows.taps[None])
        tiles = make_blocks(batch, torch.tensor([[start]]), torch.tensor([[True]]), NUM_DRAFTS + 1, 2)
        taps = predicted_states(adapter, target, run.rotary, batch, tiles)
        for num_accepted in (0, 1, 3):
            sequence = DraftSequence(networks, memory, tokens[: start + 1])
            sequence.install(rows.taps[:start], rows.decoder_kv[:start])
            foresee(sequence, tokens[start : start + NUM_DRAFTS + 1], with_refresh=False)
            anchor = start + num_accepted + 1
            served = begin(sequence, [num_accepted], [tokens[anchor]], NUM_DRAFTS, torch.Generator())
            foreseen = ForeseenRows(taps, tiles.positions, tiles.valid, torch.tensor([[start]]))
            for rows_read, drafted in ((foreseen, from_predicted), (None, from_true)):
                blocks = make_blocks(
                    batch, torch.tensor([[anchor]]), torch.tensor([[True]]), NUM_DRAFTS, 2, foreseen=rows_read
                )
                inputs = noised_inputs(run, batch, blocks, torch.zeros(1, 1, dtype=torch.long), np.random.default_rng())
                logits = run.head.logits(block_hidden(run, batch, blocks, inputs))
                drafted.append(run.head.token_ids[logits[0].argmax(-1)].tolist())
            assert served.token_ids[0].tolist() == from_predicted[-1]
    assert from_predicted != from_true, "it matters whose states a block reads"
