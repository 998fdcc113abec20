"""A Ray Serve application: every replica is one JetSpec++ server, verifier and drafter together on one node; Ray routes
requests to replicas, restarts broken ones and scales their number.

    python deploy/ray/app.py --replicas 2                       serve on 127.0.0.1:8000 until Ctrl-C
    python deploy/ray/app.py --replicas 2 --demonstrate 8       answer 8 requests at once, say who did, end
    python deploy/ray/app.py --gpus --max-replicas 8 ...        two GPUs a replica, scaled by waiting requests
    serve run deploy.ray.app:build model=demo replicas=2        inside an existing cluster

A replica passes requests on byte for byte, streams included; it knows nothing of what they ask.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import ray
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import HTTPOptions
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

START_LIMIT_S = 900.0
STOP_LIMIT_S = 60.0
HEALTH_LIMIT_S = 5.0
REPLICA_HEADER = "x-jetspec-replica"
HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "upgrade", "host", "content-length"})
"""Headers that belong to one connection. Bodies are passed on as they are, so their encoding stays."""


class Settings(BaseModel):
    """What a deployment is made of. `flags` go to `jetspecpp serve` as they are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = "demo"
    replicas: int = Field(default=2, ge=1)
    max_replicas: int | None = Field(default=None, ge=1)
    gpus: bool = False
    cpus_per_replica: float = Field(default=1.0, gt=0.0)
    max_num_seqs: int = Field(default=4, ge=1)
    flags: tuple[str, ...] = ()


class Replica:
    """One server process on this node and the way to it."""

    def __init__(self, settings: Settings) -> None:
        self._port = _free_port()
        self._process = subprocess.Popen(_command(settings, self._port))
        # The server bounds every request itself, so this client needs no limit of its own on reading.
        limits = httpx.Timeout(connect=HEALTH_LIMIT_S, read=None, write=HEALTH_LIMIT_S, pool=None)
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._port}", timeout=limits)
        self._name = serve.get_replica_context().replica_id.unique_id
        _wait_until_ready(self._process, self._port)

    async def __call__(self, request: Request) -> Response:
        """Pass one request on. A client that leaves closes the inner connection too, which ends its sequence."""
        url = httpx.URL(path=request.url.path, query=request.url.query.encode())
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP]
        inner = self._client.build_request(request.method, url, headers=headers, content=await request.body())
        answer = await self._client.send(inner, stream=True)
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
        kept[REPLICA_HEADER] = self._name
        return StreamingResponse(_chunks(answer), status_code=answer.status_code, headers=kept)

    async def check_health(self) -> None:
        """Raise when the server is gone or its health is bad: Ray then replaces this replica."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the server ended with {self._process.returncode}")
        answer = await self._client.get("/health", timeout=HEALTH_LIMIT_S)
        answer.raise_for_status()

    def __del__(self) -> None:
        """Let running requests end, then the process."""
        process = getattr(self, "_process", None)
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
        process.kill()


async def _chunks(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()


def _command(settings: Settings, port: int) -> list[str]:
    """The server's command line. With GPUs Ray shows the process the two that it reserved, as 0 and 1."""
    place = ["--verify-device", "cuda:0", "--draft-device", "cuda:1"] if settings.gpus else []
    if not settings.gpus:  # replicas share the node's cores, and each would pin itself to the first two
        place = ["--verify-core", "none", "--draft-core", "none"]
    serve_command = [sys.executable, "-m", "server.cli", "serve", "--host", "127.0.0.1", "--port", str(port)]
    sizes = ["--model", settings.model, "--max-num-seqs", str(settings.max_num_seqs)]
    return [*serve_command, *sizes, *place, *settings.flags]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(process: "subprocess.Popen[bytes]", port: int) -> None:
    """Until the server takes requests. Raises RuntimeError when it ends or needs too long."""
    limit = time.monotonic() + START_LIMIT_S
    while time.monotonic() < limit:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode} while it was loading")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=HEALTH_LIMIT_S).status_code == httpx.codes.OK:
                return
        time.sleep(0.5)
    process.kill()
    raise RuntimeError(f"the server was not ready after {START_LIMIT_S:.0f} s")


def deployment(settings: Settings) -> serve.Application:
    """The application: replicas of one server each, with both devices of a replica on one node."""
    resources: dict[str, Any] = {"num_cpus": settings.cpus_per_replica}
    if settings.gpus:
        resources["num_gpus"] = 2  # one actor's resources always lie on one node
    count: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.max_replicas is not None:
        count = {
            "autoscaling_config": {
                "min_replicas": settings.replicas,
                "max_replicas": settings.max_replicas,
                "target_ongoing_requests": settings.max_num_seqs,
            }
        }
    made = serve.deployment(
        Replica,
        name="jetspecpp",
        ray_actor_options=resources,
        max_ongoing_requests=2 * settings.max_num_seqs,  # a few wait inside, so that a free slot is filled at once
        graceful_shutdown_timeout_s=STOP_LIMIT_S,
        health_check_period_s=10,
        health_check_timeout_s=2 * HEALTH_LIMIT_S,
        **count,
    )
    return made.bind(settings)


def build(arguments: dict[str, str]) -> serve.Application:
    """Entry point of `serve run` and of Serve's config files; arguments are the fields of `Settings`."""
    return deployment(Settings.model_validate(arguments))


def environment() -> dict[str, str]:
    """Variables of the cluster's processes: where our packages lie, and patience with a proxy on a busy machine."""
    repository = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [repository, *filter(None, [os.environ.get("PYTHONPATH")])]
    limit = os.environ.get("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    return {"PYTHONPATH": os.pathsep.join(paths), "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": limit}


async def demonstrate(base_url: str, num_requests: int) -> Counter[str]:
    """Answer requests at once and count who answered. Raises `httpx.HTTPError` when one fails."""
    async with httpx.AsyncClient(base_url=base_url, timeout=STOP_LIMIT_S * 10) as client:

        async def ask(number: int) -> str:
            body = {"prompt": f"{number} plus {number} is", "max_tokens": 24, "temperature": 0}
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            text = answer.json()["choices"][0]["text"]
            print(f"{answer.headers[REPLICA_HEADER]}  {body['prompt']}{text!r}")
            return str(answer.headers[REPLICA_HEADER])

        return Counter(await asyncio.gather(*(ask(number) for number in range(num_requests))))


def main() -> int:
    """Start the application; returns the exit status."""
    parser = argparse.ArgumentParser(description="JetSpec++ replicas behind Ray Serve.")
    parser.add_argument("--model", default="demo", help="target: demo, a folder or a hub id (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=2, help="servers, the least with --max-replicas")
    parser.add_argument("--max-replicas", type=int, help="scale up to this many by waiting requests")
    parser.add_argument("--gpus", action="store_true", help="two GPUs a replica (default: CPU)")
    parser.add_argument("--cpus-per-replica", type=float, default=1.0, help="CPUs that Ray reserves")
    parser.add_argument("--max-num-seqs", type=int, default=4, help="sequences a replica decodes at the same time")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on")
    parser.add_argument("--address", help="an existing Ray cluster (default: one of this process)")
    parser.add_argument("--demonstrate", type=int, metavar="N", help="answer N requests at once and end")
    parser.add_argument("flags", nargs="*", help="more flags of jetspecpp serve, after --")
    given = parser.parse_args()
    settings = Settings(**{name: value for name, value in vars(given).items() if name in Settings.model_fields})
    ray.init(address=given.address, runtime_env={"env_vars": environment()}, include_dashboard=False)
    serve.start(http_options=HTTPOptions(host=given.host, port=given.port))
    serve.run(deployment(settings), name="jetspecpp", route_prefix="/")
    try:
        if given.demonstrate is None:
            print(f"serving on http://{given.host}:{given.port}", flush=True)
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
            return 0
        answered = asyncio.run(demonstrate(f"http://{given.host}:{given.port}", given.demonstrate))
        for name, count in answered.items():
            print(f"replica {name}: {count} answers")
        return 0 if len(answered) == settings.replicas else 1
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
