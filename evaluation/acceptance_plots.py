"""Pictures of an acceptance run: τ by method, acceptance by position, hit rate against cache size."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from evaluation.plotting import new_figure, save_all
from evaluation.records import Row
from evaluation.results import Results
from evaluation.rounds import CACHE_SIZES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR = 0.8
LEAST_SHARE = 0.005
"""Positions that fewer blocks reach are not drawn."""


def write_plots(results: Results, folder: Path) -> list[Path]:
    """Every picture that the results allow for; raises `PlotsUnavailable`."""
    rows = results.served
    pictures: dict[str, Callable[[], Figure | None]] = {
        "tau.png": lambda: tau_by_method(rows),
        "acceptance.png": lambda: acceptance_by_position(rows),
        "hit-rate.png": lambda: hit_rate_by_cache_size(results),
    }
    return save_all(pictures, folder)


def tau_by_method(rows: Sequence[Row]) -> "Figure | None":
    """Mean τ over the data sets: a panel for each temperature, a group of bars for each method, a bar for each
    budget."""
    if not rows:
        return None
    temperatures, budgets = sorted({row.temperature for row in rows}), sorted({row.budget for row in rows})
    labels = list(dict.fromkeys(row.label for row in rows))
    figure = new_figure(max(6.0, 0.8 * len(labels)), 3.4 * len(temperatures))
    panels = figure.subplots(len(temperatures), 1, squeeze=False)[:, 0]
    width = BAR / len(budgets)
    for axes, temperature in zip(panels, temperatures, strict=True):
        for offset, budget in enumerate(budgets):
            heights = {
                place: mean(found)
                for place, label in enumerate(labels)
                if (found := _taus(rows, temperature, budget, label))
            }
            shift = (offset - (len(budgets) - 1) / 2) * width
            bars = axes.bar(
                [place + shift for place in heights], list(heights.values()), width, label=f"budget {budget}"
            )
            axes.bar_label(bars, fmt="%.2f", fontsize=6, padding=2, rotation=90)
        axes.margins(y=0.15)
        axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
        axes.set_ylabel(f"τ at temperature {temperature:g}")
        axes.legend(frameon=False, fontsize=8)
    return figure


def acceptance_by_position(rows: Sequence[Row]) -> "Figure | None":
    """Share of rounds in which draft 1, 2, ... was accepted, at the largest budget and lowest temperature.

    Of jetspec++ the plans with a refresh before each pass.
    """
    if not rows:
        return None
    temperature, budget = min(row.temperature for row in rows), max(row.budget for row in rows)
    chosen = [
        row for row in rows if (row.temperature, row.budget) == (temperature, budget) and row.refreshes == row.passes
    ]
    return _panels(chosen, "draft of the block", f"accepted (T={temperature:g}, budget {budget})", _draw_acceptance)


def hit_rate_by_cache_size(results: Results) -> "Figure | None":
    """Hit rate of every selection rule against B, or of the methods with a cache where no rules were compared."""
    selection = results.selection
    if selection:
        temperature = min(row.temperature for row in selection)
        compared = [row for row in selection if row.temperature == temperature]
        lines = [(row.dataset, row.rule, row.hit_rate) for row in compared]
        name = f"hit rate (T={temperature:g}, budget {compared[0].budget})"
    else:
        rows = [row for row in results.served if row.hit_rate]
        if not rows:
            return None
        temperature, budget = min(row.temperature for row in rows), max(row.budget for row in rows)
        rows = [row for row in rows if (row.temperature, row.budget) == (temperature, budget)]
        lines = [(row.dataset, row.label, row.hit_rate) for row in rows]
        name = f"hit rate (T={temperature:g}, budget {budget})"
    datasets = list(dict.fromkeys(dataset for dataset, _, _ in lines))
    figure = new_figure(4.2 * len(datasets), 3.8)
    panels = figure.subplots(1, len(datasets), squeeze=False, sharey=True)[0]
    for axes, dataset in zip(panels, datasets, strict=True):
        for own, label, rates in lines:
            if own == dataset:
                axes.plot([int(size) for size in rates], list(rates.values()), marker="o", markersize=3, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(CACHE_SIZES, [str(size) for size in CACHE_SIZES])
        axes.set_title(dataset)
        axes.set_xlabel("cache size B")
    panels[0].set_ylabel(name)
    panels[-1].legend(frameon=False, fontsize=7)
    return figure


def _panels(rows: Sequence[Row], x_label: str, y_label: str, draw: Callable[["Axes", Sequence[Row]], None]) -> "Figure":
    datasets = list(dict.fromkeys(row.dataset for row in rows))
    figure = new_figure(4.2 * len(datasets), 3.8)
    panels = figure.subplots(1, len(datasets), squeeze=False, sharey=True)[0]
    for axes, dataset in zip(panels, datasets, strict=True):
        draw(axes, [row for row in rows if row.dataset == dataset])
        axes.set_title(dataset)
        axes.set_xlabel(x_label)
    panels[0].set_ylabel(y_label)
    panels[-1].legend(frameon=False, fontsize=7)
    return figure


def _draw_acceptance(axes: "Axes", rows: Sequence[Row]) -> None:
    for row in rows:
        shares = [share for share in row.acceptance if share >= LEAST_SHARE]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=3, label=row.label)
    axes.set_ylim(0.0, 1.0)


def _taus(rows: Sequence[Row], temperature: float, budget: int, label: str) -> list[float]:
    return [row.tau for row in rows if (row.temperature, row.budget, row.label) == (temperature, budget, label)]
