"""The command `llm`: always streams, and always asks for the usage."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.servers import Server

MODELS = """\
- model_id: demo-chat
  model_name: demo
  api_base: {base_url}
- model_id: demo-completion
  model_name: demo
  api_base: {base_url}
  completion: true
"""


@pytest.mark.parametrize(
    ("model", "options"), [("demo-chat", ()), ("demo-chat", ("--no-stream",)), ("demo-completion", ())]
)
def test_answers(server: Server, tmp_path: Path, model: str, options: tuple[str, ...]) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(base_url=server.base_url))
    command = [sys.executable, "-m", "llm", "-m", model, "--usage", "--no-log", "--key", "EMPTY", *options]
    command += ["-o", "temperature", "0", "-o", "max_tokens", "8", "The capital of France is"]
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if model == "demo-completion":  # whose usage llm does not read
        assert "Paris" in done.stdout
    else:
        assert re.search(r"Token usage: \d+ input, [1-8] output", done.stderr), done.stderr
