"""`ssd`: a small autoregressive drafter that works on the likely endings of a block while it is verified.

It reads token ids only, so nothing of the target is needed and nothing has to be predicted about it. A miss is answered
with γ autoregressive steps from the true anchor, for that sequence alone; what other sequences have prepared stays.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.plan import PassPlan, PhaseTimes
from draft_worker.block import DraftBlock
from draft_worker.branching import Branch, BranchBatch, BranchRound, block_logits, num_scratch_rows
from draft_worker.fan_out import FanOutStatistics
from draft_worker.methods import OpenedSequence
from draft_worker.timing import HOST_S, TRIAL_LENGTH, TRIAL_REPEATS, PlanChooser
from modeling.autoregressive import AutoregressiveRunner
from modeling.cache import KeyValueCache


class SpeculativeMethod:
    """All sequences share the statistics that the fan-out follows. `max_branches`: most outcomes any plan prepares."""

    tap_layers: tuple[int, ...] = ()
    decoder_layers: tuple[int, ...] = ()

    def __init__(
        self,
        runner: AutoregressiveRunner,
        num_draft_tokens: int,
        chooser: PlanChooser,
        max_branches: int,
        statistics: FanOutStatistics | None = None,
    ) -> None:
        self.runner = runner
        self.num_draft_tokens = num_draft_tokens
        self.statistics = statistics or FanOutStatistics()
        self._chooser = chooser
        self._num_scratch = num_scratch_rows(num_draft_tokens, max_branches)
        self._caches: dict[int, KeyValueCache] = {}

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @property
    def dtype(self) -> torch.dtype:
        return self.runner.dtype

    @property
    def plan(self) -> PassPlan:
        return self._chooser.plan

    def open(self, opened: OpenedSequence) -> "SpeculativeSequence":
        """Start a sequence in its slot's cache."""
        if opened.slot not in self._caches:
            self._caches[opened.slot] = self.runner.new_cache(self._num_scratch)
        return SpeculativeSequence(self, self._caches[opened.slot], opened)

    def observe_phase(self, phase: str, seconds: float, plan: PassPlan) -> None:
        """For the automatic number of branches. A `draft` is one of γ steps."""
        seconds = seconds * self.num_draft_tokens if phase == "draft" else seconds
        self._chooser.observe_phase(phase, seconds, plan.cache_size)

    def observe_verification(self, seconds: float) -> None:
        """For the automatic number of branches."""
        self._chooser.observe_verification(seconds)


class SpeculativeSequence:
    """One sequence. The cache holds the drafter's keys of the first `_num_cached` verified tokens."""

    def __init__(self, method: SpeculativeMethod, cache: KeyValueCache, opened: OpenedSequence) -> None:
        self.token_ids = list(opened.prompt_token_ids)
        self.num_rows = 0
        self._method = method
        self._cache = cache
        self._stop_token_ids = opened.stop_token_ids
        self._num_prompt_tokens = len(opened.prompt_token_ids)
        self._num_cached = 0
        self._round: BranchRound | None = None

    def commit(self, accepted: Sequence[int], anchor: int) -> None:
        """Append accepted drafts and bonus token; the drafter's keys of what the round has read are kept."""
        round_, self._round = self._round, None
        self.token_ids += [*accepted, anchor]
        if round_ is None or list(round_.block.token_ids[: len(accepted)]) != list(accepted):
            return
        rank = round_.anchor_rank(len(accepted), anchor)
        if rank is None:
            return
        self._method.statistics.observe(len(accepted), rank, was_hit=round_.was_hit)
        self._cache.keep_scratch(0, round_.num_verified, len(accepted) + 1)
        self._num_cached = round_.num_verified + len(accepted) + 1

    def install(self, taps: Tensor, decoder_kv: Tensor) -> None:
        """Count true rows, whose states are not needed, and read the prompt as far as the target has."""
        self.num_rows += taps.shape[0]
        if len(self.token_ids) == self._num_prompt_tokens:
            self._read(self.num_rows)

    def fallback(self) -> DraftBlock:
        """γ steps from the true anchor."""
        method, position = self._method, len(self.token_ids) - 1
        self._read(position)
        batch = BranchBatch(
            method.runner, self._cache, position, [Branch(-1, self.token_ids[-1])], method.num_draft_tokens
        )
        for _ in range(method.num_draft_tokens):
            batch.step()
        return batch.blocks()[0]

    def begin_round(self, block: DraftBlock, *, was_hit: bool) -> BranchRound:
        """The pass over the block, and the branches of its likely endings."""
        method, position = self._method, len(self.token_ids) - 1
        self._read(position)
        plan = method.plan
        self._round = BranchRound(
            runner=method.runner,
            cache=self._cache,
            num_verified=position,
            anchor=self.token_ids[-1],
            block=block,
            sizes=method.statistics.sizes(len(block.token_ids), plan.cache_size, was_hit=was_hit),
            stop_token_ids=self._stop_token_ids,
            plan=plan,
            was_hit=was_hit,
        )
        return self._round

    def _read(self, stop: int) -> None:
        """Bring the cache up to the verified tokens before position `stop`."""
        if self._num_cached < stop:
            self._method.runner.extend(self._cache, self._num_cached, self.token_ids[self._num_cached : stop])
            self._num_cached = stop


def measure_branching(
    runner: AutoregressiveRunner, num_draft_tokens: int, num_branches: Sequence[int]
) -> dict[int, PhaseTimes]:
    """Best of a few runs on made-up tokens, by number of branches: the pass over a block, γ steps of all branches."""
    length = max(1, min(TRIAL_LENGTH, runner.num_positions - 2 * (num_draft_tokens + 1)))
    cache = runner.new_cache(num_scratch_rows(num_draft_tokens, max(num_branches)))
    times = {}
    for size in num_branches:
        branches = [Branch(index % (num_draft_tokens + 1), 0) for index in range(size)]
        block_s = steps_s = float("inf")
        for _ in range(TRIAL_REPEATS):
            started = time.perf_counter()
            block_logits(runner, cache, length, [0] * (num_draft_tokens + 1))
            middle = time.perf_counter()
            batch = BranchBatch(runner, cache, length, branches, num_draft_tokens)
            for _ in range(num_draft_tokens):
                batch.step()
            block_s = min(block_s, middle - started)
            steps_s = min(steps_s, time.perf_counter() - middle)
        times[size] = PhaseTimes(foresight_s=block_s, pass_s=steps_s, refresh_s=0.0, host_s=HOST_S)
    return times
