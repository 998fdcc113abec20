"""Heads that draft from left to right, against a plain loop over published formulas; and what fits which method."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draft_worker.loading import MethodFiles, MethodSettings, load_method
from draft_worker.networks import DraftNetworks, load_networks
from draft_worker.refinement import opened, slot_rows
from draft_worker.round import fallback_block
from draft_worker.sequence import DraftSequence
from modeling.architecture import UnsupportedModel
from modeling.draft_model import read_draft_config, read_tensors
from protocol.worker_config import DraftMethodName
from tests.tiny.models import CPU, DraftKind, HeadKind, TinyModels, drafted_sequence, successors, true_rows

GAMMA = 4
TOKENS = [11, 58, 37, 60, 2, 99]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def open_sequence(models: TinyModels, folder: Path) -> DraftSequence:
    networks = load_networks(models.target(), folder, None, torch.float32, CPU, 256)
    return drafted_sequence(networks, true_rows(models.runner(), TOKENS), TOKENS)


def markov_drafts(networks: DraftNetworks, rows: Tensor, tensors: dict[str, Tensor]) -> list[int]:
    drafts: list[int] = []
    for row in rows:
        previous = [TOKENS[-1], *drafts][-1]
        bias = tensors["markov_head.markov_w2.weight"] @ tensors["markov_head.markov_w1.weight"][previous]
        drafts.append(int((networks.head.logits(row[None])[0] + bias).argmax()))
    return drafts


def gru_drafts(networks: DraftNetworks, rows: Tensor, tensors: dict[str, Tensor]) -> list[int]:
    input_gates, state_gates = tensors["prefix_gru.weight_ih_l0"], tensors["prefix_gru.weight_hh_l0"]
    gru = torch.nn.GRUCell(input_gates.shape[1], state_gates.shape[1], bias=False).requires_grad_(False)
    gru.weight_ih.copy_(input_gates)
    gru.weight_hh.copy_(state_gates)
    state, drafts = torch.zeros(1, state_gates.shape[1]), list[int]()
    for index, row in enumerate(rows):
        previous = [TOKENS[-1], *drafts][-1]
        state = gru(networks.embedding[previous][None], state)
        logits = networks.head.logits(row[None])[0]
        if index > 0:  # the first draft is the backbone's own
            hidden = F.silu(tensors["embed_proj.0.weight"] @ torch.cat((row, state[0])))
            logits = logits + tensors["embed_proj.2.weight"] @ hidden
        drafts.append(int(logits.argmax()))
    return drafts


@pytest.mark.parametrize("backbone", ["shifted_bidirectional", "bidirectional", "causal_mask"])
@pytest.mark.parametrize("kind", ["markov", "gru"])
@torch.inference_mode()
def test_a_block_is_what_the_plain_loop_gives(models: TinyModels, kind: HeadKind, backbone: DraftKind) -> None:
    folder = models.head(kind, backbone)
    sequence = open_sequence(models, folder)
    rows = slot_rows(sequence, opened(sequence, [-1], [TOKENS[-1]], GAMMA, generator()))[0]
    assert rows.shape[0] == GAMMA
    loop = markov_drafts if kind == "markov" else gru_drafts
    expected = loop(sequence.networks, rows, read_tensors(folder / "model.safetensors"))
    block = fallback_block(sequence, GAMMA, generator())
    assert list(block.token_ids) == expected
    assert all(0.0 < confidence <= 1.0 for confidence in block.confidences)


def test_a_markov_head_that_knows_the_rule_makes_up_for_the_masks(models: TinyModels) -> None:
    rule = successors(TOKENS[-1], GAMMA)
    backbone = fallback_block(open_sequence(models, models.draft("shifted_bidirectional")), GAMMA, generator())
    corrected = fallback_block(open_sequence(models, models.head("markov")), GAMMA, generator())
    assert list(corrected.token_ids) == rule
    assert backbone.token_ids[0] == rule[0] and list(backbone.token_ids) != rule


def test_a_head_brings_its_backbones_config(models: TinyModels) -> None:
    assert read_draft_config(models.head("gru")) == read_draft_config(models.draft("shifted_bidirectional"))


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("dflash", "causal_mask", "causal_head is True; dflash drafts a bidirectional block"),
        ("jetspec", "bidirectional", "causal_head is False"),
        ("dflash", "random", "dflash_config.inputs is 'tokens'; method dflash needs 'mask'"),
        ("jetspec", "trained", "method jetspec needs 'mask'"),
        ("dspark", "bidirectional", "the head is none; method dspark needs a Markov head"),
        ("domino", "markov", "the head is a Markov head; method domino needs a GRU head"),
        ("dspark", "gru", "the head is a GRU head; method dspark needs a Markov head"),
        ("dflash", "markov", "the head is a Markov head; method dflash needs none"),
        ("jetspec++", "gru", "the head is a GRU head; method jetspec"),
    ],
)
def test_weights_of_another_method_are_refused(
    models: TinyModels, name: DraftMethodName, kind: DraftKind | HeadKind, message: str
) -> None:
    folder = models.head(kind) if kind == "markov" or kind == "gru" else models.draft(kind)
    with pytest.raises(UnsupportedModel, match=message) as caught:
        load_method(name, MethodFiles(models.target(), folder), MethodSettings(GAMMA, 128, 1), torch.float32, CPU)
    assert str(folder) in str(caught.value)


def test_a_draft_model_is_no_drafter_of_ssd(models: TinyModels) -> None:
    with pytest.raises(UnsupportedModel, match=r"lacks the tensor"):
        load_method(
            "ssd",
            MethodFiles(models.target(), models.draft("trained")),
            MethodSettings(GAMMA, 128, 1),
            torch.float32,
            CPU,
        )
