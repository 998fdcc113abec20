"""The command line of `jetspecpp bench`: wrong input, interruptions, what is printed and written, exit codes."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from evaluation.bench.cli import execute, main
from evaluation.bench.client import Generation
from evaluation.bench.contestants import Contestant, choose_methods, method_names, with_cache_sizes
from evaluation.bench.counters import Counters
from evaluation.bench.errors import WrongInput
from evaluation.bench.measure import BenchPrompt, Measurement
from evaluation.bench.report import Report
from evaluation.bench.run import Plan
from evaluation.bench.runners import grouped
from tests.evaluation.bench_servers import exposition

AR = Contestant("ar", "ar")
FAST = Contestant("jetspec++", "jetspec++", gamma=4)
SIZED = with_cache_sizes([2, 4], 4)
PROMPT = BenchPrompt("p0", "gsm8k", [1], tuple(range(20)), 20)
PLAN = Plan([], {}, {}, 20, (), (), (), 8, 2048, stage=None, settings={"commit": "abc"})  # type: ignore[arg-type]


def measurement(contestant: Contestant, text: tuple[int, ...] = PROMPT.reference) -> Measurement:
    generation = Generation(text, len(text), 1, 0.1, 0.1 + 19 / (20.0 if contestant.drafts else 10.0))
    counters = Counters.parse(exposition(1, is_plain=not contestant.drafts))
    return Measurement(contestant, PROMPT, generation, counters, 10.0)


def adds(*measurements: Measurement, then: Callable[[], None] = lambda: None) -> Callable[..., None]:
    def work(plan: Plan, report: Report, keep: Callable[[], None]) -> None:
        report.measured.measurements += measurements
        keep()
        then()

    return work


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "good.jsonl").write_text('{"turns": ["a"]}\n')
    (tmp_path / "broken.jsonl").write_text('{"turns": ["a"]}\n{"turns": 5}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--methods", "magic"), "unknown method 'magic'; known: ar"),
        (("--datasets", "{folder}/broken.jsonl"), "broken.jsonl:2: not a JSON object"),
        (("--datasets", "nothing", "--prompts-dir", "{folder}"), "nothing.jsonl"),
        (("--datasets", "{folder}/good.jsonl", "--model", "/does/not/exist"), "/does/not/exist"),
        (("--num-prompts", "0"), "--num-prompts"),
        (("--gammas", "3,x"), "--gammas"),
        (("--gammas", "3", "--num-speculative-tokens", "4"), "not allowed with"),
        (("--methods", "ar", "--cache-sizes", "2", "--datasets", "{folder}/good.jsonl"), "--cache-sizes"),
        (("--wibble",), "--wibble"),
    ],
)
def test_wrong_input(flags: tuple[str, ...], message: str, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag.replace("{folder}", str(prompts)) for flag in flags]) == 2
    assert message in capsys.readouterr().err


def test_every_method_of_the_server_takes_part() -> None:
    chosen = choose_methods("all")
    assert [c.name for c in chosen] == [*method_names(), "ar (2 cores)"]
    assert method_names()[0] == "ar" and "jetspec++" in method_names()
    assert chosen[-1].serve_flags() == ["--method", "ar", "--verify-threads", "2", "--verify-core", "none"]
    named = choose_methods("jetspec++")
    assert [(c.name, c.is_required) for c in named] == [("ar", True), ("jetspec++", True)]
    assert not any(c.is_required for c in chosen if c.drafts)


def test_flags_of_a_server() -> None:
    assert FAST.serve_flags() == ["--method", "jetspec++", "--num-speculative-tokens", "4"]
    assert SIZED[0].serve_flags() == [*FAST.serve_flags(), "--cache-size", "2"]


def test_groups_fit_and_each_has_plain_decoding() -> None:
    groups = grouped([FAST, AR, *SIZED], 3)
    assert [[c.name for c in group] for group in groups] == [
        ["ar", "jetspec++", "jetspec++ (B=2)"],
        ["ar", "jetspec++ (B=4)"],
    ]
    assert grouped([AR], 1) == [[AR]]


def test_results_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = adds(*(measurement(c) for c in (AR, FAST, *SIZED)))
    assert execute(PLAN, tmp_path / "a.json", tmp_path / "md" / "a.md", tmp_path / "plots", work) == 0
    out = capsys.readouterr().out
    assert "| gsm8k | jetspec++ " in out
    assert (tmp_path / "md" / "a.md").read_text() in out
    assert [row["method"] for row in json.loads((tmp_path / "a.json").read_text())["rows"]][:2] == ["ar", "jetspec++"]
    pictures = sorted((tmp_path / "plots").iterdir())
    assert [p.name for p in pictures] == ["acceptance.png", "hit-rate.png", "round.png", "speedup.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") and str(p) in out for p in pictures)


def test_an_interrupted_run_keeps_and_prints_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = adds(measurement(AR), measurement(FAST), then=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert execute(PLAN, tmp_path / "a.json", work=work) == 130
    captured = capsys.readouterr()
    assert "| gsm8k | jetspec++ " in captured.out and "interrupted" in captured.err
    assert len(json.loads((tmp_path / "a.json").read_text())["rows"]) == 2
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_killed_run_leaves_the_last_complete_file(tmp_path: Path) -> None:
    seen: list[int] = []

    def look() -> None:
        seen.append(len(json.loads((tmp_path / "a.json").read_text())["rows"]))

    execute(PLAN, tmp_path / "a.json", work=adds(measurement(AR), then=look))
    assert seen == [1]


def test_a_mismatch_is_loud(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(PLAN, work=adds(measurement(AR), measurement(FAST, (*range(19), 77)))) == 1
    captured = capsys.readouterr()
    assert "MISMATCH: jetspec++ differs from ar at token 19" in captured.err
    assert "**MISMATCH**" in captured.out


def test_a_method_that_cannot_start(capsys: pytest.CaptureFixture[str]) -> None:
    def work(plan: Plan, report: Report, keep: Callable[[], None]) -> None:
        raise WrongInput("dspark: the server did not start: --draft-model: none is shipped")

    assert execute(PLAN, work=work) == 2
    assert "dspark: the server did not start: --draft-model" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert execute(PLAN, markdown_path=tmp_path / "file" / "a.md", work=adds(measurement(AR))) == 1
    captured = capsys.readouterr()
    assert "| gsm8k | ar " in captured.out and "file" in captured.err
