"""The whole server process, with uvicorn and with fake workers as processes: signals, losses, departures."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 30.0


@dataclass
class ServerProcess:
    """A running server and what it has logged."""

    process: asyncio.subprocess.Process
    client: httpx.AsyncClient
    log: list[str] = field(default_factory=list)

    async def wait_for(self, what: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not what():
                await asyncio.sleep(0.02)

    async def wait_for_metric(self, line: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while line not in (await self.client.get("/metrics")).text.splitlines():
                await asyncio.sleep(0.05)

    async def wait_until_ready(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while (await self.client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.05)

    async def exit_status(self) -> int:
        return await asyncio.wait_for(self.process.wait(), LIMIT_S)

    def stream(self, **body: object) -> AbstractAsyncContextManager[httpx.Response]:
        content = {"prompt": "hi", "temperature": 0, "stream": True, **body}
        return self.client.stream("POST", "/v1/completions", json=content)

    def logged(self, text: str) -> bool:
        return any(text in line for line in self.log)


ProcessFactory = Callable[..., AbstractAsyncContextManager[ServerProcess]]


async def read_log(process: asyncio.subprocess.Process, log: list[str]) -> None:
    assert process.stderr is not None
    async for line in process.stderr:
        log.append(line.decode())


async def end(process: asyncio.subprocess.Process) -> None:
    """Stop a server at once, in the way that leaves no worker and no runtime directory; kill it if that fails."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
    try:
        await asyncio.wait_for(process.wait(), LIMIT_S)
    except TimeoutError:
        process.kill()
        await process.wait()


@pytest.fixture
def start(model_folder: Path) -> ProcessFactory:
    @asynccontextmanager
    async def start_server(*flags: str, **environment: str) -> AsyncIterator[ServerProcess]:
        command = [sys.executable, "-m", "tests.server.serve_fakes", "--model", str(model_folder), "--port", "0"]
        weights = ["--draft-model", str(model_folder), "--adapter", str(model_folder)]
        process = await asyncio.create_subprocess_exec(
            *command,
            *([] if "ar" in flags else weights),
            *flags,
            cwd=ROOT,
            env={**os.environ, **environment},
            stderr=asyncio.subprocess.PIPE,
        )
        log: list[str] = []
        reader = asyncio.create_task(read_log(process, log))
        try:
            async with asyncio.timeout(LIMIT_S):
                while not (found := re.search(r"http://127\.0\.0\.1:(\d+)", "".join(log))):
                    assert process.returncode is None, log
                    await asyncio.sleep(0.02)
            async with httpx.AsyncClient(base_url=found[0], timeout=LIMIT_S) as client:
                yield ServerProcess(process, client, log)
        finally:
            await end(process)
            await reader

    return start_server


async def test_answers_while_loading_then_serves_then_drains(start: ProcessFactory) -> None:
    async with start(FAKE_LOAD_S="1", FAKE_ROUND_S="0.01") as server:
        health = await server.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert (await server.client.post("/v1/completions", json={"prompt": "a"})).status_code == 503
        await server.wait_until_ready()
        models = [item["id"] for item in (await server.client.get("/v1/models")).json()["data"]]
        assert models == ["tiny"]
        assert server.logged("[verifier] fake verifier started")
        await server.wait_for_metric('jetspec_draft_phase_seconds_total{phase="foresight"} 0.5')

        async with server.stream(max_tokens=200) as response:
            lines = response.aiter_lines()
            await anext(lines)
            server.process.send_signal(signal.SIGTERM)
            await server.wait_for(lambda: server.logged("draining"))
            assert (await server.client.get("/ready")).status_code == 503
            refused = await server.client.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert await server.exit_status() == 0


async def test_drain_that_takes_too_long_ends_with_an_error_event(start: ProcessFactory) -> None:
    async with start("--shutdown-timeout", "0.3", FAKE_ROUND_S="0.2") as server:
        await server.wait_until_ready()
        async with server.stream(max_tokens=400) as response:
            lines = response.aiter_lines()
            await anext(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert "shutting down" in rest[-2]
        assert '"error"' in rest[-2]
        assert await server.exit_status() == 0


async def test_second_signal_stops_at_once(start: ProcessFactory) -> None:
    async with start("--shutdown-timeout", "3000", FAKE_ROUND_S="1000") as server:
        await server.wait_until_ready()
        request = asyncio.create_task(server.client.post("/v1/completions", json={"prompt": "a"}))
        await server.wait_for_metric("jetspec_num_requests_running 1.0")
        server.process.send_signal(signal.SIGTERM)
        await server.wait_for(lambda: server.logged("draining"))
        server.process.send_signal(signal.SIGTERM)
        assert await server.exit_status() == 1
        await asyncio.gather(request, return_exceptions=True)


async def test_signal_while_loading(start: ProcessFactory) -> None:
    async with start(FAKE_LOAD_S="1000") as server:
        await server.wait_for(lambda: server.logged("fake verifier started"))
        server.process.send_signal(signal.SIGTERM)
        assert await server.exit_status() == 0


async def test_verifier_death_in_mid_stream(start: ProcessFactory) -> None:
    async with start(FAKE_DIE_AFTER="20", FAKE_ROUND_S="0.01") as server:
        await server.wait_until_ready()
        async with server.stream(max_tokens=200) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert '"error"' in lines[-2]
        assert '"code":"service_unavailable"' in lines[-2]
        assert (await server.client.get("/health")).status_code == 503
        assert await server.exit_status() == 1


async def test_stuck_verifier(start: ProcessFactory) -> None:
    async with start("--watchdog-timeout", "0.5", FAKE_SILENT_AFTER="5") as server:
        await server.wait_until_ready()
        response = await server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 100})
        assert response.status_code == 503
        assert "no progress" in response.text
        assert await server.exit_status() == 1


async def test_killed_drafter_is_replaced_and_requests_go_on(start: ProcessFactory) -> None:
    async with start(FAKE_ROUND_S="0.01") as server:
        await server.wait_until_ready()
        await server.wait_for_metric("jetspec_drafter_up 1.0")
        [line] = subprocess.run(
            ["pgrep", "-P", str(server.process.pid), "-f", "fake_worker drafter"], capture_output=True, check=True
        ).stdout.splitlines()
        async with server.stream(max_tokens=200) as response:
            os.kill(int(line), signal.SIGKILL)
            lines = [line async for line in response.aiter_lines() if line]
        assert '"finish_reason":"length"' in lines[-2]
        await server.wait_for_metric('jetspec_worker_restarts_total{worker="drafter"} 1.0')
        await server.wait_for_metric("jetspec_drafter_up 1.0")
        assert server.logged("the drafter ended with status -9")


async def test_drafter_that_the_verifier_has_lost_is_replaced(start: ProcessFactory) -> None:
    async with start(FAKE_LOSES_DRAFTER="1") as server:
        await server.wait_until_ready()
        await server.wait_for_metric("jetspec_drafter_up 1.0")
        await server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 20})
        await server.wait_for_metric('jetspec_worker_restarts_total{worker="drafter"} 1.0')
        assert server.logged("the verifier has lost its link to the drafter")
        assert (await server.client.get("/health")).status_code == 200


async def test_rejected_drafter_is_a_refusal_to_start(start: ProcessFactory) -> None:
    async with start(FAKE_REJECT="another vocabulary") as server:
        assert await server.exit_status() == 1
        await server.wait_for(lambda: server.logged("does not fit the target: another vocabulary"))


async def test_autoregressive_method_has_no_drafter(start: ProcessFactory) -> None:
    async with start("--method", "ar") as server:
        await server.wait_until_ready()
        health = (await server.client.get("/health")).json()
        assert health == {"status": "ok", "drafter_up": False, "draining": False}
        assert not server.logged("fake drafter")


async def test_traces_are_closed_at_the_end(start: ProcessFactory, tmp_path: Path) -> None:
    async with start("--trace-dir", str(tmp_path / "traces")) as server:
        await server.wait_until_ready()
        (trace,) = (tmp_path / "traces").glob("trace-*.json")
        server.process.send_signal(signal.SIGTERM)
        assert await server.exit_status() == 0
        assert json.loads(trace.read_text()) == []  # the fake workers write nothing
    (tmp_path / "file").touch()
    async with start("--trace-dir", str(tmp_path / "file")) as server:
        assert await server.exit_status() == 1
        await server.wait_for(lambda: server.logged("--trace-dir: "))


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_frees_its_sequence(start: ProcessFactory, stream: bool) -> None:
    async with start(FAKE_ROUND_S="0.05") as server:
        await server.wait_until_ready()
        body = {"prompt": "hi", "max_tokens": 400, "stream": stream}
        request = asyncio.create_task(server.client.post("/v1/completions", json=body))
        await server.wait_for_metric("jetspec_num_requests_running 1.0")
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await server.wait_for_metric("jetspec_client_disconnects_total 1.0")
        await server.wait_for_metric("jetspec_num_requests_running 0.0")
        await server.wait_for_metric('jetspec_requests_total{finished_reason="abort"} 1.0')


async def test_endless_header_is_cut_off(start: ProcessFactory) -> None:
    async with start() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.client.base_url.port)
        writer.write(b"GET /health HTTP/1.1\r\nx: " + b"a" * 200_000)
        answer = await asyncio.wait_for(reader.read(200), LIMIT_S)
        assert answer.startswith(b"HTTP/1.1 400")
        writer.close()


async def test_workers_end_with_the_server(start: ProcessFactory) -> None:
    async with start() as server:
        await server.wait_until_ready()
        found = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, check=True).stdout
        workers = [int(line) for line in found.split()]
        assert len(workers) == 2
        server.process.send_signal(signal.SIGINT)
        assert await server.exit_status() == 0
        assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


async def test_port_in_use_is_reported_at_once(model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "server.cli", "serve", "--model", str(model_folder), "--port", str(port)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert run.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in run.stderr
