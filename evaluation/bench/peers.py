"""Peers as the benchmark sees them: which file each one loads, and a process to ask."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from evaluation.bench.client import Generation
from evaluation.bench.contestants import Contestant, PeerKind
from evaluation.bench.errors import ContestantFailed

ROOT = Path(__file__).resolve().parents[2]
LOG_TAIL_CHARACTERS = 600
ANSWER_LIMIT_S = 900.0
LIBRARIES: dict[PeerKind, str] = {
    "transformers": "transformers",
    "llama.cpp-bf16": "llama.cpp",
    "llama.cpp-q4_1": "llama.cpp",
}


class PeerMissing(Exception):
    """A peer cannot take part; the message says why. Not an error: peers are optional."""


@dataclass(frozen=True)
class PeerSetup:
    """What all peers of a run share. `core` None leaves them to the operating system."""

    model_folder: Path
    is_demo: bool
    dtype: str
    stop_token_ids: list[int]
    core: int | None
    python: str = sys.executable


class PeerProcess:
    """One peer in its own process. Enter it to start and load it; raises `PeerMissing` where that cannot be."""

    def __init__(self, contestant: Contestant, setup: PeerSetup, model_file: Path | None) -> None:
        assert contestant.peer is not None
        self.contestant = contestant
        self._setup = setup
        self._command = [setup.python, "-m", "evaluation.bench.peer_worker"]
        self._command += ["--library", LIBRARIES[contestant.peer], "--dtype", setup.dtype]
        self._command += ["--model", str(model_file)] if model_file is not None else []
        self._command += ["--core", str(setup.core)] if setup.core is not None else []
        self._command += ["--lookup"] if contestant.drafts else []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - outlives this call
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=environment,
                start_new_session=True,
            )
            message = self._read()
        except (OSError, ContestantFailed) as error:
            self._end()
            raise PeerMissing(str(error)) from error
        if message["status"] != "ready":
            self._end()
            raise PeerMissing(str(message["reason"]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def generate(self, prompt_token_ids: list[int], max_tokens: int, gamma: int | None) -> Generation:
        """Greedy decoding of one prompt; raises `ContestantFailed`."""
        assert self._process is not None and self._process.stdin is not None
        request = {
            "prompt_token_ids": prompt_token_ids,
            "max_tokens": max_tokens,
            "stop_token_ids": self._setup.stop_token_ids,
            "num_lookup_tokens": gamma,
        }
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ContestantFailed(f"{error}: {self._last_words()}") from error
        message = self._read()
        token_ids = message["token_ids"]
        assert isinstance(token_ids, list)
        return Generation(
            token_ids=tuple(token_ids),
            num_tokens=int(str(message["num_tokens"])),
            num_first=int(str(message["num_first"])),
            first_s=float(str(message["first_s"])),
            end_s=float(str(message["end_s"])),
        )

    def _read(self) -> dict[str, object]:
        assert self._process is not None and self._process.stdout is not None
        limit = threading.Timer(ANSWER_LIMIT_S, self._process.kill)  # ends the reading too
        limit.start()
        line = self._process.stdout.readline()
        limit.cancel()
        if not line:
            status = self._process.wait()
            raise ContestantFailed(f"the process ended with {status}: {self._last_words()}")
        message: dict[str, object] = json.loads(line)
        return message

    def _last_words(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), LOG_TAIL_CHARACTERS, max(0, size - LOG_TAIL_CHARACTERS))
        return " | ".join(tail.decode("utf-8", "replace").strip().splitlines()[-3:]) or "it said nothing"

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
        self._log.close()


def check_library(contestant: Contestant, setup: PeerSetup) -> None:
    """Raises `PeerMissing` where the library is not installed: nothing need be fetched or written for it."""
    with PeerProcess(contestant, setup, None):
        pass


def model_file(kind: PeerKind, setup: PeerSetup, write_gguf: Callable[[Path], Path]) -> Path:
    """What a peer loads: the model folder itself, a GGUF of the same weights, or the demo target's original file.

    Raises `PeerMissing` for a file that cannot be had.
    """
    from modeling.demo import DemoError, DemoSource, cache_folder, prepare_gguf

    match kind:
        case "transformers":
            return setup.model_folder
        case "llama.cpp-bf16":
            return write_gguf(setup.model_folder)
        case "llama.cpp-q4_1":
            if not setup.is_demo:
                raise PeerMissing("only the demo target comes as Q4_1")
            try:
                return prepare_gguf(cache_folder(), DemoSource())
            except DemoError as error:
                raise PeerMissing(str(error)) from error
