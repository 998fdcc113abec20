"""The whole server with real workers and tiny models, over real sockets: clients leave, workers are lost, it ends."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.server.server_process import LIMIT_S, REAL, ServerProcess, serve_process
from tests.tiny.models import VOCAB_SIZE, TinyModels
from tests.tiny.tokenizer import write_tokenizer

Starter = Callable[..., AbstractAsyncContextManager[ServerProcess]]
NUM_TOKENS = 300
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio", "branch_cache_entries")


@pytest.fixture(scope="session")
def served_folder(models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with a tokenizer."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(models.target(), folder)
    tokenizer = write_tokenizer(folder.parent / "tokenizer", VOCAB_SIZE)
    shutil.copy(tokenizer / "tokenizer.json", folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": VOCAB_SIZE - 1}), encoding="utf-8")
    return folder


@pytest.fixture
def start(models: TinyModels, served_folder: Path) -> Starter:
    """Starts servers with real workers, placed wherever the machine likes."""

    def start_server(*flags: str) -> AbstractAsyncContextManager[ServerProcess]:
        files = (
            "--model",
            str(served_folder),
            "--draft-model",
            str(models.draft()),
            "--adapter",
            str(models.adapter()),
        )
        plan = "--num-speculative-tokens=4 --cache-size=4 --passes=1 --refreshes=1 --dtype=float32"
        placement = "--verify-core=none --draft-core=none --max-num-seqs=4"
        return serve_process(REAL, *files, *plan.split(), *placement.split(), *flags, OMP_NUM_THREADS="1")

    return start_server


async def until_at_rest(server: ServerProcess) -> None:
    """Wait until the gauges say that nothing runs; nobody sends a request meanwhile."""
    async with asyncio.timeout(LIMIT_S):
        samples = await server.samples()
        while any(samples[f"jetspec_{gauge}"] for gauge in GAUGES):
            await asyncio.sleep(0.05)
            samples = await server.samples()


async def test_leaving_clients_and_lost_drafters_change_no_text(start: Starter) -> None:
    body = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    async with start("--fallback-timeout", "1") as server:
        await server.wait_until_ready()
        plain = await server.text(**body, speculative=False)
        assert await server.text(**body) == plain
        samples = await server.samples()
        drafted = ("hit", "late_hit", "miss")  # which of them depends on who is faster
        assert sum(samples[f"jetspec_rounds_total[outcome={outcome}]"] for outcome in drafted) > 0
        # A text begins with a block that is drafted and waited for; whether one comes from a cache depends on speed.
        assert samples["jetspec_fallback_seconds_count"] > 0 and samples["jetspec_transport_seconds_count"] > 0
        assert 0.0 <= samples["jetspec_transport_seconds_sum"] < LIMIT_S

        workers = server.workers()
        requests = [asyncio.create_task(server.text(**body, stream=False)) for _ in range(8)]  # S20
        async with server.stream(**body) as response:
            await anext(response.aiter_lines())
            os.kill(workers["verifier"], signal.SIGSTOP)  # so that all are there when their clients leave
            while (await server.samples())["jetspec_time_to_first_token_seconds_count"] < 3:
                await asyncio.sleep(0.01)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        os.kill(workers["verifier"], signal.SIGCONT)
        await until_at_rest(server)
        samples = await server.samples()
        assert (
            samples["jetspec_client_disconnects_total"] == samples["jetspec_requests_total[finished_reason=abort]"] > 0
        )
        assert await server.text(**body) == plain

        async with server.stream(**body) as response:  # F1
            lines = response.aiter_lines()
            first = await anext(lines)
            os.kill(workers["drafter"], signal.SIGKILL)
            assert text_of([first, *[line async for line in lines]]) == plain
        await server.wait_for_metric('jetspec_worker_restarts_total{worker="drafter"} 1.0')
        await server.wait_for_metric("jetspec_drafter_up 1.0")
        assert (await server.client.get("/health")).status_code == 200

        stopped = server.workers()["drafter"]
        os.kill(stopped, signal.SIGSTOP)  # F2, S30
        assert await server.text(**body) == plain
        assert (await server.client.get("/health")).status_code == 200
        os.kill(stopped, signal.SIGCONT)
        assert await server.text(**body) == plain

        async with server.stream(**body) as response:  # F12
            lines = response.aiter_lines()
            await anext(lines)
            server.process.send_signal(signal.SIGTERM)
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert await server.exit_status() == 0


def text_of(lines: list[str]) -> str:
    """The text of a stream."""
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGSTOP, "no progress"), (signal.SIGKILL, "ended with status -9")]
)
async def test_lost_verifier_is_told_to_everybody(start: Starter, number: signal.Signals, reason: str) -> None:
    """F3, F4, S30."""
    async with start("--watchdog-timeout", "2") as server:
        await server.wait_until_ready()
        async with server.stream(max_tokens=NUM_TOKENS, ignore_eos=True) as response:
            lines = response.aiter_lines()
            await anext(lines)
            os.kill(server.workers()["verifier"], number)
            health = asyncio.create_task(server.wait_until_unhealthy())
            rest = [line async for line in lines if line]
            await health
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert (error["code"], rest[-1]) == ("service_unavailable", "data: [DONE]")
        assert reason in error["message"]
        assert await server.exit_status() == 1
        assert not server.workers()
