"""Equation 6: the probability of every way a verification can end.

Works on the decoder's log-probabilities over W columns, which may be a trimmed vocabulary; a
column is an index into it. Knows nothing of token ids, caches or which outcomes are worth drafting.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

ABSENT = -1
"""The column of a draft token that the trimmed vocabulary lacks."""

PROBABILITY_FLOOR = 1e-6
"""Stands in for the unknown probability of an absent draft token, and bounds every logit."""

_LOG_PROBABILITY_FLOOR = math.log(PROBABILITY_FLOOR)


@dataclass(frozen=True, slots=True)
class OutcomeTable:
    """Outcomes (k, a) with a log score, best first. `column` is the anchor's column."""

    num_accepted: Int64[Tensor, " outcomes"]
    column: Int64[Tensor, " outcomes"]
    score: Float[Tensor, " outcomes"]

    def __len__(self) -> int:
        return int(self.score.shape[0])

    def take(self, indices: Int64[Tensor, " chosen"]) -> "OutcomeTable":
        """The outcomes at `indices`, in that order."""
        return OutcomeTable(self.num_accepted[indices], self.column[indices], self.score[indices])


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest anchors of every row, best first; the row's own draft token scores -inf."""

    log_p: Float64[Tensor, "slots candidates"]
    column: Int64[Tensor, "slots candidates"]


def check_shapes(log_p: Tensor, draft_columns: Sequence[int]) -> None:
    """Raises ValueError unless there is one row per draft and one more, and columns exist."""
    if log_p.shape[0] != len(draft_columns) + 1:
        raise ValueError(f"{len(draft_columns)} drafts need {len(draft_columns) + 1} rows, got {log_p.shape[0]}")
    if any(not ABSENT <= column < log_p.shape[1] for column in draft_columns):
        raise ValueError(f"a draft column lies outside [-1, {log_p.shape[1]})")


def draft_log_probabilities(
    log_p: Float[Tensor, "slots candidates_vocab"], draft_columns: Sequence[int]
) -> Float64[Tensor, " drafts"]:
    """log p̂_i of every draft token; the floor where the trimmed vocabulary lacks it."""
    check_shapes(log_p, draft_columns)
    columns = torch.tensor(draft_columns, dtype=torch.int64, device=log_p.device)
    rows = torch.arange(len(draft_columns), device=log_p.device)
    present = log_p[rows, columns.clamp(min=0)].to(torch.float64)
    return torch.where(columns == ABSENT, _LOG_PROBABILITY_FLOOR, present)


def outcome_log_probabilities(
    log_p: Float[Tensor, "slots candidates_vocab"], draft_columns: Sequence[int]
) -> Float64[Tensor, "slots candidates_vocab"]:
    """log P(k, a) of every outcome: entry (k, a); -inf at the impossible (k, d_{k+1})."""
    scores = _log_reach(log_p, draft_columns)[:, None] + log_p.to(torch.float64)
    for row, column in enumerate(draft_columns):
        if column != ABSENT:
            scores[row, column] = -math.inf
    return scores


def top_outcomes(
    log_p: Float[Tensor, "slots candidates_vocab"], draft_columns: Sequence[int], limit_per_row: int = 32
) -> OutcomeTable:
    """The outcomes of equation 6 made from each row's `limit_per_row` likeliest tokens, best first.

    The row's own draft token is among the likeliest counted and is then removed, as in the
    paper's appendix B.1. Equal scores: the higher rank within its row first, then the smaller k.
    """
    candidates = row_candidates(log_p, draft_columns, limit_per_row)
    return rank_outcomes(_log_reach(log_p, draft_columns)[:, None] + candidates.log_p, candidates.column)


def row_candidates(
    log_p: Float[Tensor, "slots candidates_vocab"], draft_columns: Sequence[int], limit: int
) -> Candidates:
    """Each row's `limit` likeliest tokens, equals by lower column, with d_{k+1} struck out."""
    check_shapes(log_p, draft_columns)
    largest = torch.topk(log_p, min(limit, log_p.shape[1]), dim=1, sorted=False)
    column, by_column = largest.indices.sort(dim=1)
    values = largest.values.gather(1, by_column)
    values, by_value = values.sort(dim=1, descending=True, stable=True)
    column = column.gather(1, by_value)
    own_draft = torch.tensor([*draft_columns, ABSENT], dtype=torch.int64, device=log_p.device)
    struck = values.to(torch.float64).masked_fill(column == own_draft[:, None], -math.inf)
    return Candidates(struck, column)


def rank_outcomes(
    scores: Float64[Tensor, "slots candidates"], columns: Int64[Tensor, "slots candidates"]
) -> OutcomeTable:
    """Flattens rank by rank, drops what is impossible (-inf or nan), sorts stably, best first."""
    num_slots, num_candidates = scores.shape
    flat_scores = scores.T.flatten()
    num_accepted = torch.arange(num_slots, device=scores.device).repeat(num_candidates)
    possible = (flat_scores > -math.inf).nonzero().flatten()
    order = flat_scores[possible].sort(descending=True, stable=True).indices
    chosen = possible[order]
    return OutcomeTable(num_accepted[chosen], columns.T.flatten()[chosen], flat_scores[chosen])


def _log_reach(log_p: Tensor, draft_columns: Sequence[int]) -> Tensor:
    """log Π_{i≤k} p̂_i for k = 0..γ: the probability that the first k drafts are accepted."""
    accepted = draft_log_probabilities(log_p, draft_columns)
    return torch.nn.functional.pad(accepted.cumsum(0), (1, 0))  # [slots]
