"""Everything behind the HTTP surface, put together: model folder, runtime directory, links, engine and workers.

The command line and the HTTP server both open it. Knows the order of starting and stopping, and nothing of requests.
"""

import asyncio
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from protocol.channel import AsyncZmqChannel, ipc_endpoint, runtime_directory
from protocol.errors import EndpointError
from protocol.messages import CONTROL_MESSAGES, FRONTEND_MESSAGES, VerifierReady
from protocol.trace import TraceFileError, create_trace_file, finish_trace_file
from protocol.worker_config import WorkerConfig
from server.build import Weights, git_commit, identify, package_version
from server.config import DEMO_MODEL, PinnedCores, ServeConfig, choose_cores
from server.draft_files import DraftFiles, find_draft_files
from server.engine import Engine
from server.metrics import Metrics
from server.models import ModelError, ResolvedModel, resolve
from server.state import ServedModel
from server.supervisor import Supervisor, WorkerCommands
from server.tokenizer import Tokenizer, TokenizerError

logger = logging.getLogger("jetspec.service")

T = TypeVar("T")
DEMO_ALIAS = "HuggingFaceTB/SmolLM2-135M-Instruct"
REJECTION_GRACE_S = 1.0


class StartupError(Exception):
    """The server cannot start; the message is for the user."""


@dataclass(frozen=True)
class Endpoints:
    """Where the three links of a run meet."""

    frontend: str
    control: str
    peer: str


@dataclass(frozen=True)
class Service:
    """A running pair of workers and what is needed to use them."""

    config: ServeConfig
    model: ServedModel
    engine: Engine
    supervisor: Supervisor
    metrics: Metrics

    async def wait_until_ready(self) -> VerifierReady:
        """Wait for the verifier, and until it is known whether there is a drafter.

        Raises `EngineDead` when the verifier does not come up, and `StartupError` when it refuses the drafter: that is
        a wrong configuration, not a fault to work around.
        """
        info = await self.engine.wait_until_ready(self.config.startup_timeout)
        try:
            await asyncio.wait_for(self.supervisor.drafter_settled.wait(), self.config.startup_timeout)
        except TimeoutError:
            logger.warning("the drafter is not ready yet; serving without it")
        if self.config.method != "ar" and not self.metrics.is_drafter_up:
            # A refused drafter may have ended before the verifier's word about it has arrived.
            with suppress(TimeoutError):
                await asyncio.wait_for(self.engine.drafter_rejected.wait(), REJECTION_GRACE_S)
        if self.engine.rejection is not None:
            raise StartupError(f"the draft model does not fit the target: {self.engine.rejection}")
        self.metrics.set_build_info(self._build_info(info))
        if self.config.vllm_metrics:
            self.metrics.add_vllm_names(self.model.names[0])
        return info

    def _build_info(self, info: VerifierReady) -> dict[str, str]:
        """What runs here, as labels of a metric."""
        weights = {item.role: item for item in self.model.weights}
        return {
            "version": package_version(),
            "git_sha": git_commit(),
            "target_model": self.model.names[0],
            "target_revision": weights["target"].revision if "target" in weights else "",
            "draft_model": weights["draft"].name if "draft" in weights else "",
            "draft_revision": weights["draft"].revision if "draft" in weights else "",
            "dtype": info.dtype,
            "method": self.config.method,
            "block_size": str(info.num_draft_tokens + 1),
        }


@asynccontextmanager
async def open_service(
    config: ServeConfig, metrics: Metrics, commands: WorkerCommands | None = None
) -> AsyncIterator[Service]:
    """Start the workers and stop them at the end. Yields while they load.

    Raises `ConfigError` for a wrong setting, `StartupError` for a model that cannot be served.
    """
    try:
        cores = choose_cores(config)
        resolved, tokenizer = await in_daemon_thread(lambda: _load(config))
        drafter = find_draft_files(config)
        weights = await in_daemon_thread(lambda: _identify(resolved, drafter))
    except (ModelError, TokenizerError, OSError) as error:
        raise StartupError(str(error)) from None
    run_id = uuid.uuid4().hex
    with _directory_of_run() as directory, _trace_of_run(config.trace_dir, run_id) as trace:
        endpoints = _endpoints(directory)
        worker_config = _worker_config(config, resolved, drafter, cores, run_id, endpoints, trace)
        config_path = _write_config(directory, worker_config)
        frontend = AsyncZmqChannel.bind(endpoints.frontend, run_id, FRONTEND_MESSAGES)
        control = AsyncZmqChannel.bind(endpoints.control, run_id, CONTROL_MESSAGES)
        engine = Engine(
            frontend,
            metrics,
            max_num_seqs=config.max_num_seqs,
            max_num_queued=config.max_num_queued_reqs,
            watchdog_timeout_s=config.watchdog_timeout,
        )
        supervisor = Supervisor(
            config_path=config_path,
            control=control,
            engine=engine,
            metrics=metrics,
            wants_drafter=config.method != "ar",
            startup_timeout_s=config.startup_timeout,
            watchdog_timeout_s=config.watchdog_timeout,
            commands=commands or WorkerCommands(),
        )
        model = ServedModel(_served_names(config, resolved), tokenizer, str(resolved.name), weights)
        try:
            await engine.start()
            await supervisor.start()
            yield Service(config, model, engine, supervisor, metrics)
        finally:
            try:
                await engine.stop()
                await supervisor.stop()
            finally:
                supervisor.kill()
                frontend.close()
                control.close()


@contextmanager
def _directory_of_run() -> Iterator[Path]:
    """A private directory that is gone afterwards; raises `StartupError` where none can be had."""
    try:
        directory = runtime_directory()
    except EndpointError as error:
        raise StartupError(str(error)) from None
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _trace_of_run(folder: str | None, run_id: str) -> Iterator[Path | None]:
    """The file both workers write their rounds to, if asked for; raises `StartupError` where it cannot be made."""
    if folder is None:
        yield None
        return
    try:
        path = create_trace_file(
            Path(folder).expanduser().resolve(), f"trace-{time.strftime('%Y%m%d-%H%M%S')}-{run_id[:6]}"
        )
    except TraceFileError as error:
        raise StartupError(f"--trace-dir: {error}") from None
    logger.info("rounds are traced in %s", path)
    try:
        yield path
    finally:
        with suppress(OSError):
            finish_trace_file(path)


def _endpoints(directory: Path) -> Endpoints:
    try:
        return Endpoints(*(ipc_endpoint(directory, name) for name in ("frontend", "control", "peer")))
    except EndpointError as error:  # a path too long for a socket: TMPDIR decides where it lies
        raise StartupError(str(error)) from None


def _worker_config(
    config: ServeConfig,
    resolved: ResolvedModel,
    drafter: DraftFiles,
    cores: PinnedCores,
    run_id: str,
    endpoints: Endpoints,
    trace: Path | None,
) -> WorkerConfig:
    return WorkerConfig(
        run_id=run_id,
        model_path=str(resolved.folder),
        draft_path=_text(drafter.draft),
        adapter_path=_text(drafter.adapter),
        calibration_path=_text(drafter.calibration),
        method=config.method,
        dtype=config.dtype,
        draft_quantization=config.draft_quantization,
        device_verify=config.verify_device,
        device_draft=config.draft_device,
        core_verify=cores.verify,
        core_draft=cores.draft,
        verify_threads=config.verify_threads,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_draft_tokens=config.num_speculative_tokens,
        cache_size=config.cache_size,
        num_passes=config.passes,
        num_refreshes=config.refreshes,
        cache_threshold=config.cache_threshold,
        prefill_chunk=config.prefill_chunk,
        fallback_timeout_s=config.fallback_timeout,
        frontend_endpoint=endpoints.frontend,
        control_endpoint=endpoints.control,
        peer_endpoint=endpoints.peer,
        log_level=config.log_level,
        trace_path=_text(trace),
        parent_pid=os.getpid(),
    )


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Run blocking work so that the process can still end at once while it runs: a download may take an hour."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: object) -> None:
        if not future.done():
            setter(value)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
            outcome = (future.set_exception, error)
        else:
            outcome = (future.set_result, result)  # type: ignore[assignment]
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="blocking-work", daemon=True).start()
    return await future


def _load(config: ServeConfig) -> tuple[ResolvedModel, Tokenizer]:
    resolved = resolve(config.model, config.revision)
    return resolved, Tokenizer.load(resolved.folder)


def _identify(resolved: ResolvedModel, drafter: DraftFiles) -> tuple[Weights, ...]:
    """Names and revisions of everything that is loaded."""
    weights = [identify("target", resolved.folder, resolved.name)]
    if drafter.draft is not None:
        weights.append(identify("draft", drafter.draft))
    if drafter.adapter is not None:
        weights.append(identify("adapter", drafter.adapter))
    return tuple(weights)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _served_names(config: ServeConfig, resolved: ResolvedModel) -> tuple[str, ...]:
    """The names clients may use: as given, else the model's own; the demo also answers to the name of what it is."""
    if config.served_model_name is not None:
        return config.served_model_name
    return (DEMO_MODEL, DEMO_ALIAS) if config.model == DEMO_MODEL else (resolved.name,)


def _write_config(directory: Path, config: WorkerConfig) -> Path:
    path = directory / "workers.json"
    path.touch(mode=0o600)
    path.write_text(config.to_json(), encoding="utf-8")
    return path
