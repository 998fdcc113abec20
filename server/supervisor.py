"""Starts the two workers, forwards what they log, and reacts when one of them is lost.

A lost drafter is started again, with growing pauses, unless the verifier refused it; a lost verifier ends the engine.
Knows processes and the control link; sequences are the engine's business.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.channel import AsyncChannel
from protocol.messages import ControlMessage, DrafterReady, DrafterStatus, Stop
from protocol.worker_config import EXIT_UNUSABLE_FILES
from server.engine import Engine
from server.metrics import Metrics

logger = logging.getLogger("jetspec.supervisor")

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
STABLE_AFTER_S = 60.0
STOP_GRACE_S = 5.0
TERMINATE_GRACE_S = 2.0
RECEIVE_TIMEOUT_S = 0.25
MAX_LINE_BYTES = 1 << 16
MAX_UNKNOWN_STATUSES = 20
"""Heartbeats of the verifier, half a second apart, that may leave out a ready drafter; it greets again meanwhile."""


@dataclass(frozen=True)
class WorkerCommands:
    """The command lines of the two workers, without their configuration file."""

    verifier: Sequence[str] = (sys.executable, "-m", "verify_worker")
    drafter: Sequence[str] = (sys.executable, "-m", "draft_worker")


class WorkerProcess:
    """One worker, in a process group of its own; its output goes to stderr, each line after the worker's name."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.started_at = time.monotonic()
        self._process = process
        self._output = asyncio.create_task(self._copy_output(), name=f"{name}-output")

    @classmethod
    async def start(cls, name: str, command: Sequence[str], config_path: Path) -> "WorkerProcess":
        """Start a worker; its own group keeps a terminal's Ctrl-C from it, so that the server can drain first."""
        process = await asyncio.create_subprocess_exec(
            *command,
            "--config",
            str(config_path),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        return cls(name, process)

    @property
    def pid(self) -> int:
        """Process id, also the id of the group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """The exit status; negative for a signal."""
        return await self._process.wait()

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the worker and to whatever it started."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            logger.debug("%s has no process left", self.name)

    async def stop(self, grace_s: float) -> None:
        """End it: by itself within the grace (it has been told to), then by signals of growing weight."""
        for number, limit_s in ((None, grace_s), (signal.SIGTERM, TERMINATE_GRACE_S)):
            if number is not None and self.is_running:
                self.signal_group(number)
            try:
                await asyncio.wait_for(self._process.wait(), limit_s)
                break
            except TimeoutError:
                logger.debug("the %s has not ended within %g s", self.name, limit_s)
        self.signal_group(signal.SIGKILL)
        await self._process.wait()
        await asyncio.wait({self._output}, timeout=1.0)
        self._output.cancel()

    async def _copy_output(self) -> None:
        assert self._process.stdout is not None
        prefix = f"[{self.name}] ".encode()
        pending = b""
        while chunk := await self._process.stdout.read(MAX_LINE_BYTES):
            *lines, pending = (pending + chunk).split(b"\n")
            if len(pending) > MAX_LINE_BYTES:
                lines, pending = [*lines, pending], b""
            for line in lines:
                sys.stderr.buffer.write(prefix + line + b"\n")
            sys.stderr.flush()
        if pending:
            sys.stderr.buffer.write(prefix + pending + b"\n")
            sys.stderr.flush()


@dataclass
class Supervisor:
    """Keeps the workers of one run going."""

    config_path: Path
    control: AsyncChannel[ControlMessage]
    engine: Engine
    metrics: Metrics
    wants_drafter: bool
    startup_timeout_s: float
    watchdog_timeout_s: float
    commands: WorkerCommands = field(default_factory=WorkerCommands)
    first_pause_s: float = FIRST_PAUSE_S

    def __post_init__(self) -> None:
        self.drafter_settled = asyncio.Event()
        """Set once it is known whether there is a drafter: it is ready, was refused, or has ended."""
        self._verifier: WorkerProcess | None = None
        self._drafter: WorkerProcess | None = None
        self._drafter_is_ready = False
        self._drafter_heard_at = 0.0
        self._num_excused_statuses = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def rejection(self) -> str | None:
        """Why no drafter can work here, if so: the verifier refused it, or its files are wrong."""
        return self.engine.rejection

    @property
    def drafter_pid(self) -> int | None:
        """Process id of the drafter, while one runs."""
        return self._drafter.pid if self._drafter is not None and self._drafter.is_running else None

    async def start(self) -> None:
        """Start both workers and begin to watch them."""
        self._verifier = await WorkerProcess.start("verifier", self.commands.verifier, self.config_path)
        self._spawn(self._watch_verifier(self._verifier), "verifier-watch")
        if not self.wants_drafter:
            self.drafter_settled.set()
            return
        self._spawn(self._keep_drafter(), "drafter-watch")
        self._spawn(self._receive_control(), "control-receive")
        self._spawn(self._watch_drafter_health(), "drafter-health")
        self._spawn(self._watch_rejection(), "drafter-rejection")

    async def stop(self) -> None:
        """End both workers and everything they started; returns within some seconds whatever they do."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.wants_drafter:
            self.control.send(Stop())
        # A worker that is still loading does not read its messages.
        workers = ((self._verifier, self.engine.info is not None), (self._drafter, self._drafter_is_ready))
        await asyncio.gather(
            *(worker.stop(STOP_GRACE_S if listens else 0.0) for worker, listens in workers if worker is not None)
        )
        self.metrics.set_drafter_up(False)

    def kill(self) -> None:
        """End both workers at once."""
        for worker in (self._verifier, self._drafter):
            if worker is not None:
                worker.signal_group(signal.SIGKILL)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._task_ended)
        self._tasks.append(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("%s ended", task.get_name(), exc_info=error)
            self.engine.fail("the supervisor ended")

    async def _watch_verifier(self, verifier: WorkerProcess) -> None:
        status = await verifier.wait()
        if self.engine.failure is None:
            logger.error("the verifier ended with status %d", status)
            self.engine.fail(f"the verifier ended with status {status}")

    # --- the drafter

    async def _keep_drafter(self) -> None:
        """Start the drafter as often as it takes, with pauses that grow until one has run for a while."""
        pause_s = self.first_pause_s
        refused = self.engine.drafter_rejected
        while not refused.is_set():
            self._drafter = await WorkerProcess.start("drafter", self.commands.drafter, self.config_path)
            self._drafter_heard_at = time.monotonic()
            self.metrics.drafter_started()
            status = await self._drafter.wait()
            was_stable = self._drafter_is_ready and time.monotonic() - self._drafter.started_at > STABLE_AFTER_S
            self._drafter.signal_group(signal.SIGKILL)  # whatever it may have started
            self._set_drafter(is_ready=False)
            if status == EXIT_UNUSABLE_FILES:
                self.engine.rejection = "its files cannot be used; its own message says which and why"
                refused.set()
            self.drafter_settled.set()
            if refused.is_set():
                return
            pause_s = self.first_pause_s if was_stable else pause_s
            logger.warning("the drafter ended with status %d; the next one starts in %g s", status, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if not refused.is_set():
                self.metrics.restarts.labels("drafter").inc()

    async def _receive_control(self) -> None:
        while True:
            received = await self.control.receive(RECEIVE_TIMEOUT_S)
            self.metrics.stale_messages("control", self.control.num_stale + self.control.num_malformed)
            if received is not None:
                self._handle(received.message)

    def _handle(self, message: ControlMessage) -> None:
        match message:
            case DrafterReady():
                if message.pid != self.drafter_pid:
                    return  # of a drafter that has ended since
                logger.info(
                    "the drafter is ready: %d passes, %d refreshes, cache of %d",
                    message.plan_passes,
                    message.plan_refreshes,
                    message.cache_size,
                )
                self._drafter_heard_at = time.monotonic()
                self._num_excused_statuses = self.engine.num_statuses_without_drafter  # sent before it was accepted
                self._set_drafter(is_ready=True)
                self.drafter_settled.set()
            case DrafterStatus():
                self._drafter_heard_at = time.monotonic()
                self.metrics.drafter_status(message)
                self.metrics.last_progress.labels("drafter").set(0)
            case Stop():
                logger.warning("the drafter sent stop, which only the server may send")

    def _set_drafter(self, is_ready: bool) -> None:
        self._drafter_is_ready = is_ready
        self.metrics.set_drafter_up(is_ready)

    async def _watch_drafter_health(self) -> None:
        """A drafter that is silent, or that the verifier has given up, is as good as lost: end it, and `_keep_drafter`
        starts another."""
        interval_s = min(0.5, self.watchdog_timeout_s / 4)
        while True:
            await asyncio.sleep(interval_s)
            silent_s = time.monotonic() - self._drafter_heard_at
            limit_s = self.watchdog_timeout_s if self._drafter_is_ready else self.startup_timeout_s
            if self._drafter is None or not self._drafter.is_running:
                continue
            self.metrics.last_progress.labels("drafter").set(silent_s)
            if silent_s > limit_s:
                logger.error("the drafter has been silent for %g s", limit_s)
                self._drafter.signal_group(signal.SIGKILL)
            elif self._drafter_is_ready and self._is_unknown_to_verifier():
                logger.error("the verifier has lost its link to the drafter")
                self._drafter.signal_group(signal.SIGKILL)

    def _is_unknown_to_verifier(self) -> bool:
        """Whether the verifier keeps saying that it has no drafter: a link that broke once, say by a long pause."""
        num_statuses = self.engine.num_statuses_without_drafter
        self._num_excused_statuses = min(self._num_excused_statuses, num_statuses)
        return num_statuses - self._num_excused_statuses >= MAX_UNKNOWN_STATUSES

    async def _watch_rejection(self) -> None:
        await self.engine.drafter_rejected.wait()
        logger.error("the drafter is refused: %s", self.rejection)
        self._set_drafter(is_ready=False)
        self.drafter_settled.set()
        if self._drafter is not None:
            self._drafter.signal_group(signal.SIGTERM)
