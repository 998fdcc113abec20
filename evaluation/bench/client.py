"""One request over HTTP, timed as its client sees it."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from evaluation.bench.counters import Counters
from evaluation.bench.errors import ContestantFailed

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Generation:
    """A finished text. `num_first` tokens came with the first piece, at `first_s`; the last piece came at `end_s`.

    Times count from the moment the request was sent. token_ids: without the token that ended the text, which
    `num_tokens` counts.
    """

    token_ids: tuple[int, ...]
    num_tokens: int
    num_first: int
    first_s: float
    end_s: float

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first piece by the time after it, so that prefill is left out; None for a text too short."""
        num_decoded, decode_s = self.num_tokens - self.num_first, self.end_s - self.first_s
        return num_decoded / decode_s if num_decoded > 0 and decode_s > 0 else None


class Client:
    """Speaks to one server; may be used by several threads. Every failure is a `ContestantFailed`."""

    def __init__(self, base_url: str, transport: httpx.BaseTransport | None = None) -> None:
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.Client(base_url=base_url, timeout=TIMEOUT_S, transport=transport, limits=limits)

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

    def is_ready(self) -> bool:
        """Whether the server takes requests by now."""
        try:
            return self._http.get("/ready", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def counters(self) -> Counters:
        """The server's metrics as they stand."""
        try:
            response = self._http.get("/metrics").raise_for_status()
            return Counters.parse(response.text)
        except (httpx.HTTPError, ValueError) as error:
            raise ContestantFailed(f"no metrics: {error}") from error

    def tokenize(self, prompt: str) -> list[int]:
        """Token ids of a one-turn conversation, ready for the answer."""
        answer = self._post("/tokenize", {"messages": [{"role": "user", "content": prompt}]})
        return [int(token_id) for token_id in answer["tokens"]]

    def max_model_len(self) -> int:
        """The longest sequence the server takes."""
        answer = self._post("/tokenize", {"prompt": "a"})
        return int(answer["max_model_len"])

    def generate(self, prompt_token_ids: list[int], max_tokens: int, **options: object) -> Generation:
        """One prompt, streamed; greedy decoding unless the options, which are further fields of the request, differ."""
        body = {
            "prompt": prompt_token_ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **options,
        }
        try:
            sent = time.perf_counter()
            with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    raise ContestantFailed(f"HTTP {response.status_code}: {response.read().decode()[:300]}")
                return _collect(_events(response), sent)
        except httpx.HTTPError as error:
            raise ContestantFailed(f"the connection broke: {error}") from error

    def _post(self, path: str, body: dict[str, object]) -> dict[str, Any]:
        try:
            response = self._http.post(path, json=body)
            if response.status_code != 200:
                raise ContestantFailed(f"HTTP {response.status_code}: {response.text[:300]}")
            answer: dict[str, Any] = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ContestantFailed(f"{path}: {error}") from error
        return answer


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream up to its end; one that breaks off early, or reports an error, has failed."""
    for line in response.iter_lines():
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ContestantFailed(f"the server reports {event['error']}")
        yield event
    raise ContestantFailed("the stream ended early")


def _collect(events: Iterator[dict[str, Any]], sent: float) -> Generation:
    token_ids: list[int] = []
    num_first, num_tokens = 0, 0
    first_s = end_s = 0.0
    for event in events:
        now_s = time.perf_counter() - sent
        for choice in event["choices"]:
            token_ids += choice.get("token_ids", ())
            if token_ids and not num_first:
                num_first, first_s = len(token_ids), now_s
            end_s = now_s
        if event.get("usage"):
            num_tokens = int(event["usage"]["completion_tokens"])
    return Generation(tuple(token_ids), num_tokens, num_first, first_s, end_s)
