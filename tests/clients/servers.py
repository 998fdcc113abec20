"""Server processes for the clients' tests: the demo target with its drafter, or scripted workers where the text is of
no importance. They run in the project's own environment, the clients in another."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
SERVER_PYTHON = os.environ.get("JETSPEC_PYTHON", sys.executable)
"""The interpreter of the environment that the project is installed in."""
ENVIRONMENT = dict(os.environ)
"""As it is before conftest keeps the clients from the network: a first start fetches the demo target."""
START_LIMIT_S = 600.0
REST_LIMIT_S = 60.0
GAUGES = ("jetspec_num_requests_running", "jetspec_num_requests_waiting", "jetspec_kv_cache_usage_ratio")
NO_PINNING = ("--verify-core", "none", "--draft-core", "none")


@dataclass
class Server:
    """A running server, as a client sees it."""

    process: subprocess.Popen[str]
    address: str = ""
    log: list[str] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        """What clients of OpenAI's API are given."""
        return f"{self.address}/v1"

    def samples(self) -> dict[str, float]:
        """All metrics without labels."""
        families = text_string_to_metric_families(httpx.get(f"{self.address}/metrics").text)
        return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}

    def wait_until(self, condition: Callable[[dict[str, float]], bool]) -> None:
        """Wait until the metrics, which follow the verifier's reports, are so, or fail."""
        deadline = time.monotonic() + REST_LIMIT_S
        while not condition(samples := self.samples()):
            assert time.monotonic() < deadline, {gauge: samples[gauge] for gauge in GAUGES}
            time.sleep(0.1)

    def wait_for_rest(self) -> None:
        """Wait until nothing runs, waits or holds memory."""
        self.wait_until(lambda samples: not any(samples[gauge] for gauge in GAUGES))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not self.is_ready():
            assert self.process.poll() is None and time.monotonic() < deadline, "".join(self.log[-40:])
            time.sleep(0.2)

    def is_ready(self) -> bool:
        """Whether it listens, and its workers have loaded; the drafter, too, where it has one."""
        found = re.search(r"http://127\.0\.0\.1:\d+", "".join(self.log))
        if found is None:
            return False
        self.address = found[0]
        try:
            is_ready = httpx.get(f"{self.address}/ready").status_code == 200
        except httpx.TransportError:  # it ends; the caller says why
            return False
        return is_ready and self.samples()["jetspec_drafter_up"] == 1.0


@contextmanager
def _running(command: list[str], environment: Mapping[str, str]) -> Iterator[Server]:
    process = subprocess.Popen(
        [SERVER_PYTHON, *command, "--port", "0", *NO_PINNING],
        cwd=ROOT,
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    server = Server(process)
    reader = threading.Thread(target=server._read, daemon=True)
    reader.start()
    try:
        server._wait_until_ready()
        yield server
    finally:
        process.terminate()
        try:
            process.wait(REST_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()


@contextmanager
def demo_server(*flags: str) -> Iterator[Server]:
    """The demo target in fp32, so that its numbers can be compared with those of other programs."""
    arguments = ["-m", "server.cli", "serve", "--dtype", "float32", "--max-model-len", "512", "--vllm-metrics"]
    with _running([*arguments, "--shutdown-timeout", "5", *flags], {}) as server:
        yield server


@contextmanager
def scripted_server(folder: Path, *flags: str, **environment: str) -> Iterator[Server]:
    """A server whose workers play a script (tests/server/fake_worker.py); `folder` gets its model's files."""
    make = "import pathlib, sys; from tests.server.fakes import make_model_folder as m; m(pathlib.Path(sys.argv[1]))"
    subprocess.run(
        [SERVER_PYTHON, "-c", make, folder], cwd=ROOT, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)}, check=True
    )
    arguments = ["-m", "tests.server.serve_fakes", "--shutdown-timeout", "1"]
    for flag in ("--model", "--draft-model", "--adapter"):
        arguments += [flag, str(folder)]
    with _running([*arguments, *flags], environment) as server:
        yield server
