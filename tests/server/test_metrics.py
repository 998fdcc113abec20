"""The metrics: present from the start, and consistent with what clients were told."""

import asyncio

import httpx
from prometheus_client.parser import text_string_to_metric_families

from protocol.messages import DrafterStatus, PhaseTiming
from server.metrics import Metrics
from server.vllm_metrics import ALIASES
from tests.server.conftest import Stack, StackFactory


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
    for reason in ("first", "miss", "switched_off", "no_drafter", "drafter_lost", "gave_up", "timeout"):
        assert samples["jetspec_fallback_rounds_total", f"reason={reason}"] == 0
    for reason in ("queue_full", "loading", "draining", "unavailable"):
        assert samples["jetspec_admission_rejections_total", f"reason={reason}"] == 0
    for name in ("verify", "draft", "fallback", "transport"):
        assert samples[f"jetspec_{name}_seconds_count", ""] == 0
    for name in ("entries", "evictions_total", "invalidations_total"):
        assert samples[f"jetspec_branch_cache_{name}", ""] == 0
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
    assert samples["jetspec_fallback_rounds_total", "reason=first"] == rounds["first"]
    assert samples["jetspec_fallback_rounds_total", "reason=miss"] == rounds["miss"]
    alone = samples["jetspec_rounds_total", "outcome=autoregressive"]
    assert samples["jetspec_fallback_rounds_total", "reason=switched_off"] == alone
    assert samples["jetspec_fallback_seconds_count", ""] == rounds["miss"] + rounds["first"]
    assert samples["jetspec_transport_seconds_count", ""] == num_drafts - rounds["hit"]
    assert samples["jetspec_draft_seconds_count", ""] == num_drafts - rounds["first"]
    assert samples["jetspec_branch_cache_evictions_total", ""] > 0
    assert samples["jetspec_branch_cache_invalidations_total", ""] == rounds["miss"] + rounds["late_hit"]
    # Two requests ended with a stop token, which is counted in usage and never delivered.
    assert total(samples, "jetspec_committed_tokens_total") == completion_tokens - 2
    assert total(samples, "jetspec_verified_tokens_total") >= total(samples, "jetspec_committed_tokens_total")
    assert samples["jetspec_exposed_draft_latency_seconds_bucket", "le=0.00075,outcome=hit"] == rounds["hit"]
    assert samples["jetspec_exposed_draft_latency_seconds_bucket", "le=0.0005,outcome=hit"] == 0
    assert samples["jetspec_time_to_first_token_seconds_count", ""] == 6
    assert samples["jetspec_e2e_request_latency_seconds_count", ""] == 6
    # A failed sequence has no lengths: the verifier says only why.
    assert samples["jetspec_request_prompt_tokens_count", ""] == 5
    assert samples["jetspec_request_generation_tokens_count", ""] == 5


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
    assert stack.sample("jetspec_branch_cache_entries") > 0
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    while stack.sample("jetspec_num_requests_running") > 0:
        await asyncio.sleep(0.005)
    assert stack.sample("jetspec_kv_cache_usage_ratio") == stack.sample("jetspec_branch_cache_entries") == 0
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


async def test_invariants_when_requests_also_leave_and_are_refused(make_stack: StackFactory) -> None:
    """Section 2.3 of the ecosystem survey, S29 and S31: every request is counted once, every token where it belongs."""
    async with make_stack(max_num_seqs=8, max_num_queued_reqs=4) as stack:
        stack.says("abcdefgh", ends=False)
        stack.verifier.plan.round_s = 0.1  # so slow that nobody is done before the refusals
        leaving = [asyncio.create_task(stack.complete(max_tokens=400, stream=number % 2 == 0)) for number in range(6)]
        staying = [asyncio.create_task(stack.complete(max_tokens=20 + number)) for number in range(6)]
        while stack.engine.num_live < 12:
            await asyncio.sleep(0.001)
        refused = [await stack.complete() for _ in range(3)]
        stack.verifier.plan.round_s = 0.002
        answers = await asyncio.gather(*staying)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        while stack.sample("jetspec_num_requests_running") > 0:
            await asyncio.sleep(0.005)
        assert [answer.status_code for answer in refused] == [429] * 3

        samples = await scrape(stack.client)
        assert samples["jetspec_requests_total", "finished_reason=abort"] == 6
        assert samples["jetspec_requests_total", "finished_reason=length"] == 6
        assert total(samples, "jetspec_requests_total") == 12
        assert samples["jetspec_admission_rejections_total", "reason=queue_full"] == 3
        told = sum(answer.json()["usage"]["completion_tokens"] for answer in answers)
        generated = samples["jetspec_generation_tokens_total", ""]
        assert generated >= told == sum(range(20, 26))
        assert generated == total(samples, "jetspec_committed_tokens_total")  # no stop token here
        assert total(samples, "jetspec_verified_tokens_total") >= generated
        drafts = samples["jetspec_spec_decode_num_drafts_total", ""]
        accepted = samples["jetspec_spec_decode_num_accepted_tokens_total", ""]
        per_position = [samples[PER_POSITION, f"position={position}"] for position in range(8)]
        assert sum(per_position) == accepted
        assert per_position == sorted(per_position, reverse=True)
        drafted = ("hit", "late_hit", "miss", "first")
        verified = sum(samples["jetspec_verified_tokens_total", f"outcome={label}"] for label in drafted)
        assert verified / drafts == 1 + accepted / drafts
        assert sum(samples["jetspec_rounds_total", f"outcome={label}"] for label in drafted) == drafts
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio", "branch_cache_entries"):
            assert samples[f"jetspec_{gauge}", ""] == 0


PER_POSITION = "jetspec_spec_decode_num_accepted_tokens_per_pos_total"


async def test_exposition_is_clean(stack: Stack) -> None:
    await stack.complete()
    text = (await stack.client.get("/metrics")).text
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    for family in families:
        assert family.documentation, family.name
        if family.name.startswith("jetspec_"):
            assert ":" not in family.name
            assert not family.name.endswith(("_ms", "_perc", "_percent", "_created"))
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
    assert "process_resident_memory_bytes" in names


async def test_vllm_names_are_copies(make_stack: StackFactory) -> None:
    async with make_stack() as stack:
        assert "vllm:" not in (await stack.client.get("/metrics")).text
        stack.metrics.add_vllm_names('a "model"')
        for body in ({"max_tokens": 50}, {"max_tokens": 5}):
            await stack.complete(**body)
        samples = await scrape(stack.client)
        for native, alias in ALIASES.items():
            ours = {key: value for key, value in samples.items() if is_of(key[0], f"jetspec_{native}")}
            theirs = {key: value for key, value in samples.items() if is_of(key[0], f"vllm:{alias}")}
            assert len(ours) == len(theirs) > 0, native
            assert sorted(ours.values()) == sorted(theirs.values())
            assert all('model_name=a "model"' in labels and "engine=0" in labels for _, labels in theirs)
        assert samples["vllm:request_success_total", 'engine=0,finished_reason=length,model_name=a "model"'] == 1
        assert samples["vllm:spec_decode_num_drafts_total", 'engine=0,model_name=a "model"'] > 0
        lines = (await stack.client.get("/metrics")).text.splitlines()
        # What `vllm bench serve` reads before and after a run.
        assert len([line for line in lines if line.startswith("vllm:spec_decode")]) == 3 + 8


def is_of(sample: str, family: str) -> bool:
    """Whether a sample belongs to a family."""
    return sample.removeprefix(family) in ("", "_total", "_bucket", "_sum", "_count") and sample.startswith(family)
