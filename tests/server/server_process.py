"""A whole server process for tests: uvicorn on a real socket, workers as processes of their own."""

import asyncio
import os
import re
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0
"""For whatever must happen: long, since a busy machine is no fault."""
FAKES = ("-m", "tests.server.serve_fakes")
REAL = ("-m", "server.cli", "serve")


@dataclass
class ServerProcess:
    """A running server and what it has logged."""

    process: asyncio.subprocess.Process
    client: httpx.AsyncClient
    log: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self.client.base_url.port is not None
        return self.client.base_url.port

    async def wait_for(self, what: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not what():
                await asyncio.sleep(0.02)

    async def wait_for_metric(self, line: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while line not in (await self.client.get("/metrics")).text.splitlines():
                await asyncio.sleep(0.05)

    async def samples(self) -> dict[str, float]:
        """All metrics; a name with labels is written as in the exposition, labels in order."""
        families = text_string_to_metric_families((await self.client.get("/metrics")).text)
        return {
            sample.name + "".join(f"[{label}={value}]" for label, value in sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    async def wait_until_ready(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while (await self.client.get("/ready")).status_code != 200:
                assert self.process.returncode is None, self.log
                await asyncio.sleep(0.05)

    async def wait_until_unhealthy(self) -> None:
        """Wait for a 503 of `/health`: the server stays a moment to say so before it ends."""
        async with asyncio.timeout(LIMIT_S):
            while (await self.client.get("/health")).status_code != 503:
                await asyncio.sleep(0.02)

    async def exit_status(self) -> int:
        return await asyncio.wait_for(self.process.wait(), LIMIT_S)

    def stream(self, **body: object) -> AbstractAsyncContextManager[httpx.Response]:
        content = {"prompt": "hi", "temperature": 0, "stream": True, **body}
        return self.client.stream("POST", "/v1/completions", json=content)

    async def text(self, **body: object) -> str:
        """The text of a completion that must succeed."""
        response = await self.client.post("/v1/completions", json={"prompt": "hi", "temperature": 0, **body})
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text

    def logged(self, text: str) -> bool:
        return any(text in line for line in self.log)

    def workers(self) -> dict[str, int]:
        """Process ids by worker. The server starts each in a session of its own."""
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
                command = (directory / "cmdline").read_bytes().decode()
            except OSError:  # ended meanwhile
                continue
            if parent == self.process.pid:
                found["drafter" if "draft" in command else "verifier"] = int(directory.name)
        return found


ProcessFactory = Callable[..., AbstractAsyncContextManager[ServerProcess]]


async def _read_log(process: asyncio.subprocess.Process, log: list[str]) -> None:
    assert process.stderr is not None
    async for line in process.stderr:
        log.append(line.decode())


async def _end(process: asyncio.subprocess.Process) -> None:
    """Stop a server at once, in the way that leaves no worker and no runtime directory; kill it if that fails."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
    try:
        await asyncio.wait_for(process.wait(), LIMIT_S)
    except TimeoutError:
        process.kill()
        await process.wait()


@asynccontextmanager
async def serve_process(
    program: tuple[str, ...], *flags: str, certificate: Path | None = None, **environment: str
) -> AsyncIterator[ServerProcess]:
    """Start a server on a free port; yields as soon as it listens. `certificate`: what its HTTPS is checked against."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *(*program, "--port", "0", *flags),
        cwd=ROOT,
        env={**os.environ, **environment},
        stderr=asyncio.subprocess.PIPE,
    )
    log: list[str] = []
    reader = asyncio.create_task(_read_log(process, log))
    verify = True if certificate is None else ssl.create_default_context(cafile=str(certificate))
    try:
        async with asyncio.timeout(LIMIT_S):
            while not (found := re.search(r"https?://127\.0\.0\.1:(\d+)", "".join(log))):
                assert process.returncode is None, log
                await asyncio.sleep(0.02)
        async with httpx.AsyncClient(base_url=found[0], timeout=LIMIT_S, verify=verify) as client:
            yield ServerProcess(process, client, log)
    finally:
        await _end(process)
        await reader
