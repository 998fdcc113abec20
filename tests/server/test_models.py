"""What `--model` is resolved to, and how a wrong one is answered."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server import models
from server.models import ModelError, default_weights, inspect_folder, resolve

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "eos_token_id": 7,
}


def write_folder(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")],
)
def test_local_folder_is_resolved(tmp_path: Path, model_type: str, architecture: str) -> None:
    folder = write_folder(tmp_path / "tiny", model_type=model_type, architectures=[architecture])
    resolved = resolve(str(folder))
    assert resolved.name == "tiny"
    assert resolved.folder == folder.resolve()
    assert resolved.model_type == model_type
    assert (resolved.vocab_size, resolved.max_position_embeddings) == (512, 1024)
    assert resolved.eos_token_ids == (7,)


def test_generation_config_decides_the_end_tokens(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert resolve(str(folder)).eos_token_ids == (2, 5)


def test_missing_folder_is_named() -> None:
    with pytest.raises(ModelError, match=r"--model \./no-such-folder: there is no such folder"):
        resolve("./no-such-folder")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "tiny")
    (folder / name).unlink()
    with pytest.raises(ModelError, match=name):
        resolve(str(folder))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"lacks 1 of the files.*model-00002-of-00002"):
        resolve(str(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "model_type 'gpt2' is not supported"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
    ],
)
def test_unusable_config_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_folder(tmp_path / "tiny", **changes)
    with pytest.raises(ModelError, match=message):
        resolve(str(folder))


@pytest.mark.parametrize("text", ["not json", "[1, 2]"])
def test_broken_config_is_named(tmp_path: Path, text: str) -> None:
    folder = write_folder(tmp_path / "tiny")
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        inspect_folder("tiny", folder)


def test_revision_of_a_local_folder_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    with pytest.raises(ModelError, match="--revision is for hub ids"):
        resolve(str(folder), revision="main")


def _run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub client reads its environment once, at import."""
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_offline_hub_id_is_answered_without_the_hub(tmp_path: Path) -> None:
    program = "from server.models import resolve; resolve('owner/name', 'v1')"
    run = _run(program, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path), HOME=str(tmp_path))
    assert run.returncode == 1
    assert "ModelError: --model owner/name at revision v1" in run.stderr
    assert "HF_HUB_OFFLINE" in run.stderr


def test_resolving_imports_no_torch(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    program = (
        "import sys; from server.models import default_weights, resolve;"
        f"resolve({str(folder)!r}); default_weights('demo');"
        "sys.exit(sorted({'torch', 'transformers', 'modeling'} & set(sys.modules)) or 0)"
    )
    run = _run(program, HOME=str(tmp_path))
    assert run.returncode == 0, run.stderr


def test_demo_target_failure_reaches_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))  # no folder can be made below a file
    with pytest.raises(ModelError, match=r"modeling\.demo ended with 1"):
        resolve("demo")


def test_default_weights_are_found_in_checkout_or_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    empty, installed = tmp_path / "empty", tmp_path / "installed"
    monkeypatch.setattr(models, "_weight_roots", lambda: [empty, installed])
    assert default_weights("demo") is None
    for name in ("draft", "adapter"):
        (installed / "smollm2-135m" / name).mkdir(parents=True)
        (installed / "smollm2-135m" / name / "config.json").write_text("{}")
    weights = default_weights("demo")
    assert weights is not None
    assert weights.draft == installed / "smollm2-135m" / "draft"
    assert weights.adapter == installed / "smollm2-135m" / "adapter"
    assert weights.calibration is None
    (installed / "smollm2-135m" / "calibration").mkdir()
    (installed / "smollm2-135m" / "calibration" / "budget-9.json").write_text("{}")
    with_calibration = default_weights("demo")
    assert with_calibration is not None
    assert with_calibration.calibration == installed / "smollm2-135m" / "calibration"
    assert default_weights("some/other-model") is None
