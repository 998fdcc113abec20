"""The synchronous methods: a block is drafted after every outcome, from true states. Every round is a fallback.

`dflash` and `jetspec` draft it in one pass over masks and differ in their draft model only, whose block is
bidirectional or causal. `dspark` and `domino` let a head fix the drafts of such a pass from left to right.
"""

from typing import Final

from decoding.plan import PassPlan
from decoding.uniforms import noise_generator
from draft_worker.block import DraftBlock
from draft_worker.methods import OpenedSequence
from draft_worker.networks import DraftNetworks
from draft_worker.round import fallback_block
from draft_worker.sequence import DraftModelMethod, DraftSequence, SequenceMemory


class SynchronousMethod(DraftModelMethod):
    """Drafts with a draft model alone; what the target's later layers or an adapter could say is not looked at."""

    plan: Final[None] = None

    def __init__(self, networks: DraftNetworks, num_draft_tokens: int) -> None:
        super().__init__(networks, num_draft_tokens, 1)

    @property
    def decoder_layers(self) -> tuple[int, ...]:
        return ()

    def open(self, opened: OpenedSequence) -> "SynchronousSequence":
        """Start a sequence in its slot's memory."""
        return SynchronousSequence(self, self._memories.at(opened.slot), opened)

    def observe_phase(self, phase: str, seconds: float, plan: PassPlan) -> None:
        """There are no rounds to plan."""

    def observe_verification(self, seconds: float) -> None:
        """There are no rounds to plan."""


class SynchronousSequence(DraftSequence):
    """One sequence of a synchronous method."""

    def __init__(self, method: SynchronousMethod, memory: SequenceMemory, opened: OpenedSequence) -> None:
        super().__init__(method.networks, memory, opened.prompt_token_ids)
        self._num_draft_tokens = method.num_draft_tokens
        self._generator = noise_generator(0, opened.sequence_id)

    def fallback(self) -> DraftBlock:
        """The block for the anchor."""
        return fallback_block(self, self._num_draft_tokens, self._generator)

    def begin_round(self, block: DraftBlock, *, was_hit: bool) -> None:
        """Nothing is prepared while a block is verified."""
