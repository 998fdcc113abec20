"""The gate for every other method: its text is the plain one, whatever happens to its drafter, and it does draft."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from draft_worker.loading import MethodFiles, MethodSettings, load_method
from draft_worker.methods import DraftMethod
from modeling.kernels.int8 import Quantization, has_int8
from protocol.memory_channel import FaultPlan
from protocol.messages import Block, CachePush, ContextRows, OutcomeRows
from protocol.worker_config import DraftMethodName
from tests.tiny.engine import Engine, EngineOptions, Job, peer_messages
from tests.tiny.models import CPU, TAP_LAYERS, TargetKind, TinyModels

GREEDY = Job(temperature=0.0, max_tokens=24)
SAMPLED = Job(temperature=1.0, max_tokens=20, prompt=(40, 41))
FILTERED = Job(temperature=0.8, max_tokens=20, top_k=20, top_p=0.9, min_p=0.02, seed=11, prompt=(100,))
LONG_PROMPT = Job(temperature=1.0, max_tokens=16, prompt=tuple(range(20, 45)), seed=3)
JOBS = (GREEDY, SAMPLED, FILTERED, LONG_PROMPT)


@dataclass(frozen=True)
class Case:
    """A method and where its tiny weights are."""

    name: DraftMethodName
    label: str
    folder: Callable[[TinyModels, TargetKind], Path]


SYNCHRONOUS = [
    Case("dflash", "released", lambda models, target: models.draft("bidirectional", target)),
    Case("dflash", "shifted", lambda models, target: models.draft("shifted_bidirectional", target)),
    Case("jetspec", "released", lambda models, target: models.draft("causal_mask", target)),
    Case("jetspec", "shifted", lambda models, target: models.draft("shifted_causal_mask", target)),
    Case("dspark", "shifted", lambda models, target: models.head("markov", target=target)),
    Case("dspark", "in place", lambda models, target: models.head("markov", "bidirectional", target)),
    Case("domino", "shifted", lambda models, target: models.head("gru", target=target)),
    Case("domino", "in place", lambda models, target: models.head("gru", "bidirectional", target)),
]
OWN_DRAFTER = Case("ssd", "own drafter", lambda models, target: models.drafter(target))
ANY_MODEL = Case("ssd", "ordinary model", lambda models, target: models.target(target))
CASES = [*SYNCHRONOUS, OWN_DRAFTER, ANY_MODEL]


def named(case: object) -> str:
    assert isinstance(case, Case)
    return f"{case.name}, {case.label}"


def options(case: Case, **changes: object) -> EngineOptions:
    """An engine whose verifier sends what the method reads."""
    taps = () if case.name == "ssd" else TAP_LAYERS
    return replace(EngineOptions(tap_layers=taps, decoder_layers=()), **changes)  # type: ignore[arg-type]


def load(engine: Engine, case: Case, cache_size: int | None = 4, quantization: Quantization = "none") -> DraftMethod:
    """A method by name, as the drafter's process loads it."""
    files = MethodFiles(engine.models.target(engine.target), case.folder(engine.models, engine.target))
    settings = MethodSettings(
        engine.options.num_draft_tokens, engine.limits.num_positions, cache_size, quantization=quantization
    )
    return load_method(case.name, files, settings, engine.options.dtype, CPU)


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize("target", ["llama", "qwen3"])
def test_no_method_changes_a_text(models: TinyModels, case: Case, target: TargetKind) -> None:
    """Several sequences at once, greedy, at temperature 1 and filtered."""
    with Engine(models, target, options(case)) as engine:
        engine.attach_method(load(engine, case))
        texts = engine.compare(JOBS)
        sent = [*peer_messages(engine.peer.sent, ContextRows), *peer_messages(engine.peer.sent, OutcomeRows)]
    outcomes = {outcome for text in texts for outcome in text.outcomes()}
    assert outcomes == {"miss"} if case in SYNCHRONOUS else "autoregressive" not in outcomes
    assert all(record.frames[1].shape[1] == 0 for record in sent)  # keys and values that nobody reads are not sent
    if case.label != "in place" and "released" not in case.label:
        assert any(result.num_accepted > 0 for text in texts for result in text.rounds)


@pytest.mark.parametrize("case", [SYNCHRONOUS[0], SYNCHRONOUS[4], SYNCHRONOUS[6], OWN_DRAFTER], ids=named)
def test_bfloat16(models: TinyModels, case: Case) -> None:
    with Engine(models, options=options(case, dtype=torch.bfloat16)) as engine:
        engine.attach_method(load(engine, case))
        engine.compare(JOBS)


@pytest.mark.parametrize("case", [SYNCHRONOUS[4], OWN_DRAFTER], ids=named)
def test_a_drafter_that_knows_the_rule_is_often_right(models: TinyModels, case: Case) -> None:
    """The Markov head makes drafts right that the backbone alone has wrong."""
    with Engine(models, options=options(case)) as engine:
        engine.attach_method(load(engine, case))
        (text,) = engine.compare([replace(GREEDY, max_tokens=40)])
    assert text.tokens_per_round() > 2.0


@pytest.mark.parametrize("case", [OWN_DRAFTER, ANY_MODEL], ids=named)
def test_ssd_hits(models: TinyModels, case: Case) -> None:
    with Engine(models, options=options(case)) as engine:
        engine.attach_method(load(engine, case, cache_size=10))
        engine.gate_on_version(1)
        texts = engine.compare(JOBS)
        pushes = [record.message for record in peer_messages(engine.peer.received, CachePush)]
    outcomes = [outcome for text in texts for outcome in text.outcomes()]
    assert outcomes.count("hit") > 5
    assert [text.outcomes()[0] for text in texts] == ["miss"] * len(JOBS)
    assert {push.version for push in pushes if isinstance(push, CachePush)} == {1}
    if case is ANY_MODEL:  # the target as its own drafter: greedy drafts are all accepted, and every round is foreseen
        assert set(texts[0].outcomes()[1:]) == {"hit"}
        assert texts[0].tokens_per_round() == engine.options.num_draft_tokens + 1


def test_a_miss_of_one_sequence_leaves_the_others_alone(models: TinyModels) -> None:
    """Every wait is answered by one fallback block of that sequence, and what others have started is not redrafted."""
    with Engine(models, options=options(OWN_DRAFTER)) as engine:
        engine.attach_method(load(engine, OWN_DRAFTER, cache_size=2))
        engine.gate_on_version(1)
        texts = engine.compare([replace(SAMPLED, seed=seed) for seed in range(4)])
        asked = [
            (record.message.sequence_id, record.message.round + 1)
            for record in peer_messages(engine.peer.sent, OutcomeRows)
            if isinstance(record.message, OutcomeRows) and record.message.awaiting
        ]
        answered = [
            (record.message.sequence_id, record.message.round)
            for record in peer_messages(engine.peer.received, Block)
            if isinstance(record.message, Block)
        ]
    outcomes = [outcome for text in texts for outcome in text.outcomes()]
    assert "hit" in outcomes and outcomes.count("miss") > len(texts)
    assert sorted(answered) == sorted(asked)


def test_ssd_killed_in_mid_round_and_replaced(models: TinyModels) -> None:
    job = replace(SAMPLED, max_tokens=40)
    with Engine(models, options=options(OWN_DRAFTER, fallback_timeout_s=0.5)) as engine:
        plain = engine.plain(job)
        engine.attach_method(load(engine, OWN_DRAFTER), pid=100)
        running = engine.submit(job)
        engine.collect(lambda: len(engine.texts[running].rounds) >= 3)
        engine.lose_drafter()
        (text,) = engine.finish(running)
        assert text.ending == plain.ending
        assert text.outcomes()[-1] == "autoregressive" and "autoregressive" not in text.outcomes()[:1]
        engine.collect(lambda: engine.status is not None and not engine.status.drafter_connected)
        engine.attach_method(load(engine, OWN_DRAFTER), pid=101)
        again = engine.generate(job)
    assert again.ending == plain.ending
    assert "autoregressive" not in again.outcomes()


@pytest.mark.parametrize("seed", range(3))
def test_ssd_over_a_faulty_channel(models: TinyModels, seed: int) -> None:
    faults = FaultPlan(seed=seed, drop=0.02, delay_s=0.004, duplicate=0.1, reorder=0.1, truncate=0.02, reorder_s=0.01)
    with Engine(models, options=options(OWN_DRAFTER, faults=faults, fallback_timeout_s=0.15)) as engine:
        engine.attach_method(load(engine, OWN_DRAFTER))
        texts = engine.compare([*JOBS, replace(SAMPLED, seed=seed)])
    assert any("autoregressive" not in text.outcomes()[:1] for text in texts)


def test_stop_tokens_end_a_text_in_the_middle_of_a_block(models: TinyModels) -> None:
    with Engine(models, options=options(ANY_MODEL)) as engine:
        stop = engine.plain(GREEDY).token_ids[9]
        engine.attach_method(load(engine, ANY_MODEL))
        engine.gate_on_version(1)
        (text,) = engine.compare([replace(GREEDY, stop_token_ids=(stop,))])
        pushes = [record.message for record in peer_messages(engine.peer.received, CachePush)]
    assert text.end.reason == "stop"
    assert all(entry.anchor != stop for push in pushes if isinstance(push, CachePush) for entry in push.entries)


@pytest.mark.skipif(not has_int8(), reason="no VNNI or no C compiler on this machine")
@pytest.mark.parametrize("case", [SYNCHRONOUS[4], SYNCHRONOUS[6], OWN_DRAFTER], ids=named)
def test_int8_drafting_networks(models: TinyModels, case: Case) -> None:
    with Engine(models, options=options(case)) as engine:
        engine.attach_method(load(engine, case, quantization="int8"))
        texts = engine.compare(JOBS)
    assert any(result.num_accepted > 0 for text in texts for result in text.rounds)
