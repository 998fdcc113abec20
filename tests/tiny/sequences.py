"""Running sequences for tests that call the verifier itself."""

import torch

from decoding.editing import RowEditor, TextRules
from decoding.sampling import SamplingParameters
from modeling.cache import KeyValueCache
from tests.tiny.models import VOCAB_SIZE
from verify_worker.sequence import Request, Sequence


def sequence_for(prompt: list[int], cache: KeyValueCache, drafts: list[int]) -> Sequence:
    """A greedy sequence whose prompt is in the cache but for its last token, the anchor."""
    rules = TextRules(VOCAB_SIZE)
    request = Request(0, prompt, 100, SamplingParameters(temperature=0.0), rules, True)
    sequence = Sequence(request, 0, cache, RowEditor(rules, prompt, torch.device("cpu")), 0.0)
    sequence.num_rows, sequence.anchor, sequence.drafts = len(prompt) - 1, prompt[-1], drafts
    return sequence
