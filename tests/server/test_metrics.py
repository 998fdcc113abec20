"""The metrics: present from the start, and consistent with what clients were told."""

import asyncio

import httpx
from prometheus_client.parser import text_string_to_metric_families

from protocol.messages import DrafterStatus, PhaseTiming
from server.metrics import Metrics
from tests.server.conftest import Stack


async def scrape(client: httpx.AsyncClient) -> dict[tuple[str, str], float]:
    """All samples, by name and labels."""
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = text_string_to_metric_families(response.text)
    return {
        (sample.name, ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def total(samples: dict[tuple[str, str], float], name: str) -> float:
    return sum(value for (found, _), value in samples.items() if found == name)


async def test_every_label_exists_before_the_first_request(stack: Stack) -> None:
    samples = await scrape(stack.client)
    for outcome in ("hit", "late_hit", "miss", "first", "autoregressive"):
        assert samples["jetspec_rounds_total", f"outcome={outcome}"] == 0
        assert samples["jetspec_exposed_draft_latency_seconds_bucket", f"le=0.00075,outcome={outcome}"] == 0
    for reason in ("stop", "length", "abort", "error"):
        assert samples["jetspec_requests_total", f"finished_reason={reason}"] == 0
    for position in range(8):
        assert samples["jetspec_spec_decode_num_accepted_tokens_per_pos_total", f"position={position}"] == 0
    for phase in ("install", "foresight", "draft", "refresh", "refine", "push"):
        assert samples["jetspec_draft_phase_seconds_total", f"phase={phase}"] == 0
    assert samples["jetspec_drafter_up", ""] == 1
    assert ("jetspec_worker_restarts_total", "worker=drafter") in samples
    assert ("jetspec_stale_messages_total", "kind=verifier") in samples


async def test_invariants_over_all_endings(stack: Stack) -> None:
    completion_tokens = 0
    prompt_tokens = 0
    for body in (
        {"max_tokens": 50},
        {"max_tokens": 5},
        {"max_tokens": 50, "stop": "ans"},
        {"max_tokens": 50, "speculative": False},
        {"max_tokens": 50, "ignore_eos": True},
    ):
        usage = (await stack.complete(**body)).json()["usage"]
        completion_tokens += usage["completion_tokens"]
        prompt_tokens += usage["prompt_tokens"]
    stack.verifier.plan.fail_after = 5
    stream = await stack.stream(max_tokens=50, stream_options={"include_usage": True, "continuous_usage_stats": True})
    completion_tokens += stream.events[-2]["usage"]["completion_tokens"]
    prompt_tokens += stream.events[-2]["usage"]["prompt_tokens"]

    samples = await scrape(stack.client)
    assert samples["jetspec_generation_tokens_total", ""] == completion_tokens
    assert samples["jetspec_prompt_tokens_total", ""] == prompt_tokens
    assert total(samples, "jetspec_requests_total") == 6
    assert samples["jetspec_requests_total", "finished_reason=error"] == 1
    assert samples["jetspec_requests_total", "finished_reason=length"] == 2
    accepted = samples["jetspec_spec_decode_num_accepted_tokens_total", ""]
    assert total(samples, "jetspec_spec_decode_num_accepted_tokens_per_pos_total") == accepted > 0
    num_drafts = samples["jetspec_spec_decode_num_drafts_total", ""]
    labels = ("hit", "late_hit", "miss", "first")
    rounds = {label: samples["jetspec_rounds_total", f"outcome={label}"] for label in labels}
    assert sum(rounds.values()) == num_drafts > 0
    assert rounds["first"] == 5
    assert all(rounds.values())
    assert samples["jetspec_rounds_total", "outcome=autoregressive"] > 0
    # Two requests ended with a stop token, which is counted in usage and never delivered.
    assert total(samples, "jetspec_committed_tokens_total") == completion_tokens - 2
    assert total(samples, "jetspec_verified_tokens_total") >= total(samples, "jetspec_committed_tokens_total")
    assert samples["jetspec_exposed_draft_latency_seconds_bucket", "le=0.00075,outcome=hit"] == rounds["hit"]
    assert samples["jetspec_exposed_draft_latency_seconds_bucket", "le=0.0005,outcome=hit"] == 0
    assert samples["jetspec_time_to_first_token_seconds_count", ""] == 6
    assert samples["jetspec_e2e_request_latency_seconds_count", ""] == 6


async def test_inter_token_latency_counts_tokens_and_not_rounds(stack: Stack) -> None:
    stack.says("abcdefgh", ends=False)
    await stack.complete(max_tokens=21)
    samples = await scrape(stack.client)
    assert samples["jetspec_inter_token_latency_seconds_count", ""] == 20
    assert samples["jetspec_time_per_output_token_seconds_count", ""] == 1


async def test_gauges_return_to_zero_without_traffic(stack: Stack) -> None:
    stack.says("abc", ends=False)
    stack.verifier.plan.round_s = 0.02
    request = asyncio.create_task(stack.complete(max_tokens=100))
    while stack.sample("jetspec_num_requests_running") == 0:
        await asyncio.sleep(0.005)
    assert stack.sample("jetspec_kv_cache_usage_ratio") > 0
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    while stack.sample("jetspec_num_requests_running") > 0:
        await asyncio.sleep(0.005)
    assert stack.sample("jetspec_kv_cache_usage_ratio") == 0
    assert stack.sample("jetspec_requests_total", finished_reason="abort") == 1


def test_worker_totals_survive_a_restart_of_the_worker() -> None:
    metrics = Metrics(8)

    def status(count: int, total_s: float, stale: int) -> DrafterStatus:
        phases = [PhaseTiming(phase="draft", count=count, total_s=total_s)]
        return DrafterStatus(num_sequences=0, stale_messages=stale, phases=phases)

    metrics.drafter_status(status(10, 1.0, 3))
    metrics.drafter_status(status(12, 1.5, 3))
    metrics.drafter_started()
    metrics.drafter_status(status(20, 2.0, 1))

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    assert value("jetspec_draft_phase_runs_total", phase="draft") == 32
    assert value("jetspec_draft_phase_seconds_total", phase="draft") == 3.5
    assert value("jetspec_stale_messages_total", kind="drafter") == 4
