"""Prompts of all forms as token ids, and back to the text that `echo` shows.

Texts and conversations are rendered and tokenised in a thread, and refused for their length before any time is spent on
them. Knows nothing of how many tokens are to be generated, or how.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.detokenizer import IncrementalDecoder, num_partial
from server.errors import ApiError, context_too_long, invalid, unsupported
from server.openai_types import ChatBody, ChatMessage, CompletionBody, TemplateOptions
from server.state import Serving
from server.tokenizer import Encoded, Tokenizer, TokenizerError

MAX_CHARACTERS_PER_TOKEN = 32
MAX_CONTEXT_TOKENS = 8
END_OF_CONTINUED_MESSAGE = "\ue0f1end-of-continued-message\ue0f1"
"""Marks where a continued message ends in the rendered conversation; private-use characters, never sent."""

Texts = Sequence[str]


@dataclass(frozen=True)
class Prompt:
    """One prompt: its token ids, and the places of those that the tokenizer put around the text."""

    token_ids: list[int]
    added: frozenset[int] = frozenset()

    def last(self, num_tokens: int) -> "Prompt":
        """The last tokens of the prompt."""
        num_dropped = max(0, len(self.token_ids) - num_tokens)
        added = frozenset(index - num_dropped for index in self.added if index >= num_dropped)
        return Prompt(self.token_ids[num_dropped:], added)


@dataclass(frozen=True)
class Echo:
    """A prompt as text, up to a character that is not complete yet, and where each of its tokens begins in it."""

    text: str
    offsets: list[int] | None


# --- completions


async def completion_prompts(body: CompletionBody, serving: Serving) -> list[Prompt]:
    """The prompts of a completion request, in order; raises `ApiError` for one that cannot be used."""
    prompts = _as_list(body.prompt)
    limit = serving.config.max_num_prompts
    if len(prompts) > limit:
        raise invalid("prompt", f"{len(prompts)} prompts, more than {limit}")
    if not all(prompts):
        raise invalid("prompt", "must not be empty")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for text in texts:
        check_length("prompt", len(text), serving)
    if texts:
        adds = body.add_special_tokens is not False
        encoded = await asyncio.to_thread(_encode_all, serving.model.tokenizer, texts, adds)
        return [Prompt(item.token_ids, item.added) for item in encoded]
    id_lists = [prompt for prompt in prompts if not isinstance(prompt, str)]
    for ids in id_lists:
        if len(ids) <= serving.max_model_len:  # a longer one is refused for its length, not searched
            check_token_ids("prompt", ids, serving)
    return [Prompt(ids) for ids in id_lists]


def _as_list(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """One text or id list is a list of one."""
    if isinstance(prompt, str):
        return [prompt]
    texts_or_lists = [item for item in prompt if not isinstance(item, int)]
    return texts_or_lists if texts_or_lists else [[item for item in prompt if isinstance(item, int)]]


def _encode_all(tokenizer: Tokenizer, texts: Texts, add_special_tokens: bool) -> list[Encoded]:
    return [tokenizer.encode_marked(text, add_special_tokens) for text in texts]


async def text_prompt(text: str, add_special_tokens: bool | None, serving: Serving, param: str = "prompt") -> list[int]:
    """Token ids of a text."""
    check_length(param, len(text), serving)
    return await serving.model.tokenizer.encode_async(text, add_special_tokens is not False)


def check_token_ids(param: str, token_ids: Sequence[int], serving: Serving) -> None:
    """Raise for an id the model does not have."""
    for token_id in token_ids:
        if token_id >= serving.num_token_ids:
            raise invalid(param, f"token id {token_id} is outside the vocabulary of {serving.num_token_ids}")


def check_length(param: str, num_characters: int, serving: Serving) -> None:
    """Raise for a text too long to be worth tokenising."""
    limit = serving.max_model_len * MAX_CHARACTERS_PER_TOKEN
    if num_characters > limit:
        raise context_too_long(
            param,
            f"This model's maximum context length is {serving.max_model_len} tokens. However, your {param} has "
            f"{num_characters} characters, more than {limit}.",
        )


def too_many_tokens(param: str, num_prompt_tokens: int, max_tokens: int | None, serving: Serving) -> ApiError:
    """The error for a prompt and an answer that do not fit into the model together."""
    asked = f"{num_prompt_tokens} tokens in the {param}"
    if max_tokens is not None:
        asked = f"{num_prompt_tokens + max_tokens} tokens ({asked}, {max_tokens} in the completion)"
    return context_too_long(
        param,
        f"This model's maximum context length is {serving.max_model_len} tokens. However, you requested {asked}. "
        f"Please reduce the length of the {param} or of the completion.",
    )


# --- conversations


async def conversation_prompt(body: ChatBody, serving: Serving) -> Prompt:
    """The prompt of a chat request."""
    continues = body.continue_final_message is True
    if continues and body.add_generation_prompt:
        raise invalid("continue_final_message", "cannot be combined with add_generation_prompt")
    ids = await chat_prompt(
        body.messages,
        body.add_generation_prompt,
        body.chat_template_kwargs,
        serving,
        continues=continues,
        add_special_tokens=body.add_special_tokens is True,
    )
    return Prompt(ids)


async def chat_prompt(
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool | None,
    options: TemplateOptions | None,
    serving: Serving,
    *,
    continues: bool = False,
    add_special_tokens: bool = False,
) -> list[int]:
    """Token ids of a conversation, by the model's own template; `continues` leaves the last message open."""
    plain = [_message(message) for message in messages]
    check_length("messages", sum(len(message["content"]) for message in plain), serving)
    if continues:
        plain[-1]["content"] += END_OF_CONTINUED_MESSAGE
    settings: dict[str, Any] = options.model_dump(exclude_none=True) if options is not None else {}
    settings["add_generation_prompt"] = add_generation_prompt is not False and not continues
    tokenizer = serving.model.tokenizer

    def render() -> list[int]:
        text = tokenizer.render_chat(plain, **settings)
        if continues:
            text, end, _ = text.rpartition(END_OF_CONTINUED_MESSAGE)
            if not end:
                raise invalid("continue_final_message", "the chat template leaves out the last message's text")
        return tokenizer.encode(text, add_special_tokens)

    try:
        return await asyncio.to_thread(render)
    except TokenizerError as error:
        raise invalid("messages", str(error)) from None


def _message(message: ChatMessage) -> dict[str, str]:
    """A message as the template sees it."""
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name):
            raise unsupported("messages", f"{name} in a message is not supported")
    optional = {name: getattr(message, name) for name in ("name", "reasoning_content", "tool_call_id")}
    given = {name: value for name, value in optional.items() if value is not None}
    return {"role": message.role, "content": _content_text(message), **given}


def _content_text(message: ChatMessage) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise unsupported("messages", f"content parts of type {part.type[:50]!r} are not supported; only text is")
    return "".join(part.text or "" for part in message.content)


# --- back to text


def echo_of(prompt: Prompt, tokenizer: Tokenizer, *, shows_added: bool, with_offsets: bool) -> Echo:
    """The prompt as it was given: with the special tokens it holds, without those that the tokenizer added.

    A character at the end of which only some bytes are there belongs to the text that follows. Takes time for a long
    prompt, above all with offsets.
    """
    hidden = frozenset() if shows_added else prompt.added

    def decode(token_ids: Sequence[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    if not with_offsets:
        shown = [token_id for index, token_id in enumerate(prompt.token_ids) if index not in hidden]
        text = decode(shown)
        return Echo(text[: len(text) - num_partial(text)], None)
    decoder = IncrementalDecoder(decode)
    texts: list[str] = []
    offsets: list[int] = []
    num_characters = 0
    for index, token_id in enumerate(prompt.token_ids):
        offsets.append(num_characters)
        if index not in hidden:
            texts.append(decoder.push(token_id))
            num_characters += len(texts[-1])
    return Echo("".join(texts), offsets)


def context_of(prompt: Prompt, tokenizer: Tokenizer, *, is_echoed: bool, skips_special: bool) -> list[int]:
    """The last tokens of a prompt: what a decoder must see before the first token of the completion.

    With `echo` the completion goes on inside a character that the prompt left open; without, it begins afresh.
    """
    context = prompt.token_ids[-MAX_CONTEXT_TOKENS:]
    if is_echoed and num_partial(tokenizer.decode(context, skip_special_tokens=False)):
        return context
    while context and num_partial(tokenizer.decode(context, skips_special)):
        context = context[:-1]
    return context
