"""The whole server process, with uvicorn and with fake workers as processes: signals, losses, departures."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server.cli import main
from server.config import ConfigError, ServeConfig
from server.serve import run
from tests.server.server_process import LIMIT_S, ROOT, ProcessFactory


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
        async with server.stream(max_tokens=200) as response:
            os.kill(server.workers()["drafter"], signal.SIGKILL)
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


async def test_a_drafter_with_wrong_files_is_not_started_again_and_again(start: ProcessFactory) -> None:
    async with start(FAKE_UNUSABLE="1") as server:
        assert await server.exit_status() == 1
        await server.wait_for(lambda: server.logged("its files cannot be used"))
        assert not server.logged("the next one starts in")


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


async def test_workers_end_with_the_server(start: ProcessFactory) -> None:
    async with start() as server:
        await server.wait_until_ready()
        workers = list(server.workers().values())
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


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A key and a certificate for 127.0.0.1, signed by itself, in one file."""
    file = tmp_path / "server.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(file), "-out", str(tmp_path / "cert.pem")]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    file.write_bytes(file.read_bytes() + (tmp_path / "cert.pem").read_bytes())
    return file


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_https(start: ProcessFactory, certificate: Path) -> None:
    async with start("--ssl-certfile", str(certificate), certificate=certificate, FAKE_ROUND_S="0.001") as server:
        assert server.client.base_url.scheme == "https"
        await server.wait_until_ready()
        async with server.stream(max_tokens=20) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")  # plain HTTP
        assert b"200 OK" not in await asyncio.wait_for(reader.read(), LIMIT_S)
        writer.close()


def test_unusable_certificates_and_keys_are_reported_before_anything_is_loaded(tmp_path: Path) -> None:
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("no certificate")
    for wrong, message in (
        (ServeConfig(ssl_certfile=str(tmp_path / "none")), "--ssl-certfile: .* does not exist"),
        (ServeConfig(ssl_certfile=str(rubbish), ssl_keyfile=str(tmp_path / "none")), "--ssl-keyfile"),
        (ServeConfig(ssl_certfile=str(rubbish)), "--ssl-certfile and --ssl-keyfile"),
        (ServeConfig(api_key_file=str(tmp_path / "none")), "--api-key-file"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(wrong)


def test_more_than_one_http_process_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    assert main(["serve"]) == 2
    assert "WEB_CONCURRENCY" in capsys.readouterr().err


def test_model_given_twice_is_refused(capsys: Any) -> None:
    assert main(["serve", "one", "--model", "two"]) == 2
    assert "--model: the model was given twice" in capsys.readouterr().err


@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_stopped_verifier_is_no_healthy_server(start: ProcessFactory, is_busy: bool) -> None:
    """S30: its process is alive and answers nothing."""
    async with start("--watchdog-timeout", "0.5", FAKE_ROUND_S="0.02") as server:
        await server.wait_until_ready()
        request = asyncio.create_task(server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 400}))
        if is_busy:
            await server.wait_for_metric("jetspec_num_requests_running 1.0")
        else:
            await request
        os.kill(server.workers()["verifier"], signal.SIGSTOP)
        await server.wait_until_unhealthy()
        assert (await request).status_code == (503 if is_busy else 200)
        assert await server.exit_status() == 1
