"""Recorded texts of the tiny target, and texts made by hand."""

from collections.abc import Sequence

import torch

from decoding.sampling import SamplingParameters
from evaluation.texts import Request, TargetText, write_texts
from modeling.decoder import decoder_layer_ids
from tests.tiny.models import NUM_LAYERS, TAP_LAYERS, TinyModels

PROMPTS = ((1, 2, 3, 9, 17), (40, 41), (100,))
FIRST_DECODER_LAYER = decoder_layer_ids(TAP_LAYERS[-1], NUM_LAYERS)[0]


def recorded(
    models: TinyModels, temperature: float, stops: frozenset[int] = frozenset(), max_tokens: int = 24
) -> list[TargetText]:
    """What the tiny target answers."""
    sampling = SamplingParameters(temperature=temperature, seed=7)
    requests = [Request(list(prompt), sampling) for prompt in PROMPTS]
    return write_texts(models.runner(), requests, max_tokens, stops, FIRST_DECODER_LAYER, batch_size=2)


def scripted_text(prompt: Sequence[int], response: Sequence[int], stop_token_id: int | None = None) -> TargetText:
    """A text without states."""
    num_rows = len(prompt) + len(response) - 1
    taps, decoder_kv = torch.zeros(num_rows, 0, 4), torch.zeros(num_rows, 0, 2, 1, 4)
    return TargetText(list(prompt), list(response), taps, decoder_kv, (), 0, stop_token_id)
