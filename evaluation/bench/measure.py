"""Running prompts: a reference text for each, then every contestant in turn on every prompt.

Knows contestants only by what they can do (`Runner`); servers and peers look the same here.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from decoding.loops import is_loop
from evaluation.bench.client import Generation
from evaluation.bench.contestants import BASELINE, Contestant
from evaluation.bench.counters import Counters, total
from evaluation.bench.errors import ContestantFailed

logger = logging.getLogger("jetspec.bench")

MIN_TOKENS = 8
"""Shorter texts say nothing about speed and are left out."""
WARM_UP_TOKENS = 24
HEARTBEAT_S = 1.0
"""Longer than the drafter's reporting interval."""


class Runner(Protocol):
    """What can be measured."""

    @property
    def contestant(self) -> Contestant: ...
    def generate(self, prompt_token_ids: list[int], max_tokens: int) -> Generation: ...
    def counters(self) -> Counters | None: ...


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt with the text plain decoding gives, cut at the onset of a repetition loop as the paper cuts it."""

    id: str
    dataset: str
    token_ids: list[int]
    reference: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Measurement:
    """One contestant on one prompt. `ar_tokens_per_s`: plain decoding of the same prompt in the same round of turns."""

    contestant: Contestant
    prompt: BenchPrompt
    generation: Generation
    counters: Counters | None
    ar_tokens_per_s: float | None

    @property
    def speedup(self) -> float | None:
        """Against plain decoding of the same prompt."""
        speed, base = self.generation.tokens_per_s, self.ar_tokens_per_s
        return None if speed is None or base is None else speed / base

    @property
    def is_same_text(self) -> bool:
        """Whether the text is the reference."""
        return self.generation.token_ids == self.prompt.reference


@dataclass
class Measured:
    """Everything measured so far; stays readable when the run is interrupted.

    phases: counters of whole data sets, by contestant and data set, for what the drafter reports late.
    """

    measurements: list[Measurement] = field(default_factory=list)
    phases: dict[tuple[str, str], Counters] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def mismatches(self) -> list[Measurement]:
        """Texts that should be those of plain decoding and are not."""
        return [m for m in self.measurements if m.contestant.is_same_target and not m.is_same_text]


def with_reference(runner: Runner, id: str, dataset: str, token_ids: list[int], max_tokens: int) -> BenchPrompt | None:
    """A prompt with its reference text, or None when that is too short to measure."""
    text = runner.generate(token_ids, max_tokens)
    onset = next((end for end in range(1, len(text.token_ids) + 1) if is_loop(text.token_ids[:end])), None)
    limit = text.num_tokens if onset is None else onset
    if limit < MIN_TOKENS:
        return None
    reference = text.token_ids[:limit]
    return BenchPrompt(id, dataset, token_ids, reference, min(limit, max_tokens))


def warm_up(runners: Sequence[Runner], prompt: BenchPrompt, measured: Measured) -> list[Runner]:
    """Let everyone answer once, unmeasured: pages, kernels and pass plans settle. Returns who can go on."""
    going = []
    for runner in runners:
        try:
            runner.generate(prompt.token_ids, min(WARM_UP_TOKENS, prompt.max_tokens))
        except ContestantFailed as error:
            _give_up(runner, error, measured)
        else:
            going.append(runner)
    return going


def measure(
    runners: Sequence[Runner],
    prompts: Sequence[BenchPrompt],
    measured: Measured,
    after_prompt: Callable[[], None] = lambda: None,
) -> None:
    """Every contestant on every prompt, in turn, so that what disturbs the machine disturbs all alike.

    Turns rotate: nobody always follows the same neighbour. Results go to `measured` prompt by prompt; a contestant that
    fails is left out from there on.
    """
    going = list(runners)
    for dataset in dict.fromkeys(prompt.dataset for prompt in prompts):
        before = [(runner, _read(runner)) for runner in going]
        try:
            for number, prompt in enumerate(p for p in prompts if p.dataset == dataset):
                going = _one_round(going, number, prompt, measured)
                after_prompt()
            time.sleep(HEARTBEAT_S)
        finally:
            for runner, first in before:
                if any(runner is other for other in going):
                    _note_phases(runner, dataset, first, measured)


def _one_round(runners: Sequence[Runner], number: int, prompt: BenchPrompt, measured: Measured) -> list[Runner]:
    """One prompt for everyone; whoever failed is not among those returned."""
    results: list[tuple[Runner, Generation, Counters | None]] = []
    going = []
    for runner in _rotated(runners, number):
        try:
            before = runner.counters()
            generation = runner.generate(prompt.token_ids, prompt.max_tokens)
            after = runner.counters()
        except ContestantFailed as error:
            _give_up(runner, error, measured)
            continue
        going.append(runner)
        counted = None if before is None or after is None else after - before
        results.append((runner, generation, counted))
    base = next((g.tokens_per_s for runner, g, _ in results if runner.contestant.name == BASELINE), None)
    for runner, generation, counted in results:
        measured.measurements.append(Measurement(runner.contestant, prompt, generation, counted, base))
    return [runner for runner in runners if any(runner is other for other in going)]


def best_gamma(speedups: Mapping[int, float]) -> int | None:
    """The number of drafts with the highest speed-up; None when nothing was measured."""
    return max(speedups, key=lambda gamma: speedups[gamma], default=None)


def speedups_by_gamma(measured: Measured) -> dict[str, dict[int, float]]:
    """Median speed-ups by contestant and number of drafts."""
    found: dict[str, dict[int, list[float]]] = {}
    for m in measured.measurements:
        if m.contestant.gamma is not None and m.speedup is not None:
            found.setdefault(m.contestant.name, {}).setdefault(m.contestant.gamma, []).append(m.speedup)
    return {
        name: {gamma: statistics.median(values) for gamma, values in sorted(by_gamma.items())}
        for name, by_gamma in found.items()
    }


def _rotated(runners: Sequence[Runner], number: int) -> Iterator[Runner]:
    for offset in range(len(runners)):
        yield runners[(number + offset) % len(runners)]


def _give_up(runner: Runner, error: ContestantFailed, measured: Measured) -> None:
    logger.error("%s fails and is left out from here on: %s", runner.contestant.name, error)
    measured.failures[runner.contestant.name] = str(error)


def _read(runner: Runner) -> Counters | None:
    try:
        return runner.counters()
    except ContestantFailed as error:
        logger.error("%s: %s", runner.contestant.name, error)
        return None


def _note_phases(runner: Runner, dataset: str, first: Counters | None, measured: Measured) -> None:
    last = _read(runner)
    if first is not None and last is not None:
        key = (runner.contestant.name, dataset)
        measured.phases[key] = total([*([measured.phases[key]] if key in measured.phases else []), last - first])
