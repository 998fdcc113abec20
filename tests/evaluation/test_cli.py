"""`jetspecpp eval` from flags to files, on a tiny target: what it takes, what it writes, how it ends."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evaluation import laboratory
from evaluation.acceptance_plan import plan_acceptance
from evaluation.cli import build_parser, main
from evaluation.laboratory import Laboratory, Task
from evaluation.records import Measured
from tests.tiny.models import TinyModels

Run = Callable[..., int]


@pytest.fixture
def flags(folders: TinyModels, target_folder: Path, prompts_folder: Path, tmp_path: Path) -> list[str]:
    """A small run of jetspec++."""
    return [
        *("--model", str(target_folder), "--draft-model", str(folders.draft()), "--adapter", str(folders.adapter())),
        *("--prompts-dir", str(prompts_folder), "--datasets", "words,talk", "--num-prompts", "2", "--max-tokens", "12"),
        *("--budgets", "3,5", "--dtype", "float32", "--draft-quantization", "none", "--workers", "1"),
        *("--output", str(tmp_path / "out")),
    ]


@pytest.fixture
def baselines(folders: TinyModels) -> list[str]:
    """Weights of all other methods."""
    given = {
        "dflash": folders.draft("bidirectional"),
        "jetspec": folders.draft("causal_mask"),
        "dspark": folders.head("markov"),
        "domino": folders.head("gru"),
        "ssd": folders.drafter(),
    }
    return [part for name, folder in given.items() for part in ("--weights", f"{name}={folder}")]


def test_all_methods(
    flags: list[str], baselines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_file = tmp_path / "rows.json"
    assert main(["acceptance", *flags, *baselines, "--methods", "all", "--json", str(rows_file)]) == 0
    printed = capsys.readouterr()
    written = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    rows = json.loads(rows_file.read_text())["rows"]
    assert rows == written["rows"]
    keys = {(r["dataset"], r["method"], r["temperature"], r["budget"], r["passes"], r["refreshes"]) for r in rows}
    plans = {(0, 0), (1, 0), (2, 0), (3, 0), (1, 1), (2, 2), (3, 3)}
    settings = [
        *(("jetspec++", *plan) for plan in plans),
        *((method, 0, 0) for method in ("dflash", "jetspec", "dspark", "domino", "ssd")),
    ]
    assert keys == {
        (dataset, method, temperature, budget, passes, refreshes)
        for dataset in ("words", "talk")
        for temperature in (0.0, 1.0)
        for budget in (3, 5)
        for method, passes, refreshes in settings
    }
    assert len(rows) == len(keys)
    for row in rows:
        assert 1.0 <= row["tau"] <= row["budget"]
        assert bool(row["hit_rate"]) == (row["method"] in ("jetspec++", "ssd"))
        assert row["num_prompts"] == 2
    markdown = (tmp_path / "out" / "acceptance.md").read_text()
    for number in ("Table 1)", "Tables 4 and 12", "Table 5", "Table 6", "Table 11", "Table 16"):
        assert f"{number}" in markdown and f"{number}" in printed.out
    assert "8/8 conversations (talk, T=1)" in printed.err
    about = written["about"]
    assert {"date", "commit", "machine", "model"} <= set(about)


def test_a_report_has_the_tables_and_pictures(flags: list[str], tmp_path: Path) -> None:
    assert main(["acceptance", *flags, "--temperatures", "0", "--tables", "main", "--datasets", "words"]) == 0
    results, report = tmp_path / "out" / "acceptance.json", tmp_path / "report"
    assert main(["report", str(results), "--output", str(report)]) == 0
    assert (report / "acceptance.md").read_text() == (tmp_path / "out" / "acceptance.md").read_text()
    assert {path.name for path in report.iterdir()} == {"acceptance.md", "tau.png", "acceptance.png", "hit-rate.png"}


def test_a_table_costs_only_what_it_needs(flags: list[str], tmp_path: Path) -> None:
    run = ["acceptance", *flags, "--temperatures", "0", "--datasets", "words"]
    assert main([*run, "--tables", "unpipelined"]) == 0
    written = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    assert not written["rows"] and not written["selection"]
    assert {row["states"] for row in written["controls"]} == {"true"}


def test_further_draft_models_are_controls(
    flags: list[str], folders: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["acceptance", *flags, "--temperatures", "0", "--datasets", "words", "--tables", "control"]
    assert main([*run, "--control", f"mine={folders.draft('random')}"]) == 0
    written = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    assert {row["method"] for row in written["controls"]} == {"mine", "jetspec++"} and not written["rows"]
    assert "mine" in capsys.readouterr().out and "mine sha256-" in written["about"]["weights"]


@pytest.fixture
def stop_after_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM arrives when a second conversation has been asked for."""
    measure = Laboratory.measure

    def measured(self: Laboratory, task: Task) -> Iterator[Measured]:
        for number, found in enumerate(measure(self, task)):
            if number == 1:
                signal.raise_signal(signal.SIGTERM)
            yield found

    monkeypatch.setattr(laboratory.Laboratory, "measure", measured)


@pytest.mark.usefixtures("stop_after_first")
def test_an_interrupted_run_prints_and_keeps_what_it_has(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_file = tmp_path / "rows.json"
    assert main(["acceptance", *flags, "--json", str(rows_file)]) == 130
    rows = json.loads(rows_file.read_text())["rows"]
    assert {(row["dataset"], row["temperature"], row["num_prompts"]) for row in rows} == {("words", 0.0, 1)}
    printed = capsys.readouterr()
    assert "interrupted" in printed.err and "Acceptance length" in printed.out
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN


def test_a_time_limit_ends_a_run_well(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acceptance", *flags, "--minutes", "0"]) == 0
    assert "time is up after 1 of 8" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "acceptance.json").read_text())["rows"]


def test_results_come_between_rounds_of_prompts(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight prompts are two rounds of four: the table of the first is printed before the second is measured."""
    more = ["--num-prompts", "8", "--datasets", "words", "--temperatures", "0", "--tables", "main"]
    assert main(["acceptance", *flags, *more]) == 0
    assert capsys.readouterr().out.count("Acceptance length") == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--methods", "magic"), "--methods: unknown method 'magic'"),
        (("--methods", "ar"), "--methods: unknown method 'ar'"),
        (("--methods", "dspark"), "method dspark has no weights"),
        (("--methods", "dspark", "--weights", "dspark=/does/not/exist"), "/does/not/exist"),
        (("--weights", "magic=/tmp"), "--weights"),
        (("--weights", "dspark"), "--weights"),
        (("--control", "mine"), "--control"),
        (("--control", "ssd=/tmp"), "--control: ssd is a method"),
        (("--control", "mine=/does/not/exist"), "/does/not/exist"),
        (("--datasets", "gsm9k"), "unknown data set 'gsm9k'"),
        (("--datasets", ","), "--datasets"),
        (("--model", "/does/not/exist"), "/does/not/exist"),
        (("--draft-model", "/does/not/exist"), "/does/not/exist"),
        (("--adapter", "/does/not/exist"), "--adapter: /does/not/exist"),
        (("--calibration", "/does/not/exist"), "--calibration: /does/not/exist"),
        (("--budgets", "1"), "--budgets"),
        (("--budgets", "8,many"), "--budgets"),
        (("--temperatures", "nan"), "--temperatures"),
        (("--temperatures", "3"), "--temperatures"),
        (("--num-prompts", "0"), "--num-prompts"),
        (("--max-tokens", "100000"), "--max-tokens 100000"),
        (("--minutes", "-1"), "--minutes"),
        (("--workers", "0"), "--workers"),
        (("--tables", "17"), "--tables: unknown table '17'"),
        (("--dtype", "float8"), "--dtype"),
        (("--device", "magic"), "--device"),
        (("--device", "meta"), "--device: there is no meta here"),
        (("--magic",), "--magic"),
    ],
)
def test_wrong_input(
    flags: list[str], change: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["acceptance", *flags, *change]) == 2
    assert message in capsys.readouterr().err


def test_a_broken_line_of_a_prompt_file_is_named(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"turns": ["t9"]}\n{"turns": "t9"}\n')
    assert main(["acceptance", *flags, "--datasets", str(path)]) == 2
    assert f"{path}:2" in capsys.readouterr().err


def test_weights_of_another_method_are_refused(
    flags: list[str], folders: TinyModels, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folders.draft("bidirectional")
    assert main(["acceptance", *flags, "--methods", "jetspec", "--weights", f"jetspec={folder}"]) == 2
    assert str(folder) in capsys.readouterr().err


def test_a_broken_calibration_is_named(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "budget-5.json").write_text("{}")
    assert main(["acceptance", *flags, "--calibration", str(tmp_path)]) == 2
    assert str(tmp_path / "budget-5.json") in capsys.readouterr().err


def test_no_results_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "some.json").write_text("[]")
    assert main(["report", str(tmp_path / "some.json"), "--output", str(tmp_path / "out")]) == 2
    assert main(["report", str(tmp_path / "none.json"), "--output", str(tmp_path / "out")]) == 1
    assert "none.json" in capsys.readouterr().err


def test_of_all_methods_those_without_weights_are_named(flags: list[str]) -> None:
    plan = plan_acceptance(build_parser().parse_args(["acceptance", *flags, "--methods", "all"]))
    assert list(plan.options.files) == ["jetspec++"]
    assert sum(note.startswith("left out: method ") for note in plan.notes) == 5


def test_calibrations_go_by_budget(flags: list[str], tmp_path: Path) -> None:
    calibration = '{"weights": [0, 1, 0, 0, 0, 0], "anchor_temperature": 1, "threshold": null}'
    (tmp_path / "budget-5.json").write_text(calibration)

    def budgets(path: Path) -> list[int]:
        plan = plan_acceptance(build_parser().parse_args(["acceptance", *flags, "--calibration", str(path)]))
        return list(plan.calibrations)

    assert budgets(tmp_path) == [5]
    assert budgets(tmp_path / "budget-5.json") == [3, 5]


def test_the_shipped_calibration_goes_with_the_shipped_draft_model_only(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], folders: TinyModels, target_folder: Path, tmp_path: Path
) -> None:
    from evaluation import acceptance_plan
    from server.models import ShippedWeights

    calibration = '{"weights": [0, 1, 0, 0, 0, 0], "anchor_temperature": 1, "threshold": null}'
    (tmp_path / "budget-5.json").write_text(calibration)
    shipped = ShippedWeights(folders.draft(), folders.adapter(), tmp_path)
    monkeypatch.setattr(acceptance_plan, "default_weights", lambda model, method="jetspec++": shipped)
    own = flags.index("--draft-model")
    assert list(plan_acceptance(build_parser().parse_args(["acceptance", *flags])).calibrations) == [5]
    flags[own + 1] = str(folders.draft("random"))
    assert list(plan_acceptance(build_parser().parse_args(["acceptance", *flags])).calibrations) == []
