"""What a report says of where it comes from."""

import re
import subprocess
from pathlib import Path

import pytest

from evaluation import provenance
from evaluation.provenance import describe_run


def test_date_commit_and_machine() -> None:
    about = describe_run()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", about.date)
    assert re.search(r", \d+ cores$", about.machine) and "torch" in about.software
    assert set(about.as_json()) == {"date", "commit", "machine", "software"}


def test_changes_to_the_commit_are_admitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "git_commit", lambda: "0123456789abcdef")
    assert describe_run().commit == "0123456789"  # no checkout: as built
    (tmp_path / "file").write_text("one")
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "file"], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    assert describe_run().commit == "0123456789"
    (tmp_path / "file").write_text("two")
    assert describe_run().commit == "0123456789 with changes"
