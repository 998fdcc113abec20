"""The curl examples of the README and of docs/api.md, sent as they stand there."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.server.conftest import Stack, Stream

ROOT = Path(__file__).parents[2]
FILES = ("README.md", "docs/api.md")


@dataclass(frozen=True)
class Example:
    """One curl command."""

    path: str
    body: bytes | None


def examples(file: str) -> list[Example]:
    """The curl commands of a document's shell blocks, up to any pipe behind them."""
    found: list[Example] = []
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / file).read_text(encoding="utf-8"), re.DOTALL)
    for block in blocks:
        for command in re.split(r"^(?=curl )", block, flags=re.MULTILINE):
            if not command.startswith("curl "):
                continue
            words = shlex.split(command)
            words = words[: words.index("|")] if "|" in words else words
            address = next(word for word in words if word.startswith("localhost:8000"))
            body = words[words.index("-d") + 1].encode() if "-d" in words else None
            found.append(Example(address.removeprefix("localhost:8000"), body))
    return found


@pytest.mark.parametrize("file", FILES)
async def test_curl_examples_are_answered(stack: Stack, file: str) -> None:
    commands = examples(file)
    assert len(commands) >= 3
    for command in commands:
        if command.body is None:
            response = await stack.client.get(command.path)
        else:
            headers = {"Content-Type": "application/json"}
            response = await stack.client.post(command.path, content=command.body, headers=headers)
        assert response.status_code == 200, (command, response.text)
        if command.body is not None and json.loads(command.body).get("stream"):
            assert Stream(response.text).finish_reasons
