"""The server's Prometheus metrics: one registry, in this process, fed with the numbers the workers report.

Names follow the de-facto conventions of inference servers. Rules kept here: base units, counters end in `_total`, every
label value exists from the start at 0, and no label comes from a request.

With speculation tokens arrive several at a time. The inter-token latency is per token: every token of a round counts
with its share of the time since the round before. (vLLM counts one latency an engine step.)

Outcomes of a round (`outcome` label): `hit`, the block was there, finished, when verification ended; `late_hit`, it was
in the works and arrived after that; `miss`, it had to be drafted anew; `first`, the first block after the prefill,
which is always drafted anew; `autoregressive`, no draft at all. The hit rate is hit / (hit + late_hit + miss).

A fallback round (`reason` label) had no block prepared ahead: `first` and `miss` as above; the others are the
autoregressive ones, whose request switched speculation off, or which found no drafter, lost it, were given up by it, or
did not get its answer in time.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import generate_latest

from protocol.messages import DrafterStatus, Finished, PhaseTiming, RoundResult, VerifierStatus
from server.buckets import (
    FINE_BUCKETS,
    FIRST_TOKEN_BUCKETS,
    REQUEST_BUCKETS,
    TOKEN_COUNT_BUCKETS,
    TOKEN_LATENCY_BUCKETS,
)
from server.vllm_metrics import VllmAliases

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

RoundLabel = Literal["hit", "late_hit", "miss", "first", "autoregressive"]
TokenLabel = Literal["prefill", "hit", "late_hit", "miss", "first", "autoregressive"]
FinishLabel = Literal["stop", "length", "abort", "error"]
RejectionLabel = Literal["queue_full", "loading", "draining", "unavailable"]
StaleLabel = Literal["verifier", "drafter", "frontend", "control"]
WorkerLabel = Literal["verifier", "drafter"]
FallbackLabel = Literal["first", "miss", "switched_off", "no_drafter", "drafter_lost", "gave_up", "timeout"]
Phase = Literal["install", "foresight", "draft", "refresh", "refine", "push"]

ROUND_LABELS: tuple[RoundLabel, ...] = get_args(RoundLabel)
TOKEN_LABELS: tuple[TokenLabel, ...] = get_args(TokenLabel)
PHASES: tuple[Phase, ...] = get_args(Phase)


class OutcomeLabels:
    """Names the rounds of one sequence: the miss after a prefill is no failed prediction and has its own label."""

    def __init__(self) -> None:
        self._num_rounds = 0
        self.num_prepared = 0
        """Blocks prepared for the endings of the last round."""

    def of(self, result: RoundResult) -> TokenLabel:
        """The label of the next round of the sequence; to be asked once per round, in order."""
        self.num_prepared = result.num_cached
        if result.outcome == "prefill":
            return "prefill"
        self._num_rounds += 1
        return "first" if result.outcome == "miss" and self._num_rounds == 1 else result.outcome


class GrowingTotal:
    """Turns a total that a worker reports, and that restarts at 0 with the worker, into increments of a counter."""

    def __init__(self, increment: Callable[[float], None]) -> None:
        self._increment = increment
        self._last = 0.0

    def restart(self) -> None:
        """The worker was started anew."""
        self._last = 0.0

    def report(self, total: float) -> None:
        """Count what was added since the last report."""
        self._increment(total - self._last if total >= self._last else total)
        self._last = total


class Metrics:
    """Every metric of the server, and one method per thing that happens."""

    def __init__(self, num_draft_tokens: int) -> None:
        # A start time beside every counter doubles the number of series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._num_draft_tokens = num_draft_tokens
        self._aliases: list[CollectorRegistry] = []
        self.is_drafter_up = False
        self._make_speculation()
        self._make_workers()
        self._make_requests()

    def render(self) -> bytes:
        """The exposition text, format 0.0.4."""
        return generate_latest(self.registry) + b"".join(generate_latest(aliases) for aliases in self._aliases)

    def add_vllm_names(self, model_name: str) -> None:
        """From now on `render` shows the metrics under vLLM's names, too."""
        aliases = CollectorRegistry(auto_describe=False)
        aliases.register(VllmAliases(self.registry, model_name))
        self._aliases.append(aliases)

    def num_rounds(self, label: RoundLabel) -> float:
        """Rounds of one outcome so far."""
        return self.registry.get_sample_value("jetspec_rounds_total", {"outcome": label}) or 0.0

    # --- construction

    def _counter(self, name: str, text: str, label: str = "", values: Sequence[str] = ()) -> Counter:
        counter = Counter(f"jetspec_{name}", text, [label] if label else [], registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"jetspec_{name}", text, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float], label: str = "", values: Sequence[str] = ()
    ) -> Histogram:
        labels = [label] if label else []
        histogram = Histogram(f"jetspec_{name}", text, labels, buckets=buckets, registry=self.registry)
        for value in values:
            histogram.labels(value)
        return histogram

    def _make_speculation(self) -> None:
        positions = [str(position) for position in range(self._num_draft_tokens)]
        self.rounds = self._counter("rounds", "Verification rounds by outcome.", "outcome", ROUND_LABELS)
        self.committed = self._counter(
            "committed_tokens", "Tokens delivered, after every cut, by outcome of their round.", "outcome", TOKEN_LABELS
        )
        self.verified = self._counter(
            "verified_tokens", "Tokens verified, bonus included, before any cut.", "outcome", TOKEN_LABELS
        )
        self.drafts = self._counter("spec_decode_num_drafts", "Blocks verified.")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self.accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted, no bonus.")
        self.accepted_per_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted by slot.", "position", positions
        )
        self.exposed = self._histogram(
            "exposed_draft_latency_seconds",
            "From the end of a verification to the start of the next one of the sequence, by outcome.",
            FINE_BUCKETS,
            "outcome",
            ROUND_LABELS,
        )
        self.verify = self._histogram("verify_seconds", "Time of one verification.", FINE_BUCKETS)
        self.draft = self._histogram(
            "draft_seconds",
            "From the start of a drafting round to the cache the verifier found at its end.",
            FINE_BUCKETS,
        )
        self.fallback = self._histogram(
            "fallback_seconds", "Time of the drafter from a miss to the fallback block.", FINE_BUCKETS
        )
        self.transport = self._histogram(
            "transport_seconds",
            "Per awaited block: both ways of the link, and the time until a busy drafter reads its inbox.",
            FINE_BUCKETS,
        )
        self.fallbacks = self._counter(
            "fallback_rounds", "Rounds without a block prepared ahead.", "reason", get_args(FallbackLabel)
        )
        self.cache_entries = self._gauge("branch_cache_entries", "Blocks held ready for the endings of running rounds.")
        self.cache_evictions = self._counter("branch_cache_evictions", "Blocks prepared and not used.")
        self.cache_invalidations = self._counter(
            "branch_cache_invalidations", "Caches thrown away whole, as none of their blocks fitted the ending."
        )
        self.phase_seconds = self._counter("draft_phase_seconds", "Drafting time by phase.", "phase", PHASES)
        self.phase_runs = self._counter("draft_phase_runs", "Runs of a drafting phase.", "phase", PHASES)
        self._phase_totals = {
            phase: (
                GrowingTotal(self.phase_seconds.labels(phase).inc),
                GrowingTotal(self.phase_runs.labels(phase).inc),
            )
            for phase in PHASES
        }

    def _make_workers(self) -> None:
        self.drafter_up = self._gauge("drafter_up", "1 while a drafter is connected and drafting.")
        self.verifier_up = self._gauge("verifier_up", "1 while the verifier is loaded and alive.")
        self.last_progress = Gauge(
            "jetspec_worker_last_progress_seconds",
            "Seconds since a worker last showed progress.",
            ["worker"],
            registry=self.registry,
        )
        for worker in get_args(WorkerLabel):
            self.last_progress.labels(worker)
        self.restarts = self._counter(
            "worker_restarts", "Workers started again after a loss.", "worker", get_args(WorkerLabel)
        )
        self.stale = self._counter(
            "stale_messages", "Messages dropped as stale or malformed, by reader.", "kind", get_args(StaleLabel)
        )
        self._stale_totals = {kind: GrowingTotal(self.stale.labels(kind).inc) for kind in get_args(StaleLabel)}
        self.running = self._gauge("num_requests_running", "Sequences being prefilled or decoded.")
        self.waiting = self._gauge("num_requests_waiting", "Sequences waiting for a slot.")
        self.kv_usage = self._gauge("kv_cache_usage_ratio", "Share of the target's cache in use, 0 to 1.")

    def _make_requests(self) -> None:
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens prefilled.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated, as counted in usage.")
        self.requests = self._counter(
            "requests", "Requests that reached the engine, by ending.", "finished_reason", get_args(FinishLabel)
        )
        self.rejections = self._counter(
            "admission_rejections", "Requests refused before the engine.", "reason", get_args(RejectionLabel)
        )
        self.disconnects = self._counter("client_disconnects", "Clients that left before their answer was complete.")
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_BUCKETS
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Per token: the time between two rounds divided by the tokens of the second.",
            TOKEN_LATENCY_BUCKETS,
        )
        self.time_per_output_token = self._histogram(
            "time_per_output_token_seconds", "Per request: time per token after the first.", TOKEN_LATENCY_BUCKETS
        )
        self.end_to_end = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", REQUEST_BUCKETS)
        self.prompt_length = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a sequence.", TOKEN_COUNT_BUCKETS
        )
        self.answer_length = self._histogram(
            "request_generation_tokens", "Tokens generated for a sequence.", TOKEN_COUNT_BUCKETS
        )
        self.queue_time = self._histogram("request_queue_time_seconds", "Time waiting for a slot.", REQUEST_BUCKETS)
        self.prefill_time = self._histogram("request_prefill_time_seconds", "Time in prefill.", REQUEST_BUCKETS)
        self.decode_time = self._histogram("request_decode_time_seconds", "Time in decoding.", REQUEST_BUCKETS)

    def set_build_info(self, values: Mapping[str, str]) -> None:
        """Publish what runs here as labels of a gauge that is always 1."""
        info = Gauge("jetspec_build_info", "What this server runs.", list(values), registry=self.registry)
        info.labels(**values).set(1)

    # --- what happens

    def prompt_prefilled(self, num_prompt_tokens: int) -> None:
        """A prompt was processed, which also gave the first token."""
        self.prompt_tokens.inc(num_prompt_tokens)
        self.verified.labels("prefill").inc()

    def round_ended(self, result: RoundResult, label: RoundLabel, num_prepared: int) -> None:
        """One round of one live sequence was reported; `num_prepared` blocks stood ready for the round before."""
        self._count_fallback(result, label)
        self.cache_evictions.inc(max(0, num_prepared - (label == "hit")))
        self.cache_invalidations.inc(num_prepared > 0 and label != "hit")
        for histogram, seconds in (
            (self.draft, result.draft_s),
            (self.fallback, result.fallback_s),
            (self.transport, result.transport_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        self.verified.labels(label).inc(result.num_accepted + 1)
        self.rounds.labels(label).inc()
        self.exposed.labels(label).observe(result.exposed_s)
        self.verify.observe(result.verify_s)
        if result.num_drafts > 0:
            self.drafts.inc()
            self.draft_tokens.inc(result.num_drafts)
            self.accepted_tokens.inc(result.num_accepted)
            for position in range(min(result.num_accepted, self._num_draft_tokens)):
                self.accepted_per_position.labels(str(position)).inc()

    def _count_fallback(self, result: RoundResult, label: RoundLabel) -> None:
        if label in ("first", "miss"):
            self.fallbacks.labels(label).inc()
        elif result.alone_because is not None:
            self.fallbacks.labels(result.alone_because).inc()

    def sequence_finished(self, message: Finished) -> None:
        """The verifier ended a sequence; its times are measured inside the verifier."""
        self.prompt_length.observe(message.num_prompt_tokens)
        self.answer_length.observe(message.num_generated_tokens)
        self.queue_time.observe(message.queue_s)
        self.prefill_time.observe(message.prefill_s)
        self.decode_time.observe(message.decode_s)

    def verifier_status(self, status: VerifierStatus) -> None:
        """A heartbeat of the verifier."""
        self.verifier_up.set(1)
        self.running.set(status.num_running)
        self.waiting.set(status.num_waiting)
        self.cache_entries.set(status.num_cache_entries)
        self.kv_usage.set(status.kv_tokens_used / status.kv_tokens_total if status.kv_tokens_total else 0.0)
        self._stale_totals["verifier"].report(status.stale_messages)

    def verifier_lost(self) -> None:
        """Nothing runs any more; the gauges must say so without another message."""
        for gauge in (self.verifier_up, self.running, self.waiting, self.kv_usage, self.cache_entries):
            gauge.set(0)

    def drafter_status(self, status: DrafterStatus) -> None:
        """A heartbeat of the drafter."""
        self._stale_totals["drafter"].report(status.stale_messages)
        for timing in status.phases:
            self._report_phase(timing)

    def _report_phase(self, timing: PhaseTiming) -> None:
        seconds, runs = self._phase_totals[timing.phase]
        seconds.report(timing.total_s)
        runs.report(timing.count)

    def stale_messages(self, kind: StaleLabel, total: int) -> None:
        """Messages a reader has dropped so far."""
        self._stale_totals[kind].report(total)

    def set_drafter_up(self, is_up: bool) -> None:
        """Whether a drafter is loaded and connected."""
        self.is_drafter_up = is_up
        self.drafter_up.set(is_up)

    def drafter_started(self) -> None:
        """A new drafter process: its totals begin at 0."""
        totals = [self._stale_totals["drafter"], *(total for pair in self._phase_totals.values() for total in pair)]
        for total in totals:
            total.restart()

    def tokens_committed(self, label: TokenLabel, num_tokens: int) -> None:
        """Tokens of one round were handed to the client."""
        self.committed.labels(label).inc(num_tokens)

    def tokens_arrived(self, num_tokens: int, elapsed_s: float) -> None:
        """A round after the first brought tokens, `elapsed_s` after the round before it."""
        for _ in range(num_tokens):
            self.inter_token.observe(elapsed_s / num_tokens)

    def request_ended(self, reason: FinishLabel, num_generated_tokens: int, elapsed_s: float) -> None:
        """A request that reached the engine ended, whatever the ending."""
        self.requests.labels(reason).inc()
        self.generation_tokens.inc(num_generated_tokens)
        self.end_to_end.observe(elapsed_s)
