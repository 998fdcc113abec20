"""OpenTelemetry spans: what they say of requests, what they never say, and a collector that is well, ill or missing."""

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from protocol.messages import Failed
from server.app import create_app
from server.cli import main
from server.config import ConfigError, ServeConfig, from_arguments
from server.spans import OncePerMinute, RequestSpans
from server.tracing import open_spans
from tests.server.conftest import Stack
from tests.server.server_process import ROOT, ProcessFactory

CALLER_TRACE = 0x4BF92F3577B34DA6A3CE929D0E0E4736
CALLER_SPAN = 0x00F067AA0BA902B7
TRACEPARENT = f"00-{CALLER_TRACE:032x}-{CALLER_SPAN:016x}"
PROMPT = "a secret question"
ANSWER = "A short answer."


@dataclass
class Traced:
    """A stack whose requests are traced into memory."""

    stack: Stack
    exporter: InMemorySpanExporter
    app: FastAPI
    client: httpx.AsyncClient

    async def post(self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any) -> Any:
        content = {"prompt": PROMPT} if path == "/v1/completions" else {}
        return await self.client.post(path, json={**content, "temperature": 0, **body}, headers=headers)

    def spans(self) -> dict[str, ReadableSpan]:
        """All spans by name; a name that is there twice fails the test."""
        finished = self.exporter.get_finished_spans()
        assert len({span.name for span in finished}) == len(finished)
        return {span.name: span for span in finished}

    def span(self) -> ReadableSpan:
        """The one span of the one request."""
        return self.spans()["llm_request"]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def bounds(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time, span.end_time


@pytest.fixture
async def traced(stack: Stack) -> AsyncIterator[Traced]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = create_app(stack.state, RequestSpans(provider))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        yield Traced(stack, exporter, app, client)


async def test_a_completion_has_a_span_with_parameters_usage_and_speculation(traced: Traced) -> None:
    response = await traced.post(
        max_tokens=40, temperature=0.5, top_p=0.9, seed=7, jetspec=True, headers={"X-Request-Id": "abc"}
    )
    body = response.json()
    span = traced.span()
    assert (span.kind, span.status.status_code, span.parent) == (SpanKind.SERVER, StatusCode.UNSET, None)
    said = attributes(span)
    assert said["gen_ai.operation.name"] == "text_completion"
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == body["model"]
    assert said["gen_ai.response.id"] == body["id"]
    assert said["gen_ai.request.id"] == "abc"
    request = {name: said[f"gen_ai.request.{name}"] for name in ("max_tokens", "temperature", "top_p", "n", "seed")}
    assert request == {"max_tokens": 40, "temperature": 0.5, "top_p": 0.9, "n": 1, "seed": 7}
    assert said["gen_ai.request.stream"] is False
    assert said["gen_ai.usage.input_tokens"] == body["usage"]["prompt_tokens"] == len(PROMPT)
    assert said["gen_ai.usage.output_tokens"] == body["usage"]["completion_tokens"]
    assert said["gen_ai.response.finish_reasons"] == ("stop",)
    assert said["http.response.status_code"] == 200
    assert "error.type" not in said
    for name in ("rounds", "hits", "late_hits", "misses"):
        assert said[f"jetspec.{name}"] == body["jetspec"][name] > 0
    details = body["usage"]["completion_tokens_details"]
    assert said["jetspec.accepted_drafts"] == details["accepted_prediction_tokens"] > 0


async def test_queue_prefill_and_decode_follow_each_other_within_the_request(traced: Traced) -> None:
    await traced.post(max_tokens=40)
    spans = traced.spans()
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    whole = spans["llm_request"]
    for name in ("queue", "prefill", "decode"):
        parent = spans[name].parent
        assert parent is not None and parent.span_id == whole.context.span_id
    begin, end = bounds(whole)
    queue, prefill, decode = (bounds(spans[name]) for name in ("queue", "prefill", "decode"))
    assert begin <= queue[0] <= queue[1] == prefill[0] <= prefill[1] == decode[0] <= decode[1] <= end
    said = attributes(whole)
    for name, (started, ended) in (("queue", queue), ("model_prefill", prefill), ("model_decode", decode)):
        assert said[f"gen_ai.latency.time_in_{name}"] == pytest.approx((ended - started) / 1e9, abs=1e-6)
    assert 0 < said["gen_ai.latency.time_to_first_token"] < said["gen_ai.latency.e2e"]


async def test_a_streamed_chat_with_two_choices_has_one_span(traced: Traced) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    await traced.post("/v1/chat/completions", messages=messages, n=2, stream=True, max_tokens=3)
    said = attributes(traced.span())
    assert said["gen_ai.operation.name"] == "chat"
    assert (said["gen_ai.request.n"], said["gen_ai.request.choice.count"], said["jetspec.num_sequences"]) == (2, 2, 2)
    assert said["gen_ai.response.finish_reasons"] == ("length", "length")
    assert said["gen_ai.usage.output_tokens"] == 6
    assert said["gen_ai.request.stream"] is True
    assert said["gen_ai.response.time_to_first_chunk"] > 0


async def test_no_text_is_recorded(traced: Traced) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    assert ANSWER in (await traced.post(max_tokens=40, stop=["secret stop"], echo=True)).text
    await traced.post("/v1/chat/completions", messages=messages, stream=True)
    await traced.post(user=PROMPT, response_format={"type": "secret"})
    recorded = "".join(span.to_json() for span in traced.exporter.get_finished_spans())
    assert recorded.count("llm_request") == 3
    assert "secret" not in recorded
    assert ANSWER not in recorded


@pytest.mark.parametrize(
    ("traceparent", "trace_id"),
    [(f"{TRACEPARENT}-01", CALLER_TRACE), ("00-nonsense", None), (f"ff-{TRACEPARENT[3:]}-01", None)],
)
async def test_the_callers_trace_goes_on(traced: Traced, traceparent: str, trace_id: int | None) -> None:
    await traced.post(headers={"traceparent": traceparent, "tracestate": "vendor=1"})
    span = traced.span()
    if trace_id is None:
        assert span.parent is None
        return
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id, span.parent.is_remote) == (trace_id, CALLER_SPAN, True)
    assert span.context.trace_state["vendor"] == "1"
    assert {child.context.trace_id for child in traced.exporter.get_finished_spans()} == {trace_id}


async def test_a_caller_that_does_not_sample_gets_no_spans(traced: Traced) -> None:
    assert (await traced.post(headers={"traceparent": f"{TRACEPARENT}-00"})).status_code == 200
    assert traced.exporter.get_finished_spans() == ()


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({"max_tokens": -1}, 400, "invalid_value"),
        ({"model": "other"}, 404, "model_not_found"),
        ({"max_tokens": 100000}, 400, "context_length_exceeded"),
    ],
)
async def test_a_refused_request_is_no_fault_of_the_server(
    traced: Traced, body: dict[str, Any], status: int, error: str
) -> None:
    assert (await traced.post(**body)).status_code == status
    span = traced.span()
    assert span.status.status_code is StatusCode.UNSET
    assert (attributes(span)["error.type"], attributes(span)["http.response.status_code"]) == (error, status)
    assert set(traced.spans()) == {"llm_request"}


async def test_a_server_that_is_not_ready_is_at_fault(traced: Traced) -> None:
    traced.stack.state.is_ready = False
    assert (await traced.post()).status_code == 503
    assert traced.span().status.status_code is StatusCode.ERROR
    assert attributes(traced.span())["error.type"] == "service_unavailable"


async def test_a_sequence_that_the_verifier_refuses(traced: Traced) -> None:
    traced.stack.verifier.plan.reject = Failed(sequence_id=0, code="internal_error", message=PROMPT)
    assert (await traced.post()).status_code == 500
    span = traced.span()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, None)
    assert attributes(span)["error.type"] == "internal_error"
    assert attributes(span)["gen_ai.response.finish_reasons"] == ("error",)


async def test_a_failure_in_the_middle_of_a_stream_is_an_error_although_the_status_was_200(traced: Traced) -> None:
    traced.stack.verifier.plan.fail_after = 5
    response = await traced.post(stream=True, max_tokens=40)
    assert '"error"' in response.text
    spans = traced.spans()
    said = attributes(spans["llm_request"])
    assert spans["llm_request"].status.status_code is StatusCode.ERROR
    assert (said["http.response.status_code"], said["error.type"]) == (200, "internal_error")
    assert said["gen_ai.usage.output_tokens"] == 5
    assert "decode" in spans


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves(traced: Traced, stream: bool) -> None:
    """Sent below the client library, which cannot leave: the body, and the departure once the request runs."""
    traced.stack.says("abcdefgh", ends=False)
    traced.stack.verifier.plan.round_s = 0.01
    body = json.dumps({"prompt": PROMPT, "stream": stream, "max_tokens": 400}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        while traced.stack.verifier.num_rounds < 3:
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "root_path": "", "query_string": b"",
        "headers": headers, "client": ("127.0.0.1", 1), "server": ("server", 80),
    }  # fmt: skip
    await traced.app(scope, receive, send)
    span = traced.span()
    said = attributes(span)
    assert span.status.status_code is StatusCode.UNSET
    assert said["gen_ai.response.finish_reasons"] == ("abort",)
    assert 0 < said["gen_ai.usage.output_tokens"] < 400
    assert said["http.response.status_code"] == (200 if stream else 499)
    assert "error.type" not in said


async def test_only_generations_have_spans(traced: Traced) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/v1/completions"):
        await traced.client.get(path)
    await traced.client.post("/tokenize", json={"prompt": PROMPT})
    assert (await traced.client.get("/health?deep=1")).status_code == 200
    assert traced.exporter.get_finished_spans() == ()


async def test_closing_does_not_wait_for_an_exporter(stack: Stack) -> None:
    is_free = threading.Event()

    class Stuck(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            is_free.wait(60.0)
            return SpanExportResult.SUCCESS

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Stuck(), schedule_delay_millis=1))
    spans = RequestSpans(provider)
    transport = httpx.ASGITransport(create_app(stack.state, spans))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        for _ in range(20):  # the exporter hangs from the first one on
            assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
    closing = spans.close()
    assert closing.is_alive() and closing.daemon
    is_free.set()
    await asyncio.to_thread(closing.join)


@dataclass
class Collector:
    """A collector of spans on a real port."""

    port: int
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


@contextmanager
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            received.paths.append(self.path)
            received.requests.append(ExportTraceServiceRequest.FromString(content))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing: standard error is for failures."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received = Collector(server.server_port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield received
        finally:
            server.shutdown()
            thread.join()


async def test_spans_reach_a_collector_before_the_server_ends(start: ProcessFactory) -> None:
    """The batch would wait for an hour: what arrives was sent at the end."""
    with collector() as received:
        endpoint = f"http://127.0.0.1:{received.port}"
        variables = {"OTEL_SERVICE_NAME": "my-server", "OTEL_BSP_SCHEDULE_DELAY": "3600000"}
        async with start("--otlp-traces-endpoint", endpoint, **variables) as server:
            await server.wait_until_ready()
            headers = {"traceparent": f"{TRACEPARENT}-01"}
            answer = await server.client.post(
                "/v1/completions", json={"prompt": "hi", "max_tokens": 4}, headers=headers
            )
            assert answer.status_code == 200
            assert received.requests == []
            server.process.send_signal(signal.SIGTERM)
            assert await server.exit_status() == 0
    assert received.paths == ["/v1/traces"]
    (group,) = received.requests[0].resource_spans
    resource = {item.key: item.value.string_value for item in group.resource.attributes}
    assert resource["service.name"] == "my-server"
    spans = {span.name: span for scope in group.scope_spans for span in scope.spans}
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    assert spans["llm_request"].trace_id.hex() == f"{CALLER_TRACE:032x}"
    assert spans["llm_request"].parent_span_id.hex() == f"{CALLER_SPAN:016x}"


async def test_a_variable_alone_names_the_collector(start: ProcessFactory) -> None:
    with collector() as received:
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{received.port}/base",
            "OTEL_BSP_SCHEDULE_DELAY": "10",
        }
        async with start(**variables) as server:
            await server.wait_until_ready()
            await server.text(max_tokens=4)
            await server.wait_for(lambda: received.requests)
        assert set(received.paths) == {"/base/v1/traces"}
        resource = received.requests[0].resource_spans[0].resource
        assert {item.key: item.value.string_value for item in resource.attributes}["service.name"] == "jetspecpp"


async def test_a_collector_that_never_answers_disturbs_nobody(start: ProcessFactory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        async with start("--otlp-traces-endpoint", endpoint, OTEL_BSP_SCHEDULE_DELAY="1") as server:
            await server.wait_until_ready()
            answers = [await server.text(max_tokens=8) for _ in range(30)]
            assert len(set(answers)) == 1
            server.process.send_signal(signal.SIGTERM)
            assert await server.exit_status() == 0


def test_tracing_is_off_unless_asked_for() -> None:
    assert open_spans(None, {"OTEL_SERVICE_NAME": "a", "OTEL_EXPORTER_OTLP_ENDPOINT": ""}) is None
    code = "import sys, server.serve; print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "missing", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"]
)
def test_missing_packages_are_named_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    monkeypatch.setattr("server.serve.configure_logging", lambda level: None)  # its stream ends with this test
    monkeypatch.delitem(sys.modules, "server.spans")
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["serve", "--port", "0", "--otlp-traces-endpoint", "http://127.0.0.1:4318"]) == 2
    written = capsys.readouterr().err
    assert "--otlp-traces-endpoint" in written
    assert "jetspec-pp[otel]" in written
    assert missing in written


def test_variables_that_the_sdk_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1000000")
    with pytest.raises(ConfigError, match=r"OTEL_.*max_export_batch_size"):
        open_spans("http://127.0.0.1:4318", {})


@pytest.mark.parametrize("address", ["collector:4318", "ftp://a", "http://", "http://a:port"])
def test_an_endpoint_must_be_an_address(address: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        from_arguments({"otlp_traces_endpoint": address}, {})
    assert ServeConfig().otlp_traces_endpoint is None


def test_a_collector_that_is_down_is_mentioned_once_a_minute() -> None:
    now = 100.0
    quiet = OncePerMinute(lambda: now)
    record = logging.LogRecord("a", logging.WARNING, "a", 1, "retrying", (), None)
    assert quiet.filter(record)
    now = 159.0
    assert not quiet.filter(record)
    now = 160.0
    assert quiet.filter(record)
