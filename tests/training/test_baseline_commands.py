"""`jetspecpp train dflash | jetspec | dspark | domino | ssd` from end to end on a tiny target, and wrong input."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling.autoregressive import load_autoregressive
from modeling.draft_model import load_draft_model
from modeling.heads import GruConfig, MarkovConfig
from tests.tiny.models import TinyModels
from tests.training.texts import CPU, END_ID, Command, last_error
from training.cli import build_parser
from training.loop import read_state


@pytest.mark.parametrize(("name", "causal"), [("dflash", False), ("jetspec", True)])
def test_backbones_train_resume_and_load(
    train: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, causal: bool
) -> None:
    assert train(name, mask_token_id="5") == 0
    assert train(name) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 0 start tau J0 ")
    assert lines[-1].startswith("step 6 ")
    assert "J1" not in lines[-1]
    assert read_state(tmp_path / name).step == 6
    loaded = load_draft_model(tmp_path / name / name, torch.float32, CPU)
    assert loaded.head is None
    config = loaded.model.config
    assert (config.causal, config.inputs, config.slots) == (causal, "mask", "shifted")
    assert config.mask_token_id == 5, "what the first run decided stays"
    assert loaded.token_ids is not None and loaded.token_ids.numel() == 100
    assert len(list((tmp_path / "states").glob("*.bin"))) == 1


@pytest.mark.parametrize("name", ["dflash", "jetspec"])
def test_backbones_start_from_a_draft_model_that_reads_tokens(
    train: Command, models_folder: TinyModels, tmp_path: Path, name: str
) -> None:
    init = models_folder.draft("trained")
    flags = {"init": str(init), "draft_vocab": "0", "learning_rate": "1e-9", "slots": "in_place"}
    assert train(name, **flags) == 0
    started = load_draft_model(init, torch.float32, CPU).model
    trained = load_draft_model(tmp_path / name / name, torch.float32, CPU).model
    assert started.config.inputs == "tokens" and started.config.causal
    assert (trained.config.inputs, trained.config.slots) == ("mask", "in_place")
    assert trained.config.causal == (name == "jetspec")
    assert trained.config.mask_token_id is not None
    assert trained.config.block_size == started.config.block_size
    for mine, theirs in zip(trained.parameters(), started.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.01, atol=1e-3)


@pytest.fixture
def dflash(train: Command, tmp_path: Path) -> Path:
    assert train("dflash", steps="1") == 0
    return tmp_path / "dflash" / "dflash"


HEAD_FLAGS = {"dspark": {"rank": "7"}, "domino": {"state_size": "12", "bottleneck": "6"}}


@pytest.mark.parametrize("name", ["dspark", "domino"])
def test_heads_train_alone_resume_and_name_their_backbone(
    train: Command, dflash: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    before = (dflash / "model.safetensors").read_bytes()
    for _ in range(2):
        assert train(name, "--freeze-backbone", backbone=str(dflash), **HEAD_FLAGS[name]) == 0
    lines = capsys.readouterr().out.splitlines()
    starts = [line for line in lines if "backbone" in line]
    assert starts[0].startswith("step 0 start tau J0 ")
    assert lines[-1].startswith("step 6 ")
    assert len({line.partition("backbone ")[2] for line in starts}) == 1, "a frozen backbone stays as good as it was"
    folder = tmp_path / name / name
    config = json.loads((folder / "config.json").read_text())
    assert config["backbone"] == "../../dflash/dflash"
    loaded = load_draft_model(folder, torch.float32, CPU)
    assert loaded.head is not None
    assert loaded.head.config == (MarkovConfig(7) if name == "dspark" else GruConfig(12, 6))
    assert loaded.head.num_columns == 100
    assert any(tensor.abs().sum() > 0 for tensor in list(loaded.head.tensors().values())[-1:])
    assert (dflash / "model.safetensors").read_bytes() == before
    names = set(load_file(folder / "model.safetensors"))
    assert not any(part.startswith(("layers.", "fc.")) for part in names)


def test_a_shipped_head_lies_beside_its_backbone(train: Command, dflash: Path, tmp_path: Path) -> None:
    assert train("dspark", "--freeze-backbone", backbone=str(dflash), output=str(tmp_path / "out"), steps="1") == 0
    shutil.copytree(dflash, tmp_path / "weights" / "dflash")
    shutil.copytree(tmp_path / "out" / "dspark", tmp_path / "weights" / "dspark")
    path = tmp_path / "weights" / "dspark" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"backbone": "../dflash"}))
    assert load_draft_model(tmp_path / "weights" / "dspark", torch.float32, CPU).head is not None


@pytest.mark.parametrize("name", ["dspark", "domino"])
def test_heads_train_together_with_their_backbone(train: Command, dflash: Path, tmp_path: Path, name: str) -> None:
    for bfloat16 in ("off", "on"):
        assert train(name, backbone=str(dflash), learning_rate="1e-2", bfloat16=bfloat16, **HEAD_FLAGS[name]) == 0
    loaded = load_draft_model(tmp_path / name / name, torch.float32, CPU)
    started = load_draft_model(dflash, torch.float32, CPU)
    assert "backbone" not in json.loads((tmp_path / name / name / "config.json").read_text())
    assert loaded.head is not None
    assert loaded.model.config == started.model.config
    assert not torch.equal(loaded.model.norm.data, started.model.norm.data)


def test_ssd_trains_resumes_and_loads(
    train: Command, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("ssd", tap_layers="1,3", draft_vocab="90", layers="1", num_draft_tokens="3") == 0
    assert train("ssd", tap_layers="1,3", num_draft_tokens="3", bfloat16="on") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 0 start tau J0 ")
    assert lines[-1].startswith("step 6 ")
    model = load_autoregressive(tmp_path / "ssd" / "ssd", target_folder, torch.float32, CPU)
    assert model.is_shared
    assert model.stack.architecture.num_layers == 1
    assert model.token_ids is not None and model.token_ids.numel() == 90
    assert END_ID in model.token_ids.tolist()


# --- wrong input: exit code 2 and one line that names what is wrong


def test_a_backbone_that_reads_tokens_is_refused(
    train: Command, models_folder: TinyModels, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("dspark", backbone=str(models_folder.draft("trained"))) == 2
    assert "reads tokens, not masks" in last_error(capsys)


def test_a_backbone_with_a_head_is_refused(
    train: Command, dflash: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("dspark", "--freeze-backbone", backbone=str(dflash), steps="1") == 0
    assert train("domino", backbone=str(tmp_path / "dspark" / "dspark")) == 2
    assert "has a head already" in last_error(capsys)


def test_a_missing_backbone_is_named(train: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("domino", backbone="nowhere") == 2
    assert "nowhere/config.json is missing" in last_error(capsys)


def test_a_head_is_not_resumed_with_other_settings(
    train: Command, dflash: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("dspark", "--freeze-backbone", backbone=str(dflash), rank="7", steps="1") == 0
    assert train("dspark", "--freeze-backbone", backbone=str(dflash), rank="9") == 2
    assert "other settings: head was" in last_error(capsys)
    assert train("dspark", backbone=str(dflash), rank="7") == 2
    assert "freeze_backbone was True, now False" in last_error(capsys)
    assert train("domino", backbone=str(dflash), output=str(tmp_path / "dspark")) == 2
    assert "holds a training of kind 'dspark', not 'domino'" in last_error(capsys)
    assert train("dflash") == 0
    assert train("dspark", "--freeze-backbone", backbone=str(dflash), rank="7") == 2
    assert "backbone was" in last_error(capsys), "a head is trained for one state of its backbone"


def test_ssd_is_not_resumed_with_other_settings(train: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("ssd", tap_layers="1,3", steps="1", layers="1") == 0
    assert train("ssd", tap_layers="1,3", layers="2") == 2
    assert "layers was 1, now 2" in last_error(capsys)
    assert train("ssd", tap_layers="1,3", start_layers="0,9", layers="2") == 2
    assert "--start-layers" in last_error(capsys)


@pytest.mark.parametrize(("name", "flag"), [("dspark", "--rank"), ("domino", "--bottleneck"), ("ssd", "--layers")])
def test_sizes_are_counts(capsys: pytest.CaptureFixture[str], name: str, flag: str) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args([name, "--corpus", "a", "--output", "b", flag, "0"])
    assert caught.value.code == 2
    assert f"argument {flag}: '0' is not a whole number of 1 or more" in capsys.readouterr().err
