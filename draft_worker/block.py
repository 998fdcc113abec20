"""Blocks as plain values: what a drafting method proposes, and what its speculation cache holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class DraftBlock:
    """Drafts d_1..d_γ and the probability each had when it was chosen.

    logits [γ, W]: the draft model's, from the last pass over each open slot, where its method keeps them.
    """

    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
    logits: Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class PreparedBlock:
    """A block of the speculation cache, for the outcome (num_accepted, anchor)."""

    num_accepted: int
    anchor: int
    block: DraftBlock


def unknown_block(token_ids: Sequence[int]) -> DraftBlock:
    """A block whose confidences are not known (the verifier started one that is no longer remembered)."""
    return DraftBlock(tuple(token_ids), tuple(0.5 for _ in token_ids))


def find_block(prepared: Sequence[PreparedBlock], num_accepted: int, anchor: int) -> DraftBlock | None:
    """The block prepared for an outcome, if there is one."""
    for entry in prepared:
        if entry.num_accepted == num_accepted and entry.anchor == anchor:
            return entry.block
    return None
