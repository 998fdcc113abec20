"""How a drafted block fares against a recorded text, and what many such rounds come to.

A draft is accepted exactly when it is the recorded token: verification needs no target here.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

CACHE_SIZES = (1, 2, 4, 8, 16)
"""Cache sizes B that hit rates are given for (paper, Table 11)."""


@dataclass(frozen=True)
class Ending:
    """How a verification ended. `anchor` None: the text is over. `num_tested`: drafts that had a token to compare."""

    num_accepted: int
    num_committed: int
    num_tested: int
    anchor: int | None


@dataclass(frozen=True)
class Following:
    """The recorded tokens that a block is verified against. `ends`: the last of them is the stop token."""

    token_ids: Sequence[int]
    ends: bool


def verify(drafts: Sequence[int], following: Following) -> Ending | None:
    """Compare drafts with the tokens that follow the anchor.

    None where the text was cut before the outcome was known: such a round is not counted.
    """
    tokens = following.token_ids
    num_tested = min(len(drafts), len(tokens))
    num_accepted = 0
    while num_accepted < num_tested and drafts[num_accepted] == tokens[num_accepted]:
        num_accepted += 1
    if num_accepted == len(tokens):
        return Ending(num_accepted, num_accepted, num_tested, None) if following.ends else None
    is_over = following.ends and num_accepted == len(tokens) - 1
    return Ending(num_accepted, num_accepted + 1, num_tested, None if is_over else tokens[num_accepted])


def sizes_that_hold(rank: int | None) -> frozenset[int]:
    """The cache sizes that hold the outcome of a rank, counted from 0; None: it was no candidate."""
    return frozenset(size for size in CACHE_SIZES if rank is not None and rank < size)


@dataclass(frozen=True)
class Replacement:
    """An anchor replacement: the decoder's token `after` was written over the draft model's `before`.

    `number` counts drafts from 1.
    """

    number: int
    before: int
    after: int


@dataclass(frozen=True)
class CheckedReplacement:
    """Whether the target agreed with the written token, or would have agreed with the one it took the place of."""

    is_right: bool
    was_right: bool


def checked_replacements(
    replacements: Iterable[Replacement], ending: Ending, following: Following
) -> tuple[CheckedReplacement, ...]:
    """Those whose place verification reached: all drafts before it were accepted."""
    return tuple(
        CheckedReplacement(
            following.token_ids[found.number - 1] == found.after, following.token_ids[found.number - 1] == found.before
        )
        for found in replacements
        if found.number <= min(ending.num_accepted + 1, ending.num_tested)
    )


@dataclass(frozen=True)
class ReplayedRound:
    """One round.

    `was_hit`: its block came from the cache. `held_by`: the cache sizes that would have held its outcome; None where no
    next block was wanted or the method has no cache.
    """

    ending: Ending
    was_hit: bool
    held_by: frozenset[int] | None = None
    replacements: tuple[CheckedReplacement, ...] = ()


@dataclass
class Tally:
    """Counts over rounds; two tallies add up. `accepted` and `tested` by number of the draft, counted from 1."""

    num_rounds: int = 0
    num_tokens: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    tested: Counter[int] = field(default_factory=Counter)
    num_ranked: int = 0
    hits: Counter[int] = field(default_factory=Counter)
    num_replaced: int = 0
    num_replaced_right: int = 0
    num_replaced_needlessly: int = 0

    @classmethod
    def of(cls, rounds: Iterable[ReplayedRound]) -> "Tally":
        """Count some rounds."""
        tally = cls()
        for replayed in rounds:
            tally.add(replayed)
        return tally

    def add(self, replayed: ReplayedRound) -> None:
        """Count a round."""
        ending = replayed.ending
        self.num_rounds += 1
        self.num_tokens += ending.num_committed
        self.accepted.update(range(1, ending.num_accepted + 1))
        self.tested.update(range(1, ending.num_tested + 1))
        if replayed.held_by is not None:
            self.num_ranked += 1
            self.hits.update(replayed.held_by)
        for replacement in replayed.replacements:
            self.num_replaced += 1
            self.num_replaced_right += replacement.is_right
            self.num_replaced_needlessly += replacement.was_right

    def __iadd__(self, other: "Tally") -> "Tally":
        self.num_rounds += other.num_rounds
        self.num_tokens += other.num_tokens
        self.accepted += other.accepted
        self.tested += other.tested
        self.num_ranked += other.num_ranked
        self.hits += other.hits
        self.num_replaced += other.num_replaced
        self.num_replaced_right += other.num_replaced_right
        self.num_replaced_needlessly += other.num_replaced_needlessly
        return self

    @property
    def tau(self) -> float:
        """Tokens a round, bonus included."""
        return self.num_tokens / max(1, self.num_rounds)

    @property
    def hit_rate(self) -> dict[str, float]:
        """Share of ranked rounds whose outcome a cache of B would have held, by B; empty without a cache."""
        if not self.num_ranked:
            return {}
        return {str(size): self.hits[size] / self.num_ranked for size in CACHE_SIZES}

    @property
    def acceptance(self) -> list[float]:
        """Share of rounds in which draft 1, 2, ... was accepted (all before it were, too)."""
        return [self.accepted[number] / self.tested[number] for number in sorted(self.tested)]
