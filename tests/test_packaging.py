"""The wheel holds every package and the shipped weights, and the lock satisfies the project's own ranges."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _top_level_packages() -> set[str]:
    return {path.parent.name for path in ROOT.glob("*/__init__.py")}


def test_wheel_lists_every_package(project: dict[str, Any]) -> None:
    listed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(listed) == sorted(_top_level_packages())


def test_import_contracts_cover_every_package(project: dict[str, Any]) -> None:
    assert set(project["tool"]["importlinter"]["root_packages"]) == _top_level_packages()


def test_wheel_carries_packages_and_weights(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    environment = {**os.environ, "GIT_COMMIT": "c" * 40}
    subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=120
    )
    (wheel,) = tmp_path.glob("jetspec_pp-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read("server/commit.txt").decode().strip() == "c" * 40
    for package in _top_level_packages():
        assert f"{package}/__init__.py" in names
    shipped = [path for path in (ROOT / "weights").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert shipped
    for path in shipped:
        assert f"modeling/{path.relative_to(ROOT)}" in names
    page = {f"server/static/{path.name}" for path in (ROOT / "server" / "static").iterdir()}
    assert page and page <= names
    assert not any(name.startswith(("tests/", "docs/", "deploy/")) for name in names)


def test_lock_satisfies_the_declared_ranges(project: dict[str, Any]) -> None:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    declared = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["dev"]
    for requirement in map(Requirement, declared):
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement.name
    assert not any("+" in version for version in pinned.values()), "the lock must not name a build of torch"
