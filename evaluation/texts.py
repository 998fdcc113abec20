"""What the target writes on some prompts, with its true states: everything a verification could ever return.

Every token is drawn at a uniform keyed by seed and position, so the text does not depend on how it is cut into blocks,
and one recording serves the replay of every method, plan, budget and cache size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.loops import loop_onset
from decoding.sampling import SamplingParameters, draw
from evaluation.rounds import Following
from modeling.cache import KeyValueCache
from modeling.target import TargetBlock, TargetRunner

PREFILL_CHUNK = 64


@dataclass(frozen=True)
class TargetText:
    """Prompt and response, and the states of all their tokens but the last.

    taps [length-1, taps, hidden] of `tap_layers`; decoder_kv [length-1, layers, 2, kv_heads, dim] of the layers from
    `first_decoder_layer` on. `stop_token_id` followed the response; None where a limit or a repetition loop cut it.
    """

    prompt_token_ids: list[int]
    response_token_ids: list[int]
    taps: Tensor
    decoder_kv: Tensor
    tap_layers: tuple[int, ...]
    first_decoder_layer: int
    stop_token_id: int | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.response_token_ids

    @property
    def drawn_token_ids(self) -> list[int]:
        """Everything the target said, the stop token included."""
        return self.token_ids if self.stop_token_id is None else [*self.token_ids, self.stop_token_id]

    def following(self, start: int, num_draft_tokens: int) -> Following:
        """What a block whose anchor stands at `start` is verified against."""
        tokens, stop = self.drawn_token_ids, start + num_draft_tokens + 2
        return Following(tokens[start + 1 : stop], stop >= len(tokens) and self.stop_token_id is not None)

    def states(self, tap_layers: Sequence[int], decoder_layers: Sequence[int], start: int, stop: int) -> "TrueRows":
        """Rows start..stop of some of the layers that were recorded."""
        columns = [self.tap_layers.index(layer) for layer in tap_layers]
        layers = [layer - self.first_decoder_layer for layer in decoder_layers]
        return TrueRows(self.taps[start:stop, columns], self.decoder_kv[start:stop, layers])


@dataclass(frozen=True)
class TrueRows:
    """What a drafter installs: taps [rows, taps, hidden], decoder_kv [rows, layers, 2, kv_heads, dim]."""

    taps: Tensor
    decoder_kv: Tensor


@dataclass(frozen=True)
class Request:
    """A prompt to answer, and how its tokens are drawn."""

    prompt_token_ids: list[int]
    sampling: SamplingParameters


@dataclass
class _Live:
    index: int
    cache: KeyValueCache
    request: Request
    response: list[int]
    taps: list[Tensor]

    @property
    def length(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.response)


def write_texts(
    runner: TargetRunner,
    requests: Sequence[Request],
    max_tokens: int,
    stop_token_ids: frozenset[int],
    first_decoder_layer: int,
    batch_size: int = 8,
) -> list[TargetText]:
    """Let the target answer, some prompts at a time.

    An answer ends at a stop token, at `max_tokens` or at the onset of a repetition loop.
    """
    texts: dict[int, TargetText] = {}
    waiting = list(enumerate(requests))[::-1]
    caches = [runner.new_cache() for _ in range(min(batch_size, len(requests)))]
    live: list[_Live] = []
    while waiting or live:
        while waiting and caches:
            index, request = waiting.pop()
            live.append(_prefill(runner, index, request, caches.pop()))
        for text in list(live):
            end = _end(text.response, max_tokens, stop_token_ids)
            if end is not None:
                live.remove(text)
                caches.append(text.cache)
                texts[text.index] = _record(runner, text, end, stop_token_ids, first_decoder_layer)
        if live:
            _step(runner, live)
    return [texts[index] for index in range(len(requests))]


def _prefill(runner: TargetRunner, index: int, request: Request, cache: KeyValueCache) -> _Live:
    prompt, taps = request.prompt_token_ids, []
    for start in range(0, len(prompt), PREFILL_CHUNK):
        block = TargetBlock(cache, start, prompt[start : start + PREFILL_CHUNK])
        rows = runner.forward([block], last_row_only=True)
        taps.append(rows.taps)
    return _Live(index, cache, request, [draw(rows.logits[0], request.sampling, len(prompt))], taps)


def _step(runner: TargetRunner, live: Sequence[_Live]) -> None:
    rows = runner.forward([TargetBlock(text.cache, text.length - 1, text.response[-1:]) for text in live])
    for number, text in enumerate(live):
        text.taps.append(rows.taps[number : number + 1])
        text.response.append(draw(rows.logits[number], text.request.sampling, text.length))


def _end(response: Sequence[int], max_tokens: int, stop_token_ids: frozenset[int]) -> int | None:
    """How many tokens of a response are kept, the stop token left out; None while it goes on."""
    if response[-1] in stop_token_ids:
        return len(response) - 1
    onset = loop_onset(response)
    if onset is not None:
        return onset
    return len(response) if len(response) >= max_tokens else None


def _record(
    runner: TargetRunner, text: _Live, end: int, stop_token_ids: frozenset[int], first_decoder_layer: int
) -> TargetText:
    prompt = text.request.prompt_token_ids
    num_rows = len(prompt) + end - 1
    layers = slice(first_decoder_layer, None)
    pair = torch.stack((text.cache.key[layers, :, :num_rows], text.cache.value[layers, :, :num_rows]), dim=1)
    return TargetText(
        prompt_token_ids=prompt,
        response_token_ids=text.response[:end],
        taps=torch.cat(text.taps)[:num_rows].clone(),
        decoder_kv=pair.permute(3, 0, 1, 2, 4).clone(),
        tap_layers=runner.tap_layers,
        first_decoder_layer=first_decoder_layer,
        stop_token_id=text.response[end] if text.response[-1] in stop_token_ids else None,
    )
