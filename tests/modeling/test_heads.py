"""Correction heads: against plain references, one pass against slot by slot, checkpoints, and errors that name the
fault."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modeling.architecture import UnsupportedModel
from modeling.draft_model import (
    DraftConfig,
    DraftModel,
    draft_config_to_json,
    draft_model_tensors,
    head_checkpoint_config,
    load_draft_model,
)
from modeling.heads import (
    CorrectionHead,
    GruConfig,
    GruHead,
    HeadConfig,
    MarkovConfig,
    MarkovHead,
    SlotCorrector,
    head_config_from_json,
    with_head,
)
from modeling.kernels.int8 import has_int8
from modeling.vocabulary import DraftHead
from tests.modeling.tiny_models import VOCAB_SIZE, relative_error, tiny_architecture

CPU = torch.device("cpu")
HIDDEN = 72
KEPT = torch.arange(0, VOCAB_SIZE, 3)
DRAFT = DraftConfig(
    tiny_architecture(), tap_layers=(1, 3), block_size=6, num_target_layers=9, slots="shifted", mask_token_id=7
)
MARKOV, GRU = MarkovConfig(rank=5), GruConfig(state_size=12, bottleneck=6)


def randomised(head: CorrectionHead) -> CorrectionHead:
    generator = torch.Generator().manual_seed(3)
    for parameter in head.parameters():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return head.requires_grad_(False)


def make_head(config: HeadConfig, num_columns: int = len(KEPT), num_embeddings: int | None = None) -> CorrectionHead:
    if isinstance(config, MarkovConfig):
        return randomised(MarkovHead(config, num_columns, num_embeddings or num_columns + 1))
    return randomised(GruHead(config, num_columns, HIDDEN))


def corrector_of(head: CorrectionHead, token_ids: Tensor | None = KEPT) -> SlotCorrector:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)
    embedding = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)
    return SlotCorrector(head, DraftHead(weight, token_ids), embedding)


def block_inputs(rows: int = 4, drafts: int = 5, columns: int = len(KEPT)) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, backbone rows, and previous tokens, some of which the draft vocabulary lacks."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(rows, drafts, columns, generator=generator)
    hidden = torch.randn(rows, drafts, HIDDEN, generator=generator)
    return logits, hidden, torch.randint(VOCAB_SIZE, (rows, drafts), generator=generator)


def slot_by_slot(corrector: SlotCorrector, logits: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
    state = corrector.begin(logits.shape[0])
    out = []
    for index in range(logits.shape[1]):
        corrected = corrector.correct(index, logits[:, index], hidden[:, index], previous[:, index], state)
        state = corrected.state
        out.append(corrected.logits)
    return torch.stack(out, dim=1)


def test_markov_bias_is_a_low_rank_row_of_the_previous_token() -> None:
    head = make_head(MARKOV)
    assert isinstance(head, MarkovHead)
    logits, hidden, previous = block_inputs()
    corrected = corrector_of(head).correct_all(logits, hidden, previous)
    second = head.tensors()["markov_head.markov_w2.weight"]
    known = {int(token): column for column, token in enumerate(KEPT)}
    assert any(int(token) not in known for token in previous.flatten())
    for row in range(previous.shape[0]):
        for slot in range(previous.shape[1]):
            embedded = head.first[known.get(int(previous[row, slot]), len(KEPT))]
            torch.testing.assert_close(corrected[row, slot], logits[row, slot] + second @ embedded)


def test_a_markov_head_with_a_row_for_every_target_token_reads_ids() -> None:
    """Published heads with a trimmed vocabulary keep all previous tokens apart."""
    head = make_head(MARKOV, num_embeddings=VOCAB_SIZE)
    assert isinstance(head, MarkovHead)
    logits, hidden, previous = block_inputs()
    corrected = corrector_of(head).correct_all(logits, hidden, previous)
    expected = logits + head.first[previous] @ head.tensors()["markov_head.markov_w2.weight"].t()
    torch.testing.assert_close(corrected, expected)


def test_gru_head_is_torch_s_gru_and_a_bottleneck() -> None:
    head = make_head(GRU)
    corrector = corrector_of(head)
    logits, hidden, previous = block_inputs()
    tensors = head.tensors()
    reference = nn.GRU(HIDDEN, GRU.state_size, bias=False, batch_first=True)
    reference.weight_ih_l0.data = tensors["prefix_gru.weight_ih_l0"]
    reference.weight_hh_l0.data = tensors["prefix_gru.weight_hh_l0"]
    embedding = torch.nn.functional.embedding(previous, corrector._embedding)
    states, _ = reference(embedding)
    middle = torch.nn.functional.silu(torch.cat((hidden, states), dim=-1) @ tensors["embed_proj.0.weight"].t())
    expected = logits + middle @ tensors["embed_proj.2.weight"].t()
    corrected = corrector.correct_all(logits, hidden, previous)
    assert torch.equal(corrected[:, 0], logits[:, 0]), "the first draft keeps the backbone's logits"
    torch.testing.assert_close(corrected[:, 1:], expected[:, 1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [MARKOV, GRU, GruConfig(12, 6, num_uncorrected=0), GruConfig(12, 6, 2)])
@pytest.mark.parametrize("packed", [False, True])
def test_one_pass_equals_slot_by_slot(config: HeadConfig, packed: bool) -> None:
    head = make_head(config)
    inputs = block_inputs()
    whole = corrector_of(head).correct_all(*inputs)
    if packed:
        head.pack()
    torch.testing.assert_close(slot_by_slot(corrector_of(head), *inputs), whole, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(whole, inputs[0])


@pytest.mark.skipif(not has_int8(), reason="no VNNI or no C compiler on this machine")
@pytest.mark.parametrize("config", [MARKOV, GRU])
def test_a_quantised_head_stays_close(config: HeadConfig) -> None:
    inputs = block_inputs()
    plain, quantised = make_head(config), make_head(config)
    quantised.pack("int8")
    whole = corrector_of(plain).correct_all(*inputs) - inputs[0]
    assert relative_error(slot_by_slot(corrector_of(quantised), *inputs) - inputs[0], whole) < 0.03


@pytest.mark.parametrize("config", [MARKOV, GRU])
def test_a_new_head_changes_nothing_and_learns(config: HeadConfig) -> None:
    new = (
        MarkovHead(config, len(KEPT), len(KEPT) + 1)
        if isinstance(config, MarkovConfig)
        else GruHead(config, len(KEPT), HIDDEN)
    )
    logits, hidden, previous = block_inputs()
    corrected = corrector_of(new).correct_all(logits, hidden, previous)
    assert torch.equal(corrected, logits)
    corrected.square().sum().backward()
    last = list(new.parameters())[-1]
    assert last.grad is not None and last.grad.abs().sum() > 0


# --- on disk


def save_backbone(folder: Path, token_ids: Tensor | None = KEPT, head: CorrectionHead | None = None) -> DraftModel:
    torch.manual_seed(0)
    model = DraftModel(DRAFT)
    config, tensors = draft_config_to_json(DRAFT), draft_model_tensors(model)
    if head is not None:
        config, tensors = with_head(config, head.config), tensors | head.tensors()
    if token_ids is not None:
        tensors["d2t"] = token_ids - torch.arange(token_ids.numel())
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return model


def save_head(folder: Path, head: CorrectionHead, backbone: str = "../dflash", **extra: Tensor) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(head_checkpoint_config(head.config, backbone)))
    save_file(head.tensors() | extra, folder / "model.safetensors")


@pytest.mark.parametrize("config", [MARKOV, GRU])
def test_a_head_is_loaded_with_the_backbone_it_names(tmp_path: Path, config: HeadConfig) -> None:
    model = save_backbone(tmp_path / "dflash")
    head = make_head(config)
    save_head(tmp_path / "head", head, d2t=KEPT - torch.arange(len(KEPT)))
    loaded = load_draft_model(tmp_path / "head", torch.float32, CPU)
    assert loaded.head is not None
    assert loaded.head.config == config
    assert loaded.model.config == DRAFT
    assert loaded.token_ids is not None and torch.equal(loaded.token_ids, KEPT)
    assert torch.equal(loaded.model.fc.data, model.fc.data)  # type: ignore[union-attr]
    for name, tensor in loaded.head.tensors().items():
        assert torch.equal(tensor, head.tensors()[name]), name
    assert not any(parameter.requires_grad for parameter in loaded.head.parameters())
    assert load_draft_model(tmp_path / "dflash", torch.float32, CPU).head is None


@pytest.mark.parametrize("config", [MARKOV, GRU])
def test_backbone_and_head_in_one_checkpoint(tmp_path: Path, config: HeadConfig) -> None:
    head = make_head(config)
    save_backbone(tmp_path / "whole", head=head)
    loaded = load_draft_model(tmp_path / "whole", torch.bfloat16, CPU)
    assert loaded.head is not None
    assert loaded.head.config == config
    assert {tensor.dtype for tensor in loaded.head.tensors().values()} == {torch.bfloat16}


def test_released_layouts_are_read(tmp_path: Path) -> None:
    """DSpark keeps its fields at the top level and is shifted; Domino says `shift_label`."""
    save_backbone(tmp_path / "dspark", None, make_head(MARKOV, VOCAB_SIZE, VOCAB_SIZE))
    config = json.loads((tmp_path / "dspark" / "config.json").read_text())
    extra = config.pop("dflash_config")
    config |= {"architectures": ["Qwen3DSparkModel"], "mask_token_id": 7, "target_layer_ids": extra["target_layer_ids"]}
    (tmp_path / "dspark" / "config.json").write_text(json.dumps(config))
    dspark = load_draft_model(tmp_path / "dspark", torch.float32, CPU)
    assert dspark.model.config.slots == "shifted"
    assert (dspark.model.config.causal, dspark.model.config.inputs) == (False, "mask")
    assert isinstance(dspark.head, MarkovHead)
    save_backbone(tmp_path / "domino", None, make_head(GRU, VOCAB_SIZE))
    config = json.loads((tmp_path / "domino" / "config.json").read_text())
    for name in ("slots", "inputs"):
        del config["dflash_config"][name]
    for shift, slots in ((True, "shifted"), (False, "in_place")):
        config["dflash_config"]["shift_label"] = shift
        (tmp_path / "domino" / "config.json").write_text(json.dumps(config))
        assert load_draft_model(tmp_path / "domino", torch.float32, CPU).model.config.slots == slots


def test_config_round_trip() -> None:
    for config in (MARKOV, GRU, GruConfig(3, 4, 0)):
        assert head_config_from_json(with_head({"dflash_config": {"slots": "shifted"}}, config)) == config
    assert head_config_from_json({"dflash_config": {}}) is None
    assert head_config_from_json({"markov_rank": 0}) is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"markov_rank": 4, "markov_head_type": "gated"}, "'gated' is not supported"),
        ({"markov_rank": "four"}, "markov_rank is 'four'"),
        ({"dflash_config": {"projector_type": "domino", "emb_dim": 4}}, "gru_hidden_dim is None"),
        ({"dflash_config": {"projector_type": "flare"}}, "'flare' is not supported"),
    ],
)
def test_faults_of_a_head_config_are_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        head_config_from_json(config)


@pytest.mark.parametrize(
    ("backbone", "named"),
    [
        ("../nowhere", "holds no draft model"),
        ("../head", "is itself only a head"),
        ("/etc", "not a folder relative to this one"),
        ("", "not a folder relative to this one"),
    ],
)
def test_faults_of_a_backbone_are_named(tmp_path: Path, backbone: str, named: str) -> None:
    save_head(tmp_path / "head", make_head(MARKOV), backbone)
    with pytest.raises(UnsupportedModel, match=named):
        load_draft_model(tmp_path / "head", torch.float32, CPU)


def test_faults_of_a_head_s_weights_are_named(tmp_path: Path) -> None:
    save_backbone(tmp_path / "dflash")
    save_head(tmp_path / "head", make_head(GRU))
    path = tmp_path / "head" / "model.safetensors"
    tensors = load_file(path)
    save_file({name: t for name, t in tensors.items() if "weight_hh" not in name}, path)
    with pytest.raises(UnsupportedModel, match=r"lacks 'prefix_gru\.weight_hh_l0'"):
        load_draft_model(tmp_path / "head", torch.float32, CPU)
    save_file(tensors | {"embed_proj.0.weight": tensors["embed_proj.0.weight"][:, :-1].clone()}, path)
    with pytest.raises(UnsupportedModel, match=r"embed_proj\.0\.weight has shape \(6, 83\), expected \(6, 84\)"):
        load_draft_model(tmp_path / "head", torch.float32, CPU)
    (tmp_path / "head" / "config.json").write_text(json.dumps({"backbone": "../dflash"}))
    with pytest.raises(UnsupportedModel, match="names a backbone but no head"):
        load_draft_model(tmp_path / "head", torch.float32, CPU)


def test_a_head_for_another_vocabulary_is_named(tmp_path: Path) -> None:
    save_backbone(tmp_path / "dflash")
    other = KEPT.clone()
    other[-1] += 0 if int(other[-1]) == VOCAB_SIZE - 1 else 1
    other[0] = 1
    save_head(tmp_path / "head", make_head(MARKOV), d2t=other - torch.arange(len(other)))
    with pytest.raises(UnsupportedModel, match="another draft vocabulary"):
        load_draft_model(tmp_path / "head", torch.float32, CPU)
    with pytest.raises(UnsupportedModel, match="corrects 30 tokens, the draft vocabulary has 71"):
        corrector_of(make_head(GRU, 30))
    with pytest.raises(UnsupportedModel, match="knows 90 previous tokens, the target has 211"):
        corrector_of(make_head(MARKOV, num_embeddings=90))
