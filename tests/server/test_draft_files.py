"""Which files a method gets: as given, else as shipped; a calibration only with the draft model it was fitted to."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server import draft_files, models
from server.config import ConfigError, ServeConfig
from server.draft_files import DraftFiles, find_draft_files
from server.models import ShippedWeights


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShippedWeights:
    for name in ("draft", "adapter", "calibration"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "calibration" / "budget-9.json").write_text("{}")
    weights = ShippedWeights(tmp_path / "draft", tmp_path / "adapter", tmp_path / "calibration")
    monkeypatch.setattr(draft_files, "default_weights", lambda model, method: weights)
    return weights


def test_the_shipped_file_of_the_budget_is_taken(shipped: ShippedWeights) -> None:
    assert shipped.calibration is not None
    config = ServeConfig(num_speculative_tokens=8)
    assert find_draft_files(config).calibration == shipped.calibration / "budget-9.json"
    assert find_draft_files(replace(config, num_speculative_tokens=7)).calibration is None


def test_another_draft_model_gets_no_shipped_calibration(shipped: ShippedWeights) -> None:
    config = ServeConfig(num_speculative_tokens=8, draft_model=str(shipped.adapter))
    assert find_draft_files(config).calibration is None


def test_a_given_file_or_folder_is_taken(shipped: ShippedWeights, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text("{}")
    assert find_draft_files(ServeConfig(calibration=str(own))).calibration == own
    folder = ServeConfig(calibration=str(shipped.calibration), num_speculative_tokens=8)
    assert find_draft_files(folder).calibration == tmp_path / "calibration" / "budget-9.json"
    with pytest.raises(ConfigError, match=r"--calibration: .* holds no budget-4\.json"):
        find_draft_files(replace(folder, num_speculative_tokens=3))


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a target's weights, with those of dflash and a head on it."""
    folder = tmp_path / "smollm2-135m"
    for name, config in (
        ("dflash", "{}"),
        ("dspark", '{"backbone": "../dflash"}'),
        ("domino", '{"backbone": "../no"}'),
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(config)
    monkeypatch.setattr(models, "_weight_roots", lambda: [tmp_path])
    return folder


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_a_methods_shipped_folder_is_taken(weights: Path, method: Any) -> None:
    assert find_draft_files(ServeConfig(method=method)) == DraftFiles(weights / method)


def test_missing_weights_are_named_with_method_and_folder(weights: Path) -> None:
    with pytest.raises(ConfigError, match=f"method ssd: {weights / 'ssd'} holds no weights"):
        find_draft_files(ServeConfig(method="ssd"))
    with pytest.raises(ConfigError, match=r"method domino: .* names the backbone '../no'"):
        find_draft_files(ServeConfig(method="domino"))
    with pytest.raises(ConfigError, match="none is shipped for this model and method ssd"):
        find_draft_files(ServeConfig(method="ssd", model="some/other"))


def test_a_given_folder_must_hold_a_model(weights: Path, tmp_path: Path) -> None:
    given = ServeConfig(method="ssd", draft_model=str(weights / "dflash"))
    assert find_draft_files(given).draft == weights / "dflash"
    with pytest.raises(ConfigError, match=r"method ssd: .*config\.json is missing"):
        find_draft_files(replace(given, draft_model=str(tmp_path)))


@pytest.mark.parametrize("field", ["adapter", "calibration"])
def test_files_of_jetspecpp_are_refused_for_other_methods(field: str) -> None:
    with pytest.raises(ConfigError, match=f"--{field}: only the method jetspec\\+\\+ uses it, not dflash"):
        ServeConfig(method="dflash", **{field: "somewhere"})  # type: ignore[arg-type]
