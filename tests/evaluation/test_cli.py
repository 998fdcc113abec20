"""Which files `jetspecpp eval` takes, and how it answers wrong input."""

from pathlib import Path

import pytest

from evaluation.cli import _calibration_path, build_parser, main


def test_the_shipped_calibration_goes_with_the_shipped_draft_model_only(tmp_path: Path) -> None:
    shipped = tmp_path / "calibration" / "budget-9.json"
    shipped.parent.mkdir()
    shipped.touch()

    def choice(*flags: str) -> Path | None:
        return _calibration_path(build_parser().parse_args(["acceptance", *flags]), tmp_path)

    assert choice() == shipped
    assert choice("--num-speculative-tokens", "15") is None  # fitted for another budget
    assert choice("--draft-model", "other") is None
    assert choice("--draft-model", "other", "--calibration", "mine.json") == Path("mine.json")


@pytest.mark.parametrize(
    ("flags", "message"),
    [(("--methods", "magic"), "magic"), (("--model", "/does/not/exist"), "/does/not/exist")],
)
def test_wrong_input(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acceptance", *flags]) == 2
    assert message in capsys.readouterr().err
