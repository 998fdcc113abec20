"""Where a method's drafting files are: as given by flags, else as shipped for the model. Nothing is loaded here."""

from dataclasses import dataclass
from pathlib import Path

from server.config import ConfigError, ServeConfig, flag_of
from server.models import ModelError, ShippedWeights, check_draft_folder, default_weights, weights_folder


@dataclass(frozen=True)
class DraftFiles:
    """Folders of the draft model and of the adapter, the calibration's file. Only `jetspec++` has the last two."""

    draft: Path | None = None
    adapter: Path | None = None
    calibration: Path | None = None


def find_draft_files(config: ServeConfig) -> DraftFiles:
    """The files of the configured method; raises `ConfigError` naming the flag or the folder at fault."""
    if config.method == "ar":
        return DraftFiles()
    shipped = default_weights(config.model, config.method)
    given = _existing(config, "draft_model")
    draft = given or (None if shipped is None else shipped.draft)
    if draft is None:
        raise ConfigError(_missing(config))
    try:
        check_draft_folder(draft)
    except ModelError as error:
        raise ConfigError(f"method {config.method}: {error}") from None
    if config.method != "jetspec++":
        return DraftFiles(draft)
    adapter = _existing(config, "adapter") or (None if shipped is None else shipped.adapter)
    if adapter is None:
        raise ConfigError("--adapter: none is shipped for this model; give a folder, or choose another --method")
    return DraftFiles(draft, adapter, _calibration(config, shipped))


def _calibration(config: ServeConfig, shipped: ShippedWeights | None) -> Path | None:
    given = _existing(config, "calibration")
    if given is not None:
        file = _file_of_budget(given, config)
        if not file.is_file():
            raise ConfigError(f"--calibration: {given} holds no {file.name}")
        return file
    if shipped is None or shipped.calibration is None or config.draft_model is not None:
        return None
    # Fitted to the shipped draft model and to no other. A budget without one ranks uncalibrated (equation 6).
    fitted = _file_of_budget(shipped.calibration, config)
    return fitted if fitted.is_file() else None


def _file_of_budget(path: Path, config: ServeConfig) -> Path:
    """A calibration's file: the path itself, or the one for this budget in a folder."""
    return path / f"budget-{config.num_speculative_tokens + 1}.json" if path.is_dir() else path


def _existing(config: ServeConfig, name: str) -> Path | None:
    given = getattr(config, name)
    if given is None:
        return None
    path = Path(given).expanduser().resolve()
    if not path.exists():
        raise ConfigError(f"{flag_of(name)}: {given} does not exist")
    return path


def _missing(config: ServeConfig) -> str:
    folder = weights_folder(config.model, config.method)
    if folder is None:
        return f"--draft-model: none is shipped for this model and method {config.method}; give a folder, or choose ar"
    return f"method {config.method}: {folder} holds no weights; train them, or give --draft-model"
