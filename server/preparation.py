"""From a request's body to sequences the engine can run: prompts, limits, sampling, and what the model limits."""

import asyncio
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.fields import LogitBias
from protocol.messages import SamplingFields
from server.answer import Plan
from server.choice import Opening, TextOptions
from server.engine import GenerationRequest
from server.errors import invalid
from server.openai_types import ChatBody, CompletionBody, SamplingBody
from server.prompts import (
    Echo,
    Prompt,
    check_token_ids,
    completion_prompts,
    context_of,
    conversation_prompt,
    echo_of,
    too_many_tokens,
)
from server.state import Serving
from server.structured import AskedGrammar, grammar_of

DEFAULT_COMPLETION_TOKENS = 16
DEFAULT_TEMPERATURE = 1.0
SEED_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class OutputOptions:
    """What an answer shows besides its text. Counts of log-probabilities are None where none are shown."""

    num_choices: int
    num_candidates: int
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    tokens_as_ids: bool
    return_token_ids: bool
    include_usage: bool
    continuous_usage: bool
    statistics: bool
    rounds: bool


@dataclass(frozen=True)
class Prepared:
    """A checked request. Sequences stand in the plan prompt by prompt, `output.num_candidates` for each."""

    model_name: str
    request_id: str | None
    prompts: list[Prompt]
    echoes: list[Echo] | None
    plan: Plan
    output: OutputOptions
    params: dict[str, str]
    """Which parameter of this request a field of the wire stands for, where the names differ."""


@dataclass(frozen=True)
class _Asked:
    """What the two interfaces spell differently."""

    prompt_param: str
    max_tokens: int | None
    best_of: int
    echo: bool
    num_logprobs: int | None


async def prepare_completion(body: CompletionBody, serving: Serving, seeds: random.Random) -> Prepared:
    """Check and tokenise a completion request; raises `ApiError` naming the parameter."""
    name = serving.check_name(body.model)
    n = body.n or 1
    best_of = n if body.best_of is None else body.best_of
    if best_of < n:
        raise invalid("best_of", f"is {best_of}, less than n, which is {n}")
    if best_of > n and body.stream:
        raise invalid("best_of", "greater than n cannot be streamed: the best is known at the end")
    limit = _asked_limit(body)
    is_default = limit is None and not body.model_fields_set & {"max_tokens", "max_completion_tokens"}
    asked = _Asked(
        prompt_param="prompt",
        max_tokens=DEFAULT_COMPLETION_TOKENS if is_default else limit,
        best_of=best_of,
        echo=body.echo is True,
        num_logprobs=body.logprobs,
    )
    if asked.max_tokens == 0 and not asked.echo and body.prompt_logprobs is None:
        raise invalid("max_tokens", "0 is allowed only with echo or prompt_logprobs")
    _check_sampling(body, serving, asked)
    return await _prepare(body, serving, seeds, name, await completion_prompts(body, serving), asked)


async def prepare_chat(body: ChatBody, serving: Serving, seeds: random.Random) -> Prepared:
    """Check, render and tokenise a conversation; raises `ApiError` naming the parameter."""
    name = serving.check_name(body.model)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    asked = _Asked(
        prompt_param="messages",
        max_tokens=_asked_limit(body),
        best_of=body.n or 1,
        echo=False,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    _check_sampling(body, serving, asked)
    return await _prepare(body, serving, seeds, name, [await conversation_prompt(body, serving)], asked)


def _asked_limit(body: SamplingBody) -> int | None:
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid("max_completion_tokens", "differs from max_tokens")
    return body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens


def _check_sampling(body: SamplingBody, serving: Serving, asked: _Asked) -> None:
    """Everything that can be said without the prompts."""
    config, tokenizer = serving.config, serving.model.tokenizer
    check_token_ids("stop_token_ids", body.stop_token_ids or [], serving)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "is only allowed when stream is true")
    for param, number in (("n", body.n or 1), ("best_of", asked.best_of)):
        if number > config.max_n:
            raise invalid(param, f"is {number}, more than {config.max_n}")
    logprobs_param = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
    for param, asked_number in ((logprobs_param, asked.num_logprobs), ("prompt_logprobs", body.prompt_logprobs)):
        if asked_number is not None and asked_number > config.max_logprobs:
            raise invalid(param, f"is {asked_number}, more than {config.max_logprobs}")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "is only allowed when stream is false")
    if body.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "must be at least 1, or -1 for what fits")
    if body.spaces_between_special_tokens is False and tokenizer.puts_spaces_between_special_tokens:
        raise invalid("spaces_between_special_tokens", "this model's tokenizer always sets special tokens apart")


async def _prepare(
    body: SamplingBody, serving: Serving, seeds: random.Random, name: str, prompts: list[Prompt], asked: _Asked
) -> Prepared:
    _check_number_of_sequences(len(prompts), asked, serving)
    prompts = [_truncated(prompt, body.truncate_prompt_tokens, asked.max_tokens, serving) for prompt in prompts]
    if not all(prompt.token_ids for prompt in prompts):
        raise invalid(asked.prompt_param, "must not be empty")
    grammar = grammar_of(body)
    requests = _requests(body, serving, seeds, prompts, asked, grammar)
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    if num_prompt_tokens > serving.config.max_total_prompt_tokens:
        limit = serving.config.max_total_prompt_tokens
        raise invalid(asked.prompt_param, f"{num_prompt_tokens} tokens in all prompts, more than {limit}")
    skips_special = body.skip_special_tokens is not False
    tokenizer = serving.model.tokenizer

    def make_echoes() -> list[Echo]:
        with_offsets = asked.num_logprobs is not None
        return [
            echo_of(prompt, tokenizer, shows_added=not skips_special, with_offsets=with_offsets) for prompt in prompts
        ]

    echoes = await asyncio.to_thread(make_echoes) if asked.echo else None
    openings = []
    for index, prompt in enumerate(prompts):
        context: list[int] = []
        if asked.prompt_param == "prompt":  # a conversation's answer is a text of its own
            context = context_of(prompt, tokenizer, is_echoed=asked.echo, skips_special=skips_special)
        num_echoed = len(echoes[index].text) if echoes is not None else 0
        openings += [Opening(context, num_echoed)] * asked.best_of
    return Prepared(
        model_name=name,
        request_id=body.request_id,
        prompts=prompts,
        echoes=echoes,
        plan=Plan(
            requests=requests,
            openings=openings,
            num_prompt_tokens=num_prompt_tokens,
            text=TextOptions(
                decode=lambda token_ids: tokenizer.decode(token_ids, skips_special),
                stops=body.stops,
                include_stop=body.include_stop_str_in_output is True,
                eos_token_ids=tokenizer.eos_token_ids,
                is_prompt_only=asked.max_tokens == 0,
            ),
            needs_engine=asked.max_tokens != 0 or requests[0].num_prompt_logprobs is not None,
        ),
        output=_output_options(body, asked),
        params={
            "prompt_token_ids": asked.prompt_param,
            "num_logprobs": "logprobs",
            "num_prompt_logprobs": "prompt_logprobs",
            "grammar": grammar.param if grammar is not None else "response_format",
        },
    )


def _check_number_of_sequences(num_prompts: int, asked: _Asked, serving: Serving) -> None:
    """Raise for a request that could never be taken whole."""
    number = num_prompts * asked.best_of
    limit = min(serving.config.max_num_choices, serving.engine.capacity)
    if number > limit:
        param = "n" if asked.best_of > 1 else asked.prompt_param
        raise invalid(param, f"the request asks for {number} sequences (prompts times choices), more than {limit}")


def _truncated(prompt: Prompt, num_kept: int | None, max_tokens: int | None, serving: Serving) -> Prompt:
    """The end of a prompt, if the request allows to leave out its beginning; -1 leaves room for the answer."""
    if num_kept is None:
        return prompt
    if num_kept < 0:
        num_kept = max(1, serving.max_model_len - max(1, max_tokens or 1))
    return prompt.last(num_kept)


def _requests(
    body: SamplingBody,
    serving: Serving,
    seeds: random.Random,
    prompts: Sequence[Prompt],
    asked: _Asked,
    grammar: AskedGrammar | None,
) -> list[GenerationRequest]:
    """One sequence per prompt and candidate, prompt by prompt."""
    limits = [_fit_max_tokens(asked.prompt_param, len(item.token_ids), asked.max_tokens, serving) for item in prompts]
    num_new = asked.best_of * sum(limits)
    if num_new > serving.config.max_total_new_tokens:
        message = f"{num_new} over all choices, more than {serving.config.max_total_new_tokens}"
        raise invalid("max_tokens", message)
    min_tokens = body.min_tokens or 0
    if min_tokens > min(limits):
        raise invalid("min_tokens", f"is {min_tokens}, more than max_tokens, which is {min(limits)}")
    sampling = _sampling(body, serving)
    eos_token_ids = () if body.ignore_eos else serving.model.tokenizer.eos_token_ids
    shows_best = asked.best_of > (body.n or 1)
    return [
        GenerationRequest(
            prompt_token_ids=prompt.token_ids,
            sampling=sampling.model_copy(update={"seed": _seed(body.seed, candidate, seeds)}),
            max_tokens=max(1, limit),
            stop_token_ids=sorted({*eos_token_ids, *(body.stop_token_ids or [])}),
            min_tokens=min_tokens,
            speculative=body.speculative is not False and limit > 0,
            num_logprobs=0 if shows_best and asked.num_logprobs is None else asked.num_logprobs,
            num_prompt_logprobs=_num_prompt_logprobs(body, asked),
            grammar=grammar.grammar if grammar is not None else None,
        )
        for prompt, limit in zip(prompts, limits, strict=True)
        for candidate in range(asked.best_of)
    ]


def _num_prompt_logprobs(body: SamplingBody, asked: _Asked) -> int | None:
    """What is shown of the prompt's tokens: as a parameter of its own, or with `echo` the same as of the text's."""
    wanted = [body.prompt_logprobs, asked.num_logprobs if asked.echo else None]
    numbers = [number for number in wanted if number is not None]
    return max(numbers) if numbers else None


def _sampling(body: SamplingBody, serving: Serving) -> SamplingFields:
    return SamplingFields(
        temperature=DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias or {}, serving),
    )


def _logit_bias(given: dict[str, float], serving: Serving) -> list[LogitBias]:
    """The biases by token id; JSON has only strings for keys."""
    biases: list[LogitBias] = []
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid("logit_bias", f"{key[:20]!r} is no token id")
        check_token_ids("logit_bias", [int(key)], serving)
        biases.append(LogitBias(token_id=int(key), bias=float(bias)))
    return biases


def _seed(given: int | None, candidate: int, seeds: random.Random) -> int:
    """The seed of a prompt's candidate: the request's own for the first, values derived from it for the others.

    A prompt's texts thus do not depend on the other prompts of the request, and the first not on `n`.
    """
    if given is None:
        return seeds.getrandbits(63)
    if candidate == 0:
        return given & SEED_MASK
    digest = hashlib.blake2b(f"{given & SEED_MASK}:{candidate}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) & SEED_MASK


def _fit_max_tokens(param: str, num_prompt_tokens: int, max_tokens: int | None, serving: Serving) -> int:
    """The limit of new tokens: as asked if it fits, or all the room there is when nothing was asked."""
    room = serving.max_model_len - num_prompt_tokens
    if room >= 1 and max_tokens is None:
        return room
    # Without an answer too, the engine reads a prompt only where it could continue it.
    if max_tokens is None or max(1, max_tokens) > room:
        raise too_many_tokens(param, num_prompt_tokens, None if max_tokens is None else max(1, max_tokens), serving)
    return max_tokens


def _output_options(body: SamplingBody, asked: _Asked) -> OutputOptions:
    options = body.stream_options
    return OutputOptions(
        num_choices=body.n or 1,
        num_candidates=asked.best_of,
        num_logprobs=asked.num_logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        tokens_as_ids=body.return_tokens_as_token_ids is True,
        return_token_ids=body.return_token_ids is True,
        include_usage=options is not None and options.include_usage is True,
        continuous_usage=options is not None and options.continuous_usage_stats is True,
        statistics=body.jetspec is True,
        rounds=options is not None and options.jetspec_rounds is True,
    )
