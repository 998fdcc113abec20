"""What one verification taught, cut down to the columns that any rule looks at: thousands of rounds fit in memory and
can be replayed under other rules. Knows nothing of what ranks outcomes or what is fitted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from decoding.calibration import ANCHOR_CANDIDATES
from decoding.outcomes import ABSENT, check_shapes


@dataclass(frozen=True, slots=True)
class ObservedRound:
    """One round that did not end its text.

    log_p [γ+1, columns]: the decoder's log-probabilities over the kept columns, in vocabulary order. All column fields
    index them; -1 stands for a token the draft vocabulary lacks. `draft_anchors`: for each draft, the columns the draft
    model itself found likeliest there, best first; empty where they were not recorded.
    """

    log_p: Tensor
    draft_columns: list[int]
    confidences: Tensor
    num_accepted: int
    anchor_column: int
    excluded_columns: list[int]
    draft_anchors: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """How the verification ended (k*, and the column of a*), and which anchors would have ended the text."""

    num_accepted: int
    anchor_column: int
    excluded_columns: Sequence[int]


def compact_round(
    log_p: Float[Tensor, "slots candidates_vocab"],
    draft_columns: Sequence[int],
    confidences: Float[Tensor, " drafts"],
    outcome: RoundOutcome,
    draft_candidates: Int64[Tensor, "drafts candidates"] | None = None,
) -> ObservedRound:
    """Keep each row's likeliest columns, the drafts, the draft model's candidates and whatever happened.

    Columns given and returned are -1 where the draft vocabulary lacks the token.
    """
    check_shapes(log_p, draft_columns)
    # One more than a rule looks at, since the row's own draft token is struck out; ascending, so that ties stay.
    top = log_p.topk(min(ANCHOR_CANDIDATES + 1, log_p.shape[1]), dim=1).indices.flatten().tolist()
    proposed: list[list[int]] = [] if draft_candidates is None else draft_candidates.tolist()
    wanted = {*top, *draft_columns, outcome.anchor_column, *outcome.excluded_columns}.union(*proposed)
    kept = sorted(wanted - {ABSENT})
    place = {column: index for index, column in enumerate(kept)}
    return ObservedRound(
        log_p=log_p[:, torch.tensor(kept, device=log_p.device)].cpu(),
        draft_columns=[place.get(column, ABSENT) for column in draft_columns],
        confidences=confidences.cpu(),
        num_accepted=outcome.num_accepted,
        anchor_column=place.get(outcome.anchor_column, ABSENT),
        excluded_columns=[place[column] for column in outcome.excluded_columns if column != ABSENT],
        draft_anchors=[[place[column] for column in row] for row in proposed],
    )
