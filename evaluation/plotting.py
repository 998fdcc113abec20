"""The one place that imports matplotlib, which is optional; figures are made without a display."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISSING = "plots need matplotlib: pip install 'jetspec-pp[plots]'"


class PlotsUnavailable(Exception):
    """matplotlib is not installed, or a picture cannot be written."""


def new_figure(width_inches: float, height_inches: float) -> "Figure":
    """An empty figure; raises `PlotsUnavailable` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotsUnavailable(MISSING) from None
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def save(figure: "Figure", path: Path) -> None:
    """Write a picture, in the format of the file's ending; raises `PlotsUnavailable` naming the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise PlotsUnavailable(f"{path}: {error}") from None


def save_all(pictures: Mapping[str, "Callable[[], Figure | None]"], folder: Path) -> list[Path]:
    """Draw every picture that its results allow for, by file name; raises `PlotsUnavailable`."""
    written = []
    for name, draw in pictures.items():
        figure = draw()
        if figure is not None:
            save(figure, folder / name)
            written.append(folder / name)
    return written
