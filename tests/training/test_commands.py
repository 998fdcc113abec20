"""`jetspecpp train draft | adapter | corpus` from end to end on a tiny target, and what wrong input is answered."""

import errno
import fcntl
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draft_worker.networks import load_networks
from modeling.draft_model import load_draft_model
from server.cli import main as jetspecpp
from tests.tiny.models import VOCAB_SIZE, TinyModels
from tests.training.texts import CPU, END_ID, Command, last_error, make_texts, write_corpus_file
from training.cli import main
from training.corpus import read_archive, read_corpus
from training.loop import read_state

ROOT = Path(__file__).resolve().parents[2]


def test_draft_trains_resumes_and_is_served(
    train: Command, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("draft") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 0 start tau J0 ")
    assert lines[-1].startswith("step 3 ")
    assert all(f"J{passes} " in line for line in lines for passes in range(4))
    first = load_file(tmp_path / "draft" / "state" / "model.safetensors")
    assert train("draft") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 3 start")
    assert lines[-1].startswith("step 6 ")
    assert read_state(tmp_path / "draft").step == 6
    second = load_file(tmp_path / "draft" / "state" / "model.safetensors")
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert (tmp_path / "draft" / "log.txt").read_text().count("tau") == 4
    # The served form is the trained one, loads as a drafter, and keeps its vocabulary.
    networks = load_networks(target_folder, tmp_path / "draft" / "draft", None, torch.float32, CPU, 64)
    assert networks.head.token_ids.numel() == 100
    assert END_ID in networks.head.token_ids.tolist()
    assert networks.config.tap_layers == (1, 3)
    torch.testing.assert_close(networks.model.hidden_norm.data, second["hidden_norm"].bfloat16().float())


def test_draft_starts_from_a_checkpoint(train: Command, models_folder: TinyModels, tmp_path: Path) -> None:
    init = models_folder.draft("trained")
    assert train("draft", init=str(init), draft_vocab="0", learning_rate="1e-9", block_size="5") == 0
    started = load_draft_model(init, torch.float32, CPU).model
    trained = load_draft_model(tmp_path / "draft" / "draft", torch.float32, CPU)
    assert trained.token_ids is None
    assert trained.model.config.block_size == 5
    assert trained.model.config.slots == started.config.slots
    for mine, theirs in zip(trained.model.parameters(), started.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.01, atol=1e-3)


def test_an_interrupted_first_run_starts_anew(train: Command, tmp_path: Path) -> None:
    """Settings were written, the first state was not: the next run must not begin with random weights."""
    assert train("draft", learning_rate="1e-9") == 0
    expected = load_file(tmp_path / "draft" / "state" / "model.safetensors")
    for path in (tmp_path / "draft" / "state").iterdir():
        path.unlink()
    (tmp_path / "draft" / "state").rmdir()
    assert train("draft", learning_rate="1e-9") == 0
    again = load_file(tmp_path / "draft" / "state" / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("flags", [("--inputs", "mask"), ("--slots", "in_place"), ("--schedule", "noise")])
def test_variants_train(train: Command, tmp_path: Path, flags: tuple[str, str]) -> None:
    assert train("draft", *flags, steps="1") == 0
    config = json.loads((tmp_path / "draft" / "draft" / "config.json").read_text())["dflash_config"]
    assert (config["mask_token_id"] == END_ID) == ("mask" in flags)
    assert config["slots"] == ("in_place" if "in_place" in flags else "shifted")


def test_adapter_trains_resumes_and_is_served(
    train: Command, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("draft", steps="1") == 0
    draft = tmp_path / "draft" / "draft"
    assert train("adapter", draft=str(draft), layers_per_tap="1,1") == 0
    assert train("adapter", draft=str(draft)) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "agreement" in line]
    assert lines[0].startswith("step 0 start")
    assert lines[-1].startswith("step 6 ")
    assert "gap closed" in lines[-1] and "kl" in lines[-1]
    adapter = tmp_path / "adapter" / "adapter"
    networks = load_networks(target_folder, draft, adapter, torch.float32, CPU, 64)
    assert networks.adapter is not None
    assert networks.adapter.config.layers_per_tap == (1, 1)
    assert len(list((tmp_path / "states").glob("*.bin"))) == 1, "both trainings share their states"


def test_a_draft_trains_on_the_states_of_an_adapter(
    train: Command, models_folder: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluated on both kinds of states; an adapter of other taps is refused."""
    init, adapter = str(models_folder.draft("trained")), str(models_folder.adapter())
    assert train("draft", init=init, adapter=adapter) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "tau" in line]
    assert len(lines) == 2
    assert all(line.count("J3") == 2 and "; from predicted states J0" in line for line in lines)
    assert train("draft", adapter=adapter, tap_layers="0,3", output=str(tmp_path / "other")) == 2
    assert "adapter predicts layers [1, 3], the draft model reads [0, 3]" in last_error(capsys)


def test_an_adapter_starts_from_another(train: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("draft", steps="1") == 0
    draft, first = str(tmp_path / "draft" / "draft"), tmp_path / "adapter" / "adapter"
    assert train("adapter", draft=draft, layers_per_tap="2,1") == 0
    ended = [line for line in capsys.readouterr().out.splitlines() if "agreement" in line][-1]
    assert train("adapter", draft=draft, init=str(first), output=str(tmp_path / "second")) == 0
    started = next(line for line in capsys.readouterr().out.splitlines() if "agreement" in line)
    assert started.startswith("step 0 start")
    assert started.partition("agreement")[2][:4] == ended.partition("agreement")[2][:4]
    assert train("adapter", draft=draft, init=str(first), layers_per_tap="1,1", output=str(tmp_path / "third")) == 2
    assert "--init has [2, 1] layers a tap, not [1, 1]" in last_error(capsys)


# --- wrong input: exit code 2 and one line that names what is wrong


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpus": "nowhere"}, r"holds no .npz"),
        ({"model": "nowhere"}, "there is no such folder"),
        ({"tap_layers": "1,5"}, "taps layer 5 of a target with 6 layers"),
        ({"start_layers": "0,9"}, "--start-layers"),
        ({"device": "cuda"}, "no CUDA device"),
        ({"device": "abacus"}, "no such device"),
        ({"core": "9999"}, "--core 9999"),
        ({"mask_token_id": "500", "inputs": "mask"}, "--mask-token-id 500"),
    ],
)
def test_wrong_input_of_a_draft_training(
    train: Command, capsys: pytest.CaptureFixture[str], changes: dict[str, str], message: str
) -> None:
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert train("draft", **changes) == 2
    assert message in last_error(capsys)


def test_a_corpus_of_another_tokenizer(train: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus_file(tmp_path / "other" / "a.npz", make_texts(9), tokenizer=np.array("0123"))
    assert train("draft", corpus=str(tmp_path / "other")) == 2
    assert "a.npz is of another tokenizer: 0123" in last_error(capsys)


def test_a_truncated_corpus_file(train: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_corpus_file(tmp_path / "other" / "a.npz", make_texts(9))
    path.write_bytes(path.read_bytes()[:200])
    assert train("draft", corpus=str(tmp_path / "other")) == 2
    assert "a.npz is not a readable numpy archive" in last_error(capsys)


def edited_draft(models_folder: TinyModels, folder: Path, **changes: Any) -> str:
    """A draft model whose config says something else."""
    source = models_folder.draft("trained")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    config = json.loads((source / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("command", ["draft", "adapter"])
def test_a_drafter_for_another_target(
    train: Command, models_folder: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    folder = edited_draft(models_folder, tmp_path / "other", num_target_layers=7)
    assert train(command, **{"init" if command == "draft" else "draft": folder}) == 2
    assert "for another target: num_target_layers is 7, the target's is 6" in last_error(capsys)


def test_a_broken_checkpoint(
    train: Command, models_folder: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = edited_draft(models_folder, tmp_path / "other")
    path = tmp_path / "other" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert train("draft", init=folder) == 2
    assert "model.safetensors is not a readable safetensors file" in last_error(capsys)


def test_a_training_is_not_resumed_with_other_settings(
    train: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("draft", steps="1") == 0
    before = (tmp_path / "draft" / "state" / "model.safetensors").read_bytes()
    assert train("draft", block_size="6") == 2
    assert "other settings: draft was" in last_error(capsys)
    assert train("draft", draft_vocab="50") == 2
    assert "draft_vocab was 100, now 50" in last_error(capsys)
    assert train("adapter", output=str(tmp_path / "draft"), draft=str(tmp_path / "draft" / "draft")) == 2
    assert "holds a training of kind 'draft', not 'adapter'" in last_error(capsys)
    assert (tmp_path / "draft" / "state" / "model.safetensors").read_bytes() == before


def test_a_wrong_number_of_adapter_stacks(
    train: Command, models_folder: TinyModels, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("adapter", draft=str(models_folder.draft("trained")), layers_per_tap="1,2,3") == 2
    assert "--layers-per-tap [1, 2, 3]: the draft model reads 2 taps" in last_error(capsys)


def test_two_trainings_do_not_share_an_output(
    train: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "draft").mkdir()
    with (tmp_path / "draft" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert train("draft") == 2
    assert "another process is writing to" in last_error(capsys)


def test_a_full_disk(
    train: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("draft") == 0

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    monkeypatch.setattr("training.loop.save_file", fail)
    assert train("draft") == 1
    assert "the disk is full (model.safetensors); what was saved before is intact" in last_error(capsys)
    monkeypatch.undo()
    assert read_state(tmp_path / "draft").step == 3
    assert train("draft") == 0


@pytest.mark.parametrize(
    ("flag", "value", "wanted"),
    [
        ("--minutes", "0", "a positive number"),
        ("--minutes", "soon", "a positive number"),
        ("--block-size", "0", "a whole number of 1 or more"),
        ("--tap-layers", "1,x", "a list of layers"),
        ("--seed", "-1", "a whole number of 0 or more"),
    ],
)
def test_wrong_flags(capsys: pytest.CaptureFixture[str], flag: str, value: str, wanted: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["draft", "--corpus", "a", "--output", "b", flag, value])
    assert caught.value.code == 2
    assert f"argument {flag}: '{value}' is not {wanted}" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom training.cli import build_parser\nbuild_parser().format_help()\n"
        "sys.exit(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_main_command_hands_its_arguments_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["jetspecpp"])
    with pytest.raises(SystemExit) as caught:
        jetspecpp(["train", "draft", "--help"])
    assert caught.value.code == 0
    assert "usage: jetspecpp train draft" in capsys.readouterr().out


# --- train corpus


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [{"id": f"tiny/{index}", "turns": [f"t{9 + index} t{20 + index}"]} for index in range(8)]
    lines.append({"id": "train_chat/alpaca/0", "turns": ["t70 t71"], "set": "alpaca"})
    lines.append({"id": "tiny/long", "turns": [" ".join(["t9"] * 30)]})
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def answer(target_folder: Path, prompts: Path, tmp_path: Path) -> Command:
    """Runs `train corpus` on the tiny prompts."""

    def run(*flags: str, name: str = "answers") -> int:
        common = ["--prompts", str(prompts), "--model", str(target_folder), "--output", str(tmp_path / name)]
        limits = ["--max-tokens", "12", "--max-prompt-tokens", "20", "--batch-rows", "3", "--dtype", "float32"]
        return main(["corpus", *common, *limits, *flags])

    return run


def test_corpus_is_what_trainings_read(
    answer: Command, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer("--shard-size", "3", "--temperature-one-share", "0.5") == 0
    told = capsys.readouterr().err
    assert "left out 1 prompts whose licence" in told and "alpaca" in told
    assert "left out 1 prompts of more than 20 tokens" in told
    files = sorted((tmp_path / "answers").glob("*.npz"))
    assert [path.name for path in files] == ["part.00000.npz", "part.00001.npz", "part.00002.npz"]
    archives = [read_archive(path) for path in files]
    assert sorted(name for archive in archives for name in archive.ids) == [f"tiny/{index}" for index in range(8)]
    assert archives[0].tokens.dtype == np.uint16
    corpus = read_corpus(tmp_path / "answers", VOCAB_SIZE, archives[0].tokenizer)
    assert {sequence.temperature for sequence in corpus.sequences} == {0.0, 1.0}
    for sequence in corpus.sequences:
        first, *_, last = sequence.token_ids[: sequence.prompt_len].tolist()
        assert (first, last) == (1, 2), "the prompt stands in the chat template"
        assert 1 <= sequence.length - sequence.prompt_len <= 12


def contents(folder: Path) -> dict[str, list[int]]:
    """Token ids by prompt."""
    found: dict[str, list[int]] = {}
    for path in folder.glob("*.npz"):
        archive = read_archive(path)
        for name, start, stop in zip(archive.ids, archive.offsets[:-1], archive.offsets[1:], strict=True):
            assert name not in found, "a prompt is answered once"
            found[name] = archive.tokens[start:stop].tolist()
    return found


def test_corpus_resumes_with_the_answers_it_would_have_given(answer: Command, tmp_path: Path) -> None:
    assert answer(name="whole") == 0
    for _ in range(4):
        assert answer("--max-prompts", "3", name="parts") == 0
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert len(contents(tmp_path / "parts")) == 8


def test_licences_can_be_overruled(answer: Command, tmp_path: Path) -> None:
    assert answer("--allow-all-licences") == 0
    assert "train_chat/alpaca/0" in contents(tmp_path / "answers")


def test_excluded_prompts_are_left_out(answer: Command, tmp_path: Path) -> None:
    excluded = tmp_path / "excluded.jsonl"
    excluded.write_text(json.dumps({"id": 0, "turns": ["T9  t20"]}) + "\n")
    assert answer("--exclude", str(excluded)) == 0
    assert set(contents(tmp_path / "answers")) == {f"tiny/{index}" for index in range(1, 8)}


def test_wrong_input_of_a_corpus(
    answer: Command, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts.write_text("{}\n")
    assert answer() == 2
    assert "prompts.jsonl, line 1" in last_error(capsys)
    prompts.write_text(json.dumps({"id": 1, "turns": ["t9"], "set": "alpaca"}) + "\n")
    assert answer() == 2
    assert "no prompt is left" in last_error(capsys)
    (tmp_path / "answers" / "part.00000.npz").write_bytes(b"PK\x03\x04broken")
    assert answer() == 2
    assert "part.00000.npz is not a readable numpy archive" in last_error(capsys)


def test_a_full_disk_leaves_no_half_shard(
    answer: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer("--max-prompts", "3") == 0

    def fail(file: Any, **arrays: object) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("training.shards.np.savez_compressed", fail)
    assert answer() == 1
    assert "the disk is full" in last_error(capsys)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "answers").glob("part*")] == ["part.00000.npz"]
    assert answer() == 0
    assert len(contents(tmp_path / "answers")) == 8
