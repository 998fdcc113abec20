"""Equation 7: which outcomes to pre-draft.

Outcomes are disjoint, so the cache most likely to be hit holds the highest scores. Knows nothing
of where the scores come from.
"""

import math
from collections.abc import Collection

import torch

from decoding.outcomes import OutcomeTable


def select(
    table: OutcomeTable,
    cache_size: int,
    excluded_columns: Collection[int],
    threshold: float | None = None,
) -> OutcomeTable:
    """The `cache_size` best outcomes, best first; fewer when there are fewer.

    Outcomes whose anchor is in `excluded_columns` end the text and need no next block.
    `threshold` is a log score: what lies below it is left out. Equal scores keep the table's order.
    """
    if cache_size < 0:
        raise ValueError(f"cache_size must be at least 0, got {cache_size}")
    wanted = table.score > -math.inf
    if threshold is not None:
        wanted &= table.score >= threshold
    if excluded_columns:
        excluded = torch.tensor(sorted(excluded_columns), dtype=torch.int64, device=table.column.device)
        wanted &= ~torch.isin(table.column, excluded)
    kept = wanted.nonzero().flatten()
    order = table.score[kept].sort(descending=True, stable=True).indices
    return table.take(kept[order[:cache_size]])
