"""Server processes and the whole run over them, with `serve` as it is and its workers faked."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.bench import measure as measuring
from evaluation.bench.contestants import Contestant
from evaluation.bench.errors import WrongInput
from evaluation.bench.peers import PeerSetup
from evaluation.bench.report import Report
from evaluation.bench.run import Plan, run
from evaluation.bench.runners import Stage
from evaluation.bench.servers import ServerProcess
from evaluation.prompts import Prompt
from tests.server.fakes import make_model_folder

COMMAND = (sys.executable, "-m", "tests.server.serve_fakes")
AR = Contestant("ar", "ar")
FAST = Contestant("jetspec++", "jetspec++")
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def stage(folder: Path) -> Stage:
    setup = PeerSetup(folder, False, "float32", [], None)
    flags = ("--model", str(folder), "--verify-core", "none", "--draft-core", "none")
    return Stage(flags, setup, lambda kind: folder, COMMAND)


def weights(contestant: Contestant, folder: Path) -> Contestant:
    return replace(contestant, flags=("--draft-model", str(folder), "--adapter", str(folder)))


def test_a_server_starts_and_leaves_nothing(folder: Path) -> None:
    with ServerProcess(["--model", str(folder), "--method", "ar"], COMMAND) as server:
        server.wait_until_ready(needs_drafter=False, limit_s=LIMIT_S)
        assert server.client.counters().value("jetspec_verifier_up") == 1.0
        process = server._process
        assert process is not None and process.poll() is None
    assert process.poll() is not None


def test_variables_of_a_public_server_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"API_KEY": "alpha", "METRICS_REQUIRE_AUTH": "1", "HOST": "0.0.0.0", "METHOD": "ar"}.items():
        monkeypatch.setenv(f"JETSPEC_{name}", value)
    with ServerProcess(["--model", str(folder)], COMMAND) as server:
        server.wait_until_ready(needs_drafter=False, limit_s=LIMIT_S)
        assert server.client.generate([5], 4).num_tokens == 4


def test_a_server_that_does_not_start_says_why(folder: Path) -> None:
    with (
        ServerProcess(["--model", str(folder), "--method", "jetspec++"], COMMAND) as server,
        pytest.raises(WrongInput, match="--draft-model: none is shipped"),
    ):
        server.wait_until_ready(needs_drafter=True, limit_s=LIMIT_S)


def test_the_whole_run(
    folder: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reference texts, the choice of γ, a contestant that is missing, measuring, load."""
    monkeypatch.setattr(measuring, "HEARTBEAT_S", 0.0)
    monkeypatch.setenv("FAKE_TEXT", "ab cd ef gh ij kl mn op qr st uv wx yz 12 34 56 78 90")
    monkeypatch.setenv("FAKE_ROUND_S", "0.002")
    missing = Contestant("dspark", "jetspec++", gamma=3, is_required=False)  # given no weights
    plan = Plan(
        contestants=[AR, weights(FAST, folder), missing],
        prompts={"set": [Prompt("p0", "a b"), Prompt("p1", "c d"), Prompt("long", "e" * 900)]},
        sweep_prompts={"set": [Prompt("s0", "b c")]},
        max_tokens=20,
        gammas=(2, 3),
        cache_sizes=(),
        concurrency=(2,),
        max_processes=4,
        max_model_len=200,
        stage=stage,
        settings={},
    )
    report, kept = Report(), []
    caplog.set_level("INFO", "jetspec.bench")
    run(plan, report, lambda: kept.append(len(report.measured.measurements)))
    rows = report.rows()
    assert [row.method for row in rows] == ["ar", "jetspec++"]
    assert rows[0].num_prompts == rows[1].num_prompts == 2
    assert rows[1].num_speculative_tokens in (2, 3)
    assert set(report.speedups_by_gamma["jetspec++"]) == {2, 3}
    assert rows[1].tau is not None and rows[1].tau > 1.0
    assert rows[1].num_same_texts == 2 and report.mismatch_lines() == []
    assert "dspark" in report.skipped and "none is shipped" in report.skipped["dspark"]
    assert [(load.method, load.concurrency, load.num_requests) for load in report.loads] == [
        ("ar", 2, 4),
        ("jetspec++", 2, 4),
    ]
    assert kept == [2, 4, 4, 4]
    assert "prompt long is too long" in caplog.text


def test_one_asked_for_by_name_must_start(stage: Stage) -> None:
    with (
        pytest.raises(WrongInput, match=r"jetspec\+\+: the server did not start: .*none is shipped"),
        stage.open([FAST], {}),
    ):
        pass
