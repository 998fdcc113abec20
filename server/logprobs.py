"""Log-probabilities as clients see them: the shapes of completions, of chat, and of vLLM's `prompt_logprobs`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protocol.fields import TokenLogprobs, TopLogprob
from server.choice import LogprobEntry
from server.spelling import TokenSpelling

Content = dict[str, Any]


@dataclass(frozen=True)
class LogprobFormat:
    """How tokens are written, and how many of the likeliest ones are shown beside each (`num_top`)."""

    spelling: TokenSpelling
    num_top: int
    tokens_as_ids: bool

    def completion(self, entries: Sequence[LogprobEntry]) -> Content:
        """Parallel lists; `top_logprobs` holds the token itself too, so it may have one more than was asked for."""
        return {
            "tokens": [self._token(entry.token_id) for entry in entries],
            "token_logprobs": [None if entry.values is None else entry.values.logprob for entry in entries],
            "top_logprobs": [None if entry.values is None else self._top(entry.values) for entry in entries],
            "text_offset": [entry.text_offset for entry in entries],
        }

    def chat(self, entries: Sequence[LogprobEntry]) -> Content:
        """One object per token, with the bytes that it adds to the text."""
        values = [entry.values for entry in entries if entry.values is not None]
        content = [
            self._described(item.token_id, item.logprob)
            | {"top_logprobs": [self._described(top.token_id, top.logprob) for top in item.top[: self.num_top]]}
            for item in values
        ]
        return {"content": content, "refusal": None}

    def prompt(self, entries: Sequence[TokenLogprobs]) -> list[Content | None]:
        """One object per prompt token, None for the first, with the likeliest tokens and the token itself by id."""
        shown: list[Content | None] = [None]
        for entry in entries:
            ranked = {top.token_id: (top.logprob, rank) for rank, top in enumerate(entry.top[: self.num_top], 1)}
            ranked.setdefault(entry.token_id, (entry.logprob, entry.rank))
            shown.append(
                {
                    str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": self._token(token_id)}
                    for token_id, (logprob, rank) in ranked.items()
                }
            )
        return shown

    def _top(self, values: TokenLogprobs) -> dict[str, float]:
        own = TopLogprob(token_id=values.token_id, logprob=values.logprob)
        return {self._token(top.token_id): top.logprob for top in (*values.top[: self.num_top], own)}

    def _described(self, token_id: int, logprob: float) -> Content:
        return {"token": self._token(token_id), "logprob": logprob, "bytes": list(self.spelling.bytes_of(token_id))}

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.tokens_as_ids else self.spelling.spelling_of(token_id)
