"""The curl commands of the README, as a shell runs them."""

import json
import re
import shutil
import subprocess

import pytest

from tests.clients.servers import ROOT, Server

if shutil.which("curl") is None:
    pytest.skip("curl is not installed", allow_module_level=True)

ADDRESS = "localhost:8000"


def commands() -> list[str]:
    """Every command of the README's shell blocks that starts with curl, with its pipe."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    parts = [part for block in blocks for part in re.split(r"\n\s*\n", block)]
    return [part for part in parts if part.startswith("curl ") and ADDRESS in part]


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.split()[2])
def test_commands_of_the_readme(server: Server, command: str) -> None:
    port = server.address.rpartition(":")[2]
    here = command.replace(ADDRESS, f"127.0.0.1:{port}")
    done = subprocess.run(["sh", "-c", here], capture_output=True, text=True, check=True)
    assert done.stdout
    if "/metrics" in command:
        assert all(line.startswith(("jetspec_", "# ")) for line in done.stdout.splitlines())
    elif '"stream":true' in command:
        assert done.stdout.endswith("data: [DONE]\n\n")
        assert '"error"' not in done.stdout
    elif "/v1/" in command:
        assert "error" not in json.loads(done.stdout)


def test_the_readme_has_commands() -> None:
    assert len(commands()) >= 3
