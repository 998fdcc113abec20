"""`jetspecpp generate`: one answer in the terminal, streamed as it is generated."""

# ruff: noqa: T201 - a command of the command line

import argparse
import asyncio
import sys
import time

from pydantic import ValidationError

from server.answer import Answer, Usage
from server.config import ConfigError, ServeConfig
from server.engine import EngineDead, EngineError
from server.errors import ApiError
from server.metrics import Metrics
from server.openai_types import ChatBody, ChatMessage, CompletionBody, SamplingBody
from server.preparation import Prepared, prepare_chat, prepare_completion
from server.serve import configure_logging
from server.service import Service, StartupError, open_service
from server.state import ServerState, Serving

EXIT_FAILURE = 1
NUMBERS = {"max_tokens": int, "temperature": float, "top_p": float, "top_k": int, "min_p": float, "sampling_seed": int}


def generate(parsed: argparse.Namespace, config: ServeConfig) -> int:
    """Run the command; returns the exit status. Raises `ConfigError` for wrong input."""
    prompt = parsed.prompt if parsed.prompt is not None else _read_stdin()
    if not prompt.strip():
        raise ConfigError("the prompt is empty")
    numbers = _numbers(parsed)
    configure_logging(config.log_level)
    try:
        asyncio.run(_generate(parsed, config, prompt, numbers))
    except ApiError as error:
        raise ConfigError(error.message) from None
    except (StartupError, EngineError) as error:
        print(f"\njetspecpp: {error}", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise ConfigError("the prompt on standard input is no valid UTF-8") from None


def _numbers(parsed: argparse.Namespace) -> dict[str, int | float]:
    """The sampling flags that were given."""
    numbers: dict[str, int | float] = {}
    for name, kind in NUMBERS.items():
        text = getattr(parsed, name)
        if text is None:
            continue
        try:
            numbers["seed" if name == "sampling_seed" else name] = kind(text)
        except ValueError:
            raise ConfigError(f"--{name.replace('_', '-')}: expected a number, got {text!r}") from None
    return numbers


async def _generate(
    parsed: argparse.Namespace, config: ServeConfig, prompt: str, numbers: dict[str, int | float]
) -> None:
    metrics = Metrics(config.num_speculative_tokens)
    async with open_service(config, metrics) as service:
        serving = await wait_for_model(service)
        prepared = await _prepare(parsed, prompt, numbers, serving, ServerState(config, metrics))
        started_at = time.perf_counter()
        async with Answer(service.engine, metrics, prepared.plan, started_at) as answer:
            async for piece in answer.pieces():
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        print()
        if parsed.stats:
            print(_statistics(answer.usage, time.perf_counter() - started_at), file=sys.stderr)


async def wait_for_model(service: Service) -> Serving:
    """Wait for the workers, with a word about it where somebody is watching."""
    is_watched = sys.stderr.isatty()
    if is_watched:
        print("loading the model ...", end="", file=sys.stderr, flush=True)
    info = await service.wait_until_ready()
    if is_watched:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if service.config.method != "ar" and not service.metrics.is_drafter_up:
        print("jetspecpp: the drafter did not come up; decoding without it", file=sys.stderr)
    return Serving(service.model, service.engine, info, service.config)


async def _prepare(
    parsed: argparse.Namespace,
    prompt: str,
    numbers: dict[str, int | float],
    serving: Serving,
    state: ServerState,
) -> Prepared:
    if serving.engine.failure is not None:
        raise EngineDead(serving.engine.failure)
    settings: dict[str, object] = {"max_tokens": None, "speculative": not parsed.no_speculation, **numbers}
    try:
        if parsed.raw or serving.model.tokenizer.chat_template is None:
            completion = CompletionBody.model_validate({"prompt": prompt, **settings})
            return await prepare_completion(completion, serving, state.seeds)
        messages = [ChatMessage(role="user", content=prompt)]
        chat = ChatBody.model_validate({"messages": messages, **settings})
        return await prepare_chat(chat, serving, state.seeds)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ConfigError(f"{_flag(first['loc'][0])}: {first['msg']}") from None


def _flag(field: object) -> str:
    name = {"seed": "sampling_seed", "messages": "prompt"}.get(str(field), str(field))
    return name if name not in (*NUMBERS, *SamplingBody.model_fields) else "--" + name.replace("_", "-")


def _statistics(usage: Usage, elapsed_s: float) -> str:
    num_drafts = usage.num_accepted_drafts + usage.num_rejected_drafts
    return (
        f"{usage.num_prompt_tokens} prompt tokens, {usage.num_generated_tokens} generated in {elapsed_s:.2f} s "
        f"({usage.num_generated_tokens / max(elapsed_s, 1e-9):.1f} tokens/s), "
        f"{usage.num_accepted_drafts} of {num_drafts} drafts accepted"
    )
