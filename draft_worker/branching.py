"""`ssd`: while a block is verified, its likely endings by the drafter's own word, and a continuation of each.

One pass over the block [y0, d_1..d_γ] gives the drafter's distribution after every prefix; the top F_k tokens of row k
are the anchors of k accepted drafts (without d_{k+1}, which would have been accepted). Then γ autoregressive steps over
all branches, packed in one batch: branch (k, a) sees the verified tokens, the block's rows 0..k and its own rows.

Scratch rows: the block's γ + 1, then one row a branch for every step. Knows no messages and no clock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decoding.plan import PassPlan
from draft_worker.block import DraftBlock, PreparedBlock, find_block
from modeling.autoregressive import AutoregressiveRunner
from modeling.cache import KeyValueCache

ABSENT = -1


@dataclass(frozen=True)
class Branch:
    """An anticipated outcome: k accepted drafts, then the token `anchor`."""

    num_accepted: int
    anchor: int


def num_scratch_rows(num_draft_tokens: int, max_branches: int) -> int:
    """Scratch rows that a round needs."""
    return num_draft_tokens + 1 + max_branches * num_draft_tokens


@dataclass
class BranchRound:
    """The work of one round. `anchor` stands at position `num_verified`, all tokens before it are in the cache.

    sizes: F_k for k = 0..γ. logits [γ+1, W] of the block's rows, None until they have been computed.
    """

    runner: AutoregressiveRunner
    cache: KeyValueCache
    num_verified: int
    anchor: int
    block: DraftBlock
    sizes: Sequence[int]
    stop_token_ids: frozenset[int]
    plan: PassPlan
    was_hit: bool
    prepared: list[PreparedBlock] = field(default_factory=list)
    version: int = 0
    logits: Tensor | None = None
    branches: list[Branch] = field(default_factory=list)
    batch: "BranchBatch | None" = None

    def steps(self) -> Iterator[str]:
        """`foresight` is the pass over the block; every step of all branches is a `draft`."""
        yield "foresight"
        self.logits = block_logits(self.runner, self.cache, self.num_verified, [self.anchor, *self.block.token_ids])
        self.branches = choose_branches(self.runner, self.logits, self.block, self.sizes, self.stop_token_ids)
        if not self.branches:
            return
        self.batch = BranchBatch(self.runner, self.cache, self.num_verified, self.branches, len(self.block.token_ids))
        for _ in self.block.token_ids:
            yield "draft"
            self.batch.step()
        self.prepared = [
            PreparedBlock(branch.num_accepted, branch.anchor, block)
            for branch, block in zip(self.branches, self.batch.blocks(), strict=True)
        ]
        self.version += 1

    def find(self, num_accepted: int, anchor: int) -> DraftBlock | None:
        """The finished block for an outcome."""
        return find_block(self.prepared, num_accepted, anchor)

    def is_begun(self, num_accepted: int, anchor: int) -> bool:
        """Whether the outcome's branch has taken a step: those that are left are fewer than a fallback block's."""
        has_steps = self.batch is not None and self.batch.num_steps > 0
        return has_steps and Branch(num_accepted, anchor) in self.branches

    def finish(self, num_accepted: int, anchor: int) -> DraftBlock:
        """Take the steps that are left on the branch of a begun outcome alone. Ends the round."""
        assert self.batch is not None, "the outcome is begun"
        return self.batch.finish(self.branches.index(Branch(num_accepted, anchor)))

    def anchor_rank(self, num_accepted: int, anchor: int) -> int | None:
        """Place, from 1, of a realised outcome's anchor among those of its length; None where nobody looked."""
        if self.logits is None:
            return None
        row, column = self.logits[num_accepted], self.runner.head.column(anchor)
        if column == ABSENT:
            return row.shape[0]
        is_before = row > row[column]
        if num_accepted < len(self.block.token_ids):
            own = self.runner.head.column(self.block.token_ids[num_accepted])
            if own != ABSENT:
                is_before[own] = False
        return 1 + int(is_before.sum())


def block_logits(
    runner: AutoregressiveRunner, cache: KeyValueCache, num_verified: int, token_ids: Sequence[int]
) -> Tensor:
    """One causal pass over a block from position `num_verified` on, into the first scratch rows: logits [rows, W]."""
    rows = len(token_ids)
    visible = _verified_keys(runner, cache, num_verified, rows)
    visible[:, :rows] = torch.ones(rows, rows, dtype=torch.bool, device=runner.device).tril()
    positions = torch.arange(num_verified, num_verified + rows, device=runner.device)
    return runner.branch(cache, 0, torch.tensor(token_ids, device=runner.device), positions, visible)


def choose_branches(
    runner: AutoregressiveRunner,
    logits: Tensor,
    block: DraftBlock,
    sizes: Sequence[int],
    stop_token_ids: frozenset[int],
) -> list[Branch]:
    """The top F_k anchors of every row k of logits [γ+1, W], by length.

    Never d_{k+1} for k < γ, and nothing that ends the text or lies behind a draft that does: no block follows it.
    """
    head, drafts = runner.head, block.token_ids
    ends = [number for number, token_id in enumerate(drafts) if token_id in stop_token_ids]
    num_lengths = ends[0] + 1 if ends else len(drafts) + 1
    allowed = logits[:num_lengths].clone()
    columns = [head.column(token_id) for token_id in sorted(stop_token_ids)]
    allowed[:, [column for column in columns if column != ABSENT]] = float("-inf")
    for number, token_id in enumerate(drafts[:num_lengths]):
        if head.column(token_id) != ABSENT:
            allowed[number, head.column(token_id)] = float("-inf")
    best = allowed.topk(min(max(sizes), allowed.shape[1]), dim=1)
    token_ids, values = head.token_ids[best.indices].tolist(), best.values.tolist()
    return [
        Branch(number, token_ids[number][rank])
        for number in range(num_lengths)
        for rank in range(min(sizes[number], best.values.shape[1]))
        if values[number][rank] > float("-inf")
    ]


class BranchBatch:
    """Branches side by side; every step adds one token to each of them."""

    def __init__(
        self,
        runner: AutoregressiveRunner,
        cache: KeyValueCache,
        num_verified: int,
        branches: Sequence[Branch],
        num_draft_tokens: int,
    ) -> None:
        self._runner, self._cache = runner, cache
        self._num_draft_tokens = num_draft_tokens
        self._rows_a_step = len(branches)
        self._first_row = num_draft_tokens + 1
        device = runner.device
        accepted = torch.tensor([branch.num_accepted for branch in branches], device=device)
        self._positions = num_verified + 1 + accepted
        self._visible = _verified_keys(runner, cache, num_verified, len(branches))
        block_row = torch.arange(num_draft_tokens + 1, device=device)
        self._visible[:, : num_draft_tokens + 1] = block_row[None, :] <= accepted[:, None]
        self._last = torch.tensor([branch.anchor for branch in branches], device=device)
        self._token_ids: list[Tensor] = []
        self._confidences: list[Tensor] = []

    @property
    def num_steps(self) -> int:
        """Tokens that every branch has so far."""
        return len(self._token_ids)

    @torch.inference_mode()
    def step(self) -> None:
        """The next token of every branch."""
        step = self.num_steps
        first = self._first_row + step * self._rows_a_step
        branch = torch.arange(self._last.shape[0], device=self._last.device)
        self._visible[branch, first + branch] = True
        logits = self._runner.branch(self._cache, first, self._last, self._positions + step, self._visible).float()
        top, column = logits.max(dim=-1)
        self._last = self._runner.head.token_ids[column]
        self._token_ids.append(self._last)
        self._confidences.append((top - logits.logsumexp(-1)).exp())

    @torch.inference_mode()
    def finish(self, branch: int) -> DraftBlock:
        """Let all branches go but one, and draft the rest of its block."""
        kept = slice(branch, branch + 1)
        self._visible, self._positions, self._last = self._visible[kept], self._positions[kept], self._last[kept]
        self._token_ids = [token_ids[kept] for token_ids in self._token_ids]
        self._confidences = [confidences[kept] for confidences in self._confidences]
        while self.num_steps < self._num_draft_tokens:
            self.step()
        return self.blocks()[0]

    def blocks(self) -> list[DraftBlock]:
        """What has been drafted, by branch."""
        tokens = torch.stack(self._token_ids, dim=1).tolist()
        confidences = torch.stack(self._confidences, dim=1).tolist()
        return [DraftBlock(tuple(t), tuple(c)) for t, c in zip(tokens, confidences, strict=True)]


def _verified_keys(runner: AutoregressiveRunner, cache: KeyValueCache, num_verified: int, rows: int) -> Tensor:
    """Rows that see the verified tokens and no scratch row yet: bool [rows, scratch + keys]."""
    num_keys = runner.num_keys(num_verified)
    visible = torch.zeros(rows, cache.num_scratch + num_keys, dtype=torch.bool, device=runner.device)
    visible[:, cache.num_scratch : cache.num_scratch + num_verified] = True
    return visible
