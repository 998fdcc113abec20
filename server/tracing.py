"""What a request tells of itself for its OpenTelemetry span, and the layer that sees it begin and end.

Those who know something of a request write it into its `RequestTrace`; a `SpanSink` makes spans of it at the end.
Without a sink the layer is not there, and what is written is thrown away. Counts, parameters and times only: no text of
a prompt or of an answer, and no message of an error, which may quote one.

A span is an error where the server is at fault: the engine failed, or the status is 5xx. A refused request (4xx) has an
`error.type` and, as HTTP servers' spans have it, no error status; one whose client left has the finish reason `abort`.

Attributes are those of the GenAI semantic conventions where they have one, else (`gen_ai.latency.*`, and of a request
`id` and `n`) vLLM's, which dashboards read, else our own.
"""

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.answer import Outcome, Timeline
from server.config import ConfigError
from server.errors import ApiError
from server.preparation import Prepared

logger = logging.getLogger("jetspec.tracing")

SPAN_NAME = "llm_request"
PROVIDER = "jetspec"
NS_PER_S = 1_000_000_000
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

Operation = Literal["text_completion", "chat"]
OPERATIONS: Mapping[str, Operation] = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}

AttributeValue = str | bool | int | float | list[str]
Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Phase:
    """A part of a request's life; times by `time.perf_counter`."""

    name: Literal["queue", "prefill", "decode"]
    started_at: float
    ended_at: float


class RequestTrace:
    """What is known of one request; it begins when this is made."""

    def __init__(self, operation: Operation) -> None:
        self._epoch_ns = time.time_ns()
        self._started_at = time.perf_counter()
        self.attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
        }
        self.phases: list[Phase] = []
        self.is_fault = False
        """Whether the server could not do what it should have done."""

    @property
    def started_ns(self) -> int:
        """When the request came, in nanoseconds since the epoch."""
        return self._epoch_ns

    def wall_clock_ns(self, at: float) -> int:
        """A time by `time.perf_counter` in nanoseconds since the epoch; clocks that are set meanwhile do not matter."""
        return self._epoch_ns + round((at - self._started_at) * NS_PER_S)

    def prepared(self, prepared: Prepared, response_id: str, is_stream: bool) -> None:
        """The request was understood; of several sequences the first one's parameters are shown."""
        first, output = prepared.plan.requests[0], prepared.output
        sampling = first.sampling
        self.attributes |= {
            "gen_ai.request.model": prepared.model_name,
            "gen_ai.request.max_tokens": first.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.request.choice.count": output.num_choices,
            "gen_ai.request.n": output.num_choices,
            "gen_ai.request.stream": is_stream,
            "gen_ai.response.id": response_id,
            "gen_ai.response.model": prepared.model_name,
            "gen_ai.usage.input_tokens": prepared.plan.num_prompt_tokens,
            "jetspec.num_sequences": len(prepared.plan.requests),
            "jetspec.speculative": first.speculative,
        }

    def answered(self, outcome: Outcome) -> None:
        """The request reached the engine, and ended there in one way or another."""
        usage, counts = outcome.usage, outcome.counts
        num_by_label = counts.by_label
        self.attributes |= {
            "gen_ai.usage.output_tokens": usage.num_generated_tokens,
            "gen_ai.response.finish_reasons": outcome.finish_reasons,
            "jetspec.rounds": sum(num_by_label.values()),
            "jetspec.hits": num_by_label.get("hit", 0),
            "jetspec.late_hits": num_by_label.get("late_hit", 0),
            "jetspec.misses": num_by_label.get("miss", 0),
            "jetspec.first_rounds": num_by_label.get("first", 0),
            "jetspec.autoregressive_rounds": num_by_label.get("autoregressive", 0),
            "jetspec.accepted_drafts": usage.num_accepted_drafts,
            "jetspec.rejected_drafts": usage.num_rejected_drafts,
            "jetspec.verify_s": counts.verify_s,
            "jetspec.exposed_s": counts.exposed_s,
        }
        self._note_times(outcome.timeline)

    def failed(self, error: ApiError) -> None:
        """The engine did not take the request, or did not complete it."""
        self.attributes["error.type"] = error.code
        self.is_fault = error.status >= 500

    def crashed(self, error: BaseException) -> None:
        """The application raised what nobody had foreseen, or was told to stop."""
        self.attributes["error.type"] = type(error).__name__
        self.is_fault = True

    def responded(self, status: int, error_code: str | None) -> None:
        """The HTTP status was sent; the span's own error stands where it has one."""
        self.attributes["http.response.status_code"] = status
        if status >= 400 and "gen_ai.response.finish_reasons" not in self.attributes:
            self.attributes.setdefault("error.type", error_code or str(status))
        self.is_fault = self.is_fault or status >= 500

    def _note_times(self, timeline: Timeline) -> None:
        """What is known of them: the verifier says how long a sequence waited when it sends its first token."""
        self.attributes["gen_ai.latency.e2e"] = timeline.ended_at - self._started_at
        prefilled_at, admitted_at = timeline.prefilled_at, timeline.admitted_at
        if prefilled_at is None:
            return
        time_to_first_s = prefilled_at - self._started_at
        self.attributes["gen_ai.latency.time_to_first_token"] = time_to_first_s
        if self.attributes.get("gen_ai.request.stream"):
            self.attributes["gen_ai.response.time_to_first_chunk"] = time_to_first_s
        if admitted_at is not None:
            self._add_phase("queue", timeline.submitted_at, admitted_at, "gen_ai.latency.time_in_queue")
            self._add_phase("prefill", admitted_at, prefilled_at, "gen_ai.latency.time_in_model_prefill")
        self._add_phase("decode", prefilled_at, timeline.ended_at, "gen_ai.latency.time_in_model_decode")

    def _add_phase(
        self, name: Literal["queue", "prefill", "decode"], started_at: float, ended_at: float, attribute: str
    ) -> None:
        self.phases.append(Phase(name, started_at, ended_at))
        self.attributes[attribute] = ended_at - started_at


class SpanSink(Protocol):
    """Takes what ended requests have told."""

    def record(self, trace: RequestTrace, headers: Headers) -> None:
        """Make the spans of a request that ends now, as part of the caller's trace if its headers name one."""

    def close(self) -> threading.Thread:
        """Send what is left; ends with the thread, which nothing has to wait for."""


class RequestTracing:
    """The layer around the application that sees a generation request from its headers to its last byte."""

    def __init__(self, app: ASGIApp, spans: SpanSink) -> None:
        self._app = app
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = OPERATIONS.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if operation is None:
            await self._app(scope, receive, send)
            return
        trace = RequestTrace(operation)
        state = scope.setdefault("state", {})
        state["trace"] = trace
        trace.attributes |= {"http.request.method": scope["method"], "http.route": scope["path"]}
        if "request_id" in state:
            trace.attributes["gen_ai.request.id"] = state["request_id"]

        async def noting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.responded(message["status"], state.get("error_code"))
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except BaseException as error:
            trace.crashed(error)
            raise
        finally:
            self._spans.record(trace, scope["headers"])


def trace_of(request: Request) -> RequestTrace:
    """The trace of a request; without tracing, one that nobody reads."""
    trace = request.scope.get("state", {}).get("trace")
    return trace if isinstance(trace, RequestTrace) else RequestTrace("text_completion")


def open_spans(endpoint: str | None, environment: Mapping[str, str]) -> SpanSink | None:
    """The way to the collector that the setting or a standard variable names; None when none does.

    Raises `ConfigError` when OpenTelemetry is not installed or cannot use its variables.
    """
    asked_by = "--otlp-traces-endpoint" if endpoint is not None else None
    asked_by = asked_by or next((name for name in ENDPOINT_VARIABLES if environment.get(name)), None)
    if asked_by is None:
        return None
    try:
        from server.spans import collector_spans
    except ImportError as error:
        hint = f"{error.name} is not installed: pip install 'jetspec-pp[otel]'"
        raise ConfigError(f"{asked_by}: needs the packages of the extra otel; {hint}") from None
    try:
        spans = collector_spans(endpoint)
    except ValueError as error:
        raise ConfigError(f"OpenTelemetry cannot use its OTEL_* variables: {error}") from None
    logger.info("a span per request goes to the collector of %s", asked_by)
    return spans
