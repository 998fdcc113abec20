"""What an acceptance run has measured so far: counts by data set, method, temperature, budget and variant.

Counts of prompts add up in any order, so that an interrupted run, or several processes, lose nothing. Knows no tables.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import get_args

from decoding.observation import ObservedRound
from evaluation.drafting import Refresh
from evaluation.replay import States, Variant
from evaluation.rounds import ReplayedRound, Tally
from protocol.worker_config import DraftMethodName

MOST_OBSERVED = 2000
"""Rounds of a data set and temperature that are kept for other selection rules, about 30 kB each."""

FROM_TRUE_STATES = Variant("true", 0)
"""The variant of every method that drafts in one go, after verification."""


@dataclass(frozen=True)
class Unit:
    """A data set at a temperature: the target's texts are common to everything measured on it."""

    dataset: str
    temperature: float


@dataclass(frozen=True)
class Series:
    """A method at one budget (γ + 1 rows a verification), drafting in one way."""

    method: str
    budget: int
    variant: Variant


@dataclass(frozen=True)
class Measured:
    """What one conversation gave: rounds of each series, and rounds kept for other selection rules, by budget."""

    unit: Unit
    number: int
    rounds: dict[Series, list[ReplayedRound]]
    observed: dict[int, list[ObservedRound]] = field(default_factory=dict)


@dataclass(frozen=True)
class ObservedAt:
    """An observed round, and where it comes from."""

    unit: Unit
    prompt: int
    round: ObservedRound


@dataclass(frozen=True)
class Row:
    """One line of the results.

    tau: tokens a round, bonus included. hit_rate by B: share of rounds whose outcome a cache of B would have held, the
    first round (always a fallback) left out. acceptance: share of rounds in which draft 1, 2, ... was accepted.
    replaced: drafts that the decoder wrote over and verification reached; replaced_right and replaced_needlessly: where
    the target agreed with the decoder, and where it would have agreed with the draft model.
    """

    dataset: str
    method: str
    temperature: float
    budget: int
    passes: int
    refreshes: int
    states: States
    refresh: Refresh
    tau: float
    hit_rate: dict[str, float]
    acceptance: list[float]
    num_rounds: int
    num_tokens: int
    num_prompts: int
    replaced: int = 0
    replaced_right: int = 0
    replaced_needlessly: int = 0

    @property
    def is_served(self) -> bool:
        """Whether a server drafts so: no control."""
        if self.method == "jetspec++":
            return self.states == "served" and self.refresh != "alone"
        return self.method in get_args(DraftMethodName) and self.passes == 0

    @property
    def label(self) -> str:
        """The method, with its plan where it has one."""
        return f"{self.method} J{self.passes}-R{self.refreshes}" if self.method == "jetspec++" else self.method

    def as_json(self) -> dict[str, object]:
        return asdict(self)


class Records:
    """All counts. `units`: the order in which rows come, whoever is measured first."""

    def __init__(self, units: Iterable[Unit] = ()) -> None:
        self._tallies: dict[Unit, dict[Series, Tally]] = {unit: {} for unit in units}
        self._prompts: dict[Unit, set[int]] = {}
        self.observed: dict[int, list[ObservedAt]] = {}

    def add(self, measured: Measured) -> None:
        """Count a conversation."""
        of_unit = self._tallies.setdefault(measured.unit, {})
        for series, rounds in measured.rounds.items():
            tally = of_unit.setdefault(series, Tally())
            tally += Tally.of(rounds)
        self._prompts.setdefault(measured.unit, set()).add(measured.number)
        for budget, observed in measured.observed.items():
            kept = self.observed.setdefault(budget, [])
            room = MOST_OBSERVED - sum(item.unit == measured.unit for item in kept)
            kept += [ObservedAt(measured.unit, measured.number, item) for item in observed[: max(0, room)]]

    @property
    def units(self) -> list[Unit]:
        """All data sets and temperatures, in order."""
        return list(self._tallies)

    def rows(self) -> list[Row]:
        """All rows; a series that saw no round is left out."""
        return [
            self._row(unit, series, tally)
            for unit, of_unit in self._tallies.items()
            for series, tally in of_unit.items()
            if tally.num_rounds
        ]

    def _row(self, unit: Unit, series: Series, tally: Tally) -> Row:
        variant = series.variant
        return Row(
            dataset=unit.dataset,
            method=series.method,
            temperature=unit.temperature,
            budget=series.budget,
            passes=variant.num_passes,
            refreshes=variant.num_refreshes,
            states=variant.states,
            refresh=variant.refresh,
            tau=tally.tau,
            hit_rate=tally.hit_rate,
            acceptance=tally.acceptance,
            num_rounds=tally.num_rounds,
            num_tokens=tally.num_tokens,
            num_prompts=len(self._prompts[unit]),
            replaced=tally.num_replaced,
            replaced_right=tally.num_replaced_right,
            replaced_needlessly=tally.num_replaced_needlessly,
        )
