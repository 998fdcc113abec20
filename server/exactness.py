"""`jetspecpp exactness`: are the texts of every drafting method, token for token, those of plain decoding?

Both go through the same running engine, several at a time, so that what is compared is what is served: the company a
sequence has, the timing and the drafts may differ, the tokens may not.
"""

# ruff: noqa: T201 - a command of the command line

import argparse
import asyncio
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast, get_args

from protocol.fields import TokenLogprobs
from protocol.messages import Finished, PromptLogprobs, RoundResult
from server.config import ConfigError, DtypeChoice, MethodChoice, ServeConfig, flag_of, from_arguments
from server.draft_files import find_draft_files
from server.engine import EngineError
from server.exactness_requests import Parameters, request_for
from server.metrics import ROUND_LABELS, Metrics
from server.serve import configure_logging
from server.service import StartupError, open_service
from server.state import Serving
from server.terminal import wait_for_model
from server.tokenizer import Tokenizer, TokenizerError

logger = logging.getLogger("jetspec.exactness")

EXIT_FAILURE = 1
BASELINE = "ar"
METHODS = tuple(method for method in get_args(MethodChoice) if method != BASELINE)
ALL = "all"
ONE_METHODS_FLAGS = ("draft_model", "adapter", "calibration")
TEMPERATURES = (0.0, 1.0)

PROMPTS = (
    "Explain in a few sentences why the sky is blue during the day and red at sunset.",
    "A train travels 60 km in 45 minutes. How long does it need for 200 km at the same speed? Show your steps.",
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "Give me three tips for learning a new language, each in one sentence.",
    "What is the sum of the first 20 odd numbers? Explain how you know.",
    "Write a short letter to a neighbour asking them to water the plants next week.",
    "Write a SQL query that lists the five customers with the highest total of orders.",
    "Summarise the story of Little Red Riding Hood in one paragraph.",
    "If 3x + 7 = 25, what is x? Check your answer.",
    "List the planets of the solar system in order, with one fact about each.",
    "Explain what a hash table is to someone who has never programmed.",
    "Write a bash command that counts the lines of all .txt files in a folder, and explain it.",
)


@dataclass(frozen=True)
class Result:
    """One comparison: of `total` texts, so many were identical to those of the baseline."""

    method: str
    temperature: float
    dtype: str
    parameters: Parameters
    identical: int
    total: int


@dataclass(frozen=True)
class Comparison:
    """The results of one method, and whether any draft was verified in it: plain decoding equals itself."""

    results: list[Result]
    is_meaningful: bool


@dataclass(frozen=True)
class Text:
    """What one generation gave; the log-probabilities where they were asked for."""

    token_ids: tuple[int, ...]
    reason: str
    stop_token_id: int | None
    logprobs: tuple[TokenLogprobs, ...]


def exactness(parsed: argparse.Namespace) -> int:
    """Run the command; returns 0 when every text is identical. Raises `ConfigError` for wrong input."""
    dtypes = _choices("--dtype", parsed.dtype or ["auto"], get_args(DtypeChoice))
    methods = _methods(parsed)
    num_prompts = _count("--num-prompts", parsed.num_prompts)
    max_tokens = _count("--max-tokens", parsed.max_tokens)
    prompts = _prompts(parsed.prompts, num_prompts)
    (parameters,) = _choices("--parameters", [parsed.parameters], get_args(Parameters))
    quiet = {} if parsed.log_level else {"log_level": "warning"}
    arguments = {**vars(parsed), "dtype": None}
    configs = [
        from_arguments(arguments, os.environ, dtype=dtype, method=method, **quiet)
        for dtype in dtypes
        for method in methods
    ]
    if len(methods) > 1:
        for config in configs:
            find_draft_files(config)  # so that nothing runs for minutes before a missing folder is named
    configure_logging(configs[0].log_level)
    results: list[Result] = []
    silent: list[str] = []
    for config in configs:
        try:
            comparison = asyncio.run(_compare(config, prompts, max_tokens, cast(Parameters, parameters)))
        except (StartupError, EngineError) as error:
            logger.error("%s: %s", config.method, error)
            silent.append(config.method)
            continue
        results += comparison.results
        if not comparison.is_meaningful:
            logger.error(
                "%s: the drafter was never in time: no draft was verified, so the comparison shows nothing",
                config.method,
            )
            silent.append(config.method)
    if parsed.json is not None:
        _write(Path(parsed.json), results)
    return _verdict(results, silent)


def _methods(parsed: argparse.Namespace) -> list[str]:
    """The methods asked for, `all` spelled out. Files given by flag belong to one method."""
    given = [name for item in parsed.methods or ["jetspec++"] for name in item.split(",")]
    methods = list(METHODS) if given == [ALL] else _choices("--methods", given, (*METHODS, ALL))
    if ALL in methods:
        raise ConfigError(f"--methods: {ALL} stands alone")
    for name in ONE_METHODS_FLAGS:
        if len(methods) > 1 and getattr(parsed, name) is not None:
            raise ConfigError(f"{flag_of(name)}: its files are for one method, and --methods names {len(methods)}")
    return methods


def _verdict(results: Sequence[Result], silent: Sequence[str]) -> int:
    different = sorted({result.method for result in results if result.identical < result.total})
    if different:
        print(f"verdict: {', '.join(different)} differs from {BASELINE}")
    elif silent:
        print(f"verdict: nothing was compared for {', '.join(sorted(set(silent)))}")
    else:
        print(f"verdict: all identical to {BASELINE}")
    return EXIT_FAILURE if different or silent else 0


async def _compare(config: ServeConfig, prompts: Sequence[str], max_tokens: int, parameters: Parameters) -> Comparison:
    metrics = Metrics(config.num_speculative_tokens)
    results: list[Result] = []
    async with open_service(config, metrics) as service:
        serving = await wait_for_model(service)
        if not metrics.is_drafter_up:
            raise StartupError("without a drafter there is nothing to compare")
        token_ids = [_tokenise(prompt, service.model.tokenizer) for prompt in prompts]
        _check_lengths(token_ids, max_tokens, serving.max_model_len)
        for temperature in TEMPERATURES:
            baseline = await _run(serving, token_ids, temperature, max_tokens, parameters, speculative=False)
            texts = await _run(serving, token_ids, temperature, max_tokens, parameters, speculative=True)
            num_identical = _num_identical(config.method, baseline, texts)
            results.append(
                Result(config.method, temperature, serving.info.dtype, parameters, num_identical, len(texts))
            )
            _print(results[-1])
        _report_rounds(config.method, metrics)
    drafted = sum(metrics.num_rounds(label) for label in ROUND_LABELS if label != "autoregressive")
    return Comparison(results, drafted > 0)


async def _run(
    serving: Serving,
    prompts: Sequence[list[int]],
    temperature: float,
    max_tokens: int,
    parameters: Parameters,
    *,
    speculative: bool,
) -> list[Text]:
    """All texts of one method; the verifier runs as many at a time as it has slots."""

    async def one(index: int, token_ids: list[int]) -> Text:
        stops = serving.model.tokenizer.eos_token_ids
        request = request_for(index, token_ids, temperature, max_tokens, stops, serving.num_token_ids, parameters)
        committed: list[int] = []
        logprobs: list[TokenLogprobs] = []
        async for event in serving.engine.generate(replace(request, speculative=speculative)):
            if isinstance(event, Finished):
                return Text(tuple(committed), event.reason, event.stop_token_id, tuple(logprobs))
            if isinstance(event, PromptLogprobs):
                logprobs += event.entries
            if isinstance(event, RoundResult):
                committed += event.token_ids
                logprobs += event.logprobs or []
        raise AssertionError("a generation ends with Finished or raises")

    return list(await asyncio.gather(*(one(index, token_ids) for index, token_ids in enumerate(prompts))))


def _num_identical(method: str, baseline: Sequence[Text], texts: Sequence[Text]) -> int:
    for index, (expected, found) in enumerate(zip(baseline, texts, strict=True)):
        if expected != found:
            pairs = zip(expected.token_ids, found.token_ids, strict=False)
            position = next((at for at, (left, right) in enumerate(pairs) if left != right), None)
            ended_alike = replace(found, logprobs=expected.logprobs) == expected
            where = "its log-probabilities" if ended_alike else "the end" if position is None else f"token {position}"
            print(f"prompt {index}: {method} differs from {BASELINE} at {where}")
    return sum(expected == found for expected, found in zip(baseline, texts, strict=True))


def _tokenise(prompt: str, tokenizer: Tokenizer) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode(prompt)
    try:
        text = tokenizer.render_chat([{"role": "user", "content": prompt}], add_generation_prompt=True)
    except TokenizerError as error:
        raise ConfigError(str(error)) from None
    return tokenizer.encode(text, add_special_tokens=False)


def _check_lengths(prompts: Sequence[list[int]], max_tokens: int, max_model_len: int) -> None:
    longest = max(map(len, prompts))
    if longest + max_tokens > max_model_len:
        raise ConfigError(
            f"--max-tokens: {max_tokens} after a prompt of {longest} tokens exceeds the model's {max_model_len}"
        )


def _choices(flag: str, given: Sequence[str], allowed: Sequence[str]) -> list[str]:
    names = [name for item in given for name in item.split(",")]
    for name in names:
        if name not in allowed:
            raise ConfigError(f"{flag}: must be one of {', '.join(allowed)}, got {name!r}")
    return names


def _count(flag: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:12]) < 1 << 31:
        raise ConfigError(f"{flag}: expected a whole number above 0, got {text!r}")
    return int(text)


def _prompts(path: str | None, num_prompts: int) -> list[str]:
    prompts = list(PROMPTS) if path is None else _read_prompts(Path(path))
    if num_prompts > len(prompts):
        raise ConfigError(f"--num-prompts: {num_prompts} asked for, {len(prompts)} available")
    return prompts[:num_prompts]


def _read_prompts(path: Path) -> list[str]:
    """The first turn of every line."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [str(json.loads(line)["turns"][0]) for line in lines]
    except OSError as error:
        raise ConfigError(f"--prompts: {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f'--prompts: {path}: expected lines of JSON with {{"turns": [...]}}') from None


def _print(result: Result) -> None:
    print(
        f"{result.method:12} temperature {result.temperature:g}  {result.dtype:9} {result.parameters} parameters  "
        f"{result.identical} of {result.total} identical to {BASELINE}",
        flush=True,
    )


def _report_rounds(method: str, metrics: Metrics) -> None:
    counts = {label: int(metrics.num_rounds(label)) for label in ROUND_LABELS}
    print(f"{method:12} rounds: " + ", ".join(f"{count} {label}" for label, count in counts.items()))


def _write(path: Path, results: Sequence[Result]) -> None:
    try:
        path.write_text(json.dumps({"results": [asdict(result) for result in results]}, indent=2) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(f"--json: {path}: {error.strerror}") from None
