"""Results of an acceptance run as a file, and read back from one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from decoding.calibration import Calibration
from evaluation.layout import Table
from evaluation.records import Records, Row, Unit
from evaluation.selection import SelectionRow, compare_rules
from evaluation.tables import all_tables

Kind = TypeVar("Kind", Row, SelectionRow)


class ResultFileError(ValueError):
    """A file holds no results of an acceptance run; the message names it and what is wrong."""


@dataclass(frozen=True)
class Results:
    """about: where and how it was measured, plain words by name. rows: everything, controls too."""

    about: Mapping[str, object]
    rows: Sequence[Row]
    selection: Sequence[SelectionRow] = field(default_factory=list)

    @classmethod
    def of(cls, records: Records, about: Mapping[str, object], calibrations: Mapping[int, Calibration]) -> "Results":
        """Everything a run has measured, selection rules compared on the rounds that were kept."""
        selection = [
            row
            for budget, observed in records.observed.items()
            for row in compare_rules(observed, budget, calibrations.get(budget))
        ]
        selection.sort(key=lambda row: records.units.index(Unit(row.dataset, row.temperature)))
        return cls(about, records.rows(), selection)

    @property
    def served(self) -> list[Row]:
        """The rows of methods as a server runs them."""
        return [row for row in self.rows if row.is_served]

    def tables(self) -> list[Table]:
        """Every table that has rows."""
        return all_tables(self.rows, self.selection)

    def to_json(self) -> str:
        """What `from_json` reads."""
        content = {
            "about": dict(self.about),
            "rows": [row.as_json() for row in self.served],
            "controls": [row.as_json() for row in self.rows if not row.is_served],
            "selection": [row.as_json() for row in self.selection],
        }
        return json.dumps(content, indent=1) + "\n"

    def rows_as_json(self) -> str:
        """The served rows alone."""
        return json.dumps({"rows": [row.as_json() for row in self.served]}, indent=1) + "\n"

    def to_markdown(self) -> str:
        """What was measured where, then the tables."""
        head = ["# Acceptance", "", *(f"- {name}: {value}" for name, value in self.about.items()), ""]
        return "\n".join([*head, *(table.to_markdown() for table in self.tables())])


def read_results(path: Path) -> Results:
    """Results from a file. Raises `ResultFileError`, or OSError where it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ResultFileError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise ResultFileError(f'{path}: not the results of an acceptance run: no list "rows"')
    about = content.get("about")
    return Results(
        about if isinstance(about, dict) else {},
        [*_parsed(Row, content, "rows", path), *_parsed(Row, content, "controls", path)],
        _parsed(SelectionRow, content, "selection", path),
    )


def _parsed(kind: type[Kind], content: Mapping[str, Any], name: str, path: Path) -> list[Kind]:
    parsed = []
    for number, entry in enumerate(content.get(name, []), start=1):
        try:
            parsed.append(kind(**entry))
        except TypeError as error:
            raise ResultFileError(f"{path}: {name}, entry {number}: {error}") from error
    return parsed


def write_whole(path: Path, text: str) -> None:
    """In one piece: a run that is killed leaves the file of before. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
