"""Measured times of the drafter's phases, at start by trial and afterwards as they happen, for the automatic pass
plan."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, cast

import torch

from decoding.plan import DEFAULT_MAX_PASSES, SERVING_CACHE_SIZE, PassPlan, PhaseTimes, choose_plan
from draft_worker.foresight import foresee
from draft_worker.networks import DraftNetworks
from draft_worker.refinement import begin, refine, refresh
from draft_worker.round import REFRESH_SLOTS
from draft_worker.sequence import DraftSequence, new_memory
from protocol.trace import NO_TRACE, WORK_TRACK, Detail, Trace

logger = logging.getLogger("jetspec.drafter")

Phase = Literal["install", "foresight", "draft", "refresh", "refine", "push"]
PHASES: tuple[Phase, ...] = ("install", "foresight", "draft", "refresh", "refine", "push")
TRIAL_LENGTH = 192
TRIAL_REPEATS = 4
HOST_S = 0.0005
NO_TIMES = PhaseTimes(foresight_s=0.0, pass_s=0.0, refresh_s=0.0, host_s=0.0)
"""Stands for a drafter without foresight, which has no plan to choose."""


@dataclass
class PhaseClock:
    """Seconds and runs by phase since the start; each run also goes to the trace."""

    trace: Trace = NO_TRACE
    total_s: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    count: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))

    @contextmanager
    def measure(self, phase: str, shown_as: str | None = None, **details: Detail) -> Iterator[None]:
        """Time one run of a phase."""
        started = time.perf_counter()
        yield
        ended = time.perf_counter()
        name = cast(Phase, phase)
        self.total_s[name] += ended - started
        self.count[name] += 1
        self.trace.complete(shown_as or phase, started, ended, WORK_TRACK, **details)


def shown_phase(phase: str, version: int) -> str:
    """A phase of a round as the paper calls it: J0, J1, ...; `version` counts the passes before it."""
    return f"J{version}" if phase in ("draft", "refine") else phase


def measure_phases(
    networks: DraftNetworks, num_draft_tokens: int, cache_sizes: tuple[int, ...]
) -> dict[int, PhaseTimes]:
    """Best of a few runs of each phase on made-up states, by cache size."""
    generator = torch.Generator().manual_seed(0)
    beyond = 2 * (num_draft_tokens + 1)
    length = max(1, min(TRIAL_LENGTH, networks.num_positions - beyond))
    memory = new_memory(networks, length + beyond, num_draft_tokens, max(cache_sizes))
    sequence = DraftSequence(networks, memory, [0] * (length + 1))
    sequence.num_rows = length
    block = [0] * (num_draft_tokens + 1)
    times = {}
    for size in cache_sizes:
        rows = [index % (num_draft_tokens + 1) for index in range(size)]
        best = [float("inf")] * 3
        for _ in range(TRIAL_REPEATS):
            marks = [time.perf_counter()]
            foresee(sequence, block, with_refresh=True)
            marks.append(time.perf_counter())
            drafts = begin(sequence, rows, [0] * size, num_draft_tokens, generator)
            marks.append(time.perf_counter())
            refresh(sequence, drafts, REFRESH_SLOTS)
            marks.append(time.perf_counter())
            refine(sequence, drafts)
            best = [min(old, after - before) for old, before, after in zip(best, marks[:-1], marks[1:], strict=True)]
        times[size] = PhaseTimes(foresight_s=best[0], pass_s=best[1], refresh_s=best[2], host_s=HOST_S)
        logger.info("phase times at B=%d: %s", size, times[size])
    return times


class PlanChooser:
    """The pass plan: fixed numbers where given, else what fits into the measured verification time (equation 3)."""

    def __init__(
        self,
        times: dict[int, PhaseTimes],
        cache_size: int | None,
        num_passes: int | None,
        num_refreshes: int | None,
    ) -> None:
        self._times = {size: t for size, t in times.items() if cache_size is None or size == cache_size} or times
        self._num_passes = num_passes
        self._num_refreshes = num_refreshes
        self._verify_s: float | None = None
        self._slowness = 1.0
        self.plan = self._choose()

    def observe_phase(self, phase: str, seconds: float, cache_size: int) -> None:
        """Take a phase's time at work: the trial ran while the verifier was loading, and machines change their
        speed."""
        times = self._times.get(cache_size)
        if times is None:
            return
        tried = {
            "foresight": times.foresight_s,
            "draft": times.pass_s,
            "refine": times.pass_s,
            "refresh": times.refresh_s,
        }
        expected = tried.get(phase, 0.0)
        if expected > 0.0:
            self._slowness += 0.05 * (min(seconds / expected, 4.0) - self._slowness)

    def observe_verification(self, seconds: float) -> None:
        """Take the time from one outcome to the next of a sequence whose block was ready."""
        before = self._verify_s
        self._verify_s = seconds if before is None else 0.9 * before + 0.1 * seconds
        self.plan = self._choose()

    def _choose(self) -> PassPlan:
        if self._verify_s is None:
            chosen = PassPlan(1, 1, SERVING_CACHE_SIZE if SERVING_CACHE_SIZE in self._times else max(self._times))
        else:
            most_passes = DEFAULT_MAX_PASSES if self._num_passes is None else self._num_passes
            most_refreshes = DEFAULT_MAX_PASSES if self._num_refreshes is None else self._num_refreshes
            chosen = choose_plan(self._times, self._verify_s / self._slowness, most_passes, most_refreshes)
        passes = chosen.num_passes if self._num_passes is None else self._num_passes
        refreshes = min(passes, chosen.num_refreshes) if self._num_refreshes is None else self._num_refreshes
        return PassPlan(passes, min(refreshes, passes), chosen.cache_size)
