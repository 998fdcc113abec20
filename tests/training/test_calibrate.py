"""Observed rounds and the calibration fitted to them, on a tiny target."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decoding import observation
from decoding.calibration import Calibration, calibrated_scores
from decoding.observation import ObservedRound
from decoding.outcomes import top_outcomes
from decoding.plan import PassPlan
from decoding.rules import SCORE_RULES
from decoding.sampling import SamplingParameters, draw
from decoding.selection import select
from draft_worker.round import DraftRound
from modeling.target import TargetBlock, TargetRunner, load_target
from tests.tiny.models import VOCAB_SIZE, TinyModels
from tests.training.texts import CPU, END_ID
from training import rounds
from training.calibrate import CACHE_SIZES
from training.cli import main
from training.rounds import Bench, observe_text, open_bench

NUM_DRAFTS = 4


@pytest.fixture
def bench(models_folder: TinyModels, target_folder: Path) -> Bench:
    target = load_target(target_folder, torch.float32, CPU)
    folders = models_folder.draft("trained"), models_folder.adapter()
    return open_bench(target, *folders, NUM_DRAFTS, PassPlan(1, 1, 4), [END_ID], 128, 40)


def plain_text(runner: TargetRunner, prompt: list[int], sampling: SamplingParameters, count: int) -> list[int]:
    """The target's text without any drafting."""
    cache, tokens = runner.new_cache(), list(prompt)
    for start, token_id in enumerate(prompt):
        rows = runner.forward([TargetBlock(cache, start, [token_id])])
    while len(tokens) < len(prompt) + count:
        tokens.append(draw(rows.logits[-1], sampling, len(tokens)))
        rows = runner.forward([TargetBlock(cache, len(tokens) - 1, tokens[-1:])])
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_follow_the_targets_own_text(
    bench: Bench, target_runner: TargetRunner, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """What the observed rounds commit is the plain text of the same seed."""
    committed: list[int] = []
    observed = rounds._observed

    def record(bench: Bench, drafting: DraftRound, num_accepted: int, anchor: int) -> ObservedRound:
        committed.extend([*drafting.block.token_ids[:num_accepted], anchor])
        return observed(bench, drafting, num_accepted, anchor)

    monkeypatch.setattr(rounds, "_observed", record)
    prompt, sampling = [1, 9, 20, 2], SamplingParameters(temperature, seed=5)
    found = list(observe_text(bench, prompt, sampling, 0))
    assert len(found) > 3
    text = plain_text(target_runner, prompt, sampling, len(committed) + 1)
    assert committed == text[len(prompt) + 1 :]
    assert sum(round.num_accepted + 1 for round in found) == len(committed)


def test_observed_columns_lose_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranking on the kept columns is ranking on all of them."""
    calibration = Calibration((0.3, 0.8, 0.1, -0.2, 0.4, 0.1), 1.3, None)
    networks = bench.networks
    monkeypatch.setattr(observation, "ANCHOR_CANDIDATES", 6)
    observed = rounds._observed
    checked = 0

    def check(bench: Bench, drafting: DraftRound, num_accepted: int, anchor: int) -> ObservedRound:
        nonlocal checked
        kept = observed(bench, drafting, num_accepted, anchor)
        assert drafting.foresight is not None
        log_p = drafting.outlook(drafting.foresight)
        assert kept.log_p.shape[1] < log_p.shape[1]
        drafts = networks.to_columns(drafting.block.token_ids)
        ends = networks.to_columns([END_ID])
        for mine, full in (
            (top_outcomes(kept.log_p, kept.draft_columns, 6), top_outcomes(log_p, drafts, 6)),
            (
                calibrated_scores(kept.log_p, kept.draft_columns, kept.confidences, calibration, 6),
                calibrated_scores(log_p, drafts, kept.confidences, calibration, 6),
            ),
        ):
            mine, full = select(mine, 16, kept.excluded_columns), select(full, 16, ends)
            assert torch.equal(mine.num_accepted, full.num_accepted)
            torch.testing.assert_close(mine.score, full.score)
            # A kept column is right when it holds the same numbers.
            torch.testing.assert_close(kept.log_p[:, mine.column], log_p[:, full.column])
        torch.testing.assert_close(kept.log_p[:, kept.anchor_column], log_p[:, networks.to_columns([anchor])[0]])
        checked += 1
        return kept

    monkeypatch.setattr(rounds, "_observed", check)
    assert list(observe_text(bench, [1, 30, 2], SamplingParameters(0.0), 0))
    assert checked > 3


@pytest.fixture
def calibrate(target_folder: Path, models_folder: TinyModels, tmp_path: Path) -> Callable[..., int]:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p/{index}", "turns": [f"t{9 + index} t{100 - index}"]} for index in range(12)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(*flags: str, draft: Path | None = None) -> int:
        folders = ["--model", str(target_folder), "--draft", str(draft or models_folder.draft("trained"))]
        folders += ["--adapter", str(models_folder.adapter()), "--prompts", str(prompts)]
        limits = ["--num-draft-tokens", "4", "--max-tokens", "20", "--dtype", "float32", "--prompts-per-file", "3"]
        return main(["calibrate", *folders, "--output", str(tmp_path / "out"), *limits, "--skip", "4", *flags])

    return run


def test_calibration_is_fitted_reported_and_loads(
    calibrate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate() == 0
    calibration = Calibration.from_json((tmp_path / "out" / "budget-5.json").read_text())
    assert calibration.weights != (0.0,) * 6
    report = json.loads((tmp_path / "out" / "report-5.json").read_text())
    assert report["num_rounds"] > 10
    assert len(report["prompts"]["prompts.jsonl"]) == 3
    assert report["is_cross_fitted"]
    assert set(report["hit_rate"]) == set(SCORE_RULES)
    for rates in report["hit_rate"].values():
        ordered = [rates[str(size)] for size in CACHE_SIZES]
        assert ordered == sorted(ordered)
        assert 0 <= ordered[0] <= ordered[-1] <= 1
    assert report["hit_rate"]["served"]["16"] > 0.2
    told = capsys.readouterr().out
    assert all(f"hit rate {rule}: B=1 " in told for rule in SCORE_RULES)
    assert "threshold: " in told
    # The same rounds give the same numbers.
    first = (tmp_path / "out" / "budget-5.json").read_text()
    assert calibrate() == 0
    assert (tmp_path / "out" / "budget-5.json").read_text() == first
    assert not list((tmp_path / "out").glob("*.partial"))


def test_wrong_input_of_a_calibration(
    calibrate: Callable[..., int],
    models_folder: TinyModels,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def last_error() -> str:
        return capsys.readouterr().err.strip().splitlines()[-1]

    assert calibrate("--skip", "12") == 2
    assert "no prompt is left after the first 12" in last_error()
    assert calibrate("--model", "nowhere") == 2
    assert "there is no such folder" in last_error()
    other = tmp_path / "other"
    other.mkdir()
    source = models_folder.draft("trained")
    (other / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    config = json.loads((source / "config.json").read_text()) | {"vocab_size": VOCAB_SIZE + 1}
    (other / "config.json").write_text(json.dumps(config))
    assert calibrate(draft=other) == 2
    assert f"vocab_size is {VOCAB_SIZE + 1}, the target's is {VOCAB_SIZE}" in last_error()
    assert not list((tmp_path / "out").glob("budget-*"))
