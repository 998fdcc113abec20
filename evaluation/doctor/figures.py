"""The numbers of a trial that an explanation needs: means over rounds, costs in ms a round."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from evaluation.bench.counters import PREDICTED, Counters, RoundStatistics, total
from evaluation.doctor.trial import CaseKind, Comparison

EXPOSED = "jetspec_exposed_draft_latency_seconds"
ALONE = ("no_drafter", "drafter_lost", "gave_up", "timeout")


@dataclass(frozen=True)
class Figures:
    """Short prompts unless a field says otherwise; None: nothing of the kind happened.

    speedup: median over prompts of tokens per second, drafted against plain. plain_step_ms, round_ms: from the start of
    one verification to the start of the next. hit_exposed_ms, miss_exposed_ms: the gap before a round of that outcome.
    draft_ms: the drafter's time for a cache, fallback_ms for a block after a miss. alone: drafted requests' rounds
    without drafts, by reason. tau_by_kind: of every kind of case.
    """

    speedup: float | None
    plain: RoundStatistics
    drafted: RoundStatistics
    hit_exposed_ms: float | None
    miss_exposed_ms: float | None
    draft_ms: float | None
    fallback_ms: float | None
    alone: dict[str, int] = field(default_factory=dict)
    tau_by_kind: dict[CaseKind, float] = field(default_factory=dict)
    num_comparisons: int = 0
    num_different_texts: int = 0

    @property
    def plain_step_ms(self) -> float | None:
        return _round_ms(self.plain)

    @property
    def round_ms(self) -> float | None:
        return _round_ms(self.drafted)

    def share(self, outcome: str) -> float:
        """Of the rounds whose block could be foreseen."""
        num_predicted = sum(self.drafted.outcomes.get(label, 0) for label in PREDICTED)
        return self.drafted.outcomes.get(outcome, 0) / num_predicted if num_predicted else 0.0

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def figures_of(compared: Sequence[Comparison]) -> Figures:
    """From all comparisons; at least one must be short."""
    by_kind: dict[CaseKind, list[Comparison]] = {}
    for comparison in compared:
        by_kind.setdefault(comparison.case.kind, []).append(comparison)
    short = by_kind["short"]
    drafted = total([c.drafted.counters for c in short])
    speedups = [c.speedup for c in short if c.speedup is not None]
    taus = {kind: RoundStatistics.of(total([c.drafted.counters for c in group])).tau for kind, group in by_kind.items()}
    alone = {reason: _count(total([c.drafted.counters for c in compared]), reason) for reason in ALONE}
    return Figures(
        speedup=statistics.median(speedups) if speedups else None,
        plain=RoundStatistics.of(total([c.plain.counters for c in short])),
        drafted=RoundStatistics.of(drafted),
        hit_exposed_ms=_mean_ms(drafted, EXPOSED, outcome="hit"),
        miss_exposed_ms=_mean_ms(drafted, EXPOSED, outcome="miss"),
        draft_ms=_mean_ms(drafted, "jetspec_draft_seconds"),
        fallback_ms=_mean_ms(drafted, "jetspec_fallback_seconds"),
        alone={reason: count for reason, count in alone.items() if count},
        tau_by_kind={kind: tau for kind, tau in taus.items() if tau is not None},
        num_comparisons=len(compared),
        num_different_texts=sum(not c.is_same_text for c in compared),
    )


def _count(counters: Counters, reason: str) -> int:
    return round(counters.value("jetspec_fallback_rounds_total", reason=reason))


def _mean_ms(counters: Counters, name: str, **labels: str) -> float | None:
    count = counters.value(f"{name}_count", **labels)
    return 1e3 * counters.value(f"{name}_sum", **labels) / count if count else None


def _round_ms(rounds: RoundStatistics) -> float | None:
    if rounds.verify_ms is None:
        return None
    return rounds.verify_ms + (rounds.exposed_ms or 0.0)
