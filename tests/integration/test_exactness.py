"""The gate: text with speculation is the text without, token for token, whatever the drafter, the channel and the
company."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from decoding.sampling import SamplingParameters, draw
from modeling.kernels.int8 import has_int8
from protocol.memory_channel import FaultPlan
from protocol.messages import OpenSequence, OutcomeRows, PeerHello
from tests.tiny.drafters import Adversary, Oracle
from tests.tiny.engine import Engine, EngineOptions, Job, RecordingChannel, peer_messages
from tests.tiny.models import TargetKind, TinyModels, true_rows

GREEDY = Job(temperature=0.0, max_tokens=24)
SAMPLED = Job(temperature=1.0, max_tokens=20, prompt=(40, 41))
FILTERED = Job(temperature=0.8, max_tokens=20, top_k=20, top_p=0.9, min_p=0.02, seed=11, prompt=(100,))
JOBS = (GREEDY, SAMPLED, FILTERED)
TARGETS: tuple[TargetKind, ...] = ("llama", "qwen3")


def continued(engine: Engine, job: Job) -> list[int]:
    """Prompt and plain continuation, long enough that an oracle never runs out of text."""
    return [*job.prompt, *engine.plain(replace(job, max_tokens=job.max_tokens + 12)).token_ids]


def attach_oracle(engine: Engine, jobs: tuple[Job, ...], correctness: float) -> None:
    """An oracle for jobs that are then run by `Engine.compare`, first plainly, then with speculation."""
    texts = [continued(engine, job) for job in jobs]
    known = {engine.next_id + len(jobs) + index: text for index, text in enumerate(texts)}

    def make(channel: RecordingChannel, hello: PeerHello) -> Oracle:
        return Oracle(channel, hello, known, correctness)

    engine.attach(make)


@pytest.mark.parametrize("target", TARGETS)
def test_trained_drafter_hits_and_changes_nothing(models: TinyModels, target: TargetKind) -> None:
    with Engine(models, target) as engine:
        engine.attach_real("trained")
        engine.gate_on_version(2)
        texts = engine.compare(JOBS)
    outcomes = [outcome for text in texts for outcome in text.outcomes()]
    assert outcomes.count("hit") > 5
    assert outcomes.count("miss") >= len(JOBS)  # the first block of every sequence is a fallback
    assert texts[0].tokens_per_round() > 1.5


@pytest.mark.skipif(not has_int8(), reason="no VNNI or no C compiler on this machine")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_drafter_hits_and_changes_nothing(models: TinyModels, dtype: torch.dtype) -> None:
    with Engine(models, options=EngineOptions(dtype=dtype)) as engine:
        engine.attach_real("trained", quantization="int8")
        engine.gate_on_version(2)
        texts = engine.compare(JOBS)
    assert [outcome for text in texts for outcome in text.outcomes()].count("hit") > 5
    assert texts[0].tokens_per_round() > 1.5


@pytest.mark.parametrize("target", TARGETS)
def test_random_drafter_changes_nothing(models: TinyModels, target: TargetKind) -> None:
    with Engine(models, target) as engine:
        engine.attach_real("random")
        texts = engine.compare(JOBS)
    assert all(text.outcomes() and "autoregressive" not in text.outcomes() for text in texts)


@pytest.mark.parametrize("target", TARGETS)
def test_oracle_always_hits_and_every_draft_is_accepted(models: TinyModels, target: TargetKind) -> None:
    with Engine(models, target) as engine:
        attach_oracle(engine, JOBS, 1.0)
        engine.gate_on_version(1)
        texts = engine.compare(JOBS)
    for text in texts:
        assert text.outcomes()[0] == "miss"
        assert set(text.outcomes()[1:]) == {"hit"}
        assert text.tokens_per_round() == engine.options.num_draft_tokens + 1


@pytest.mark.parametrize("target", TARGETS)
def test_oracle_that_is_often_wrong(models: TinyModels, target: TargetKind) -> None:
    with Engine(models, target) as engine:
        attach_oracle(engine, JOBS, 0.6)
        engine.gate_on_version(1)
        texts = engine.compare(JOBS)
    accepted = {result.num_accepted for text in texts for result in text.rounds[1:]}
    assert engine.options.num_draft_tokens in accepted and len(accepted) >= 3


@pytest.mark.parametrize("target", TARGETS)
def test_adversary_changes_nothing(models: TinyModels, target: TargetKind) -> None:
    with Engine(models, target) as engine:
        engine.attach(Adversary)
        engine.gate_on_version(1)
        texts = engine.compare(JOBS)
        engine.collect(lambda: engine.status is not None and engine.status.stale_messages > 0)
    outcomes = [outcome for text in texts for outcome in text.outcomes()]
    assert "hit" in outcomes  # its rubbish was believed, verified and rejected
    assert "autoregressive" not in outcomes
    assert max(len(result.token_ids) for text in texts for result in text.rounds) < 5


def test_bias_of_qwen2_is_loaded_and_served(models: TinyModels) -> None:
    with Engine(models, "qwen2") as engine:
        engine.attach_real("trained")
        engine.gate_on_version(2)
        texts = engine.compare(JOBS)
    assert any("hit" in text.outcomes() for text in texts)


@pytest.mark.parametrize("target", TARGETS)
def test_bfloat16(models: TinyModels, target: TargetKind) -> None:
    jobs = [GREEDY, SAMPLED, replace(SAMPLED, seed=3), replace(SAMPLED, seed=4)]
    with Engine(models, target, EngineOptions(dtype=torch.bfloat16)) as engine:
        engine.attach_real("trained")
        engine.gate_on_version(2)
        texts = engine.compare(jobs)
    assert any("hit" in text.outcomes() for text in texts)
    assert any(result.num_accepted > 0 for text in texts for result in text.rounds)


@pytest.mark.parametrize("job", JOBS)
def test_every_token_is_the_targets_draw_at_its_position(models: TinyModels, job: Job) -> None:
    """The plain text itself, against a loop of clean passes."""
    parameters = SamplingParameters(job.temperature, job.top_k, job.top_p, job.min_p, job.seed)
    runner, token_ids = models.runner("llama"), list(job.prompt)
    for position in range(len(job.prompt), len(job.prompt) + job.max_tokens):
        token_ids.append(draw(true_rows(runner, token_ids).logits[-1], parameters, position))
    with Engine(models) as engine:
        assert engine.plain(job).token_ids == token_ids[len(job.prompt) :]


def test_a_drafter_without_an_adapter_only_falls_back(models: TinyModels) -> None:
    with Engine(models, options=EngineOptions(decoder_layers=())) as engine:
        engine.attach_real("bidirectional", with_adapter=False)
        texts = engine.compare(JOBS)
    assert {outcome for text in texts for outcome in text.outcomes()} == {"miss"}


def test_bidirectional_mask_drafter_with_foresight(models: TinyModels) -> None:
    with Engine(models) as engine:
        engine.attach_real("bidirectional", passes=0, refreshes=0)
        engine.compare(JOBS)


@pytest.mark.parametrize("seed", range(5))
def test_faulty_channel(models: TinyModels, seed: int) -> None:
    faults = FaultPlan(seed=seed, drop=0.02, delay_s=0.004, duplicate=0.1, reorder=0.1, truncate=0.02, reorder_s=0.01)
    options = EngineOptions(faults=faults, fallback_timeout_s=0.15)
    with Engine(models, "llama", options) as engine:
        engine.attach_real("trained")
        texts = engine.compare([*JOBS, replace(SAMPLED, seed=seed)])
    assert any("autoregressive" not in text.outcomes()[:1] for text in texts)  # drafts did arrive


@pytest.mark.parametrize("seed", range(3))
def test_slow_channel_that_reorders(models: TinyModels, seed: int) -> None:
    faults = FaultPlan(seed=seed, delay_s=0.01, reorder=0.3, duplicate=0.3, reorder_s=0.015)
    with Engine(models, "qwen3", EngineOptions(faults=faults, fallback_timeout_s=0.3)) as engine:
        attach_oracle(engine, JOBS, 0.6)
        engine.compare(JOBS)


def test_several_requests_at_once(models: TinyModels) -> None:
    jobs = [
        replace(job, seed=seed, prompt=(seed + 1, *range(20, 20 + 3 * seed)))
        for seed, job in enumerate((SAMPLED, GREEDY, SAMPLED, FILTERED, SAMPLED, GREEDY, SAMPLED))
    ]
    with Engine(models) as engine:
        engine.attach_real("trained")
        engine.gate_on_version(2)
        texts = engine.compare(jobs)
        waits = [text.end.queue_s for text in texts]
        assert [text.rounds[0].queue_s for text in texts] == waits
        assert all(item.queue_s is None for text in texts for item in text.rounds[1:])
        slots = [
            record.message.slot
            for record in peer_messages(engine.peer.sent, OpenSequence)
            if isinstance(record.message, OpenSequence)
        ]
    assert len(slots) == 7 and set(slots) == {0, 1, 2, 3}  # four ran at once, three waited for their slots
    assert max(waits[:4]) < min(waits[4:])
    assert all("hit" in text.outcomes() for text in texts)


def test_other_requests_do_not_change_a_text(models: TinyModels) -> None:
    with Engine(models) as engine:
        engine.attach_real("trained")
        alone = engine.generate(SAMPLED)
        crowd = [engine.submit(replace(SAMPLED, seed=seed)) for seed in range(1, 4)]
        plain = engine.submit(replace(SAMPLED, seed=9), speculative=False)
        among_others = engine.generate(SAMPLED)
        texts = engine.finish(*crowd, plain)
    assert among_others.ending == alone.ending
    assert len({tuple(text.token_ids) for text in texts}) == 4  # the seed matters


def test_rows_follow_each_other_without_gap_and_reach_only_to_the_last_accepted(models: TinyModels) -> None:
    with Engine(models) as engine:
        attach_oracle(engine, (SAMPLED,), 0.6)
        engine.compare([SAMPLED])
        outcomes = peer_messages(engine.peer.sent, OutcomeRows)
    assert len(outcomes) > 3
    for record in outcomes:
        message = record.message
        assert isinstance(message, OutcomeRows)
        assert all(frame.shape[0] == message.num_accepted + 1 for frame in record.frames)
    for before, after in pairwise(record.message for record in outcomes):
        assert isinstance(before, OutcomeRows) and isinstance(after, OutcomeRows)
        assert after.round == before.round + 1
        assert after.start == before.start + before.num_accepted + 1
