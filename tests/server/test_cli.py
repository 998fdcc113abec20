"""The command line: help without torch, wrong input, generate and exactness over fake workers."""

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from server.cli import main
from server.config import ServeConfig, flag_of
from server.exactness import METHODS, PROMPTS
from server.models import ShippedWeights
from server.supervisor import WorkerCommands

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "tests.server.fake_worker")


@pytest.fixture
def fake_workers(monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> list[str]:
    """Flags for a run whose workers are fakes."""
    commands = WorkerCommands((*COMMAND, "verifier"), (*COMMAND, "drafter"))
    monkeypatch.setattr("server.service.WorkerCommands", lambda: commands)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = str(model_folder)
    return ["--model", folder, "--draft-model", folder, "--adapter", folder]


def test_no_command_imports_torch() -> None:
    modules = ["server.cli", "server.serve", "server.exactness", "server.terminal"]
    code = (
        f"import sys, {', '.join(modules)}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_help_needs_little() -> None:
    code = "import sys, server.cli; print([name for name in ('pydantic', 'fastapi', 'zmq') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert all(command in capsys.readouterr().out for command in ["serve"])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["dance"], "dance"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--dtype", "int8"], "--dtype"),
        (["generate", ""], "prompt"),
        (["generate", "a", "--temperature", "hot"], "--temperature"),
        (["exactness", "--num-prompts", "0"], "--num-prompts"),
        (["exactness", "--num-prompts", "13"], "--num-prompts"),
        (["exactness", "--dtype", "int8"], "--dtype"),
        (["exactness", "--methods", "magic"], "--methods: must be one of dflash, jetspec, dspark, domino, ssd"),
        (["exactness", "--methods", "all,ssd"], "--methods"),
        (["exactness", "--methods", "all", "--draft-model", "/x"], "--draft-model"),
        (["exactness", "--methods", "ssd,domino", "--model", "some/other"], "this model and method ssd"),
        (["serve", "--method", "magic"], "--method: must be one of ar, dflash, jetspec"),
        (["exactness", "--max-tokens", "many"], "--max-tokens"),
        (["exactness", "--prompts", "/does/not/exist"], "--prompts"),
        (["exactness", "--parameters", "wild"], "--parameters: must be one of plain, random"),
    ],
)
def test_wrong_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_missing_model_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a", "--model", "/does/not/exist"]) == 1
    assert "/does/not/exist" in capsys.readouterr().err


def test_a_runtime_directory_that_cannot_be_used_is_a_message(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    assert main(["generate", "a", "--model", str(model_folder), "--method", "ar"]) == 1
    captured = capsys.readouterr()
    assert "socket paths have at most" in captured.err and "Traceback" not in captured.err
    assert not list(deep.iterdir())


def test_generate_prints_the_answer(fake_workers: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--max-tokens", "20", "--stats", *fake_workers]) == 0
    captured = capsys.readouterr()
    assert captured.out == "abcdefghabcdefghabcd\n"
    assert "20 generated" in captured.err


@pytest.mark.parametrize(
    ("flags", "name"),
    [(["--temperature", "3"], "--temperature"), (["--max-tokens", "100000"], "maximum context length")],
)
def test_generate_checks_like_the_server(
    fake_workers: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], name: str
) -> None:
    assert main(["generate", "hello", *flags, *fake_workers]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["generate", "a"], ["exactness"]])
def test_missing_weights_are_wrong_input(
    command: list[str], model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = "--methods" if command == ["exactness"] else "--method"
    arguments = [*command, "--model", str(model_folder), flag, "ssd"]
    assert main(arguments) == 2
    assert "none is shipped for this model and method ssd" in capsys.readouterr().err
    assert main([*arguments, "--draft-model", str(tmp_path)]) == 2
    assert f"method ssd: {tmp_path / 'config.json'} is missing" in capsys.readouterr().err


def test_exactness_writes_its_results(
    fake_workers: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert len(PROMPTS) >= 8
    path = tmp_path / "results.json"
    arguments = ["exactness", "--dtype", "float32", "--num-prompts", "3", "--max-tokens", "20", "--json", str(path)]
    assert main([*arguments, *fake_workers]) == 0
    expected = {"method": "jetspec++", "dtype": "float32", "parameters": "plain", "identical": 3, "total": 3}
    results: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    assert results == [{**expected, "temperature": 0.0}, {**expected, "temperature": 1.0}]
    assert "3 of 3 identical" in capsys.readouterr().out


def test_exactness_runs_every_method_and_gives_a_verdict(
    fake_workers: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its own weights; the fake workers draft whatever the method."""
    for name in (*METHODS, "draft", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.setattr(
        "server.draft_files.default_weights",
        lambda model, method: ShippedWeights(tmp_path / method, tmp_path / "adapter", None),
    )
    arguments = ["exactness", "--methods", "all", "--num-prompts", "1", "--max-tokens", "8", *fake_workers[:2]]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "identical to ar" in line and "temperature" in line] == [
        method for method in METHODS for _ in range(2)
    ]
    assert lines[-1] == "verdict: all identical to ar"


def test_exactness_notices_a_difference(
    fake_workers: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DIFFERS", "1")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["one"]}\n{"turns": ["two", "three"]}\n')
    arguments = ["exactness", "--prompts", str(prompts), "--num-prompts", "2", "--max-tokens", "20"]
    assert main([*arguments, *fake_workers]) == 1
    output = capsys.readouterr().out
    assert "0 of 2 identical" in output
    assert "differs from ar at token 5" in output


def test_exactness_without_any_draft_is_no_success(
    fake_workers: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NO_DRAFTS", "1")
    path = tmp_path / "results.json"
    arguments = ["exactness", "--num-prompts", "2", "--max-tokens", "20", "--json", str(path)]
    assert main([*arguments, *fake_workers]) == 1
    assert "no draft was verified" in capfd.readouterr().err
    assert len(json.loads(path.read_text())["results"]) == 2


def test_flags_in_the_documentation_exist() -> None:
    known = {flag_of(item.name) for item in fields(ServeConfig)}
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(--[a-z0-9-]+)", text))
    assert len(named) > 20
    assert named <= known
