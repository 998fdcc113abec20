"""Several requests at a time: throughput of the server and latency of each request."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from evaluation.bench.client import Generation
from evaluation.bench.errors import ContestantFailed
from evaluation.bench.measure import BenchPrompt, Runner
from evaluation.bench.rows import Spread


@dataclass(frozen=True)
class Load:
    """One server under so many requests at a time. Latency is of whole requests, in seconds: median and quartiles."""

    method: str
    concurrency: int
    num_requests: int
    tokens_per_s: float
    latency_s: float
    latency_quartiles_s: tuple[float, float]
    longest_s: float
    num_same_texts: int

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def put_under_load(runner: Runner, prompts: Sequence[BenchPrompt], concurrency: int) -> Load:
    """All prompts, `concurrency` of them at any time; each prompt is used as often as it takes for two full turns.

    Raises `ContestantFailed`.
    """
    num_requests = max(len(prompts), 2 * concurrency)
    jobs = [prompts[number % len(prompts)] for number in range(num_requests)]

    def run(prompt: BenchPrompt) -> Generation:
        return runner.generate(prompt.token_ids, prompt.max_tokens)

    started = time.perf_counter()
    pool = ThreadPoolExecutor(concurrency)
    try:
        generations = list(pool.map(run, jobs))
    finally:
        pool.shutdown(cancel_futures=True)  # on Ctrl-C only what runs is waited for
    elapsed_s = time.perf_counter() - started
    latency = Spread.of([generation.end_s for generation in generations])
    if latency is None:
        raise ContestantFailed("there is no prompt to send")
    return Load(
        method=runner.contestant.name,
        concurrency=concurrency,
        num_requests=num_requests,
        tokens_per_s=sum(generation.num_tokens for generation in generations) / elapsed_s,
        latency_s=latency.median,
        latency_quartiles_s=(latency.low, latency.high),
        longest_s=max(generation.end_s for generation in generations),
        num_same_texts=sum(g.token_ids == p.reference for g, p in zip(generations, jobs, strict=True)),
    )
