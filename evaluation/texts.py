"""What the target writes on some prompts, with its true states: everything a verification could ever return.

Every token is drawn at a uniform keyed by seed and position, so the text does not depend on how it is cut into
blocks, and
one recording serves the replay of every method, plan and cache size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.loops import is_loop
from decoding.sampling import SamplingParameters, draw
from modeling.cache import KeyValueCache
from modeling.target import TargetBlock, TargetRunner

PREFILL_CHUNK = 64


@dataclass(frozen=True)
class TargetText:
    """Prompt and response. taps [length-1, taps, hidden] and decoder_kv [length-1, layers, 2, kv_heads, dim]."""

    prompt_token_ids: list[int]
    response_token_ids: list[int]
    taps: Tensor
    decoder_kv: Tensor

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.response_token_ids


@dataclass
class _Live:
    index: int
    cache: KeyValueCache
    prompt: list[int]
    response: list[int]
    taps: list[Tensor]


def write_texts(
    runner: TargetRunner,
    prompts: Sequence[list[int]],
    sampling: SamplingParameters,
    max_tokens: int,
    stop_token_ids: frozenset[int],
    first_decoder_layer: int,
    batch_size: int = 8,
) -> list[TargetText]:
    """Let the target answer, some prompts at a time; an answer ends at a stop token, `max_tokens` or a repetition
    loop."""
    texts: dict[int, TargetText] = {}
    waiting = list(enumerate(prompts))[::-1]
    caches = [runner.new_cache() for _ in range(min(batch_size, len(prompts)))]
    live: list[_Live] = []
    while waiting or live:
        while waiting and caches:
            index, prompt = waiting.pop()
            live.append(_prefill(runner, index, prompt, caches.pop(), sampling))
        finished = [text for text in live if _is_over(text, max_tokens, stop_token_ids)]
        for text in finished:
            live.remove(text)
            caches.append(text.cache)
            texts[text.index] = _record(text, stop_token_ids, first_decoder_layer)
        if live:
            _step(runner, live, sampling)
    return [texts[index] for index in range(len(prompts))]


def _prefill(
    runner: TargetRunner, index: int, prompt: list[int], cache: KeyValueCache, sampling: SamplingParameters
) -> _Live:
    taps = []
    for start in range(0, len(prompt), PREFILL_CHUNK):
        block = TargetBlock(cache, start, prompt[start : start + PREFILL_CHUNK])
        rows = runner.forward([block], last_row_only=True)
        taps.append(rows.taps)
    return _Live(index, cache, prompt, [draw(rows.logits[0], sampling, len(prompt))], taps)


def _step(runner: TargetRunner, live: Sequence[_Live], sampling: SamplingParameters) -> None:
    blocks = [TargetBlock(t.cache, len(t.prompt) + len(t.response) - 1, [t.response[-1]]) for t in live]
    rows = runner.forward(blocks)
    for number, text in enumerate(live):
        text.taps.append(rows.taps[number : number + 1])
        text.response.append(draw(rows.logits[number], sampling, len(text.prompt) + len(text.response)))


def _is_over(text: _Live, max_tokens: int, stop_token_ids: frozenset[int]) -> bool:
    return text.response[-1] in stop_token_ids or len(text.response) >= max_tokens or is_loop(text.response)


def _record(text: _Live, stop_token_ids: frozenset[int], first_decoder_layer: int) -> TargetText:
    response = text.response[:-1] if text.response[-1] in stop_token_ids else text.response
    num_rows = len(text.prompt) + len(response) - 1
    layers = slice(first_decoder_layer, None)
    pair = torch.stack((text.cache.key[layers, :, :num_rows], text.cache.value[layers, :, :num_rows]), dim=1)
    taps = torch.cat(text.taps)[:num_rows].clone()
    return TargetText(text.prompt, list(response), taps, pair.permute(3, 0, 1, 2, 4).clone())
