"""From flags to what an acceptance run will do: what can be wrong is found here, before anything is loaded."""

import argparse
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from decoding.calibration import Calibration
from evaluation.acceptance import Study
from evaluation.contestants import (
    FORESIGHT,
    FROM_TRUTH,
    METHODS,
    NOT_PIPELINED,
    REFRESH_ALONE,
    SERVED,
    ContestantFiles,
    ContestantSettings,
    read_calibration,
)
from evaluation.laboratory import LaboratoryOptions, choose_num_positions
from evaluation.prompts import load_prompts
from evaluation.provenance import describe_run
from evaluation.replay import Variant
from modeling.kernels.int8 import choose_quantization
from protocol.worker_config import DraftMethodName
from server.build import identify
from server.models import ModelError, check_draft_folder, default_weights, resolve, weights_folder

OURS: DraftMethodName = "jetspec++"
OBSERVED_BUDGET = 16
"""The paper's budget where one is enough."""

TABLES: dict[str, tuple[Variant, ...]] = {
    "main": SERVED,
    "control": FROM_TRUTH,
    "refresh": (*SERVED, *REFRESH_ALONE),
    "foresight": (*FROM_TRUTH, *FORESIGHT),
    "selection": SERVED,
    "unpipelined": (*FROM_TRUTH, *NOT_PIPELINED),
}
"""What jetspec++ has to do for each table."""

MAX_BUDGET = 256

Number = TypeVar("Number", int, float)


class WrongInput(Exception):
    """A flag that cannot be used; the message names it."""


@dataclass(frozen=True)
class AcceptancePlan:
    """A run that is ready to start. notes: what is left out, for people."""

    study: Study
    options: LaboratoryOptions
    calibrations: dict[int, Calibration]
    num_workers: int
    about: dict[str, object]
    notes: list[str] = field(default_factory=list)


def plan_acceptance(parsed: argparse.Namespace) -> AcceptancePlan:
    """Check all flags. Raises `WrongInput`, `PromptFileError`, `ModelError`, `UnsupportedModel` or
    `InvalidCalibration`."""
    budgets = _list(parsed.budgets, "--budgets", lambda text, flag: _integer(text, flag, 2, MAX_BUDGET))
    temperatures = _list(parsed.temperatures, "--temperatures", lambda text, flag: _number(text, flag, 0.0, 2.0))
    tables = tuple(TABLES) if parsed.tables == "all" else _names(parsed.tables, "--tables", "table", TABLES)
    num_prompts = _integer(parsed.num_prompts, "--num-prompts", 1)
    max_tokens = _integer(parsed.max_tokens, "--max-tokens", 2)
    minutes = None if parsed.minutes is None else _number(parsed.minutes, "--minutes", 0.0, math.inf)
    num_cores = len(os.sched_getaffinity(0))
    num_workers = num_cores if parsed.workers is None else _integer(parsed.workers, "--workers", 1)
    notes: list[str] = []
    methods = _methods(parsed, notes)
    datasets = _list(parsed.datasets, "--datasets", lambda text, flag: text)
    prompts = {dataset: load_prompts(dataset, parsed.prompts_dir, num_prompts) for dataset in datasets}
    target = resolve(parsed.model)
    files = {name: _files(parsed, name, budgets) for name in methods}
    observed = OBSERVED_BUDGET if OBSERVED_BUDGET in budgets else max(budgets)
    controls = _controls(parsed)
    settings = ContestantSettings(
        budgets=budgets,
        num_positions=choose_num_positions(target.folder, max_tokens, budgets),
        quantization=choose_quantization(parsed.draft_quantization, _device(parsed.device)),
        variants=tuple(dict.fromkeys(variant for table in tables for variant in TABLES[table])),
        observed_budget=observed if "selection" in tables else None,
    )
    calibrations = {}
    if OURS in files:
        calibrations = {budget: read_calibration(path) for budget, path in files[OURS].calibrations}
        notes += [
            f"no calibration for budget {budget}: jetspec++ ranks outcomes uncalibrated"
            for budget in budgets
            if budget not in calibrations
        ]
    options = LaboratoryOptions(target.folder, files, controls, settings, max_tokens, parsed.dtype, parsed.device)
    about: dict[str, object] = {
        **describe_run().as_json(),
        "model": target.name,
        "dtype": parsed.dtype,
        "drafting weights": settings.quantization,
        "prompts": f"first {num_prompts} of the fixed shuffle, at most {max_tokens} tokens a turn",
        "calibrated budgets": ", ".join(map(str, calibrations)) or "none",
        "weights": ", ".join(_revisions(options)),
    }
    study = Study(prompts, temperatures, minutes)
    return AcceptancePlan(study, options, calibrations, num_workers, about, notes)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise WrongInput(f"--device: expected cpu or cuda:N, got {text!r}") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise WrongInput(f"--device: there is no {text} here")
    return device


def _controls(parsed: argparse.Namespace) -> dict[str, Path]:
    controls = _folders(parsed.control, "--control")
    for name, folder in controls.items():
        if name in METHODS:
            raise WrongInput(f"--control: {name} is a method; choose another name")
        _check_folder(f"--control {name}", folder)
    return controls


def _revisions(options: LaboratoryOptions) -> Iterator[str]:
    """Every method and control with an id of its weights."""
    for name, found in options.files.items():
        yield f"{name} {_revision(found.draft)}"
        if found.adapter is not None:
            yield f"its adapter {_revision(found.adapter)}"
    for control, folder in options.controls.items():
        yield f"{control} {_revision(folder)}"


def _revision(folder: Path) -> str:
    return identify("draft", folder).revision


def _methods(parsed: argparse.Namespace, notes: list[str]) -> tuple[DraftMethodName, ...]:
    """The methods that are asked for; of `all` those without weights are noted and left out."""
    if parsed.methods != "all":
        return _names(parsed.methods, "--methods", "method", METHODS)
    found = []
    for name in METHODS:
        try:
            _draft_folder(parsed, name)
        except WrongInput as error:
            notes.append(f"left out: {error}")
        else:
            found.append(name)
    if not found:
        raise WrongInput("--methods all: no method has weights; " + "; ".join(notes))
    return tuple(found)


def _files(parsed: argparse.Namespace, name: DraftMethodName, budgets: Sequence[int]) -> ContestantFiles:
    """Where a method's weights are, as given or as shipped. Raises `WrongInput` naming the flag."""
    draft = _draft_folder(parsed, name)
    if name != OURS:
        return ContestantFiles(draft)
    shipped = default_weights(parsed.model)
    adapter: Path | None = parsed.adapter or (None if shipped is None else shipped.adapter)
    if adapter is None:
        raise WrongInput("--adapter: none is shipped for this model; give a folder")
    if not (adapter / "config.json").is_file():
        raise WrongInput(f"--adapter: {adapter} holds no config.json")
    calibration: Path | None = parsed.calibration
    is_own_draft = draft != (None if shipped is None else shipped.draft)
    if calibration is None and shipped is not None and not is_own_draft:
        calibration = shipped.calibration  # fitted to the shipped draft model and to no other
    if calibration is None:
        return ContestantFiles(draft, adapter)
    if not calibration.exists():
        raise WrongInput(f"--calibration: {calibration} does not exist")
    paths = [
        (budget, calibration / f"budget-{budget}.json" if calibration.is_dir() else calibration) for budget in budgets
    ]
    return ContestantFiles(draft, adapter, tuple((budget, path) for budget, path in paths if path.is_file()))


def _draft_folder(parsed: argparse.Namespace, name: DraftMethodName) -> Path:
    given = _given_weights(parsed).get(name)
    if name == OURS and parsed.draft_model is not None:
        given = parsed.draft_model
    shipped = default_weights(parsed.model, name)
    folder = given or (None if shipped is None else shipped.draft)
    if folder is None:
        place = weights_folder(parsed.model, name)
        where = "nothing is shipped for this model" if place is None else f"{place} holds none"
        raise WrongInput(f"method {name} has no weights: {where}; train them, or give --weights {name}=FOLDER")
    _check_folder(f"method {name}", folder)
    return folder


def _check_folder(whose: str, folder: Path) -> None:
    try:
        check_draft_folder(folder)
    except ModelError as error:
        raise WrongInput(f"{whose}: {error}") from error


def _given_weights(parsed: argparse.Namespace) -> dict[str, Path]:
    found = _folders(parsed.weights, "--weights")
    unknown = [name for name in found if name not in METHODS]
    if unknown:
        raise WrongInput(f"--weights: unknown method {unknown[0]!r}; known: {', '.join(METHODS)}")
    return found


def _folders(texts: Sequence[str], flag: str) -> dict[str, Path]:
    """Folders by name, from a flag that may be given several times."""
    found = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not name or not equals or not folder:
            raise WrongInput(f"{flag}: expected NAME=FOLDER, got {text!r}")
        found[name] = Path(folder)
    return found


Name = TypeVar("Name", bound=str)


def _names(text: str, flag: str, kind: str, known: Iterable[Name]) -> tuple[Name, ...]:
    by_text = {str(name): name for name in known}

    def parse(part: str, flag: str) -> Name:
        if part not in by_text:
            raise WrongInput(f"{flag}: unknown {kind} {part!r}; known: {', '.join(by_text)}")
        return by_text[part]

    return _list(text, flag, parse)


Item = TypeVar("Item")


def _list(text: str, flag: str, parse: Callable[[str, str], Item]) -> tuple[Item, ...]:
    """Comma-separated values, doubles once."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise WrongInput(f"{flag}: nothing is given")
    return tuple(dict.fromkeys(parse(part, flag) for part in parts))


def _integer(text: str, flag: str, minimum: int, maximum: int = 1 << 31) -> int:
    return _checked(text, flag, int, "a whole number", minimum, maximum)


def _number(text: str, flag: str, minimum: float, maximum: float) -> float:
    return _checked(text, flag, float, "a number", minimum, maximum)


def _checked(
    text: str, flag: str, read: Callable[[str], Number], kind: str, minimum: Number, maximum: Number
) -> Number:
    try:
        value = read(text)
    except ValueError:
        raise WrongInput(f"{flag}: expected {kind}, got {text!r}") from None
    if not minimum <= value <= maximum:  # also refuses NaN, which compares false
        raise WrongInput(f"{flag}: must be between {minimum:g} and {maximum:g}, got {text}")
    return value
