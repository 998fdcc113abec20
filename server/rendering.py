"""The shapes of answers in the OpenAI interface: completions and chat, whole and in chunks."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from server.answer import Ending, Usage

Content = dict[str, Any]


def usage_body(usage: Usage) -> Content:
    """The `usage` object; accepted drafts are part of the completion, rejected ones are not."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_generated_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.num_accepted_drafts,
            "rejected_prediction_tokens": usage.num_rejected_drafts,
        },
    }


@dataclass(frozen=True)
class AnswerFormat:
    """One response: its id, time and model, and which of the two interfaces it speaks."""

    kind: Literal["completion", "chat"]
    model: str
    prompt_token_ids: Sequence[int]
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))
    identifier: str = field(default_factory=lambda: uuid.uuid4().hex)

    def whole(self, text: str, token_ids: Sequence[int], ending: Ending, usage: Usage) -> Content:
        """The answer in one piece."""
        choice = self._choice({"text": text}, {"message": {"role": "assistant", "content": text}}, ending)
        if self.return_token_ids:
            choice |= {"token_ids": list(token_ids), "prompt_token_ids": list(self.prompt_token_ids)}
        return self._head(is_chunk=False) | {"choices": [choice], "usage": usage_body(usage)}

    def opening(self, usage: Usage) -> Content | None:
        """The chunk before any text: chat announces the role."""
        if self.kind == "completion":
            return None
        choice = self._choice({}, {"delta": {"role": "assistant", "content": ""}}, None)
        return self._chunk([choice], usage)

    def piece(self, text: str, token_ids: Sequence[int], usage: Usage) -> Content:
        """A chunk of text."""
        choice = self._choice({"text": text}, {"delta": {"content": text}}, None)
        if self.return_token_ids:
            choice["token_ids"] = list(token_ids)
        return self._chunk([choice], usage)

    def closing(self, ending: Ending, usage: Usage) -> Content:
        """The chunk that says why the text ended; it has no text of its own."""
        return self._chunk([self._choice({"text": ""}, {"delta": {}}, ending)], usage)

    def usage_chunk(self, usage: Usage) -> Content:
        """The last chunk, without choices, for clients that asked for it."""
        return self._head(is_chunk=True) | {"choices": [], "usage": usage_body(usage)}

    def _head(self, is_chunk: bool) -> Content:
        if self.kind == "completion":
            identifier, name = f"cmpl-{self.identifier}", "text_completion"
        else:
            identifier, name = f"chatcmpl-{self.identifier}", "chat.completion" + (".chunk" if is_chunk else "")
        return {"id": identifier, "object": name, "created": self.created, "model": self.model}

    def _choice(self, completion: Content, chat: Content, ending: Ending | None) -> Content:
        return {
            "index": 0,
            **(completion if self.kind == "completion" else chat),
            "logprobs": None,
            "finish_reason": None if ending is None else ending.reason,
            "stop_reason": None if ending is None else ending.stop_reason,
        }

    def _chunk(self, choices: list[Content], usage: Usage) -> Content:
        chunk = self._head(is_chunk=True) | {"choices": choices}
        if self.include_usage:
            chunk["usage"] = usage_body(usage) if self.continuous_usage else None
        return chunk
