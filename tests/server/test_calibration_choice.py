"""Which calibration a drafter gets: the one of its budget, and only with the draft model it was fitted to."""

from dataclasses import replace
from pathlib import Path

import pytest

from server import service
from server.config import ConfigError, ServeConfig
from server.models import ShippedWeights


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShippedWeights:
    for name in ("draft", "adapter", "calibration"):
        (tmp_path / name).mkdir()
    (tmp_path / "calibration" / "budget-9.json").write_text("{}")
    weights = ShippedWeights(tmp_path / "draft", tmp_path / "adapter", tmp_path / "calibration")
    monkeypatch.setattr(service, "default_weights", lambda model: weights)
    return weights


def test_the_shipped_file_of_the_budget_is_taken(shipped: ShippedWeights) -> None:
    assert shipped.calibration is not None
    config = ServeConfig(num_speculative_tokens=8)
    assert service._draft_paths(config).calibration == shipped.calibration / "budget-9.json"
    assert service._draft_paths(replace(config, num_speculative_tokens=7)).calibration is None


def test_another_draft_model_gets_no_shipped_calibration(shipped: ShippedWeights, tmp_path: Path) -> None:
    config = ServeConfig(num_speculative_tokens=8, draft_model=str(tmp_path))
    assert service._draft_paths(config).calibration is None


def test_a_given_file_or_folder_is_taken(shipped: ShippedWeights, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text("{}")
    assert service._draft_paths(ServeConfig(calibration=str(own))).calibration == own
    folder = ServeConfig(calibration=str(shipped.calibration), num_speculative_tokens=8)
    assert service._draft_paths(folder).calibration == tmp_path / "calibration" / "budget-9.json"
    with pytest.raises(ConfigError, match=r"--calibration: .* holds no budget-4\.json"):
        service._draft_paths(replace(folder, num_speculative_tokens=3))
