"""What a drafting method is to its users: the drafter's loop, training and evaluation.

Every method drafts by argmax, at any temperature. The verifier draws each token from the target alone and accepts a
draft that equals the draw: that is lossless whatever the draft is, and no proposal is accepted more often than the most
likely token. So nothing but token ids goes to the verifier.

Synchronous methods answer every outcome with a fallback block; pipelined ones (`begin_round`) prepare blocks for the
likely outcomes meanwhile. Knows no messages, no clock and no networks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decoding.plan import PassPlan
from draft_worker.block import DraftBlock, PreparedBlock


@dataclass(frozen=True)
class OpenedSequence:
    """A new sequence: its prompt, the tokens that end it, and the slot whose memory it takes over."""

    sequence_id: int
    slot: int
    prompt_token_ids: list[int]
    stop_token_ids: frozenset[int] = frozenset()


class Round(Protocol):
    """What a pipelined method does while a block is verified.

    `prepared` holds the best finished blocks by outcome; `version` counts how often it was replaced. `plan` is what the
    round was begun with.
    """

    @property
    def prepared(self) -> Sequence[PreparedBlock]: ...

    @property
    def version(self) -> int: ...

    @property
    def plan(self) -> PassPlan: ...

    def steps(self) -> Iterator[str]:
        """Yields the name of each phase just before it runs: between two of them the caller may look at its inbox."""
        ...

    def find(self, num_accepted: int, anchor: int) -> DraftBlock | None:
        """The best finished block for an outcome."""
        ...

    def is_begun(self, num_accepted: int, anchor: int) -> bool:
        """Whether a block for an outcome is in the works that takes less to finish than a fallback block."""
        ...

    def finish(self, num_accepted: int, anchor: int) -> DraftBlock:
        """Finish the block of a begun outcome, and the round with it."""
        ...


class MethodSequence(Protocol):
    """One sequence: verified tokens, and the target's true rows of all of them but the last, the anchor."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def num_rows(self) -> int:
        """n: rows installed so far, which is the anchor's position once a verification has ended."""
        ...

    def commit(self, accepted: Sequence[int], anchor: int) -> None:
        """Append how a verification ended: the accepted drafts and the bonus token. Their rows come by `install`."""
        ...

    def install(self, taps: Tensor, decoder_kv: Tensor) -> None:
        """Append true rows: taps [rows, taps, hidden], decoder_kv [rows, layers, 2, kv_heads, dim]."""
        ...

    def fallback(self) -> DraftBlock:
        """The block of a miss, for the anchor, from true states only."""
        ...

    def begin_round(self, block: DraftBlock, *, was_hit: bool) -> Round | None:
        """Start to work on what follows `block`, which is being verified now; None from a synchronous method.

        `was_hit`: the block came from the speculation cache, not from `fallback`.
        """
        ...


class DraftMethod(Protocol):
    """A loaded method. `plan` is what pipelined rounds follow at present, None for a synchronous method."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Target layers whose rows it reads."""
        ...

    @property
    def decoder_layers(self) -> tuple[int, ...]:
        """Target layers whose keys and values it reads."""
        ...

    @property
    def plan(self) -> PassPlan | None: ...

    def open(self, opened: OpenedSequence) -> MethodSequence:
        """Start a sequence in its slot's memory, which is allocated when first used."""
        ...

    def observe_phase(self, phase: str, seconds: float, plan: PassPlan) -> None:
        """Take the time of a phase of a round, as it happened."""
        ...

    def observe_verification(self, seconds: float) -> None:
        """Take the time from one outcome to the next of a sequence whose block was ready."""
        ...
