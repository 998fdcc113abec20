"""The results as pictures: speed-up, acceptance by position, the time of a round, hit rate against cache size, load."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evaluation.bench.contestants import CACHED_METHOD
from evaluation.bench.report import Report
from evaluation.bench.rows import Row
from evaluation.plotting import new_figure, save_all

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR = 0.8


def write_plots(report: Report, folder: Path) -> list[Path]:
    """Every picture the results allow for; raises `PlotsUnavailable`."""
    rows = report.rows()
    pictures: dict[str, Callable[[], Figure | None]] = {
        "speedup.png": lambda: speedup_bars(rows),
        "acceptance.png": lambda: acceptance_by_position(rows),
        "round.png": lambda: round_time(rows),
        "hit-rate.png": lambda: hit_rate_by_cache_size(rows),
        "concurrency.png": lambda: concurrency(report),
    }
    return save_all(pictures, folder)


def speedup_bars(rows: Sequence[Row]) -> "Figure | None":
    """Median speed-up over plain decoding with quartiles, a group of bars for each contestant."""
    measured = [row for row in rows if row.speedup_over_ar is not None]
    if not measured:
        return None
    methods, datasets = _names(measured)
    figure = new_figure(max(6.0, 0.9 * len(methods)), 4.0)
    axes = figure.subplots()
    width = BAR / len(datasets)
    for offset, dataset in enumerate(datasets):
        own = [row for row in measured if row.dataset == dataset]
        places = [methods.index(row.method) + (offset - (len(datasets) - 1) / 2) * width for row in own]
        heights = [row.speedup_over_ar or 0.0 for row in own]
        quartiles = [row.speedup_quartiles or (height, height) for row, height in zip(own, heights, strict=True)]
        below = [height - low for height, (low, _) in zip(heights, quartiles, strict=True)]
        above = [high - height for height, (_, high) in zip(heights, quartiles, strict=True)]
        bars = axes.bar(places, heights, width, yerr=[below, above], capsize=2, label=dataset)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axes.margins(y=0.15)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(methods)), methods, rotation=30, ha="right")
    axes.set_ylabel("speed-up over ar")
    axes.legend(frameon=False)
    return figure


def acceptance_by_position(rows: Sequence[Row]) -> "Figure | None":
    """Share of blocks whose draft in a slot was accepted, one panel a data set."""
    drafted = [row for row in rows if row.acceptance]
    if not drafted:
        return None
    _, datasets = _names(drafted)
    figure = new_figure(5.0 * len(datasets), 3.8)
    panels = figure.subplots(1, len(datasets), squeeze=False, sharey=True)[0]
    for axes, dataset in zip(panels, datasets, strict=True):
        for row in drafted:
            if row.dataset == dataset:
                axes.plot(range(1, len(row.acceptance) + 1), row.acceptance, marker="o", label=row.method)
        axes.set_title(dataset)
        axes.set_xlabel("slot of the block")
        axes.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("accepted")
    panels[0].set_ylim(0.0, 1.0)
    return figure


def round_time(rows: Sequence[Row]) -> "Figure | None":
    """Verification and the exposed time on top of it, a bar a contestant and data set."""
    measured = [row for row in rows if row.verify_ms is not None and row.exposed_ms is not None]
    if not measured:
        return None
    labels = [f"{row.method}\n{row.dataset}" for row in measured]
    verify_ms = [row.verify_ms or 0.0 for row in measured]
    exposed_ms = [row.exposed_ms or 0.0 for row in measured]
    figure = new_figure(7.0, 1.0 + 0.45 * len(measured))
    axes = figure.subplots()
    axes.barh(labels, verify_ms, label="verify", color="#2b6cb0")
    bars = axes.barh(labels, exposed_ms, left=verify_ms, label="exposed", color="#e53e3e")
    axes.bar_label(bars, labels=[f"+{value:.2f}" for value in exposed_ms], fontsize=7, padding=2)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel("ms a round")
    axes.legend(frameon=False)
    return figure


def hit_rate_by_cache_size(rows: Sequence[Row]) -> "Figure | None":
    """Hit rate of the foresight method where its cache size was fixed (`--cache-sizes`)."""
    sized = [row for row in rows if row.cache_size is not None and row.hit_rate is not None]
    if not sized:
        return None
    figure = new_figure(5.0, 3.8)
    axes = figure.subplots()
    for dataset in dict.fromkeys(row.dataset for row in sized):
        points = sorted((row.cache_size or 0, row.hit_rate or 0.0) for row in sized if row.dataset == dataset)
        axes.plot([size for size, _ in points], [rate for _, rate in points], marker="o", label=dataset)
    sizes = sorted({row.cache_size or 0 for row in sized})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("cache size B")
    axes.set_ylabel(f"hit rate of {CACHED_METHOD}")
    axes.set_ylim(0.0, 1.0)
    axes.legend(frameon=False)
    return figure


def concurrency(report: Report) -> "Figure | None":
    """Throughput and request latency against the number of requests at a time."""
    if not report.loads:
        return None
    figure = new_figure(9.0, 3.8)
    left, right = figure.subplots(1, 2)
    for method in dict.fromkeys(load.method for load in report.loads):
        own = sorted((load for load in report.loads if load.method == method), key=lambda load: load.concurrency)
        counts = [load.concurrency for load in own]
        left.plot(counts, [load.tokens_per_s for load in own], marker="o", label=method)
        right.plot(counts, [load.latency_s for load in own], marker="o", label=method)
    left.set_ylabel("tok/s together")
    right.set_ylabel("median request, s")
    for axes in (left, right):
        axes.set_xlabel("requests at a time")
        axes.set_ylim(bottom=0.0)
        axes.legend(frameon=False)
    return figure


def _names(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    return list(dict.fromkeys(row.method for row in rows)), list(dict.fromkeys(row.dataset for row in rows))
