"""Turns, ratios and failures, with contestants whose speed is a number; and the rows made of them."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from evaluation.bench import measure as measuring
from evaluation.bench.client import Generation
from evaluation.bench.concurrency import put_under_load
from evaluation.bench.contestants import Contestant
from evaluation.bench.counters import Counters
from evaluation.bench.errors import ContestantFailed
from evaluation.bench.measure import (
    BenchPrompt,
    Measured,
    best_gamma,
    measure,
    speedups_by_gamma,
    warm_up,
    with_reference,
)
from evaluation.bench.report import Report, write_json
from evaluation.bench.rows import Spread, rows_of
from tests.evaluation.bench_servers import exposition

TEXT = tuple(range(100, 140))


@dataclass
class Scripted:
    """Generates its text at a speed that may depend on the prompt; fails or is interrupted where it is told."""

    contestant: Contestant
    speed: dict[int, float]
    text: tuple[int, ...] = TEXT
    fails_on: int | None = None
    interrupts_on: int | None = None
    calls: list[int] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def generate(self, prompt_token_ids: list[int], max_tokens: int) -> Generation:
        (prompt,) = prompt_token_ids
        self.log.append(self.contestant.name)
        if prompt == self.interrupts_on:
            raise KeyboardInterrupt
        if prompt == self.fails_on:
            raise ContestantFailed("no answer")
        self.calls.append(prompt)
        num_tokens = min(max_tokens, len(self.text))
        decode_s = (num_tokens - 1) / self.speed[prompt]
        return Generation(self.text[:num_tokens], num_tokens, 1, 0.25, 0.25 + decode_s)

    def counters(self) -> Counters | None:
        if self.contestant.peer is not None:
            return None
        return Counters.parse(exposition(len(self.calls), is_plain=not self.contestant.drafts))


AR = Contestant("ar", "ar")
FAST = Contestant("jetspec++", "jetspec++", gamma=4)
PEER = Contestant("transformers", "ar", peer="transformers")
PROMPTS = [BenchPrompt(f"p{number}", "gsm8k", [number], TEXT[:40], 40) for number in range(3)]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reports late here."""
    monkeypatch.setattr(measuring, "HEARTBEAT_S", 0.0)


def test_ratios_are_taken_prompt_by_prompt() -> None:
    ar = Scripted(AR, {0: 10.0, 1: 20.0, 2: 40.0})
    fast = Scripted(FAST, {0: 30.0, 1: 20.0, 2: 80.0})
    measured = Measured()
    measure([ar, fast], PROMPTS, measured)
    base, row = rows_of(measured)
    assert base.speedup_over_ar == 1.0 and base.speedup_quartiles == (1.0, 1.0)
    assert row.tokens_per_s == pytest.approx(30.0)  # median of 30, 20, 80
    assert row.speedup_over_ar == pytest.approx(2.0)  # median of 3, 1, 2: not the ratio of the medians, which is 1.5
    assert row.speedup_quartiles == pytest.approx((1.5, 2.5))
    assert row.tau == pytest.approx(27 / 11)
    assert (row.hit_rate, row.num_prompts, row.num_same_texts) == (0.8, 3, 3)
    assert row.phases_ms == pytest.approx({"foresight": 13.0})
    assert (base.tau, base.hit_rate, base.phases_ms) == (1.0, None, {})
    assert row.first_token_ms == 250.0


def test_turns_rotate() -> None:
    log: list[str] = []
    runners = [Scripted(c, dict.fromkeys(range(3), 1.0), log=log) for c in (AR, FAST, PEER)]
    measure(runners, PROMPTS, Measured())
    names = [AR.name, FAST.name, PEER.name]
    assert log == names + names[1:] + names[:1] + names[2:] + names[:2]


def test_one_that_fails_is_left_out_and_keeps_what_it_has() -> None:
    ar = Scripted(AR, dict.fromkeys(range(3), 10.0))
    fast = Scripted(FAST, dict.fromkeys(range(3), 20.0), fails_on=1)
    measured = Measured()
    measure([ar, fast], PROMPTS, measured)
    assert fast.calls == [0] and ar.calls == [0, 1, 2]
    assert measured.failures == {"jetspec++": "no answer"}
    assert [row.num_prompts for row in rows_of(measured)] == [3, 1]


def test_what_was_measured_before_an_interrupt_stays() -> None:
    ar = Scripted(AR, dict.fromkeys(range(3), 10.0))
    fast = Scripted(FAST, dict.fromkeys(range(3), 20.0), interrupts_on=2)
    measured, kept = Measured(), []
    with pytest.raises(KeyboardInterrupt):
        measure([ar, fast], PROMPTS, measured, lambda: kept.append(len(measured.measurements)))
    assert kept == [2, 4]
    assert [row.num_prompts for row in rows_of(measured)] == [2, 2]
    assert rows_of(measured)[1].phases_ms  # read even then


def test_a_different_text_is_a_mismatch_unless_a_peer_wrote_it() -> None:
    other = (*TEXT[:7], 5, *TEXT[8:])
    runners = [
        Scripted(AR, dict.fromkeys(range(3), 10.0)),
        Scripted(FAST, dict.fromkeys(range(3), 20.0), text=other),
        Scripted(PEER, dict.fromkeys(range(3), 20.0), text=other),
    ]
    report = Report()
    measure(runners, PROMPTS[:1], report.measured)
    assert report.mismatch_lines() == ["jetspec++ differs from ar at token 7: gsm8k, prompt p0"]
    assert "**MISMATCH**: jetspec++" in report.as_markdown()
    assert [row.num_same_texts for row in report.rows()] == [1, 0, 0]


def test_a_shorter_text_is_a_mismatch_too() -> None:
    report = Report()
    measure([Scripted(FAST, {0: 1.0}, text=TEXT[:30])], PROMPTS[:1], report.measured)
    assert report.mismatch_lines() == ["jetspec++ differs from ar in length: gsm8k, prompt p0"]


def test_the_reference_ends_where_a_loop_begins() -> None:
    loop = Scripted(AR, {9: 1.0}, text=(*range(10), *([7, 8] * 50)))
    prompt = with_reference(loop, "p", "d", [9], 100)
    assert prompt is not None
    assert 10 + 24 <= prompt.max_tokens < 40
    assert prompt.reference == loop.text[: prompt.max_tokens]
    assert with_reference(Scripted(AR, {9: 1.0}, text=TEXT[:4]), "p", "d", [9], 100) is None


def test_warm_up_sorts_out_who_does_not_answer() -> None:
    ar, fast = Scripted(AR, {0: 1.0}), Scripted(FAST, {0: 1.0}, fails_on=0)
    measured = Measured()
    assert warm_up([ar, fast], PROMPTS[0], measured) == [ar]
    assert list(measured.failures) == ["jetspec++"]


def test_the_best_gamma_has_the_highest_median_speedup() -> None:
    runners = [Scripted(AR, dict.fromkeys(range(3), 10.0))]
    for gamma, speeds in ((3, (20.0, 20.0, 20.0)), (6, (90.0, 15.0, 15.0))):
        runners.append(Scripted(FAST.with_gamma(gamma), dict(enumerate(speeds))))
    trial = Measured()
    measure(runners, PROMPTS, trial)
    tried = speedups_by_gamma(trial)
    assert tried == {"jetspec++": {3: pytest.approx(2.0), 6: pytest.approx(1.5)}}
    report = Report(speedups_by_gamma=tried)
    assert "| jetspec++                 | 2.00 | 1.50 |" in report.as_markdown()
    assert report.as_json()["speedups_by_gamma"] == tried
    assert best_gamma(tried["jetspec++"]) == 3
    assert best_gamma({}) is None


def test_spread() -> None:
    assert Spread.of([]) is None
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)


def test_load_counts_every_token_and_every_request() -> None:
    runner = Scripted(AR, dict.fromkeys(range(3), 10.0))
    load = put_under_load(runner, PROMPTS, 4)
    assert (load.num_requests, load.num_same_texts, sorted(runner.calls)) == (8, 8, [0, 0, 0, 1, 1, 1, 2, 2])
    assert load.latency_s == load.longest_s == pytest.approx(0.25 + 39 / 10.0)
    assert load.tokens_per_s > 0
    with pytest.raises(ContestantFailed, match="no answer"):
        put_under_load(Scripted(AR, dict.fromkeys(range(3), 1.0), fails_on=1), PROMPTS, 2)


def test_json_shape(tmp_path: Path) -> None:
    report = Report(skipped={"dspark": "no weights"}, settings={"commit": "abc"})
    runners = [Scripted(AR, dict.fromkeys(range(3), 10.0)), Scripted(FAST, dict.fromkeys(range(3), 20.0))]
    measure([*runners, Scripted(PEER, dict.fromkeys(range(3), 5.0))], PROMPTS, report.measured)
    report.loads.append(put_under_load(runners[0], PROMPTS, 2))
    path = tmp_path / "results" / "bench.json"
    write_json(path, report)
    content = json.loads(path.read_text())
    required = {"method", "dataset", "tokens_per_s", "speedup_over_ar", "tau", "verify_ms", "exposed_ms", "hit_rate"}
    for row in content["rows"]:
        assert required | {"num_prompts"} <= set(row)
    by_name = {row["method"]: row for row in content["rows"]}
    assert by_name["jetspec++"]["num_speculative_tokens"] == 4
    assert by_name["transformers"]["tau"] is None and by_name["transformers"]["speedup_over_ar"] == 0.5
    assert content["concurrency"][0]["concurrency"] == 2
    assert (content["skipped"], content["settings"]) == ({"dspark": "no weights"}, {"commit": "abc"})
    assert [file.name for file in path.parent.iterdir()] == ["bench.json"]


def test_what_was_left_out_is_one_line_a_reason() -> None:
    report = Report(skipped={"llama.cpp": "not installed", "dspark": "no weights", "llama.cpp-q4_1": "not installed"})
    lines = report.as_markdown().splitlines()
    assert "- left out: **llama.cpp, llama.cpp-q4_1**: not installed" in lines
    assert "- left out: **dspark**: no weights" in lines


def test_markdown_has_every_row_and_a_dash_for_what_does_not_apply() -> None:
    report = Report(settings={"date": "2026-11-30"})
    runners = [Scripted(AR, dict.fromkeys(range(3), 10.0)), Scripted(FAST, dict.fromkeys(range(3), 20.0))]
    measure(runners, PROMPTS, report.measured)
    lines = report.as_markdown().splitlines()
    assert lines[0] == "date 2026-11-30"
    row = next(line for line in lines if line.startswith("| gsm8k | jetspec++"))
    assert "| 4 " in row and "2.00 (2.00–2.00)" in row and "| 2.45 " in row and "| 0.800 " in row and "| 3/3 " in row
    plain = next(line for line in lines if line.startswith("| gsm8k | ar"))
    assert "| – " in plain
    assert len({len(line) for line in lines[2:6]}) == 1  # the columns line up
