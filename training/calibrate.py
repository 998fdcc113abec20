"""`jetspecpp train calibrate`: fits the outcome scores of equation 8 to held-out rounds and says what the fit is worth.

Hit rates and coverage come from rounds of other prompts than the fit that is measured (two halves, each fitted on the
other); the calibration that is written is fitted on all rounds, both temperatures pooled.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from decoding.calibration import (
    RoundRecord,
    fit,
    observe_round,
    realised_score,
)
from decoding.observation import ObservedRound
from decoding.plan import PassPlan
from decoding.rules import SCORE_RULES, outcome_rank, scored_outcomes
from decoding.sampling import SamplingParameters
from decoding.selection import select
from server.models import default_weights
from server.tokenizer import Tokenizer
from training.errors import InputError
from training.output import StopRequest, exclusive
from training.prompts import SHUFFLE_SEED, read_prompts, shuffled, worded
from training.rounds import Bench, observe_text, open_bench
from training.session import Place, note, open_target

CACHE_SIZES = (1, 2, 4, 8, 16)
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class CalibrateOptions:
    """The command's flags. `draft` and `adapter` None: those shipped for the model."""

    prompts: tuple[Path, ...]
    output: Path
    model: str
    draft: Path | None
    adapter: Path | None
    dtype: str
    num_draft_tokens: int
    passes: int
    refreshes: int
    cache_size: int
    prompts_per_file: int
    skip: int
    max_tokens: int
    max_prompt_tokens: int
    target_rate: float
    minutes: float | None
    threads: int | None
    core: int | None
    device: str
    seed: int


@dataclass(frozen=True)
class HeldOutPrompt:
    """A prompt in the model's template, and the file it comes from."""

    file: str
    prompt_id: str
    token_ids: list[int]


@dataclass(frozen=True)
class Observation:
    """A round, what it teaches, and the number of the prompt it belongs to."""

    prompt: int
    round: ObservedRound
    record: RoundRecord


@dataclass(frozen=True)
class CalibrationReport:
    """What is written beside a calibration: where it comes from, and how well it did on rounds it had not seen.

    hit_rate: by rule and cache size. coverage: share of rounds whose outcome reached the threshold; cache_entries: how
    many outcomes reach it on average. is_cross_fitted: false where one prompt had to serve for fit and measure.
    """

    num_rounds: int
    is_cross_fitted: bool
    tau: float
    hit_rate: dict[str, dict[str, float]]
    coverage: float | None
    cache_entries: float | None
    target_rate: float
    shuffle_seed: int
    skipped: int
    prompts: dict[str, list[str]]

    def lines(self) -> list[str]:
        """For people."""
        found = [f"{self.num_rounds} rounds, tau {self.tau:.3f}"]
        for rule, rates in self.hit_rate.items():
            sizes = " ".join(f"B={size} {rate:.3f}" for size, rate in rates.items())
            found.append(f"hit rate {rule}: {sizes}")
        if self.coverage is None:
            found.append(f"threshold: none, {self.target_rate} cannot be promised from these rounds")
        else:
            covered = f"covers {self.coverage:.3f} (aim {self.target_rate})"
            found.append(f"threshold: {covered}, {self.cache_entries:.1f} entries a round")
        return found


def calibrate(options: CalibrateOptions) -> None:
    """Run rounds, fit, report, write. Raises `InputError`, `UnsupportedModel` or OSError."""
    device = Place(options.device, options.core, options.threads, options.seed).prepare()
    files = open_target(options.model)
    draft, adapter = _weights(options)
    prompts = choose_prompts(options, files.tokenizer)
    with exclusive(options.output):
        target = files.load(device, options.dtype)
        num_positions = options.max_prompt_tokens + options.max_tokens + 2 * (options.num_draft_tokens + 1)
        bench = open_bench(
            target,
            draft,
            adapter,
            options.num_draft_tokens,
            PassPlan(options.passes, options.refreshes, options.cache_size),
            files.tokenizer.eos_token_ids,
            min(num_positions, target.architecture.max_positions),
            options.max_tokens,
        )
        stop = StopRequest()
        with stop.listening():
            observations = list(observe(bench, prompts, options, stop))
        if not observations:
            raise InputError("no round was observed: give more prompts, more --minutes or more --max-tokens")
        calibration = fit([item.record for item in observations], options.target_rate)
        report = make_report(observations, prompts, options)
        budget = options.num_draft_tokens + 1
        write_text(options.output / f"budget-{budget}.json", calibration.to_json() + "\n")
        write_text(options.output / f"report-{budget}.json", json.dumps(asdict(report), indent=1) + "\n")
        for line in report.lines():
            print(line)
        print(f"wrote {options.output / f'budget-{budget}.json'}")


def _weights(options: CalibrateOptions) -> tuple[Path, Path]:
    shipped = default_weights(options.model)
    draft = options.draft or (None if shipped is None else shipped.draft)
    adapter = options.adapter or (None if shipped is None else shipped.adapter)
    if draft is None or adapter is None:
        raise InputError(f"--draft and --adapter: none are shipped for {options.model}; give both folders")
    return draft, adapter


def choose_prompts(options: CalibrateOptions, tokenizer: Tokenizer) -> list[HeldOutPrompt]:
    """The prompts after the evaluation's in each file's fixed shuffle. Raises `InputError` when none is left."""
    chosen: list[HeldOutPrompt] = []
    for path in options.prompts:
        left = shuffled(read_prompts(path))[options.skip :]
        taken = 0
        for prompt in left:
            message = {"role": "user", "content": worded(prompt, path)}
            text = tokenizer.render_chat([message], add_generation_prompt=True)
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            if taken < options.prompts_per_file and len(token_ids) <= options.max_prompt_tokens:
                chosen.append(HeldOutPrompt(path.name, prompt.prompt_id, token_ids))
                taken += 1
        if taken < options.prompts_per_file:
            note(f"{path}: {taken} prompts after the first {options.skip}")
    if not chosen:
        raise InputError(f"no prompt is left after the first {options.skip} of each file; lower --skip")
    return chosen


def observe(
    bench: Bench, prompts: Sequence[HeldOutPrompt], options: CalibrateOptions, stop: StopRequest
) -> Iterator[Observation]:
    """Rounds of all prompts at both temperatures, files in turn, so that a time limit cuts all files alike."""
    started = time.monotonic()
    order = sorted(range(len(prompts)), key=lambda index: _rank_in_file(prompts, index))
    for done, index in enumerate(order):
        for temperature in TEMPERATURES:
            sampling = SamplingParameters(temperature, seed=options.seed)
            for observed in observe_text(bench, prompts[index].token_ids, sampling, index):
                record = observe_round(
                    observed.log_p,
                    observed.draft_columns,
                    observed.confidences,
                    observed.num_accepted,
                    observed.anchor_column,
                )
                yield Observation(index, observed, record)
                elapsed = time.monotonic() - started
                if stop() or (options.minutes is not None and elapsed > 60 * options.minutes):
                    note(f"stopped after {done} of {len(prompts)} prompts")
                    return
        note(f"{done + 1}/{len(prompts)} prompts, {time.monotonic() - started:.0f} s")


def _rank_in_file(prompts: Sequence[HeldOutPrompt], index: int) -> int:
    return sum(other.file == prompts[index].file for other in prompts[:index])


def make_report(
    observations: Sequence[Observation], prompts: Sequence[HeldOutPrompt], options: CalibrateOptions
) -> CalibrationReport:
    """Measure every rule on rounds of prompts it was not fitted on."""
    halves = [[item for item in observations if item.prompt % 2 == parity] for parity in (0, 1)]
    pairs = [(halves[1], halves[0]), (halves[0], halves[1])] if all(halves) else [(list(observations),) * 2]
    hits = {rule: dict.fromkeys(CACHE_SIZES, 0) for rule in SCORE_RULES}
    num_covered, num_entries, has_threshold = 0, 0, True
    for fitted_on, measured_on in pairs:
        calibration = fit([item.record for item in fitted_on], options.target_rate)
        for item in measured_on:
            for rule in SCORE_RULES:
                rank = outcome_rank(item.round, rule, calibration, max(CACHE_SIZES))
                for size in CACHE_SIZES:
                    hits[rule][size] += rank is not None and rank < size
        if calibration.threshold is None:
            has_threshold = False
            continue
        threshold = calibration.threshold
        for item in measured_on:
            score = realised_score(item.record, calibration.weights, calibration.anchor_temperature)
            num_covered += score >= threshold
            table = scored_outcomes(item.round, "served", calibration)
            num_entries += len(select(table, len(table), item.round.excluded_columns, threshold))
    count = len(observations)
    return CalibrationReport(
        num_rounds=count,
        is_cross_fitted=len(pairs) > 1,
        tau=sum(item.round.num_accepted + 1 for item in observations) / count,
        hit_rate={rule: {str(size): n / count for size, n in by_size.items()} for rule, by_size in hits.items()},
        coverage=num_covered / count if has_threshold else None,
        cache_entries=num_entries / count if has_threshold else None,
        target_rate=options.target_rate,
        shuffle_seed=SHUFFLE_SEED,
        skipped=options.skip,
        prompts={
            file: [prompt.prompt_id for prompt in prompts if prompt.file == file]
            for file in dict.fromkeys(prompt.file for prompt in prompts)
        },
    )


def write_text(path: Path, text: str) -> None:
    """Write a file in one piece."""
    temporary = path.with_name(path.name + ".partial")
    try:
        temporary.write_text(text, encoding="utf-8")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(path)
