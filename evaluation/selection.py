"""Selection rules compared on the rounds of one run (paper, Table 11): what a cache of B would have held under each.

Whatever a rule needs fitted is fitted on the rounds of other prompts than those it is measured on: two halves of the
prompts, all data sets and temperatures pooled, each measured with the fit of the other. A calibration that is given is
taken as it is, since calibration never sees evaluation prompts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from decoding.calibration import Calibration, fit, observe_round
from decoding.observation import ObservedRound
from decoding.rules import (
    AnchorSource,
    ScoreRule,
    fan_out_holds,
    fan_out_sizes,
    fit_fan_out,
    outcome_rank,
)
from evaluation.records import ObservedAt, Unit
from evaluation.rounds import CACHE_SIZES

CONFORMAL_RATE = 0.9

Holds = Callable[[ObservedRound, int], bool]
"""Whether a cache of some size holds what happened in a round."""


@dataclass(frozen=True)
class SelectionRow:
    """Hit rate of a rule by B, on the rounds of one data set and temperature."""

    dataset: str
    temperature: float
    budget: int
    rule: str
    hit_rate: dict[str, float]
    num_rounds: int

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def compare_rules(observed: Sequence[ObservedAt], budget: int, calibration: Calibration | None) -> list[SelectionRow]:
    """Hit rates of all rules; empty where the prompts are too few to fit on some and measure on others."""
    halves = [[item for item in observed if item.prompt % 2 == parity] for parity in (0, 1)]
    if not all(halves):
        return []
    hits: dict[tuple[Unit, str], dict[int, int]] = {}
    totals: dict[tuple[Unit, str], int] = {}
    for fitted_on, measured_on in ((halves[1], halves[0]), (halves[0], halves[1])):
        for name, holds in rules([item.round for item in fitted_on], calibration):
            for item in measured_on:
                key = item.unit, name
                totals[key] = totals.get(key, 0) + 1
                counts = hits.setdefault(key, dict.fromkeys(CACHE_SIZES, 0))
                for size in CACHE_SIZES:
                    counts[size] += holds(item.round, size)
    return [
        SelectionRow(
            dataset=unit.dataset,
            temperature=unit.temperature,
            budget=budget,
            rule=name,
            hit_rate={str(size): count / totals[unit, name] for size, count in counts.items()},
            num_rounds=totals[unit, name],
        )
        for (unit, name), counts in hits.items()
    ]


def rules(fitted_on: Sequence[ObservedRound], given: Calibration | None) -> Iterator[tuple[str, Holds]]:
    """Every rule with its name, fitted; a fan-out whose decay cannot be fitted is left out."""
    own = fit_calibration(fitted_on)
    served = given or own
    yield "served (calibrated)", _score_rule("served", served)
    if given is not None:
        yield "calibrated on this run", _score_rule("served", own)
    yield "uncalibrated", _score_rule("uncalibrated", served)
    yield "draft-model", _score_rule("draft-model", served)
    sources: tuple[AnchorSource, ...] = ("decoder", "draft")
    for source in sources:
        found = _fan_out_rule(fitted_on, source)
        if found is not None:
            yield f"geometric fan-out, {source} anchors", found


def fit_calibration(rounds: Sequence[ObservedRound]) -> Calibration:
    """Equation 8 fitted to observed rounds."""
    records = [
        observe_round(item.log_p, item.draft_columns, item.confidences, item.num_accepted, item.anchor_column)
        for item in rounds
    ]
    return fit(records, CONFORMAL_RATE)


def _score_rule(rule: ScoreRule, calibration: Calibration) -> Holds:
    ranks: dict[int, int | None] = {}

    def holds(observed: ObservedRound, size: int) -> bool:
        if id(observed) not in ranks:
            ranks[id(observed)] = outcome_rank(observed, rule, calibration, max(CACHE_SIZES))
        rank = ranks[id(observed)]
        return rank is not None and rank < size

    return holds


def _fan_out_rule(fitted_on: Sequence[ObservedRound], source: AnchorSource) -> Holds | None:
    fitted = fit_fan_out(fitted_on, source)
    if fitted is None:
        return None
    num_drafts = len(fitted_on[0].draft_columns)
    sizes = {size: fan_out_sizes(fitted, num_drafts, size) for size in CACHE_SIZES}
    return lambda observed, size: fan_out_holds(observed, sizes[size], source)
