"""From measurements to the rows of the table: medians and quartiles over prompts, means over rounds."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from evaluation.bench.contestants import BASELINE, Contestant
from evaluation.bench.counters import RoundStatistics, phases_ms, total
from evaluation.bench.measure import Measured, Measurement


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over prompts."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """None of nothing; one value is its own quartiles."""
        if not values:
            return None
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Row:
    """One contestant on one data set; None: does not apply or was not measured.

    tokens_per_s, speedup_over_ar, first_token_ms: medians over prompts, with quartiles beside them; the speed-up is the
    median of the ratios to plain decoding of the same prompt. tau, verify_ms, exposed_ms, hit_rate, acceptance: means
    over rounds (`RoundStatistics`). phases_ms: drafting, ms a round.
    """

    method: str
    dataset: str
    tokens_per_s: float | None
    speedup_over_ar: float | None
    tau: float | None
    verify_ms: float | None
    exposed_ms: float | None
    hit_rate: float | None
    num_prompts: int
    num_speculative_tokens: int | None = None
    cache_size: int | None = None
    tokens_per_s_quartiles: tuple[float, float] | None = None
    speedup_quartiles: tuple[float, float] | None = None
    tau_quartiles: tuple[float, float] | None = None
    first_token_ms: float | None = None
    num_tokens: int = 0
    num_same_texts: int = 0
    phases_ms: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    acceptance: tuple[float, ...] = ()

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def rows_of(measured: Measured) -> list[Row]:
    """One row a data set and contestant, in the order of measuring, plain decoding first."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for m in measured.measurements:
        groups.setdefault((m.prompt.dataset, m.contestant.name), []).append(m)
    datasets = list(dict.fromkeys(dataset for dataset, _ in groups))
    ordered = sorted(groups, key=lambda key: (datasets.index(key[0]), key[1] != BASELINE))
    return [_row(groups[key], measured) for key in ordered]


def _row(group: Sequence[Measurement], measured: Measured) -> Row:
    contestant, dataset = group[0].contestant, group[0].prompt.dataset
    prompts = {m.prompt.id for m in group}  # plain decoding answers one once for every group of contestants
    speeds = Spread.of([m.generation.tokens_per_s for m in group if m.generation.tokens_per_s is not None])
    speedups = Spread.of([m.speedup for m in group if m.speedup is not None])
    readings = [m.counters for m in group if m.counters is not None]
    rounds = RoundStatistics.of(total(readings)) if readings else None
    taus = Spread.of([tau for tau in (RoundStatistics.of(reading).tau for reading in readings) if tau is not None])
    phases = measured.phases.get((contestant.name, dataset))
    return Row(
        method=contestant.name,
        dataset=dataset,
        tokens_per_s=speeds.median if speeds else None,
        speedup_over_ar=speedups.median if speedups else None,
        tau=rounds.tau if rounds else None,
        verify_ms=rounds.verify_ms if rounds else None,
        exposed_ms=rounds.exposed_ms if rounds else None,
        hit_rate=_hit_rate(contestant, rounds),
        num_prompts=len(prompts),
        num_speculative_tokens=contestant.gamma,
        cache_size=contestant.cache_size,
        tokens_per_s_quartiles=(speeds.low, speeds.high) if speeds else None,
        speedup_quartiles=(speedups.low, speedups.high) if speedups else None,
        tau_quartiles=(taus.low, taus.high) if taus else None,
        first_token_ms=1e3 * statistics.median(m.generation.first_s for m in group),
        num_tokens=sum(m.generation.num_tokens for m in group),
        num_same_texts=len(prompts - {m.prompt.id for m in group if not m.is_same_text}),
        phases_ms=phases_ms(phases) if phases else {},
        outcomes=rounds.outcomes if rounds else {},
        acceptance=rounds.acceptance if rounds else (),
    )


def _hit_rate(contestant: Contestant, rounds: RoundStatistics | None) -> float | None:
    """Only where drafts are asked for: plain decoding has no round that could hit."""
    return rounds.hit_rate if rounds is not None and contestant.drafts else None
