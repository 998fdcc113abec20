"""Puts into the wheel what a checkout has besides its packages: the shipped draft weights, as modeling/weights, where
server/models.py looks, and the commit it was built from, as server/commit.txt, for server/build.py.

An editable install reads both from the checkout instead: copies there would be stale after the next change.
"""

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WeightsHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":
            return
        build_data["force_include"]["weights"] = "modeling/weights"
        commit = find_commit(self.root)
        if commit:
            self._folder = tempfile.TemporaryDirectory()
            file = Path(self._folder.name) / "commit.txt"
            file.write_text(commit + "\n", encoding="ascii")
            build_data["force_include"][str(file)] = "server/commit.txt"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def find_commit(root: str) -> str:
    """The commit in GIT_COMMIT, for builds without the repository, else that of the repository, else nothing."""
    given = os.environ.get("GIT_COMMIT", "")
    if given:
        return given
    try:
        command = ["git", "-C", root, "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
