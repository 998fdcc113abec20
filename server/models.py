"""What `--model` means: the demo target, a local folder, or a hub id, resolved to a folder that the workers can load.

Checks everything that can be checked without loading weights, so that a wrong argument is answered in a second and by
name. Does not import torch: the demo target is prepared by `python -m modeling.demo` in a process of its own.
"""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEMO_NAME = "demo"
DEMO_LIMIT_S = 3600.0
# model_type of config.json, and the class whose weights we can run
SUPPORTED_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# The folder below weights/ that holds the drafter trained for a model
SHIPPED_WEIGHTS = {DEMO_NAME: "smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m"}
ADAPTER_METHOD = "jetspec++"  # its parts are in draft/ and adapter/, other methods are in a folder of their name
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]  # never pickles, never code


class ModelError(Exception):
    """`--model` names nothing that can be served; the message says what is wrong and with which file."""


@dataclass(frozen=True)
class ResolvedModel:
    """A model folder that passed every check short of loading it."""

    name: str  # the id clients use
    folder: Path  # holds config.json, tokenizer.json and safetensors
    model_type: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ShippedWeights:
    """Folders of a method's draft weights that come with this project. Only `jetspec++` has an adapter.

    The calibration folder, None when none is shipped, holds a `budget-<N>.json` for each budget N (drafts and anchor)
    that it was fitted for.
    """

    draft: Path
    adapter: Path | None
    calibration: Path | None


def resolve(model: str, revision: str | None = None) -> ResolvedModel:
    """Turn `--model` (and `--revision`, for hub ids) into a checked folder. Raises ModelError.

    An existing folder wins over a hub id of the same spelling. The hub is asked for safetensors, JSON and tokenizer
    files only; with HF_HUB_OFFLINE=1 it is not asked at all, and the local hub cache answers.
    """
    if model == DEMO_NAME:
        return inspect_folder(DEMO_NAME, _prepare_demo())
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ModelError(f"--revision is for hub ids, and {model} is a local folder")
        return inspect_folder(folder.resolve().name, folder.resolve())
    if HUB_ID.fullmatch(model):
        return inspect_folder(model, _download(model, revision))
    raise ModelError(
        f"--model {model}: there is no such folder, and it is neither '{DEMO_NAME}' nor a hub id (owner/name)"
    )


def default_weights(model: str, method: str = ADAPTER_METHOD) -> ShippedWeights | None:
    """The draft weights shipped for this `--model` and `--method`, from the checkout or the installed package.

    None without any.
    """
    draft = weights_folder(model, method)
    if draft is None or not (draft / "config.json").is_file():
        return None
    if method != ADAPTER_METHOD:
        return ShippedWeights(draft, None, None)
    adapter, calibration = draft.parent / "adapter", draft.parent / "calibration"
    if not (adapter / "config.json").is_file():
        return None
    has_calibration = any(calibration.glob("budget-*.json"))
    return ShippedWeights(draft, adapter, calibration if has_calibration else None)


def weights_folder(model: str, method: str) -> Path | None:
    """Where the draft weights of a method are, or would be, for a model; None for a model that nothing is shipped
    for."""
    name = SHIPPED_WEIGHTS.get(model)
    if name is None:
        return None
    part = "draft" if method == ADAPTER_METHOD else method
    folders = [root / name / part for root in _weight_roots()]
    return next((folder for folder in folders if (folder / "config.json").is_file()), folders[0])


def check_draft_folder(folder: Path) -> None:
    """Raise `ModelError` unless a folder, and the one whose head it is, has a config."""
    backbone = _read_json(folder / "config.json").get("backbone")
    if isinstance(backbone, str) and not (folder / backbone / "config.json").is_file():
        raise ModelError(f"{folder / 'config.json'} names the backbone {backbone!r}, which holds no draft model")


def inspect_folder(name: str, folder: Path) -> ResolvedModel:
    """Check a model folder's files and its architecture. Raises ModelError naming the file at fault."""
    config = _read_json(folder / "config.json")
    model_type = _check_architecture(folder, config)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder} has no tokenizer.json; save the tokenizer in its fast form first")
    _check_weights(folder)
    return ResolvedModel(
        name=name,
        folder=folder,
        model_type=model_type,
        vocab_size=_positive(folder, config, "vocab_size"),
        max_position_embeddings=_positive(folder, config, "max_position_embeddings"),
        eos_token_ids=_eos_token_ids(folder, config),
    )


def _prepare_demo() -> Path:
    command = [sys.executable, "-m", "modeling.demo"]
    try:
        # Its stderr is ours: the user sees the progress of a first start.
        run = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=DEMO_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"preparing the demo target took longer than {DEMO_LIMIT_S:.0f} s") from error
    lines = run.stdout.splitlines()  # the folder is the last of them
    if run.returncode != 0 or not lines:
        raise ModelError(f"the demo target could not be prepared ({' '.join(command[1:])} ended with {run.returncode})")
    return Path(lines[-1])


def _download(model: str, revision: str | None) -> Path:
    from httpx2 import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = model if revision is None else f"{model} at revision {revision}"
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=["*/*"]))
    except GatedRepoError as error:
        raise ModelError(f"--model {where}: access is restricted; set HF_TOKEN to a token that may read it") from error
    except RevisionNotFoundError as error:
        raise ModelError(f"--model {where}: the hub has no such revision") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"--model {where}: there is no such local folder and no such model on the hub") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"--model {where}: there is no such local folder, it is not in the local hub cache, and the hub "
            "is switched off (HF_HUB_OFFLINE) or cannot be reached"
        ) from error
    except (
        HTTPError,
        OSError,
        ValueError,
    ) as error:  # answers, transport and disk; an id the client refuses is a ValueError
        raise ModelError(f"--model {where}: {error}") from error


def _weight_roots() -> Sequence[Path]:
    roots = [Path(__file__).resolve().parent.parent / "weights"]
    spec = importlib.util.find_spec("modeling")  # finds a top-level package without importing it
    if spec is not None:
        roots += [Path(location) / "weights" for location in spec.submodule_search_locations or ()]
    return roots


def _check_architecture(folder: Path, config: dict[str, Any]) -> str:
    model_type = config.get("model_type")
    supported = ", ".join(SUPPORTED_ARCHITECTURES.values())
    if not isinstance(model_type, str) or model_type not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"{folder / 'config.json'}: model_type {model_type!r} is not supported; supported: {supported}"
        )
    architectures = config.get("architectures")
    if architectures and SUPPORTED_ARCHITECTURES[model_type] not in architectures:
        raise ModelError(
            f"{folder / 'config.json'}: architectures {architectures} is not supported; supported: {supported}"
        )
    if config.get("quantization_config") is not None:
        raise ModelError(f"{folder / 'config.json'}: quantized checkpoints (quantization_config) are not supported")
    return model_type


def _check_weights(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map")
        missing = sorted({str(name) for name in weight_map.values() if not (folder / str(name)).is_file()})
        if missing:
            raise ModelError(
                f"{folder} lacks {len(missing)} of the files its index names, the first of them {missing[0]}"
            )
    elif not (folder / "model.safetensors").is_file():
        raise ModelError(f"{folder} has no model.safetensors; pickled weights (.bin, .pt) are not loaded")


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    value = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    if value is None:
        value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in values):
        raise ModelError(f"{folder}: eos_token_id {value!r} is not a token id or a list of them")
    return tuple(values)


def _positive(folder: Path, config: dict[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"{folder / 'config.json'}: {field} is {value!r}, a positive number is needed")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing: {path.parent} is no model folder") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value
