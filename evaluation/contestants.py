"""The methods that are compared: their files, their loaded networks, and what each measures on a recorded text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, get_args

import torch

from decoding.calibration import Calibration, InvalidCalibration
from decoding.observation import ObservedRound
from draft_worker.fan_out import FanOutStatistics
from draft_worker.loading import check_draft_model
from draft_worker.networks import DraftNetworks, load_networks
from draft_worker.synchronous import SynchronousMethod
from evaluation.baselines import AutoregressiveReplay, replay_fallbacks
from evaluation.records import FROM_TRUE_STATES, Series
from evaluation.replay import Player, Replay, ReplaySettings, Variant
from evaluation.rounds import ReplayedRound
from evaluation.texts import TargetText
from modeling.autoregressive import AutoregressiveRunner, load_autoregressive
from modeling.kernels.int8 import Quantization
from protocol.worker_config import DraftMethodName

METHODS: tuple[DraftMethodName, ...] = get_args(DraftMethodName)

SERVED = (
    *(Variant("served", passes) for passes in range(4)),
    *(Variant("served", passes, "replace") for passes in range(1, 4)),
)
REFRESH_ALONE = tuple(Variant("served", passes, "alone") for passes in range(1, 4))
FROM_TRUTH = tuple(Variant("true", passes) for passes in range(4))
FORESIGHT = tuple(Variant(states, passes) for states in ("predicted", "copied") for passes in range(4))
NOT_PIPELINED = tuple(Variant("true", passes, "replace") for passes in range(1, 4))
ALL_VARIANTS = (*SERVED, *REFRESH_ALONE, *FROM_TRUTH, *FORESIGHT, *NOT_PIPELINED)

OBSERVED = Variant("served", 1, "replace")
"""The variant whose rounds other selection rules are replayed on."""


@dataclass(frozen=True)
class Played:
    """A series on one text, and the rounds that were kept."""

    series: Series
    rounds: list[ReplayedRound]
    observed: Sequence[ObservedRound] = ()


class Contestant(Protocol):
    """A loaded method."""

    @property
    def tap_layers(self) -> Sequence[int]: ...

    @property
    def decoder_layers(self) -> Sequence[int]: ...

    def play(self, text: TargetText, number: int) -> Iterator[Played]:
        """All series on one text; `number` keys its noise."""
        ...


class RefiningContestant:
    """A draft model whose passes are replayed: `jetspec++` in all its variants, `jetspec` as the negative control.

    Budgets share one replay where the draft model is causal. `observed_budget`: whose rounds are kept.
    """

    def __init__(
        self,
        name: str,
        networks: DraftNetworks,
        variants: Sequence[Variant],
        budgets: Sequence[int],
        stop_token_ids: frozenset[int],
        calibrations: Mapping[int, Calibration],
        observed_budget: int | None = None,
    ) -> None:
        self._name = name
        self._networks = networks
        groups = [tuple(budgets)] if networks.config.causal else [(budget,) for budget in budgets]
        self._settings = [
            ReplaySettings(
                players=tuple(
                    Player(variant, budget - 1, variant == OBSERVED and budget == observed_budget)
                    for budget in group
                    for variant in variants
                ),
                stop_token_ids=stop_token_ids,
                calibrations={budget - 1: calibration for budget, calibration in calibrations.items()},
            )
            for group in groups
        ]

    @property
    def tap_layers(self) -> Sequence[int]:
        return self._networks.config.tap_layers

    @property
    def decoder_layers(self) -> Sequence[int]:
        return range(self._networks.decoder.first_layer, self._networks.target.num_layers)

    def play(self, text: TargetText, number: int) -> Iterator[Played]:
        for settings in self._settings:
            for played in Replay(self._networks, text, settings, number).run():
                series = Series(self._name, played.player.num_draft_tokens + 1, played.player.variant)
                yield Played(series, played.rounds, played.observed)


class SynchronousContestant:
    """A method that drafts every block after verification, in one go."""

    def __init__(
        self, name: str, networks: DraftNetworks, budgets: Sequence[int], stop_token_ids: frozenset[int]
    ) -> None:
        self._name = name
        self._methods = {budget: SynchronousMethod(networks, budget - 1) for budget in budgets}
        self._stop_token_ids = stop_token_ids
        self.tap_layers: Sequence[int] = networks.config.tap_layers
        self.decoder_layers: Sequence[int] = ()

    def play(self, text: TargetText, number: int) -> Iterator[Played]:
        for budget, method in self._methods.items():
            rounds = replay_fallbacks(method, text, budget - 1, self._stop_token_ids, number)
            yield Played(Series(self._name, budget, FROM_TRUE_STATES), rounds)


class AutoregressiveContestant:
    """`ssd`, whose fan-out learns from round to round, as in the server; every budget has its own statistics.

    So its hit rate depends a little on the texts that a process has seen before; τ does not.
    """

    tap_layers: Sequence[int] = ()
    decoder_layers: Sequence[int] = ()

    def __init__(self, name: str, runner: AutoregressiveRunner, budgets: Sequence[int]) -> None:
        self._name = name
        self._runner = runner
        self._statistics = {budget: FanOutStatistics() for budget in budgets}

    def play(self, text: TargetText, number: int) -> Iterator[Played]:
        replay = AutoregressiveReplay(self._runner, text)
        for budget, statistics in self._statistics.items():
            yield Played(Series(self._name, budget, FROM_TRUE_STATES), replay.rounds(budget - 1, statistics))


@dataclass(frozen=True)
class ContestantFiles:
    """Where a method's weights are. `calibrations` by budget."""

    draft: Path
    adapter: Path | None = None
    calibrations: tuple[tuple[int, Path], ...] = ()


@dataclass(frozen=True)
class ContestantSettings:
    """What all contestants share. `variants` are those of `jetspec++`."""

    budgets: tuple[int, ...]
    num_positions: int
    quantization: Quantization
    variants: tuple[Variant, ...] = ALL_VARIANTS
    observed_budget: int | None = None


def load_contestant(
    name: DraftMethodName,
    target: Path,
    files: ContestantFiles,
    settings: ContestantSettings,
    stop_token_ids: frozenset[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Contestant:
    """Load a method. Raises `UnsupportedModel` or `InvalidCalibration` naming the file at fault."""
    if name == "ssd":
        model = load_autoregressive(files.draft, target, dtype, device)
        runner = AutoregressiveRunner(model, settings.num_positions, settings.quantization)
        return AutoregressiveContestant(name, runner, settings.budgets)
    networks = load_networks(
        target, files.draft, files.adapter, dtype, device, settings.num_positions, settings.quantization
    )
    check_draft_model(name, networks, files.draft)
    if name not in ("jetspec++", "jetspec"):
        return SynchronousContestant(name, networks, settings.budgets, stop_token_ids)
    variants = settings.variants if name == "jetspec++" else FROM_TRUTH
    calibrations = {budget: read_calibration(path) for budget, path in files.calibrations}
    return RefiningContestant(
        name, networks, variants, settings.budgets, stop_token_ids, calibrations, settings.observed_budget
    )


def load_control(
    name: str,
    target: Path,
    draft: Path,
    settings: ContestantSettings,
    stop_token_ids: frozenset[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Contestant:
    """Any draft model, refined from true states: how it takes Jacobi passes. Raises `UnsupportedModel`."""
    networks = load_networks(target, draft, None, dtype, device, settings.num_positions, settings.quantization)
    return RefiningContestant(name, networks, FROM_TRUTH, settings.budgets, stop_token_ids, {})


def read_calibration(path: Path) -> Calibration:
    """A calibration file. Raises `InvalidCalibration` naming it."""
    try:
        return Calibration.from_json(path.read_text(encoding="utf-8"))
    except InvalidCalibration as error:
        raise InvalidCalibration(f"{path}: {error}") from error
