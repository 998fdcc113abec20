"""Acceptance lengths and hit rates offline: prompts, recorded target texts, replayed rounds, one row a setting."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from decoding.calibration import Calibration
from decoding.plan import PassPlan
from draft_worker.networks import DraftNetworks
from evaluation.replay import Replay, ReplayedRound, ReplaySettings
from evaluation.texts import TargetText

CACHE_SIZES = (1, 2, 4, 8, 16)
OFFLINE_CACHE_SIZE = 16
"""The paper's cache size in its offline tables."""


@dataclass(frozen=True)
class Row:
    """tau: tokens a round, bonus included. hit_rate by B, the first round (always a fallback) left out."""

    dataset: str
    method: str
    temperature: float
    budget: int
    passes: int
    refreshes: int
    states: str
    tau: float
    hit_rate: dict[str, float] = field(default_factory=dict)
    num_rounds: int = 0

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Setting:
    """One line of the table: J, R, and where the states of a hit's context come from."""

    num_passes: int
    num_refreshes: int
    foresight: bool = True


STANDARD_SETTINGS = (
    Setting(0, 0, foresight=False),
    Setting(1, 0, foresight=False),
    Setting(3, 0, foresight=False),
    Setting(0, 0),
    Setting(1, 0),
    Setting(1, 1),
    Setting(3, 3),
)


def measure(
    networks: DraftNetworks,
    texts: Sequence[TargetText],
    dataset: str,
    temperature: float,
    num_draft_tokens: int,
    setting: Setting,
    calibration: Calibration | None,
    stop_token_ids: frozenset[int],
) -> Row:
    """Replay all texts under one setting."""
    settings = ReplaySettings(
        plan=PassPlan(setting.num_passes, setting.num_refreshes, OFFLINE_CACHE_SIZE),
        num_draft_tokens=num_draft_tokens,
        calibration=calibration,
        stop_token_ids=stop_token_ids,
        foresight=setting.foresight,
    )
    rounds = [r for text in texts for r in Replay(networks, text, settings).run()]
    has_cache = setting.foresight and networks.adapter is not None
    return Row(
        dataset=dataset,
        method="jetspec++",
        temperature=temperature,
        budget=num_draft_tokens + 1,
        passes=setting.num_passes,
        refreshes=setting.num_refreshes,
        states="predicted" if setting.foresight else "true",
        tau=tokens_per_round(rounds),
        hit_rate={str(size): hit_rate(rounds, size) for size in CACHE_SIZES} if has_cache else {},
        num_rounds=len(rounds),
    )


def tokens_per_round(rounds: Sequence[ReplayedRound]) -> float:
    """Mean acceptance length, bonus included."""
    return sum(r.num_accepted + 1 for r in rounds) / max(1, len(rounds))


def hit_rate(rounds: Sequence[ReplayedRound], cache_size: int) -> float:
    """Share of rounds whose outcome is among the `cache_size` best."""
    return sum(r.rank < cache_size for r in rounds) / max(1, len(rounds))


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = [
        f"{'dataset':10} {'method':10} {'T':>3} {'budget':>6} {'states':>9} {'plan':>6} {'tau':>6}  hit@4 hit@16 rounds"
    ]
    for row in rows:
        hits = [f"{row.hit_rate[key]:.3f}" if key in row.hit_rate else "    -" for key in ("4", "16")]
        plan = f"J{row.passes}-R{row.refreshes}"
        lines.append(
            f"{row.dataset:10} {row.method:10} {row.temperature:3.0f} {row.budget:6d} {row.states:>9} {plan:>6} "
            f"{row.tau:6.3f}  {hits[0]}  {hits[1]} {row.num_rounds:6d}"
        )
    return "\n".join(lines)
