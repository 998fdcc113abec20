"""What a training examines is what the drafter drafts: the served form of every draft model, loaded by its method."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from draft_worker.loading import MethodFiles, MethodSettings, load_method
from draft_worker.methods import OpenedSequence
from modeling.draft_model import Slots
from modeling.heads import GruConfig, HeadConfig, MarkovConfig, SlotCorrector
from modeling.layers import RotaryTable
from modeling.target import Target, TargetRunner
from modeling.vocabulary import DraftHead
from protocol.worker_config import DraftMethodName
from tests.tiny.models import VOCAB_SIZE, make_draft_model, true_rows
from tests.training.texts import CPU, States
from training.baselines import LabelRule, taught_blocks
from training.blocks import make_blocks
from training.corpus import Batch
from training.draft import DraftRun, save_draft
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
