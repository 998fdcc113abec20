"""From a method's name and its files to the loaded method."""

from dataclasses import dataclass
from pathlib import Path

import torch

from decoding.calibration import Calibration
from draft_worker.foreseeing import ForesightMethod, Ranking
from draft_worker.methods import DraftMethod
from draft_worker.networks import DraftNetworks, load_networks
from draft_worker.speculative import SpeculativeMethod, measure_branching
from draft_worker.synchronous import SynchronousMethod
from draft_worker.timing import NO_TIMES, PlanChooser, measure_phases
from modeling.architecture import UnsupportedModel
from modeling.autoregressive import AutoregressiveRunner, load_autoregressive
from modeling.heads import CorrectionHead, GruHead, MarkovHead
from modeling.kernels.int8 import Quantization
from protocol.worker_config import DraftMethodName

AUTO_CACHE_SIZES = (1, 2, 4, 8)
AUTO_BRANCHES = (1, 2, 4, 8, 16)
HEADS: dict[DraftMethodName, type[CorrectionHead]] = {"dspark": MarkovHead, "domino": GruHead}
HEAD_NAMES: dict[type[CorrectionHead], str] = {MarkovHead: "a Markov head", GruHead: "a GRU head"}


@dataclass(frozen=True)
class MethodFiles:
    """Folders of the target, of the method's weights and, for `jetspec++`, of the adapter; calibration is a file.

    `draft` holds a draft model, for `dspark` and `domino` with a head, for `ssd` an autoregressive drafter.
    """

    target: Path
    draft: Path
    adapter: Path | None = None
    calibration: Path | None = None


@dataclass(frozen=True)
class MethodSettings:
    """Sizes and plan numbers. None for a number of the plan: chosen from times that are measured at start and at work.

    `threshold` is a log score; outcomes below it are not drafted.
    """

    num_draft_tokens: int
    num_positions: int
    cache_size: int | None = None
    num_passes: int | None = None
    num_refreshes: int | None = None
    threshold: float | None = None
    quantization: Quantization = "none"


def load_method(
    name: DraftMethodName, files: MethodFiles, settings: MethodSettings, dtype: torch.dtype, device: torch.device
) -> DraftMethod:
    """Load a method. Raises `UnsupportedModel` saying which file does not fit the method or the target."""
    match name:
        case "dflash" | "jetspec" | "dspark" | "domino":
            networks = load_networks(
                files.target, files.draft, None, dtype, device, settings.num_positions, settings.quantization
            )
            check_draft_model(name, networks, files.draft)
            return SynchronousMethod(networks, settings.num_draft_tokens)
        case "ssd":
            model = load_autoregressive(files.draft, files.target, dtype, device)
            return speculative_method(
                AutoregressiveRunner(model, settings.num_positions, settings.quantization), settings
            )
        case "jetspec++":
            networks = load_networks(
                files.target, files.draft, files.adapter, dtype, device, settings.num_positions, settings.quantization
            )
            check_draft_model(name, networks, files.draft)
            return foresight_method(networks, settings, _calibration(files.calibration))


def foresight_method(
    networks: DraftNetworks, settings: MethodSettings, calibration: Calibration | None
) -> ForesightMethod:
    """`jetspec++` from loaded networks; runs its phases a few times where the plan is not fixed."""
    sizes = AUTO_CACHE_SIZES if settings.cache_size is None else (settings.cache_size,)
    times = {1: NO_TIMES}
    if networks.adapter is not None:
        times = measure_phases(networks, settings.num_draft_tokens, sizes)
    chooser = PlanChooser(times, settings.cache_size, settings.num_passes, settings.num_refreshes)
    ranking = Ranking(calibration, settings.threshold)
    return ForesightMethod(networks, settings.num_draft_tokens, chooser, max(sizes), ranking)


def speculative_method(runner: AutoregressiveRunner, settings: MethodSettings) -> SpeculativeMethod:
    """`ssd` from a loaded drafter; without a cache size, as many branches as fit into a verification."""
    sizes = AUTO_BRANCHES if settings.cache_size is None else (settings.cache_size,)
    times = measure_branching(runner, settings.num_draft_tokens, sizes)
    chooser = PlanChooser(times, settings.cache_size, num_passes=0, num_refreshes=0)
    return SpeculativeMethod(runner, settings.num_draft_tokens, chooser, max(sizes))


def check_draft_model(name: DraftMethodName, networks: DraftNetworks, folder: Path) -> None:
    """Raise `UnsupportedModel` when a draft model was trained for another method: it would draft, but badly."""
    found = None if networks.corrector is None else networks.corrector.head
    wanted = HEADS.get(name)
    if (wanted is None) != (found is None) or (wanted is not None and not isinstance(found, wanted)):
        raise UnsupportedModel(
            f"{folder}: the head is {_head_name(type(found))}; method {name} needs {_head_name(wanted)}"
        )
    if name == "jetspec++":
        return
    config = networks.config
    if config.inputs != "mask":
        raise UnsupportedModel(f"{folder}: dflash_config.inputs is {config.inputs!r}; method {name} needs 'mask'")
    if name in ("dflash", "jetspec") and config.causal != (name == "jetspec"):
        raise UnsupportedModel(
            f"{folder}: dflash_config.causal_head is {config.causal}; "
            "dflash drafts a bidirectional block (false), jetspec a causal one (true)"
        )


def _head_name(kind: type | None) -> str:
    return next((label for head, label in HEAD_NAMES.items() if kind is head), "none")


def _calibration(path: Path | None) -> Calibration | None:
    return None if path is None else Calibration.from_json(path.read_text(encoding="utf-8"))
