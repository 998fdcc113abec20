"""Ways to choose which outcomes are pre-drafted, replayed on observed rounds (paper, Table 11).

The served rule is equation 8; each of the others removes one source of information. Knows nothing of how rounds were
drafted or of where the fits come from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from decoding.calibration import ANCHOR_CANDIDATES, Calibration, calibrated_scores
from decoding.fanout import allocate, fit_acceptance_rate, fit_decay
from decoding.observation import ObservedRound
from decoding.outcomes import OutcomeTable, row_candidates, top_outcomes
from decoding.selection import select

ScoreRule = Literal["served", "uncalibrated", "draft-model"]
"""`served`: the calibrated score. `uncalibrated`: equation 6. `draft-model`: lengths by the draft model's own
probabilities."""

AnchorSource = Literal["decoder", "draft"]
"""Who proposes the anchors of a fixed fan-out. After all drafts are accepted only the decoder can."""

SCORE_RULES: tuple[ScoreRule, ...] = get_args(ScoreRule)


def scored_outcomes(observed: ObservedRound, rule: ScoreRule, calibration: Calibration) -> OutcomeTable:
    """Outcomes as a rule ranks them, best first."""
    if rule == "uncalibrated":
        return top_outcomes(observed.log_p, observed.draft_columns)
    if rule == "draft-model":
        weights = (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # p̃_i = q(d_i), the draft model's own probability
        calibration = Calibration(weights, calibration.anchor_temperature, None)
    return calibrated_scores(observed.log_p, observed.draft_columns, observed.confidences, calibration)


def outcome_rank(
    observed: ObservedRound,
    rule: ScoreRule,
    calibration: Calibration,
    limit: int | None = None,
    max_accepted: int | None = None,
) -> int | None:
    """How many outcomes a rule puts before the one that happened; None when it is not among the `limit` best.

    `max_accepted`: outcomes that accept more drafts are none, because a draft ends the text.
    """
    table = scored_outcomes(observed, rule, calibration)
    if max_accepted is not None:
        table = table.take((table.num_accepted <= max_accepted).nonzero().flatten())
    table = select(table, len(table) if limit is None else limit, observed.excluded_columns)
    happened = (table.num_accepted == observed.num_accepted) & (table.column == observed.anchor_column)
    found = happened.nonzero().flatten().tolist()
    return int(found[0]) if found else None


def anchor_rank(observed: ObservedRound, source: AnchorSource) -> int | None:
    """The realised anchor's place at its length, counted from 1, among the anchors of `source`; None beyond them.

    The draft token at that place is no anchor, and neither is one that ends the text.
    """
    length = observed.num_accepted
    if source == "decoder" or length == len(observed.draft_columns):
        candidates = row_candidates(observed.log_p, observed.draft_columns, ANCHOR_CANDIDATES)
        proposed: list[int] = candidates.column[length].tolist()
    else:
        if not observed.draft_anchors:
            raise ValueError("the draft model's anchors were not recorded in this round")
        proposed = observed.draft_anchors[length]
    struck = {*observed.excluded_columns, *observed.draft_columns[length : length + 1]}
    anchors = [column for column in proposed if column not in struck]
    return anchors.index(observed.anchor_column) + 1 if observed.anchor_column in anchors else None


@dataclass(frozen=True, slots=True)
class FanOutFit:
    """The law of the accepted length (α) and of the anchors at one length (ρ) that a fixed fan-out assumes."""

    acceptance_rate: float
    decay: float


def fit_fan_out(rounds: Sequence[ObservedRound], source: AnchorSource) -> FanOutFit | None:
    """Fit α and ρ; None where too few anchors rank low to fit ρ."""
    if not rounds:
        return None
    num_drafts = len(rounds[0].draft_columns)
    ranks = [anchor_rank(observed, source) or ANCHOR_CANDIDATES + 1 for observed in rounds]
    try:
        decay = fit_decay(ranks)
    except ValueError:
        return None
    return FanOutFit(fit_acceptance_rate([observed.num_accepted for observed in rounds], num_drafts), decay)


def fan_out_sizes(fit: FanOutFit, num_drafts: int, cache_size: int) -> tuple[int, ...]:
    """Anchors per accepted length 0..γ: the series over all lengths, rounded by largest remainders (appendix B.3)."""
    return allocate(fit.acceptance_rate, fit.decay, num_drafts, cache_size, every_length=True)


def fan_out_holds(observed: ObservedRound, sizes: Sequence[int], source: AnchorSource) -> bool:
    """Whether a fixed fan-out, filled with the anchors of `source`, would have held what happened."""
    rank = anchor_rank(observed, source)
    return rank is not None and rank <= sizes[observed.num_accepted]
