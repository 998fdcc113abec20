"""The tables of the paper, made from the rows of a run. Each says in its note what it is measured on.

A table that has nothing to show is left out, so that a run of a few methods or an interrupted one prints what it has.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import mean
from typing import TypeVar

from evaluation.drafting import Refresh
from evaluation.layout import Table, number
from evaluation.records import Row
from evaluation.replay import States
from evaluation.rounds import CACHE_SIZES
from evaluation.selection import SelectionRow

PASSES = (0, 1, 2, 3)
PASS_COLUMNS = tuple(f"J{passes}" for passes in PASSES)
OURS = "jetspec++"
CONTROL = "jetspec"

Value = TypeVar("Value")

Find = Callable[[int], float | None]
"""τ after J passes."""


def all_tables(rows: Sequence[Row], selection: Sequence[SelectionRow]) -> list[Table]:
    """Every table that has rows, in the paper's order."""
    found = [
        acceptance_lengths(rows),
        hit_rates(rows),
        control(rows),
        refreshes(rows),
        foresight(rows),
        selection_rules(selection),
        without_pipelining(rows),
    ]
    return [table for table in found if table.rows]


def acceptance_lengths(rows: Sequence[Row]) -> Table:
    """The analogue of Table 1: data sets as columns."""
    served = [row for row in rows if row.is_served]
    datasets = _distinct(row.dataset for row in served)
    lines = []
    for temperature, budget, label in _distinct((row.temperature, row.budget, row.label) for row in served):
        tau = {
            row.dataset: row.tau
            for row in served
            if (row.temperature, row.budget, row.label) == (temperature, budget, label)
        }
        average = mean(tau.values()) if len(tau) == len(datasets) else None
        cells = [number(tau.get(dataset)) for dataset in datasets]
        lines.append((f"{temperature:g}", str(budget), label, *cells, number(average)))
    return Table(
        "Acceptance length τ (analogue of Table 1)",
        "Tokens a verification commits, bonus included. jetspec++ drafts from predicted states on a hit of its cache "
        "(B = 16), from true states in one pass on a miss; every other method from true states or tokens.",
        ("T", "budget", "method", *datasets, "mean"),
        tuple(sorted(lines, key=lambda line: (line[0], int(line[1])))),
        num_labels=3,
    )


def hit_rates(rows: Sequence[Row]) -> Table:
    """Hit rates of the methods that have a speculation cache, by its size."""
    served = [row for row in rows if row.is_served and row.hit_rate]
    lines = [
        (
            *_place(row),
            row.label,
            *(number(row.hit_rate.get(str(size)), 3) for size in CACHE_SIZES),
            str(row.num_rounds),
        )
        for row in served
    ]
    return Table(
        "Hit rate by cache size B",
        "Share of rounds whose outcome the cache held; the first round of a text, always a fallback, is left out.",
        (*_PLACE, "method", *(f"B={size}" for size in CACHE_SIZES), "rounds"),
        tuple(lines),
        num_labels=4,
    )


def control(rows: Sequence[Row]) -> Table:
    """The analogue of Tables 4 and 12: Jacobi passes on a draft model that was not trained for them."""
    lines = [
        (*place, method, *_by_passes(find))
        for place, group in _places(rows)
        for method in sorted({row.method for row in group}, key=lambda name: (name == OURS, name))
        if _has(find := _finder(group, method, "true", "none"))
    ]
    has_control = any(line[3] != OURS for line in lines)
    return Table(
        "Jacobi passes: draft models trained otherwise against ours (analogue of Tables 4 and 12)",
        f"τ after J passes from true states, without refresh. `{CONTROL}` was trained on mask inputs and fully noised "
        "blocks only.",
        (*_PLACE, "draft model", *PASS_COLUMNS),
        tuple(lines) if has_control else (),
        num_labels=4,
    )


def refreshes(rows: Sequence[Row]) -> Table:
    """The analogue of Table 5: what passes, refreshes and anchor replacements each give."""
    kinds: tuple[tuple[str, Refresh], ...] = (
        ("passes alone", "none"),
        ("refresh before each, nothing written", "alone"),
        ("refresh and anchor replacement", "replace"),
    )
    lines = []
    for place, group in _places(rows):
        if not _has(_finder(group, OURS, "served", "alone")):
            continue
        lines += [(*place, name, *_by_passes(_finder(group, OURS, "served", kind))) for name, kind in kinds]
    return Table(
        "Passes, context refresh, anchor replacement (analogue of Table 5)",
        "τ of jetspec++ as served, R = 0 or R = J.",
        (*_PLACE, "before each pass", *PASS_COLUMNS),
        tuple(lines),
        num_labels=4,
    )


def foresight(rows: Sequence[Row]) -> Table:
    """The analogue of Table 6: predicted states against true ones and against copies of the last verified one."""
    names: tuple[tuple[str, States], ...] = (
        ("true", "true"),
        ("predicted (foresight)", "predicted"),
        ("last verified state copied", "copied"),
    )
    lines = []
    for place, group in _places(rows):
        found = {states: _finder(group, OURS, states, "none") for _, states in names}
        if not all(_has(find) for find in found.values()):
            continue
        lines += [(*place, name, *_by_passes(found[states])) for name, states in names]
        kept = [_ratio(found["predicted"](j), found["true"](j)) for j in PASSES]
        recovered = [
            _ratio(
                _difference(found["predicted"](j), found["copied"](j)),
                _difference(found["true"](j), found["copied"](j)),
            )
            for j in PASSES
        ]
        lines.append((*place, "kept of true", *(number(value) for value in kept)))
        lines.append((*place, "gap recovered", *(number(value) for value in recovered)))
    return Table(
        "Foresight against true states (analogue of Table 6)",
        "τ after J passes without refresh. Every block but a text's first is drafted before the one under verification "
        "has been verified, whether or not a cache would have held its outcome. Gap recovered: (predicted − copied) / "
        "(true − copied).",
        (*_PLACE, "context states", *PASS_COLUMNS),
        tuple(lines),
        num_labels=4,
    )


def without_pipelining(rows: Sequence[Row]) -> Table:
    """The analogue of Table 16: refresh with anchor replacement where every block is drafted after verification."""
    lines = []
    for place, group in _places(rows):
        plain, replaced = (_finder(group, OURS, "true", kind) for kind in ("none", "replace"))
        if not _has(replaced):
            continue
        lines += [(*place, "passes alone", *_by_passes(plain), "-", "-", "-")]
        last = max((row for row in group if row.states == "true" and row.refresh == "replace"), key=lambda r: r.passes)
        shares = (number(_ratio(count, last.replaced)) for count in (last.replaced_right, last.replaced_needlessly))
        lines += [(*place, "refresh and anchor replacement", *_by_passes(replaced), str(last.replaced), *shares)]
    return Table(
        "Refresh and anchor replacement without pipelining (analogue of Table 16)",
        "τ after J passes, every block drafted from true states after verification. Replaced: tokens that the decoder "
        "wrote at the largest J and verification reached; right: the target agreed; needless: it would have agreed "
        "with the draft model's token.",
        (*_PLACE, "before each pass", *PASS_COLUMNS, "replaced", "right", "needless"),
        tuple(lines),
        num_labels=4,
    )


def selection_rules(rows: Sequence[SelectionRow]) -> Table:
    """The analogue of Table 11: hit rate of each selection rule."""
    lines = [
        (
            row.dataset,
            f"{row.temperature:g}",
            str(row.budget),
            row.rule,
            *(number(row.hit_rate[str(size)], 3) for size in CACHE_SIZES),
            str(row.num_rounds),
        )
        for row in rows
    ]
    return Table(
        "Selection rules on recorded rounds (analogue of Table 11)",
        "Hit rate by cache size B on the rounds of jetspec++ J1-R1. What a rule has to have fitted comes from the "
        "other half of the prompts; a calibration that was given is taken as it is.",
        (*_PLACE, "rule", *(f"B={size}" for size in CACHE_SIZES), "rounds"),
        tuple(lines),
        num_labels=4,
    )


_PLACE = ("data set", "T", "budget")


def _place(row: Row) -> tuple[str, str, str]:
    return row.dataset, f"{row.temperature:g}", str(row.budget)


def _places(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, str, str], list[Row]]]:
    """Rows of one data set, temperature and budget."""
    for place in _distinct(_place(row) for row in rows):
        yield place, [row for row in rows if _place(row) == place]


def _finder(rows: Sequence[Row], method: str, states: States, refresh: Refresh) -> Find:
    """τ by J. Without a pass no refresh happens either."""
    tau = {
        row.passes: row.tau
        for row in rows
        if row.method == method and row.states == states and (row.refresh == refresh or row.passes == 0)
    }
    return tau.get


def _has(find: Find) -> bool:
    return any(find(passes) is not None for passes in PASSES[1:])


def _by_passes(find: Find) -> Iterator[str]:
    return (number(find(passes)) for passes in PASSES)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _difference(more: float | None, less: float | None) -> float | None:
    return None if more is None or less is None else more - less


def _distinct(values: Iterable[Value]) -> list[Value]:
    return list(dict.fromkeys(values))
