"""`jetspecpp serve` as a process: started on a free port, watched until it is ready, stopped without leftovers."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from evaluation.bench.client import Client
from evaluation.bench.errors import ContestantFailed, WrongInput
from server.config import ENVIRONMENT_PREFIX, http_flags

READY_LIMIT_S = 900.0
POLL_S = 0.1
STOP_LIMIT_S = 15.0
LOG_TAIL_LINES = 5
LISTENING = re.compile(r"listening on (http://\S+),")
COMMAND = (sys.executable, "-m", "server.cli", "serve")
PR_SET_PDEATHSIG = 1


class ServerProcess:
    """One running server. Enter it to start; it is ready after `wait_until_ready`."""

    def __init__(self, flags: Sequence[str], command: Sequence[str] = COMMAND) -> None:
        self._command = [*command, "--port", "0", *flags]
        self._log = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - outlives this call
        self._process: subprocess.Popen[str] | None = None
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        """The way to speak to it; only once it is ready."""
        assert self._client is not None, "the server is not ready"
        return self._client

    def __enter__(self) -> Self:
        # A session of its own: Ctrl-C in the terminal is the benchmark's to answer, which still wants to read metrics.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            text=True,
            start_new_session=True,
            preexec_fn=_end_with_parent,
            env=_environment(os.environ),
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            self._client.close()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGINT)  # the second signal: at once
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # its workers end with it
                self._process.wait()
        self._log.close()

    def wait_until_ready(self, needs_drafter: bool, limit_s: float = READY_LIMIT_S) -> None:
        """Raises `WrongInput` with the server's own words when it ends, and `ContestantFailed` when it hangs."""
        assert self._process is not None, "the server is not started"
        deadline = time.monotonic() + limit_s
        while self._client is None or not self._client.is_ready():
            if self._process.poll() is not None:
                raise WrongInput(f"the server did not start: {self.last_words()}")
            if time.monotonic() > deadline:
                raise ContestantFailed(f"not ready after {limit_s:.0f} s: {self.last_words()}")
            found = LISTENING.search(self.log())
            if found and self._client is None:
                self._client = Client(found[1])
            time.sleep(POLL_S)
        if needs_drafter and self.client.counters().value("jetspec_drafter_up") != 1.0:
            raise WrongInput(f"the server runs without its drafter: {self.last_words()}")

    def log(self) -> str:
        """Everything the server has written so far."""
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode("utf-8", "replace")

    def last_words(self) -> str:
        """The errors it has logged, or its last lines."""
        lines = [line for line in self.log().splitlines() if line.strip()]
        faults = [line for line in lines if re.search(r"\bERROR\b|jetspecpp:|Error: ", line)]
        return " | ".join((faults or lines)[-LOG_TAIL_LINES:]) or "it said nothing"


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without the variables of a public server, such as its keys and certificates: this one has a single client."""
    left_out = {ENVIRONMENT_PREFIX + name.upper() for name in http_flags()}
    return {name: value for name, value in environment.items() if name not in left_out}


def _end_with_parent() -> None:
    """In the new process: end when the benchmark is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
