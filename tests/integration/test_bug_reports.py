"""Bugs that users of other speculative servers reported, over a real engine: those of docs/bug-reports.md that no other
test of a package covers."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from decoding.sampling import SamplingParameters, processed_probabilities
from tests.integration.test_exactness import attach_oracle
from tests.tiny.drafters import Adversary
from tests.tiny.engine import Engine, EngineOptions, Job
from tests.tiny.models import TinyModels, true_rows

JOB = Job(temperature=1.0, max_tokens=10, prompt=(40, 41, 7))


def with_adversary(engine: Engine, jobs: tuple[Job, ...]) -> None:
    engine.attach(Adversary)


def with_oracle(engine: Engine, jobs: tuple[Job, ...]) -> None:
    attach_oracle(engine, jobs, 1.0)


@pytest.mark.parametrize("attach", [with_adversary, with_oracle])
def test_a_seed_repeats_its_text_after_hits_and_misses(
    models: TinyModels, attach: Callable[[Engine, tuple[Job, ...]], None]
) -> None:
    """S06: alone, again, and among others; with every block wrong, and with every block right."""
    others = [replace(JOB, seed=seed) for seed in range(20, 24)]
    jobs = (JOB, JOB, *others[:2], JOB, *others[2:])
    with Engine(models) as engine:
        attach(engine, jobs)
        texts = engine.compare(jobs)
    assert texts[0].token_ids == texts[1].token_ids == texts[4].token_ids
    assert len({tuple(text.token_ids) for text in texts}) == 1 + len(others)


def test_unseeded_requests_follow_the_targets_distribution(models: TinyModels) -> None:
    """S07: the second token, drawn in a round whose drafts are all wrong, at seeds as the server makes them."""
    top_k, num_requests, batch, prompt = 4, 160, 20, list(JOB.prompt)
    runner = models.runner("llama")

    def following(token_ids: list[int]) -> dict[int, float]:
        row = processed_probabilities(
            true_rows(runner, token_ids).logits[-1], SamplingParameters(1.0, top_k, 1.0, 0.0, 0)
        )
        return {int(token_id): float(row[token_id]) for token_id in torch.nonzero(row).flatten()}

    expected: Counter[int] = Counter()
    for first, share in following(prompt).items():
        for second, part in following([*prompt, first]).items():
            expected[second] += share * part  # type: ignore[assignment]  # counters add floats as well

    seeds = random.Random(1)
    with Engine(models) as engine:
        engine.attach(Adversary)
        jobs = [replace(JOB, max_tokens=2, top_k=top_k, seed=seeds.getrandbits(63)) for _ in range(num_requests)]
        texts = [
            text
            for start in range(0, num_requests, batch)
            for text in engine.finish(*[engine.submit(job) for job in jobs[start : start + batch]])
        ]
    counts = Counter(text.token_ids[1] for text in texts)
    assert set(counts) <= set(expected)
    squares = [
        (counts[token_id] - num_requests * share) ** 2 / (num_requests * share) for token_id, share in expected.items()
    ]
    freedom = len(expected) - 1
    assert sum(squares) < freedom + 4 * (2 * freedom) ** 0.5


def test_the_same_long_prompt_again_is_drafted_as_well(models: TinyModels) -> None:
    """S18: nothing is kept of a prompt on one side only, which would let the acceptance of the next one collapse."""
    job = replace(JOB, prompt=tuple(range(3, 63)), max_tokens=24, temperature=0.0)
    with Engine(models) as engine:
        engine.attach_real("trained")
        engine.gate_on_version(2)
        first, *others = [engine.generate(job) for _ in range(3)]
    assert first.tokens_per_round() > 1.0
    for text in others:
        assert text.ending == first.ending
        assert text.tokens_per_round() > 0.7 * first.tokens_per_round()  # the noise of a block is another each time


def in_use(engine: Engine) -> tuple[int, ...] | None:
    """Sequences that run and wait, positions and blocks that are held, as the verifier's latest report tells."""
    status = engine.status
    if status is None:
        return None
    return status.num_running, status.num_waiting, status.kv_tokens_used, status.num_cache_entries


def test_aborted_choices_leave_nothing_behind(models: TinyModels) -> None:
    """S21: four choices are aborted after their first tokens, time and again, while other requests come and go."""
    with Engine(models, options=EngineOptions(max_num_seqs=6, max_model_len=400)) as engine:
        engine.attach_real("trained")
        plain = engine.plain(JOB)
        for turn in range(12):
            choices = [engine.submit(replace(JOB, max_tokens=390, seed=100 * turn + index)) for index in range(4)]
            engine.collect(lambda choices=choices: any(engine.texts[item].rounds for item in choices))  # type: ignore[misc]
            for sequence_id in choices:
                engine.abort(sequence_id)
            other = engine.submit(JOB)
            *aborted, text = engine.finish(*choices, other)
            assert text.ending == plain.ending
            assert {item.end.reason for item in aborted} == {"abort"}
        engine.status = None
        engine.collect(lambda: in_use(engine) == (0, 0, 0, 0))


@pytest.mark.parametrize("max_num_seqs", [1, 3, 5, 7])
def test_any_number_of_sequences(models: TinyModels, max_num_seqs: int) -> None:
    """S34: batch sizes for which no shape was prepared, filled and overfilled."""
    jobs = [replace(JOB, seed=seed, prompt=(seed + 1, 9, seed + 2)) for seed in range(max_num_seqs + 2)]
    with Engine(models, options=EngineOptions(max_num_seqs=max_num_seqs)) as engine:
        engine.attach_real("trained")
        texts = engine.compare(jobs)
    assert all(text.end.reason == "length" for text in texts)
