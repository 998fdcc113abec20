"""OpenTelemetry spans of requests, sent to a collector in the background.

The only module that imports OpenTelemetry's SDK, which comes with the extra `otel`; `server.tracing` imports this one
when tracing is asked for. Variables (`OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, `OTEL_BSP_*`, ...) are the SDK's
business. No provider is made global: other libraries of this process do not begin to trace.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.build import package_version
from server.tracing import SPAN_NAME, Headers, RequestTrace

DEFAULT_SERVICE_NAME = "jetspecpp"
TRACES_PATH = "/v1/traces"
TRACE_HEADERS = (b"traceparent", b"tracestate")
EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
QUIET_S = 60.0


class RequestSpans:
    """Makes the spans of ended requests; what becomes of them is the provider's business, in a thread of its own."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("jetspecpp", package_version())
        self._propagator = TraceContextTextMapPropagator()

    def record(self, trace: RequestTrace, headers: Headers) -> None:
        """One span for the request, and one below it for each phase that it came to."""
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._caller(headers),
            kind=SpanKind.SERVER,
            attributes=trace.attributes,
            start_time=trace.started_ns,
        )
        below = set_span_in_context(span, Context())
        for phase in trace.phases:
            started_ns = trace.wall_clock_ns(phase.started_at)
            child = self._tracer.start_span(phase.name, context=below, start_time=started_ns)
            child.end(trace.wall_clock_ns(phase.ended_at))
        if trace.is_fault:
            span.set_status(StatusCode.ERROR)
        span.end(trace.wall_clock_ns(time.perf_counter()))

    def close(self) -> threading.Thread:
        """Send what is left. The SDK may take half a minute for a collector that does not answer, hence the thread."""
        closing = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        closing.start()
        return closing

    def _caller(self, headers: Headers) -> Context:
        """The caller's span, by the W3C headers; a root where they are missing or malformed."""
        carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in TRACE_HEADERS}
        return self._propagator.extract(carrier, Context())


class OncePerMinute(logging.Filter):
    """Lets one message a minute through: a collector that is down would have one every few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._passed_at: float | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        if self._passed_at is not None and now - self._passed_at < QUIET_S:
            return False
        self._passed_at = now
        return True


def collector_spans(endpoint: str | None) -> RequestSpans:
    """Spans that go to a collector over HTTP; without an address, to the one the SDK's variables name.

    Raises ValueError for a variable the SDK cannot use.
    """
    logging.getLogger(EXPORTER_LOGGER).addFilter(OncePerMinute())
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(_traces_address(endpoint))))
    return RequestSpans(provider)


def _traces_address(endpoint: str | None) -> str | None:
    """An address without a path is a collector's, whose traces have their usual place."""
    if endpoint is not None and urlsplit(endpoint).path in ("", "/"):
        return endpoint.rstrip("/") + TRACES_PATH
    return endpoint


def _resource() -> Resource:
    """This server. A name given here would hide the one that a variable gives."""
    attributes = {"service.version": package_version()}
    named = "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not named and not os.environ.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = DEFAULT_SERVICE_NAME
    return Resource.create(attributes)
