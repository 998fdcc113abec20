"""One request on the verifier: its tokens, its limits, its speculation cache, and where it stands.

Tokens are taken one at a time, whatever block they came in. Knows no messages, and no tensors but its cache.
"""

import enum
import time
from dataclasses import dataclass, field
from typing import Literal

from decoding.acceptance import Outcome
from decoding.editing import RowEditor, TextRules
from decoding.sampling import SamplingParameters
from modeling.cache import KeyValueCache
from protocol.messages import AloneReason

EndReason = Literal["stop", "length"]


class Stage(enum.Enum):
    """What a running sequence does next."""

    PREFILL = "prefill"
    READY = "ready"  # its next block can be verified
    AWAITING = "awaiting"  # it waits for the drafter's block


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    sequence_id: int
    prompt_token_ids: list[int]
    max_tokens: int
    sampling: SamplingParameters
    rules: TextRules
    speculative: bool
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True)
class Committed:
    """Tokens of one round after the cut, and how the text ended if it did; the stop token itself is not among them."""

    token_ids: list[int]
    reason: EndReason | None
    stop_token_id: int | None


@dataclass
class SpeculationCache:
    """The verifier's copy: blocks for the outcomes of the round under verification, best version that has arrived."""

    round: int = 0
    version: int = 0
    blocks: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    drafting_s: float = 0.0

    def start_round(self, number: int) -> None:
        """Forget the round before."""
        self.round, self.version = number, 0
        self.blocks = {}

    def take(
        self, number: int, version: int, blocks: dict[tuple[int, int], list[int]], drafting_s: float = 0.0
    ) -> bool:
        """Replace the content by a newer version; False when it is for another round or older."""
        if number != self.round or version <= self.version:
            return False
        self.version, self.blocks, self.drafting_s = version, blocks, drafting_s
        return True

    def find(self, outcome: Outcome) -> list[int] | None:
        return self.blocks.get((outcome.num_accepted, outcome.anchor))


@dataclass(frozen=True)
class BlockTimes:
    """What the block of a round cost before its verification, in seconds; None where it does not apply."""

    draft_s: float | None = None
    fallback_s: float | None = None
    transport_s: float | None = None


NO_TIMES = BlockTimes()


@dataclass
class Sequence:
    """A running request. `num_rows` = n rows in the target's cache; `anchor` is the committed token at position n.

    `editor` has seen every drawn token, those of the round that is being concluded too.
    """

    request: Request
    slot: int
    cache: KeyValueCache
    editor: RowEditor
    arrived_at: float
    stage: Stage = Stage.PREFILL
    num_rows: int = 0
    anchor: int = 0
    num_generated: int = 0
    round: int = 0
    drafts: list[int] = field(default_factory=list)
    source: Literal["hit", "late_hit", "miss", "autoregressive"] = "autoregressive"
    block_times: BlockTimes = NO_TIMES
    speculation: SpeculationCache = field(default_factory=SpeculationCache)
    is_drafted: bool = False
    alone_because: AloneReason | None = None
    admitted_at: float = field(default_factory=time.perf_counter)
    prefilled_at: float = 0.0
    verified_at: float = 0.0
    awaiting_since: float = 0.0

    @property
    def sequence_id(self) -> int:
        return self.request.sequence_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    def commit(self, outcome: Outcome, max_model_len: int) -> Committed:
        """Take an outcome's tokens over one by one, up to an end of the text.

        That is a stop token, a token after which the grammar allows none, `max_tokens` or the end of the context. Only
        the last of an outcome's tokens can be one of the first two: verification ends there.
        """
        tokens = [*self.drafts[: outcome.num_accepted], outcome.anchor]
        taken: list[int] = []
        for token_id in tokens:
            self.num_generated += 1
            if token_id in self.request.rules.stop_token_ids:
                return Committed(taken, "stop", token_id)
            taken.append(token_id)
            if len(taken) == len(tokens) and self.editor.is_complete:
                return Committed(taken, "stop", None)
            is_full = self.num_prompt_tokens + self.num_generated >= max_model_len
            if self.num_generated >= self.request.max_tokens or is_full:
                return Committed(taken, "length", None)
        return Committed(taken, None, None)
