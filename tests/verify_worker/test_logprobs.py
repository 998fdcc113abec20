"""Log-probabilities of generated and of prompt tokens against one clean pass over the text (S12)."""

from dataclasses import replace

import pytest
import torch

from protocol.fields import TokenLogprobs
from tests.tiny.engine import Engine, EngineOptions, Job
from tests.tiny.models import TinyModels, true_rows

PROMPT = tuple((7 * index + 3) % 128 for index in range(21))
JOB = Job(prompt=PROMPT, max_tokens=14, temperature=0.8, num_logprobs=3, num_prompt_logprobs=2)
COMPANY = [Job(prompt=(seed, 5), max_tokens=20, temperature=1.0, seed=seed) for seed in range(3)]


def check(found: list[TokenLogprobs], logits: torch.Tensor, token_ids: list[int], count: int) -> None:
    """Entries for `token_ids` against the rows of logits that they were drawn from."""
    logprobs = torch.log_softmax(logits, dim=-1)
    assert [entry.token_id for entry in found] == token_ids
    for entry, row in zip(found, logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        best = torch.topk(row, count)
        assert [top.token_id for top in entry.top] == best.indices.tolist()
        assert [top.logprob for top in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("prefill_chunk", [8, 64])
def test_logprobs_are_those_of_a_clean_pass(models: TinyModels, prefill_chunk: int) -> None:
    with Engine(models, "llama", EngineOptions(prefill_chunk=prefill_chunk)) as engine:
        engine.attach_real("trained")
        company = [engine.submit(job) for job in COMPANY]
        text = engine.generate(JOB)
        engine.finish(*company)
    token_ids = [*PROMPT, *text.token_ids]
    logits = true_rows(models.runner("llama"), token_ids).logits
    check(text.logprobs, logits[len(PROMPT) - 1 : -1], text.token_ids, 3)
    check(text.prompt_logprobs, logits[: len(PROMPT) - 1], list(PROMPT[1:]), 2)


def test_what_a_request_does_to_the_distribution_does_not_show(models: TinyModels) -> None:
    """Raw values, whatever bias, penalties and filters made of the rows; a stop token has none."""
    job = replace(
        JOB,
        logit_bias=((70, 30.0), (9, -20.0)),
        presence_penalty=2.0,
        repetition_penalty=1.5,
        top_k=3,
        num_prompt_logprobs=None,
    )
    with Engine(models) as engine:
        engine.attach_real("trained")
        free = engine.generate(job)
        stop = free.token_ids[5]
        stopped = engine.generate(replace(job, stop_token_ids=(stop,)))
    logits = true_rows(models.runner("llama"), [*PROMPT, *free.token_ids]).logits[len(PROMPT) - 1 : -1]
    check(free.logprobs, logits, free.token_ids, 3)
    assert stopped.logprobs == free.logprobs[: free.token_ids.index(stop)]


def test_the_text_does_not_depend_on_what_is_reported(models: TinyModels) -> None:
    with Engine(models) as engine:
        engine.attach_real("trained")
        texts = [
            engine.generate(replace(JOB, num_logprobs=logprobs, num_prompt_logprobs=prompt_logprobs))
            for logprobs, prompt_logprobs in ((None, None), (0, None), (20, 0), (None, 20))
        ]
    assert len({tuple(text.token_ids) for text in texts}) == 1
    assert all(result.logprobs is None for result in texts[0].rounds)
    assert [len(text.logprobs) for text in texts] == [0, 14, 14, 0]
    assert [len(text.prompt_logprobs) for text in texts] == [0, 0, len(PROMPT) - 1, len(PROMPT) - 1]
    assert {len(entry.top) for entry in texts[1].logprobs} == {0}


def test_a_prompt_of_one_token_has_no_logprobs(models: TinyModels) -> None:
    with Engine(models) as engine:
        text = engine.plain(Job(prompt=(4,), max_tokens=2, num_prompt_logprobs=1))
    assert text.prompt_logprobs == []
