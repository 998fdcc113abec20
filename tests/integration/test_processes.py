"""Two real processes over ipc: the same texts, and a drafter killed in mid-stream changes none of them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from protocol.channel import ZmqChannel, ipc_endpoint, runtime_directory
from protocol.messages import (
    CONTROL_MESSAGES,
    FRONTEND_MESSAGES,
    ControlMessage,
    DrafterReady,
    Failed,
    Finished,
    FrontendMessage,
    RoundResult,
    SamplingFields,
    Stop,
    Submit,
    VerifierReady,
    VerifierStatus,
)
from protocol.worker_config import WorkerConfig
from tests.tiny.models import TinyModels

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0


@dataclass
class Processes:
    """Both workers, and the server's ends of their links."""

    config: WorkerConfig
    config_file: Path
    frontend: ZmqChannel[FrontendMessage]
    control: ZmqChannel[ControlMessage]
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    heard: list[FrontendMessage] = field(default_factory=list)
    drafters: list[DrafterReady] = field(default_factory=list)
    next_id: int = 0

    def start(self, package: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", package, "--config", str(self.config_file)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        self.running.append(process)
        return process

    def listen(self, condition: Callable[[], bool]) -> None:
        """Take messages in until a condition holds; a worker that ended fails the test."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, "the workers do not answer"
            received = self.frontend.receive(0.02)
            if received is not None:
                self.heard.append(received.message)
            ready = self.control.receive(0.0)
            if ready is not None and isinstance(ready.message, DrafterReady):
                self.drafters.append(ready.message)

    def submit(self, temperature: float, *, speculative: bool) -> int:
        self.next_id += 1
        sampling = SamplingFields(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=5)
        self.frontend.send(
            Submit(
                sequence_id=self.next_id,
                prompt_token_ids=[1, 2, 3, 9],
                max_tokens=120,
                sampling=sampling,
                stop_token_ids=[],
                speculative=speculative,
            )
        )
        return self.next_id

    def rounds(self, sequence_id: int) -> list[RoundResult]:
        return [m for m in self.heard if isinstance(m, RoundResult) and m.sequence_id == sequence_id]

    def is_over(self, sequence_id: int) -> bool:
        return any(isinstance(m, Finished | Failed) and m.sequence_id == sequence_id for m in self.heard)

    def finish(self, sequence_id: int) -> list[int]:
        self.listen(lambda: self.is_over(sequence_id))
        return [token for result in self.rounds(sequence_id) for token in result.token_ids]


@pytest.fixture
def processes(models: TinyModels) -> Iterator[Processes]:
    folder = runtime_directory()
    config = WorkerConfig(
        run_id="a" * 32,
        model_path=str(models.target("llama")),
        draft_path=str(models.draft("trained")),
        adapter_path=str(models.adapter()),
        dtype="float32",
        max_model_len=128,
        num_draft_tokens=4,
        cache_size=4,
        num_passes=1,
        num_refreshes=1,
        fallback_timeout_s=5.0,
        frontend_endpoint=ipc_endpoint(folder, "frontend"),
        control_endpoint=ipc_endpoint(folder, "control"),
        peer_endpoint=ipc_endpoint(folder, "peer"),
        parent_pid=os.getpid(),
    )
    file = folder / "workers.json"
    file.write_text(config.to_json(), encoding="utf-8")
    frontend = ZmqChannel.bind(config.frontend_endpoint, config.run_id, FRONTEND_MESSAGES)
    control = ZmqChannel.bind(config.control_endpoint, config.run_id, CONTROL_MESSAGES)
    stack = Processes(config, file, frontend, control)
    yield stack
    for process in stack.running:
        process.kill()
        process.wait()
    frontend.close()
    control.close()
    shutil.rmtree(folder)


def test_texts_are_the_same_and_survive_the_death_of_the_drafter(processes: Processes) -> None:
    stack = processes
    verifier, drafter = stack.start("verify_worker"), stack.start("draft_worker")
    stack.listen(lambda: any(isinstance(m, VerifierReady) for m in stack.heard) and len(stack.drafters) == 1)
    assert stack.drafters[0].pid == drafter.pid

    plain = {t: stack.finish(stack.submit(t, speculative=False)) for t in (0.0, 1.0)}
    assert [len(tokens) for tokens in plain.values()] == [120, 120]
    for temperature, expected in plain.items():
        sequence_id = stack.submit(temperature, speculative=True)
        assert stack.finish(sequence_id) == expected
        outcomes = {result.outcome for result in stack.rounds(sequence_id)}
        assert "autoregressive" not in outcomes and {"hit", "late_hit"} & outcomes

    running = stack.submit(1.0, speculative=True)
    stack.listen(lambda: len(stack.rounds(running)) > 5)
    os.kill(drafter.pid, signal.SIGKILL)
    assert drafter.wait() == -signal.SIGKILL
    assert stack.finish(running) == plain[1.0]
    assert stack.rounds(running)[-1].outcome == "autoregressive"

    successor = stack.start("draft_worker")
    stack.listen(lambda: len(stack.drafters) == 2)
    assert stack.drafters[1].pid == successor.pid
    again = stack.submit(1.0, speculative=True)
    assert stack.finish(again) == plain[1.0]
    assert "autoregressive" not in {result.outcome for result in stack.rounds(again)}
    stack.listen(lambda: isinstance(stack.heard[-1], VerifierStatus) and stack.heard[-1].drafter_connected)

    stack.frontend.send(Stop())
    stack.control.send(Stop())
    assert verifier.wait(WAIT_S) == 0
    assert successor.wait(WAIT_S) == 0


SERVER_TO_KILL = """
import json, os, subprocess, sys, time
config = json.load(open(sys.argv[1])) | {"parent_pid": os.getpid()}
json.dump(config, open(sys.argv[1], "w"))
commands = [[sys.executable, "-m", name, "--config", sys.argv[1]] for name in ("verify_worker", "draft_worker")]
print(*[subprocess.Popen(command, start_new_session=True).pid for command in commands], flush=True)
time.sleep(1000)
"""


def is_running(pid: int) -> bool:
    """Whether a process has not ended; one that has may remain as a zombie where nobody waits for it."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def test_a_killed_server_leaves_no_worker(processes: Processes) -> None:
    stack = processes
    command = [sys.executable, "-c", SERVER_TO_KILL, str(stack.config_file)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        workers = [int(pid) for pid in server.stdout.readline().split()]
        stack.listen(lambda: any(isinstance(m, VerifierReady) for m in stack.heard) and len(stack.drafters) == 1)
        assert all(map(is_running, workers))
        server.kill()
    stack.listen(lambda: not any(map(is_running, workers)))
