"""A server's `/metrics` as numbers, and what the difference of two readings says about the rounds between them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

DRAFTED = ("hit", "late_hit", "miss", "first")
ROUNDS = (*DRAFTED, "autoregressive")
PREDICTED = ("hit", "late_hit", "miss")
"""Rounds whose block could have been foreseen: the first one after a prefill cannot."""
PHASES = ("foresight", "draft", "refresh", "refine", "push", "install")

Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Counters:
    """Samples by name and labels; a missing one counts as 0."""

    samples: Mapping[Key, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Counters":
        """Read the exposition format; raises `ValueError` for anything else."""
        samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        return cls(samples)

    def value(self, name: str, **labels: str) -> float:
        """One sample."""
        return self.samples.get((name, tuple(sorted(labels.items()))), 0.0)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """All samples of a name, by the value of one label."""
        return {dict(labels)[label]: value for (n, labels), value in self.samples.items() if n == name}

    def __sub__(self, before: "Counters") -> "Counters":
        return Counters({key: value - before.samples.get(key, 0.0) for key, value in self.samples.items()})


def total(readings: Iterable[Counters]) -> Counters:
    """The sum of several differences."""
    sums: dict[Key, float] = {}
    for reading in readings:
        for key, value in reading.samples.items():
            sums[key] = sums.get(key, 0.0) + value
    return Counters(sums)


@dataclass(frozen=True)
class RoundStatistics:
    """Means over some rounds. None: nothing of the kind happened.

    tau: tokens a round, bonus included, before any cut. hit_rate: blocks that were there when verification ended, of
    all but the first of a text. exposed_ms: from the end of one verification to the start of the next, all rounds.
    acceptance: by slot, the share of blocks whose draft in it was accepted. outcomes: rounds by outcome.
    """

    num_rounds: int
    tau: float | None
    hit_rate: float | None
    verify_ms: float | None
    exposed_ms: float | None
    acceptance: tuple[float, ...]
    outcomes: dict[str, int]

    @classmethod
    def of(cls, counters: Counters) -> "RoundStatistics":
        """From the difference of two readings."""
        rounds = {label: counters.value("jetspec_rounds_total", outcome=label) for label in ROUNDS}
        verified = sum(counters.value("jetspec_verified_tokens_total", outcome=label) for label in ROUNDS)
        exposed = "jetspec_exposed_draft_latency_seconds"
        exposed_s = sum(counters.value(f"{exposed}_sum", outcome=label) for label in ROUNDS)
        num_exposed = sum(counters.value(f"{exposed}_count", outcome=label) for label in ROUNDS)
        num_blocks = counters.value("jetspec_spec_decode_num_drafts_total")
        accepted = counters.by_label("jetspec_spec_decode_num_accepted_tokens_per_pos_total", "position")
        return cls(
            num_rounds=round(sum(rounds.values())),
            tau=_ratio(verified, sum(rounds.values())),
            hit_rate=_ratio(rounds["hit"], sum(rounds[label] for label in PREDICTED)),
            verify_ms=_ms(counters.value("jetspec_verify_seconds_sum"), counters.value("jetspec_verify_seconds_count")),
            exposed_ms=_ms(exposed_s, num_exposed),
            acceptance=tuple(accepted[p] / num_blocks for p in sorted(accepted, key=int)) if num_blocks else (),
            outcomes={label: round(count) for label, count in rounds.items() if count},
        )


def phases_ms(counters: Counters) -> dict[str, float]:
    """Time of each drafting phase, in ms a round; empty where nothing was drafted.

    The drafter reports its phases with its heartbeats, so the readings must lie more than one apart from the rounds.
    """
    num_rounds = sum(counters.value("jetspec_rounds_total", outcome=label) for label in DRAFTED)
    if not num_rounds:
        return {}
    seconds = {phase: counters.value("jetspec_draft_phase_seconds_total", phase=phase) for phase in PHASES}
    return {phase: 1e3 * value / num_rounds for phase, value in seconds.items() if value}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _ms(seconds: float, count: float) -> float | None:
    return 1e3 * seconds / count if count else None
