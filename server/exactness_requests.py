"""The requests that `jetspecpp exactness` compares: plain ones, or each with sampling parameters of its own.

Parameters are a function of the prompt's number and the temperature, so both sides of a comparison, and every run, get
the same. Knows nothing of engines.
"""

import json
import random
from collections.abc import Sequence
from typing import Literal

from protocol.fields import ChoiceGrammar, Grammar, JsonObjectGrammar, JsonSchemaGrammar, LogitBias, RegexGrammar
from protocol.messages import SamplingFields
from server.engine import GenerationRequest

Parameters = Literal["plain", "random"]

FIRST_SEED = 1000
NUM_BIASED = 4
GRAMMARS: Sequence[Grammar] = (
    JsonObjectGrammar(),
    JsonSchemaGrammar(
        schema_text=json.dumps(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 20},
                    "age": {"type": "integer", "minimum": 0, "maximum": 120},
                    "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
                },
                "required": ["name", "age", "tags"],
                "additionalProperties": False,
            }
        )
    ),
    RegexGrammar(pattern="[A-Z][a-z ]{10,60}[.!]"),
    ChoiceGrammar(choices=["yes", "no", "yes, but not always"]),
)


def request_for(
    index: int,
    prompt_token_ids: list[int],
    temperature: float,
    max_tokens: int,
    stop_token_ids: Sequence[int],
    vocab_size: int,
    parameters: Parameters,
) -> GenerationRequest:
    """The request of the prompt with this number; `temperature` holds in both modes."""
    seed = FIRST_SEED + index
    if parameters == "plain":
        sampling = SamplingFields(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
        return GenerationRequest(prompt_token_ids, sampling, max_tokens, list(stop_token_ids))
    dice = random.Random(f"{seed} {temperature}")
    return GenerationRequest(
        prompt_token_ids,
        SamplingFields(
            temperature=temperature,
            top_k=dice.choice((0, 0, 5, 50)),
            top_p=dice.choice((1.0, 0.95, 0.7)),
            min_p=dice.choice((0.0, 0.02, 0.2)),
            seed=seed,
            presence_penalty=dice.choice((0.0, 0.6, -0.4)),
            frequency_penalty=dice.choice((0.0, 0.8, -0.2)),
            repetition_penalty=dice.choice((1.0, 1.3, 0.9)),
            logit_bias=[
                LogitBias(token_id=dice.randrange(vocab_size), bias=dice.uniform(-100.0, 10.0))
                for _ in range(dice.choice((0, NUM_BIASED)))
            ],
        ),
        max_tokens,
        sorted({*stop_token_ids, *(dice.randrange(vocab_size) for _ in range(dice.choice((0, NUM_BIASED))))}),
        min_tokens=dice.choice((0, 0, max_tokens // 2)),
        num_logprobs=dice.choice((None, 0, 5)),
        num_prompt_logprobs=dice.choice((None, None, 2)),
        grammar=dice.choice((None, None, *GRAMMARS)),
    )
