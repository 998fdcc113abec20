"""The results as Markdown and JSON."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evaluation.bench.concurrency import Load
from evaluation.bench.counters import PHASES
from evaluation.bench.measure import Measured
from evaluation.bench.rows import Row, rows_of

NOTE = (
    "tok/s and speed-up: median over prompts (quartiles), without prefill; the speed-up is taken prompt by prompt. "
    "τ, verification, exposed time and hit rate: means over rounds; exposed counts every round, the hit rate all but "
    "the first of a text. same: texts that are those of ar, token for token; peers compute in another order."
)


@dataclass
class Report:
    """Everything a run has to say. speedups_by_gamma: how each contestant's γ was chosen."""

    measured: Measured = field(default_factory=Measured)
    loads: list[Load] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    speedups_by_gamma: dict[str, dict[int, float]] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        return rows_of(self.measured)

    def as_json(self) -> dict[str, object]:
        """The content of the `--json` file."""
        return {
            "rows": [row.as_json() for row in self.rows()],
            "concurrency": [load.as_json() for load in self.loads],
            "skipped": self.skipped,
            "failed": self.measured.failures,
            "speedups_by_gamma": self.speedups_by_gamma,
            "settings": self.settings,
        }

    def as_markdown(self) -> str:
        """Tables, and below them what a reader must know about them."""
        rows = self.rows()
        parts = [_about(self.settings), _main_table(rows), NOTE]
        parts += [_phase_table(rows)] if any(row.phases_ms for row in rows) else []
        parts += [_gamma_table(self.speedups_by_gamma)] if self.speedups_by_gamma else []
        parts += [_load_table(self.loads)] if self.loads else []
        faults = [f"- left out: **{', '.join(names)}**: {reason}" for reason, names in _by_reason(self.skipped).items()]
        faults += [f"- **{name}** failed: {reason}" for name, reason in self.measured.failures.items()]
        faults += [f"- **MISMATCH**: {line}" for line in self.mismatch_lines()]
        return "\n\n".join([*parts, *(["\n".join(faults)] if faults else [])]) + "\n"

    def mismatch_lines(self) -> list[str]:
        """One line for every text that should equal plain decoding's and does not."""
        lines = []
        for m in self.measured.mismatches():
            pairs = zip(m.prompt.reference, m.generation.token_ids, strict=False)
            at = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
            where = "in length" if at is None else f"at token {at}"
            lines.append(f"{m.contestant.name} differs from ar {where}: {m.prompt.dataset}, prompt {m.prompt.id}")
        lines += [
            f"{load.method} at {load.concurrency} requests: {load.num_requests - load.num_same_texts} texts differ"
            for load in self.loads
            if load.num_same_texts < load.num_requests
        ]
        return lines


def write_json(path: Path, report: Report) -> None:
    """Replace the file in one step, so that a killed run leaves the last complete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    unfinished.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _by_reason(skipped: dict[str, str]) -> dict[str, list[str]]:
    """One line for all that lack the same library."""
    names: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        names.setdefault(reason, []).append(name)
    return names


def _about(settings: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items() if value not in (None, ""))


def _main_table(rows: Sequence[Row]) -> str:
    head = ["data", "method", "γ", "tok/s", "speed-up", "τ", "verify ms", "exposed ms", "hit rate", "first ms"]
    head += ["same", "prompts"]
    body = [
        [
            row.dataset,
            row.method,
            _count(row.num_speculative_tokens),
            _with_quartiles(row.tokens_per_s, row.tokens_per_s_quartiles, 1),
            _with_quartiles(row.speedup_over_ar, row.speedup_quartiles, 2),
            _number(row.tau, 2),
            _number(row.verify_ms, 1),
            _number(row.exposed_ms, 2),
            _number(row.hit_rate, 3),
            _number(row.first_token_ms, 0),
            f"{row.num_same_texts}/{row.num_prompts}",
            str(row.num_prompts),
        ]
        for row in rows
    ]
    return _table(head, body)


def _phase_table(rows: Sequence[Row]) -> str:
    head = ["drafting, ms a round", "data", *PHASES, "together", "rounds by outcome"]
    body = [
        [
            row.method,
            row.dataset,
            *(_number(row.phases_ms.get(phase), 1) for phase in PHASES),
            _number(sum(row.phases_ms.values()), 1),
            ", ".join(f"{count} {name}" for name, count in row.outcomes.items()),
        ]
        for row in rows
        if row.phases_ms
    ]
    return _table(head, body)


def _gamma_table(speedups: Mapping[str, Mapping[int, float]]) -> str:
    gammas = sorted({gamma for by_gamma in speedups.values() for gamma in by_gamma})
    head = ["speed-up on trial prompts", *(f"γ={gamma}" for gamma in gammas)]
    return _table(
        head, [[name, *(_number(by_gamma.get(gamma), 2) for gamma in gammas)] for name, by_gamma in speedups.items()]
    )


def _load_table(loads: Sequence[Load]) -> str:
    head = ["method", "requests at a time", "tok/s together", "request s", "longest s", "same", "requests"]
    body = [
        [
            load.method,
            str(load.concurrency),
            _number(load.tokens_per_s, 1),
            _with_quartiles(load.latency_s, load.latency_quartiles_s, 2),
            _number(load.longest_s, 2),
            f"{load.num_same_texts}/{load.num_requests}",
            str(load.num_requests),
        ]
        for load in loads
    ]
    return _table(head, body)


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up in a terminal."""
    widths = [max(len(line[column]) for line in (head, *body)) for column in range(len(head))]

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([row(head), row(["-" * width for width in widths]), *map(row, body)])


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _count(value: int | None) -> str:
    return "–" if value is None else str(value)


def _with_quartiles(value: float | None, quartiles: tuple[float, float] | None, digits: int) -> str:
    if value is None or quartiles is None:
        return _number(value, digits)
    return f"{value:.{digits}f} ({quartiles[0]:.{digits}f}–{quartiles[1]:.{digits}f})"
