"""The metrics under vLLM's names, for dashboards, autoscalers and benchmarks that look for those.

Nothing is counted here: every family is a copy, made when it is asked for, of one of ours. Names with a colon are for
recording rules by Prometheus's own convention, which is why these are not the native ones and come with a flag.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

PREFIX = "vllm:"
ALIASES = {
    "num_requests_running": "num_requests_running",
    "num_requests_waiting": "num_requests_waiting",
    "kv_cache_usage_ratio": "kv_cache_usage_perc",  # between 0 and 1 there, too
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "requests": "request_success",
    "admission_rejections": "admission_rejections",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "request_queue_time_seconds": "request_queue_time_seconds",
    "request_prefill_time_seconds": "request_prefill_time_seconds",
    "request_decode_time_seconds": "request_decode_time_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
    "spec_decode_num_drafts": "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens": "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens": "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos": "spec_decode_num_accepted_tokens_per_pos",
}
"""Ours, after `jetspec_`, and theirs, after `vllm:`."""
NEVER = ("num_preemptions", "A sequence is never interrupted once it runs: always 0.")
ENGINE = "0"


class VllmAliases(Collector):
    """A collector over another registry. `model_name` labels every sample, as there."""

    def __init__(self, source: CollectorRegistry, model_name: str) -> None:
        self._source = source
        self._labels = {"model_name": model_name, "engine": ENGINE}

    def collect(self) -> Iterator[Metric]:
        """Every aliased family with the values of now."""
        for family in self._source.collect():
            alias = ALIASES.get(family.name.removeprefix("jetspec_"))
            if alias is not None and family.name.startswith("jetspec_"):
                yield self._copy(family, PREFIX + alias)
        never = CounterMetricFamily(PREFIX + NEVER[0], NEVER[1], labels=list(self._labels))
        never.add_metric(list(self._labels.values()), 0.0)
        yield never

    def _copy(self, family: Metric, name: str) -> Metric:
        copied = Metric(name, family.documentation, family.type)
        copied.samples = [
            Sample(
                name + sample.name.removeprefix(family.name),
                {**self._labels, **sample.labels},
                sample.value,
                sample.timestamp,
                sample.exemplar,
            )
            for sample in family.samples
        ]
        return copied
