"""`jetspecpp serve`: the life of the server process, from binding the port to the exit status.

The port is bound before anything is loaded, so a port in use is reported at once, and probes get an answer while the
model loads. A first signal drains, a second one stops at once; a lost verifier ends the process with status 1.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from server.app import create_app
from server.config import ConfigError, ServeConfig
from server.engine import Engine, EngineDead
from server.keys import ApiKeys, load_keys
from server.metrics import Metrics
from server.service import Service, StartupError, open_service
from server.state import ServerState
from server.supervisor import WorkerCommands
from server.tracing import SpanSink, open_spans

logger = logging.getLogger("jetspec.serve")

BACKLOG = 2048
CONNECTION_GRACE_S = 5
MOMENT_FOR_LAST_EVENTS_S = 1.0
DRAIN_POLL_S = 0.05
LAST_SPANS_LIMIT_S = 3.0

EXIT_OK = 0
EXIT_FAILURE = 1


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: this module decides what a signal means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Signals:
    """The first SIGTERM or SIGINT asks for the end, a second one for it at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.at_once: Callable[[], None] | None = None
        """What a second signal does besides being noted."""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Listen while the context lasts."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self.receive, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def receive(self, number: signal.Signals) -> None:
        """A signal arrived."""
        logger.info("received %s", number.name)
        if not self.first.is_set():
            self.first.set()
            return
        self.second.set()
        if self.at_once is not None:
            self.at_once()


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket; raises `StartupError` when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


def check_certificates(config: ServeConfig) -> None:
    """Raises `ConfigError` naming the flag whose file is no usable key or certificate."""
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for flag, path in (("--ssl-certfile", config.ssl_certfile), ("--ssl-keyfile", config.ssl_keyfile)):
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{flag}: {path} does not exist")
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:  # an SSLError is one, too
        raise ConfigError(f"--ssl-certfile and --ssl-keyfile: they cannot be used together: {error}") from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except OSError as error:
            raise ConfigError(f"--ssl-ca-certs: {config.ssl_ca_certs} cannot be used: {error}") from None


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def http_server(state: ServerState, spans: SpanSink | None = None) -> HttpServer:
    """The HTTP server for a state. h11 because the other parser takes headers without limit."""
    settings = state.config
    config = uvicorn.Config(
        create_app(state, spans),
        http="h11",
        ws="none",
        lifespan="off",
        h11_max_incomplete_event_size=settings.h11_max_incomplete_event_size,
        timeout_keep_alive=settings.timeout_keep_alive,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=settings.ssl_cert_reqs,
        timeout_graceful_shutdown=CONNECTION_GRACE_S,
        server_header=False,
        log_config=None,
        access_log=False,
    )
    return HttpServer(config)


def run(config: ServeConfig, commands: WorkerCommands | None = None) -> int:
    """Serve until a signal or a lost verifier; returns the exit status.

    Raises `ConfigError` for keys, certificates or a tracing that cannot be used, and `StartupError` for an address.
    """
    check_certificates(config)
    keys = load_keys(config)
    spans = open_spans(config.otlp_traces_endpoint, os.environ)
    listener = bind_socket(config.host, config.port)
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    logger.info("listening on %s://%s:%d, loading the model", scheme, host, port)
    if not keys.are_required and not _is_loopback(host):
        logger.warning("no --api-key is set: whoever reaches %s:%d can use this server", host, port)
    return asyncio.run(_serve(config, keys, listener, commands, spans))


async def _serve(
    config: ServeConfig,
    keys: ApiKeys,
    listener: socket.socket,
    commands: WorkerCommands | None,
    spans: SpanSink | None,
) -> int:
    metrics = Metrics(config.num_speculative_tokens)
    state = ServerState(config, metrics, keys=keys)
    server = http_server(state, spans)
    signals = Signals()
    with signals.installed():
        http = asyncio.create_task(server.serve(sockets=[listener]), name="http")
        try:
            return await _run_service(config, state, http, signals, commands)
        finally:
            server.should_exit = True
            server.force_exit = signals.second.is_set()
            await asyncio.wait({http}, timeout=CONNECTION_GRACE_S + 1.0)
            http.cancel()
            await asyncio.gather(http, return_exceptions=True)
            if spans is not None:
                await _send_last_spans(spans, signals)


async def _send_last_spans(spans: SpanSink, signals: Signals) -> None:
    """Wait until the last spans are out, the time is over, or a second signal comes."""
    closing = spans.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_SPANS_LIMIT_S):
            while closing.is_alive() and not signals.second.is_set():
                await asyncio.sleep(DRAIN_POLL_S)


async def _run_service(
    config: ServeConfig,
    state: ServerState,
    http: asyncio.Task[None],
    signals: Signals,
    commands: WorkerCommands | None,
) -> int:
    """Load, serve, and drain; whatever ends it, the workers are gone afterwards."""
    work = asyncio.create_task(_load_and_watch(config, state, commands, signals), name="service")
    stop = asyncio.create_task(signals.first.wait())
    try:
        await asyncio.wait({work, stop, http}, return_when=asyncio.FIRST_COMPLETED)
        if http.done():
            logger.error("the HTTP server ended by itself")
            work.cancel()
        elif not work.done() and not state.is_ready:
            work.cancel()  # a signal while loading: nothing to drain
        return await work
    except asyncio.CancelledError:
        return EXIT_FAILURE if http.done() else EXIT_OK
    except (StartupError, EngineDead) as error:
        logger.error("%s", error)
        return EXIT_FAILURE
    finally:
        stop.cancel()


async def _load_and_watch(
    config: ServeConfig, state: ServerState, commands: WorkerCommands | None, signals: Signals
) -> int:
    async with open_service(config, state.metrics, commands) as service:
        signals.at_once = service.supervisor.kill
        state.model, state.engine = service.model, service.engine
        info = await service.wait_until_ready()
        state.is_ready = True
        names = ", ".join(service.model.names)
        logger.info("serving %s in %s, up to %d tokens a sequence", names, info.dtype, info.max_model_len)
        return await _until_the_end(service, state, signals)


async def _until_the_end(service: Service, state: ServerState, signals: Signals) -> int:
    if not await _first_of(service.engine.failed, signals.first):
        logger.error("the engine is lost: %s", service.engine.failure)
        await asyncio.sleep(MOMENT_FOR_LAST_EVENTS_S)  # for the error events, and for a probe to see the 503
        return EXIT_FAILURE
    state.is_draining = True
    logger.info("draining: %d requests have %g s", service.engine.num_live, state.config.shutdown_timeout)
    await _drain(service.engine, signals, state.config.shutdown_timeout)
    status = EXIT_FAILURE if service.engine.failure is not None else EXIT_OK
    if service.engine.num_live > 0:
        service.engine.fail("the server is shutting down")
        if not signals.second.is_set():
            await asyncio.sleep(MOMENT_FOR_LAST_EVENTS_S)
    return EXIT_FAILURE if signals.second.is_set() else status


async def _first_of(failed: asyncio.Event, signalled: asyncio.Event) -> bool:
    """Wait for a failure or a signal; True for the signal alone."""
    waits = [asyncio.create_task(failed.wait()), asyncio.create_task(signalled.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return not failed.is_set()


async def _drain(engine: Engine, signals: Signals, timeout_s: float) -> None:
    """Wait until nothing runs, the time is over, or a second signal comes."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while engine.num_live > 0 and not signals.second.is_set():
                await asyncio.sleep(DRAIN_POLL_S)


def configure_logging(level: str) -> None:
    """Everything goes to stderr, one line each."""
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
