"""A table of texts, for a terminal and for Markdown. Knows nothing of what is in it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Columns and rows of cells. The first `num_labels` columns are words, the others numbers."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_labels: int = 1

    def to_text(self) -> str:
        """Aligned for a terminal."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[index]) for line in lines) for index in range(len(self.columns))]
        body = [
            "  ".join(
                cell.ljust(width) if index < self.num_labels else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *body])

    def to_markdown(self) -> str:
        """With its title as a heading and its note below."""
        marks = ["---" if index < self.num_labels else "---:" for index in range(len(self.columns))]
        lines = [_line(self.columns), _line(marks), *(_line(row) for row in self.rows)]
        return "\n".join([f"## {self.title}", "", *lines, "", self.note]).rstrip() + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def number(value: float | None, places: int = 2) -> str:
    """A cell; a dash where there is nothing."""
    return "-" if value is None else f"{value:.{places}f}"
