"""What the server says about itself and its weights."""

from pathlib import Path

import pytest

from server.build import ROOT, UNKNOWN, Weights, git_commit, identify


def write_weights(folder: Path, content: bytes, config: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def test_revision_of_a_hub_snapshot_is_its_commit(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / ("a" * 40), b"x")
    assert identify("target", folder) == Weights("target", "Qwen/Qwen3-8B", "a" * 40)


def test_revision_of_a_folder_changes_with_its_contents_and_not_with_its_place(tmp_path: Path) -> None:
    large = bytes(3 << 20)
    one = identify("draft", write_weights(tmp_path / "one" / "draft", large))
    same = identify("draft", write_weights(tmp_path / "two" / "draft", large))
    assert one.name == "one/draft" and one.revision == same.revision
    assert one.revision.startswith("sha256-") and str(tmp_path) not in one.revision
    others = [
        identify("draft", write_weights(tmp_path / "three" / "draft", large[:-1] + b"x")),
        identify("draft", write_weights(tmp_path / "four" / "draft", b"x" + large[1:])),
        identify("draft", write_weights(tmp_path / "five" / "draft", large + b"\0")),
        identify("draft", write_weights(tmp_path / "six" / "draft", large, '{"a": 1}')),
    ]
    assert len({one.revision, *(other.revision for other in others)}) == 5


def test_weights_may_be_a_single_file(tmp_path: Path) -> None:
    file = write_weights(tmp_path / "adapter", b"abc") / "model.safetensors"
    assert identify("adapter", file).name == "adapter/model.safetensors"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_commit_of_a_checkout() -> None:
    assert git_commit() == UNKNOWN or len(git_commit()) == 40
