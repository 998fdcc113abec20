"""The benchmark as a story: reference texts, the best γ of each method, every contestant in turn, then several requests
at a time."""

import argparse
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evaluation.bench.concurrency import put_under_load
from evaluation.bench.contestants import (
    BASELINE,
    CACHED_METHOD,
    PEER_GAMMAS,
    Contestant,
    choose_methods,
    peers,
    with_cache_sizes,
)
from evaluation.bench.errors import ContestantFailed, WrongInput
from evaluation.bench.measure import (
    BenchPrompt,
    Measured,
    Runner,
    best_gamma,
    measure,
    speedups_by_gamma,
    warm_up,
    with_reference,
)
from evaluation.bench.peers import PeerMissing, PeerSetup, model_file
from evaluation.bench.report import Report
from evaluation.bench.runners import ServerRunner, Stage, grouped
from evaluation.prompts import Prompt, load_prompts
from evaluation.provenance import describe_run
from server.models import DEMO_NAME, ResolvedModel, resolve

logger = logging.getLogger("jetspec.bench")


@dataclass(frozen=True)
class Plan:
    """Everything a run is told. prompts, sweep_prompts: by data set, the latter disjoint from what is measured."""

    contestants: list[Contestant]
    prompts: dict[str, list[Prompt]]
    sweep_prompts: dict[str, list[Prompt]]
    max_tokens: int
    gammas: tuple[int, ...]
    cache_sizes: tuple[int, ...]
    concurrency: tuple[int, ...]
    max_processes: int
    max_model_len: int
    stage: Stage
    settings: dict[str, object]


def plan_run(parsed: argparse.Namespace, server_flags: tuple[str, ...]) -> Plan:
    """Check everything that can be checked before anything starts.

    Raises `WrongInput`, `PromptFileError` or `ModelError`, whose messages name the flag or the file and line.
    """
    contestants = choose_methods(parsed.methods) + (peers() if parsed.peers else [])
    sweeps = parsed.num_speculative_tokens is None and any(c.drafts for c in contestants)
    gammas = tuple(parsed.gammas) if sweeps else ()
    if parsed.num_speculative_tokens is not None:
        contestants = [c.with_gamma(parsed.num_speculative_tokens) if c.drafts else c for c in contestants]
    if parsed.cache_sizes and CACHED_METHOD not in [c.method for c in contestants]:
        raise WrongInput(f"--cache-sizes: {CACHED_METHOD} is not among the methods")
    num_sweep = parsed.sweep_prompts if gammas else 0
    loaded = {
        dataset: load_prompts(dataset, parsed.prompts_dir, parsed.num_prompts + num_sweep)
        for dataset in parsed.datasets.split(",")
    }
    model = resolve(parsed.model)
    common = ("--model", parsed.model, "--dtype", parsed.dtype, "--max-model-len", str(parsed.max_model_len))
    cores = ("--verify-core", parsed.verify_core, "--draft-core", parsed.draft_core)
    return Plan(
        contestants=contestants,
        prompts={dataset: prompts[: parsed.num_prompts] for dataset, prompts in loaded.items()},
        # A file with too few prompts for both is swept on its first ones.
        sweep_prompts={
            name: (prompts[parsed.num_prompts :] or prompts)[:num_sweep] for name, prompts in loaded.items()
        },
        max_tokens=parsed.max_tokens,
        gammas=gammas,
        cache_sizes=parsed.cache_sizes,
        concurrency=parsed.concurrency,
        max_processes=parsed.max_servers,
        max_model_len=parsed.max_model_len,
        stage=_stage(parsed, model, (*common, *cores, *server_flags)),
        settings=describe_run().as_json()
        | {"model": model.name, "dtype": parsed.dtype, "max tokens": parsed.max_tokens},
    )


def run(plan: Plan, report: Report, keep: Callable[[], None]) -> None:
    """Everything; results go to `report` as they come, and `keep` is called after every prompt.

    Raises `WrongInput` when a contestant that was asked for cannot start.
    """
    baseline = [contestant for contestant in plan.contestants if contestant.name == BASELINE]
    with plan.stage.open(baseline, {}) as kept:
        prompts, sweep_prompts = _reference_texts(plan, kept[0])
        contestants = _with_best_gammas(plan, sweep_prompts, report, kept) if plan.gammas else plan.contestants
        if plan.cache_sizes:
            gammas = [contestant.gamma for contestant in contestants if contestant.method == CACHED_METHOD]
            contestants = [*contestants, *(with_cache_sizes(plan.cache_sizes, gammas[0]) if gammas else ())]
        for group in grouped(contestants, plan.max_processes):
            with plan.stage.open(group, report.skipped, kept) as runners:
                going = warm_up(runners, prompts[0], report.measured)
                logger.info("measuring %d contestants on %d prompts", len(going), len(prompts))
                measure(going, prompts, report.measured, keep)
    if plan.concurrency:
        _measure_concurrency(plan, contestants, prompts, report, keep)


def _reference_texts(plan: Plan, runner: Runner) -> tuple[list[BenchPrompt], list[BenchPrompt]]:
    """The prompts to measure and those to choose γ with, each with plain decoding's text."""
    assert isinstance(runner, ServerRunner)
    logger.info("reference texts")
    measured = _references(runner, plan.prompts, plan)
    swept = _references(runner, plan.sweep_prompts, plan)
    if not measured:
        raise WrongInput("--datasets: no prompt is left: all are too long, or their texts too short, to be measured")
    return measured, swept or measured[:1]


def _references(runner: ServerRunner, prompts: dict[str, list[Prompt]], plan: Plan) -> list[BenchPrompt]:
    found = []
    try:
        for dataset, of_dataset in prompts.items():
            for prompt in of_dataset:
                token_ids = runner.client.tokenize(prompt.text)
                if len(token_ids) + plan.max_tokens > plan.max_model_len:
                    logger.warning("%s, prompt %s is too long and left out", dataset, prompt.id)
                    continue
                made = with_reference(runner, prompt.id, dataset, token_ids, plan.max_tokens)
                if made is None:
                    logger.warning("%s, prompt %s has too short an answer and is left out", dataset, prompt.id)
                else:
                    found.append(made)
    except ContestantFailed as error:
        raise WrongInput(f"{BASELINE}: {error}") from error
    return found


def _with_best_gammas(
    plan: Plan, prompts: Sequence[BenchPrompt], report: Report, kept: Sequence[Runner]
) -> list[Contestant]:
    """Everyone with the γ that was fastest on some prompts that are not measured later."""
    trial = Measured()
    not_started: dict[str, str] = {}
    candidates = [
        # One γ must work for a method that was asked for; another may be beyond what its weights were trained for.
        replace(contestant.with_gamma(gamma), is_required=contestant.is_required and gamma == plan.gammas[0])
        for contestant in plan.contestants
        if contestant.drafts
        for gamma in (plan.gammas if contestant.peer is None else PEER_GAMMAS)
    ]
    baseline = [contestant for contestant in plan.contestants if contestant.name == BASELINE]
    for group in grouped([*baseline, *candidates], plan.max_processes):
        with plan.stage.open(group, not_started, kept) as runners:
            measure(warm_up(runners, prompts[0], trial), prompts, trial)
    tried = report.speedups_by_gamma = speedups_by_gamma(trial)
    chosen = []
    for contestant in plan.contestants:
        gamma = best_gamma(tried.get(contestant.name, {}))
        if gamma is not None:
            logger.info("%s: γ=%d is the fastest of %s", contestant.name, gamma, sorted(tried[contestant.name]))
            chosen.append(contestant.with_gamma(gamma))
        elif contestant.drafts:
            report.skipped[contestant.name] = not_started.get(contestant.name, "no γ could be tried")
        else:
            chosen.append(contestant)
    return chosen


def _measure_concurrency(
    plan: Plan,
    contestants: Sequence[Contestant],
    prompts: Sequence[BenchPrompt],
    report: Report,
    keep: Callable[[], None],
) -> None:
    """Plain decoding and the foresight method, turn by turn at each level, on servers with room for the most."""
    flags = ("--max-num-seqs", str(max(plan.concurrency)))
    chosen = [replace(c, flags=(*c.flags, *flags)) for c in contestants if c.name in (BASELINE, CACHED_METHOD)]
    with plan.stage.open(chosen, report.skipped) as runners:
        going: list[Runner] = warm_up(runners, prompts[0], report.measured)
        for level in plan.concurrency:
            for runner in list(going):
                logger.info("%s, %d requests at a time", runner.contestant.name, level)
                try:
                    report.loads.append(put_under_load(runner, prompts, level))
                except ContestantFailed as error:
                    report.measured.failures[f"{runner.contestant.name} under load"] = str(error)
                    going.remove(runner)
                keep()


def _stage(parsed: argparse.Namespace, model: ResolvedModel, server_flags: tuple[str, ...]) -> Stage:
    core = _peer_core(parsed.verify_core)
    is_demo = parsed.model == DEMO_NAME
    setup = PeerSetup(model.folder, is_demo, _peer_dtype(parsed), list(model.eos_token_ids), core, parsed.peer_python)
    return Stage(server_flags, setup, lambda kind: model_file(kind, setup, _write_gguf))


def _peer_core(verify_core: str) -> int | None:
    """Peers run where the verifier runs."""
    cores = sorted(os.sched_getaffinity(0))
    if verify_core == "none" or len(cores) < 2:
        return None
    if verify_core == "auto":
        return cores[0]
    if not verify_core.isdigit() or int(verify_core) not in cores:
        raise WrongInput(f"--verify-core: must be auto, none or one of {cores}, got {verify_core!r}")
    return int(verify_core)


def _peer_dtype(parsed: argparse.Namespace) -> str:
    """transformers' faster type: torch's kernels are all it has. Asked where peers run only, since it takes torch."""
    if not parsed.peers or parsed.dtype != "auto":
        return str(parsed.dtype)
    from modeling.runtime import has_fast_bfloat16

    return "bfloat16" if has_fast_bfloat16() else "float32"


def _write_gguf(folder: Path) -> Path:
    from evaluation.bench.gguf_file import cached_gguf
    from modeling.architecture import UnsupportedModel
    from modeling.demo import cache_folder

    try:
        return cached_gguf(folder, cache_folder())
    except (UnsupportedModel, OSError) as error:
        raise PeerMissing(str(error)) from error
