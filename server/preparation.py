"""From a request's body to a sequence the engine can run: prompt, limits, sampling, and what the model limits."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.messages import SamplingFields
from server.answer import TextOptions
from server.engine import GenerationRequest
from server.errors import ApiError, context_too_long, invalid, unsupported
from server.openai_types import ChatBody, ChatMessage, CompletionBody, SamplingBody, TemplateOptions
from server.state import Serving
from server.tokenizer import TokenizerError

DEFAULT_COMPLETION_TOKENS = 16
DEFAULT_TEMPERATURE = 1.0
SEED_MASK = (1 << 63) - 1
MAX_CHARACTERS_PER_TOKEN = 32


@dataclass(frozen=True)
class Prepared:
    """A checked request."""

    model_name: str
    generation: GenerationRequest
    text: TextOptions
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool


async def prepare_completion(body: CompletionBody, serving: Serving, seeds: random.Random) -> Prepared:
    """Check and tokenise a completion request; raises `ApiError` naming the parameter."""
    name = serving.check_name(body.model)
    _check_sampling(body, serving)
    prompt = await _completion_prompt(body, serving)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    is_default = asked is None and not body.model_fields_set & {"max_tokens", "max_completion_tokens"}
    return _prepare(body, serving, seeds, name, prompt, "prompt", DEFAULT_COMPLETION_TOKENS if is_default else asked)


async def prepare_chat(body: ChatBody, serving: Serving, seeds: random.Random) -> Prepared:
    """Check, render and tokenise a conversation; raises `ApiError` naming the parameter."""
    name = serving.check_name(body.model)
    _check_sampling(body, serving)
    prompt = await chat_prompt(body.messages, body.add_generation_prompt, body.chat_template_kwargs, serving)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return _prepare(body, serving, seeds, name, prompt, "messages", asked)


async def chat_prompt(
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool | None,
    options: TemplateOptions | None,
    serving: Serving,
) -> list[int]:
    """Token ids of a conversation, by the model's own template."""
    plain = [{"role": message.role, "content": _content_text(message)} for message in messages]
    _check_length("messages", sum(len(message["content"]) for message in plain), serving)
    extra = options.model_dump(exclude_none=True) if options is not None else {}
    tokenizer = serving.model.tokenizer
    try:
        text = tokenizer.render_chat(plain, add_generation_prompt=add_generation_prompt is not False, **extra)
    except TokenizerError as error:
        raise invalid("messages", str(error)) from None
    return await tokenizer.encode_async(text, add_special_tokens=False)


async def text_prompt(text: str, add_special_tokens: bool | None, serving: Serving, param: str = "prompt") -> list[int]:
    """Token ids of a text; a text far too long is refused before any time is spent on it."""
    _check_length(param, len(text), serving)
    return await serving.model.tokenizer.encode_async(text, add_special_tokens is not False)


def check_token_ids(param: str, token_ids: Sequence[int], serving: Serving) -> None:
    """Raise for an id the model does not have."""
    for token_id in token_ids:
        if token_id >= serving.num_token_ids:
            raise invalid(param, f"token id {token_id} is outside the vocabulary of {serving.num_token_ids}")


async def _completion_prompt(body: CompletionBody, serving: Serving) -> list[int]:
    """The one prompt of the request: a text or token ids, alone or as the only element of a list."""
    prompt: str | list[int] | list[str] | list[list[int]] = body.prompt
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(prompt, list) and isinstance(first, str | list):
        if len(prompt) > 1:
            raise unsupported("prompt", "this server takes one prompt per request")
        only: str | list[int] = first
    else:
        only = [item for item in prompt if isinstance(item, int)] if isinstance(prompt, list) else prompt
    if isinstance(only, str):
        return await text_prompt(only, body.add_special_tokens, serving) if only else []
    if len(only) <= serving.max_model_len:  # a longer one is refused for its length, not searched
        check_token_ids("prompt", only, serving)
    return only


def _content_text(message: ChatMessage) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise unsupported("messages", f"content parts of type {part.type[:50]!r} are not supported; only text is")
    return "".join(part.text or "" for part in message.content)


def _check_length(param: str, num_characters: int, serving: Serving) -> None:
    limit = serving.max_model_len * MAX_CHARACTERS_PER_TOKEN
    if num_characters > limit:
        raise context_too_long(
            param,
            f"This model's maximum context length is {serving.max_model_len} tokens. However, your {param} has "
            f"{num_characters} characters, more than {limit}.",
        )


def _check_sampling(body: SamplingBody, serving: Serving) -> None:
    check_token_ids("stop_token_ids", body.stop_token_ids or [], serving)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "is only allowed when stream is true")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid("max_completion_tokens", "differs from max_tokens")


def _prepare(
    body: SamplingBody,
    serving: Serving,
    seeds: random.Random,
    name: str,
    prompt: list[int],
    prompt_param: str,
    max_tokens: int | None,
) -> Prepared:
    if not prompt:
        raise invalid(prompt_param, "must not be empty")
    max_tokens = _fit_max_tokens(prompt_param, len(prompt), max_tokens, serving)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid("min_tokens", f"is {min_tokens}, more than max_tokens, which is {max_tokens}")
    tokenizer = serving.model.tokenizer
    eos_token_ids = () if body.ignore_eos else tokenizer.eos_token_ids
    seed = seeds.getrandbits(63) if body.seed is None else body.seed & SEED_MASK
    skip_special = body.skip_special_tokens is not False
    options = body.stream_options
    return Prepared(
        model_name=name,
        generation=GenerationRequest(
            prompt_token_ids=prompt,
            sampling=SamplingFields(
                temperature=DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
                top_k=max(0, body.top_k or 0),
                top_p=1.0 if body.top_p is None else body.top_p,
                min_p=body.min_p or 0.0,
                seed=seed,
            ),
            max_tokens=max_tokens,
            stop_token_ids=sorted({*eos_token_ids, *(body.stop_token_ids or [])}),
            min_tokens=min_tokens,
            speculative=body.speculative is not False,
        ),
        text=TextOptions(
            decode=lambda token_ids: tokenizer.decode(token_ids, skip_special),
            stops=body.stops,
            include_stop=body.include_stop_str_in_output is True,
            eos_token_ids=tokenizer.eos_token_ids,
        ),
        include_usage=options is not None and options.include_usage is True,
        continuous_usage=options is not None and options.continuous_usage_stats is True,
        return_token_ids=body.return_token_ids is True,
    )


def _fit_max_tokens(param: str, num_prompt_tokens: int, max_tokens: int | None, serving: Serving) -> int:
    """The limit of new tokens: as asked if it fits, or all the room there is when nothing was asked."""
    room = serving.max_model_len - num_prompt_tokens
    if room >= 1 and max_tokens is None:
        return room
    if max_tokens is None or max_tokens > room:
        raise _too_many_tokens(param, num_prompt_tokens, max_tokens, serving)
    return max_tokens


def _too_many_tokens(param: str, num_prompt_tokens: int, max_tokens: int | None, serving: Serving) -> ApiError:
    asked = f"{num_prompt_tokens} tokens in the {param}"
    if max_tokens is not None:
        asked = f"{num_prompt_tokens + max_tokens} tokens ({asked}, {max_tokens} in the completion)"
    return context_too_long(
        param,
        f"This model's maximum context length is {serving.max_model_len} tokens. However, you requested {asked}. "
        f"Please reduce the length of the {param} or of the completion.",
    )
