"""`jetspec++`: foresight on the block under verification, blocks for its likeliest endings, refined until it ends."""

from dataclasses import dataclass

from decoding.calibration import Calibration
from decoding.plan import PassPlan
from decoding.uniforms import noise_generator
from draft_worker.block import DraftBlock
from draft_worker.methods import OpenedSequence
from draft_worker.networks import DraftNetworks
from draft_worker.round import DraftRound, SelectionRule, fallback_block
from draft_worker.sequence import DraftModelMethod, DraftSequence, SequenceMemory
from draft_worker.timing import PlanChooser


@dataclass(frozen=True)
class Ranking:
    """How outcomes are ranked in every sequence: a calibration (None: the decoder's own probabilities), and the log
    score below which none is drafted."""

    calibration: Calibration | None = None
    threshold: float | None = None


class ForesightMethod(DraftModelMethod):
    """Needs an adapter; without one it only falls back. `max_cache_size`: most outcomes any plan prepares."""

    def __init__(
        self,
        networks: DraftNetworks,
        num_draft_tokens: int,
        chooser: PlanChooser,
        max_cache_size: int,
        ranking: Ranking | None = None,
    ) -> None:
        super().__init__(networks, num_draft_tokens, max_cache_size)
        self.ranking = ranking or Ranking()
        self._chooser = chooser

    @property
    def decoder_layers(self) -> tuple[int, ...]:
        return tuple(range(self.networks.decoder.first_layer, self.networks.target.num_layers))

    @property
    def plan(self) -> PassPlan:
        return self._chooser.plan

    def open(self, opened: OpenedSequence) -> "ForesightSequence":
        """Start a sequence in its slot's memory."""
        return ForesightSequence(self, self._memories.at(opened.slot), opened)

    def observe_phase(self, phase: str, seconds: float, plan: PassPlan) -> None:
        """For the automatic plan."""
        self._chooser.observe_phase(phase, seconds, plan.cache_size)

    def observe_verification(self, seconds: float) -> None:
        """For the automatic plan."""
        self._chooser.observe_verification(seconds)


class ForesightSequence(DraftSequence):
    """One sequence of `jetspec++`."""

    def __init__(self, method: ForesightMethod, memory: SequenceMemory, opened: OpenedSequence) -> None:
        super().__init__(method.networks, memory, opened.prompt_token_ids)
        self._method = method
        self._rule = SelectionRule(method.ranking.calibration, method.ranking.threshold, opened.stop_token_ids)
        self._generator = noise_generator(0, opened.sequence_id)

    def fallback(self) -> DraftBlock:
        """The block of a miss: J0 from true states."""
        return fallback_block(self, self._method.num_draft_tokens, self._generator)

    def begin_round(self, block: DraftBlock, *, was_hit: bool) -> DraftRound | None:
        """Foresight and the drafts it leads to."""
        if self.networks.adapter is None:
            return None
        return DraftRound(self, block, self._method.plan, self._rule, self._generator)
