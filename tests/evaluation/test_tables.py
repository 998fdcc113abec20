"""Tables from rows made by hand: what stands where, and what is computed from what."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.acceptance_plots import write_plots
from evaluation.layout import Table
from evaluation.records import Measured, Records, Row, Series, Unit
from evaluation.replay import States, Variant
from evaluation.results import ResultFileError, Results, read_results, write_whole
from evaluation.rounds import Ending, ReplayedRound, sizes_that_hold
from evaluation.selection import SelectionRow
from evaluation.tables import (
    acceptance_lengths,
    all_tables,
    control,
    foresight,
    hit_rates,
    refreshes,
    selection_rules,
    without_pipelining,
)


def row(tau: float, method: str = "jetspec++", variant: Variant | None = None, **changes: object) -> Row:
    variant = variant or Variant("served", 0)
    fields: dict[str, object] = {
        "dataset": "gsm8k",
        "method": method,
        "temperature": 0.0,
        "budget": 16,
        "passes": variant.num_passes,
        "refreshes": variant.num_refreshes,
        "states": variant.states,
        "refresh": variant.refresh,
        "tau": tau,
        "hit_rate": {str(size): 1 - 0.5 / size for size in (1, 2, 4, 8, 16)} if variant.states == "served" else {},
        "acceptance": [0.8, 0.5, 0.1],
        "num_rounds": 100,
        "num_tokens": round(100 * tau),
        "num_prompts": 4,
    }
    return Row(**(fields | changes))  # type: ignore[arg-type]


def cells(table: Table) -> list[tuple[str, ...]]:
    return [line[table.num_labels :] for line in table.rows]


def test_acceptance_lengths_have_data_sets_as_columns() -> None:
    rows = [
        row(2.0, "dflash", Variant("true", 0), budget=8),
        row(2.5, "dflash", Variant("true", 0)),
        row(3.5, "dflash", Variant("true", 0), dataset="math500"),
        row(3.0, variant=Variant("served", 1, "replace")),
        row(9.9, variant=Variant("served", 1, "alone")),  # a control
        row(9.9, variant=Variant("true", 3)),
        row(9.9, "jetspec", Variant("true", 3)),
    ]
    table = acceptance_lengths(rows)
    assert table.columns == ("T", "budget", "method", "gsm8k", "math500", "mean")
    assert table.rows == (
        ("0", "8", "dflash", "2.00", "-", "-"),
        ("0", "16", "dflash", "2.50", "3.50", "3.00"),
        ("0", "16", "jetspec++ J1-R1", "3.00", "-", "-"),
    )


def test_hit_rates_of_methods_with_a_cache() -> None:
    table = hit_rates([row(2.0, "dflash", Variant("true", 0)), row(2.5)])
    assert table.rows == (("gsm8k", "0", "16", "jetspec++ J0-R0", "0.500", "0.750", "0.875", "0.938", "0.969", "100"),)


def test_the_negative_control_needs_the_other_draft_model() -> None:
    ours = [row(2.0 + j, variant=Variant("true", j)) for j in range(4)]
    theirs = [row(2.0 - 0.5 * j, "jetspec", Variant("true", j)) for j in range(4)]
    assert cells(control([*ours, *theirs])) == [("2.00", "1.50", "1.00", "0.50"), ("2.00", "3.00", "4.00", "5.00")]
    assert control(ours).rows == ()


def test_refreshes_share_the_draft_that_precedes_all() -> None:
    rows = [
        row(2.0),
        row(2.1, variant=Variant("served", 1)),
        row(2.2, variant=Variant("served", 1, "alone")),
        row(2.6, variant=Variant("served", 1, "replace")),
    ]
    assert cells(refreshes(rows)) == [
        ("2.00", "2.10", "-", "-"),
        ("2.00", "2.20", "-", "-"),
        ("2.00", "2.60", "-", "-"),
    ]
    assert refreshes([rows[0], rows[1], rows[3]]).rows == ()


def test_foresight_gives_shares_of_the_true_states() -> None:
    tau: dict[States, float] = {"true": 4.0, "predicted": 3.5, "copied": 2.0}
    rows = [row(tau[states] + 0.5 * j, variant=Variant(states, j)) for states in tau for j in range(2)]
    found = {line[3]: line[4:6] for line in foresight(rows).rows}
    assert found["kept of true"] == ("0.88", "0.89")  # 3.5 / 4, 4 / 4.5
    assert found["gap recovered"] == ("0.75", "0.75")  # (3.5 - 2) / (4 - 2)
    same = [replace(found, tau=2.0) for found in rows]
    assert {line[3]: line[4] for line in foresight(same).rows}["gap recovered"] == "-"


def test_without_pipelining_says_how_often_the_decoder_was_right() -> None:
    rows = [
        *(row(2.0, variant=Variant("true", j)) for j in range(2)),
        row(2.5, variant=Variant("true", 1, "replace"), replaced=40, replaced_right=30, replaced_needlessly=4),
    ]
    assert cells(without_pipelining(rows))[1] == ("2.00", "2.50", "-", "-", "40", "0.75", "0.10")


def test_selection_rules_by_cache_size() -> None:
    rates = {str(size): 0.5 for size in (1, 2, 4, 8, 16)}
    table = selection_rules([SelectionRow("gsm8k", 1.0, 16, "uncalibrated", rates, 12)])
    assert table.rows == (("gsm8k", "1", "16", "uncalibrated", *["0.500"] * 5, "12"),)


def test_a_table_as_text_and_as_markdown() -> None:
    table = Table("Title", "A note.", ("name", "τ"), (("a|b", "1.00"), ("longer", "10.00")))
    assert table.to_text() == "Title\nname        τ\na|b      1.00\nlonger  10.00"
    assert table.to_markdown() == (
        "## Title\n\n| name | τ |\n| --- | ---: |\n| a\\|b | 1.00 |\n| longer | 10.00 |\n\nA note.\n"
    )


def measured(unit: Unit, number: int, *num_accepted: int) -> Measured:
    rounds = [ReplayedRound(Ending(k, k + 1, 3, 5), False, sizes_that_hold(k)) for k in num_accepted]
    return Measured(unit, number, {Series("jetspec++", 4, Variant("served", 0)): rounds})


def test_counts_of_prompts_add_up_in_any_order() -> None:
    unit, other = Unit("gsm8k", 0.0), Unit("gsm8k", 1.0)
    parts = [measured(unit, 0, 0, 3), measured(unit, 1, 1), measured(other, 0, 2)]
    forth, back = Records(), Records()
    for part in parts:
        forth.add(part)
    for part in parts[::-1]:
        back.add(part)
    (first, second) = forth.rows()
    assert (first.tau, first.num_rounds, first.num_prompts) == (7 / 3, 3, 2)
    assert first.hit_rate["1"] == pytest.approx(1 / 3) and first.hit_rate["4"] == 1.0
    assert back.rows() == [second, first]
    ordered = Records([unit, other])
    for part in parts[::-1]:
        ordered.add(part)
    assert ordered.rows() == [first, second]


RESULTS = Results(
    {"date": "today"},
    [
        row(3.0),
        row(2.5, variant=Variant("served", 1)),
        row(2.0, "dflash", Variant("true", 0)),
        row(9.0, variant=Variant("copied", 1)),
    ],
    [SelectionRow("gsm8k", 0.0, 16, "uncalibrated", {str(size): 0.5 for size in (1, 2, 4, 8, 16)}, 12)],
)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_whole(tmp_path / "deep" / "acceptance.json", RESULTS.to_json())
    found = read_results(tmp_path / "deep" / "acceptance.json")
    assert found == RESULTS
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["acceptance.json"]
    assert found.to_markdown() == RESULTS.to_markdown()
    assert "- date: today" in found.to_markdown()
    assert all(table.title in found.to_markdown() for table in all_tables(RESULTS.rows, RESULTS.selection))


def test_the_rows_of_a_server_alone() -> None:
    rows = json.loads(RESULTS.rows_as_json())["rows"]
    assert [(r["method"], r["passes"], r["tau"]) for r in rows] == [
        ("jetspec++", 0, 3.0),
        ("jetspec++", 1, 2.5),
        ("dflash", 0, 2.0),
    ]
    assert {"dataset", "temperature", "budget", "refreshes", "hit_rate"} <= set(rows[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no list"),
        ('{"rows": 1}', "no list"),
        ('{"rows": [{"tau": 1}]}', "rows, entry 1"),
        ('{"rows": [1]}', "rows, entry 1"),
        ('{"rows": [], "selection": [{"magic": 1}]}', "selection, entry 1"),
    ],
)
def test_a_file_without_results_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "some.json"
    path.write_text(content)
    with pytest.raises(ResultFileError, match=rf"some\.json: .*{message}"):
        read_results(path)


def test_pictures(tmp_path: Path) -> None:
    written = write_plots(RESULTS, tmp_path)
    assert [path.name for path in written] == ["tau.png", "acceptance.png", "hit-rate.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert write_plots(Results({}, []), tmp_path / "none") == []
    without_rules = write_plots(Results({}, RESULTS.rows), tmp_path / "some")
    assert len(without_rules) == 3
