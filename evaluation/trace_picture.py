"""The picture of some rounds: time from left to right, one lane for the verifier, one below it for the drafter."""

import re
from typing import TYPE_CHECKING

from evaluation.plotting import new_figure
from evaluation.trace_spans import Excerpt, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LANES = {"verifier": 1.0, "drafter": 0.0}
LANE_HEIGHT = 0.72
INCHES_A_ROUND = 1.25
MIN_LABEL_SHARE = 0.012
"""Of the picture's width: narrower spans get no text."""

VERIFY_COLOURS = {"hit": "#2b6cb0", "late_hit": "#6b9bd1", "miss": "#8a8f98", "autoregressive": "#b8bcc4"}
COLOURS = {
    "prefill": "#4a5568",
    "exposed": "#e53e3e",
    "foresight": "#dd9c2e",
    "refresh": "#8e5bb5",
    "J0": "#2f855a",
    "J1": "#48a868",
    "J2": "#6cc287",
    "J3": "#94d6a8",
    "push": "#1a202c",
    "install": "#a0785a",
    "fallback": "#c05621",
}
OTHER_PASSES = "#bfe6cb"
UNKNOWN = "#cbd5e0"


def draw(excerpt: Excerpt) -> "Figure":
    """The figure; raises `PlotsUnavailable` without matplotlib."""
    num_rounds = excerpt.last_round - excerpt.first_round + 1
    figure = new_figure(max(7.0, INCHES_A_ROUND * num_rounds), 3.2)
    axes = figure.subplots()
    verifications = [span for span in excerpt.spans if _is_own_verification(span, excerpt)]
    origin_ms = verifications[0].start_ms
    width_ms = verifications[-1].end_ms - origin_ms
    for span in excerpt.spans:
        _draw_span(axes, span, origin_ms, width_ms)
    axes.set_xlim(0.0, width_ms)
    axes.set_ylim(-0.5, 1.5)
    axes.set_yticks(list(LANES.values()), list(LANES))
    axes.set_xlabel("ms")
    axes.set_title(
        f"sequence {excerpt.sequence_id}, rounds {excerpt.first_round} to {excerpt.last_round}; "
        "in a verification: drafts accepted of drafts verified",
        fontsize=9,
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _add_legend(figure, axes, excerpt)
    return figure


def colour_of(span: Span) -> str:
    """A verification is coloured by where its block came from, everything else by its name."""
    if span.name == "verify":
        return VERIFY_COLOURS.get(str(span.details.get("source")), UNKNOWN)
    is_pass = re.fullmatch(r"J\d+", span.name) is not None
    return COLOURS.get(span.name, OTHER_PASSES if is_pass else UNKNOWN)


def legend_name(span: Span) -> str:
    """What the legend calls it."""
    return f"verify ({span.details.get('source')})" if span.name == "verify" else span.name


def _is_own_verification(span: Span, excerpt: Excerpt) -> bool:
    is_chosen = excerpt.first_round <= span.details.get("round", -1) <= excerpt.last_round
    return span.name == "verify" and span.sequence_id == excerpt.sequence_id and is_chosen


def _draw_span(axes: "Axes", span: Span, origin_ms: float, width_ms: float) -> None:
    lane = LANES.get(span.process)
    if lane is None:
        return
    start_ms, length_ms = span.start_ms - origin_ms, span.end_ms - span.start_ms
    axes.barh(
        lane, length_ms, left=start_ms, height=LANE_HEIGHT, color=colour_of(span), edgecolor="white", linewidth=0.3
    )
    if length_ms < MIN_LABEL_SHARE * width_ms or span.name == "exposed":
        return
    text = f"{span.details['accepted']}/{span.details['drafts']}" if span.name == "verify" else span.name
    middle_ms = min(max(start_ms + length_ms / 2, 0.0), width_ms)
    axes.text(middle_ms, lane, text, ha="center", va="center", fontsize=6, color="white", clip_on=True)


def _add_legend(figure: "Figure", axes: "Axes", excerpt: Excerpt) -> None:
    from matplotlib.patches import Patch

    shown = {legend_name(span): colour_of(span) for span in excerpt.spans if span.process in LANES}
    verifier = {legend_name(span) for span in excerpt.spans if span.process == "verifier"}
    names = sorted(shown, key=lambda name: (name not in verifier, name))
    handles = [Patch(color=shown[name], label=name) for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(10, len(handles)), fontsize=7, frameon=False)
