"""What `jetspecpp exactness` asks for: the same on both sides, and in random mode everything there is."""

import pytest

from protocol.fields import SamplingFields
from server.engine import GenerationRequest
from server.exactness_requests import GRAMMARS, Parameters, request_for

VOCAB_SIZE = 50


def made(index: int, temperature: float = 1.0, parameters: Parameters = "random") -> GenerationRequest:
    return request_for(index, [1, 2], temperature, 40, [7], VOCAB_SIZE, parameters)


@pytest.mark.parametrize("parameters", ["plain", "random"])
def test_both_sides_get_the_same(parameters: Parameters) -> None:
    for index in range(10):
        assert made(index, parameters=parameters) == made(index, parameters=parameters)
    assert made(0).sampling.seed != made(1).sampling.seed


def test_plain_requests_leave_the_distribution_alone() -> None:
    request = made(3, 0.5, "plain")
    assert request.sampling == SamplingFields(temperature=0.5, top_k=0, top_p=1.0, min_p=0.0, seed=1003)
    assert (request.stop_token_ids, request.min_tokens, request.num_logprobs, request.grammar) == ([7], 0, None, None)


def test_random_requests_use_every_parameter_sometimes_and_stay_in_the_vocabulary() -> None:
    requests = [made(index) for index in range(60)]
    neutral = made(0, parameters="plain")
    for name in SamplingFields.model_fields:
        if name != "temperature":
            assert any(getattr(request.sampling, name) != getattr(neutral.sampling, name) for request in requests), name
    for name in ("min_tokens", "num_logprobs", "num_prompt_logprobs", "stop_token_ids"):
        assert any(getattr(request, name) != getattr(neutral, name) for request in requests), name
    kinds = {request.grammar.kind for request in requests if request.grammar is not None}
    assert kinds == {grammar.kind for grammar in GRAMMARS}
    assert any(request.grammar is None for request in requests)
    for request in requests:
        assert 7 in request.stop_token_ids and max(request.stop_token_ids) < VOCAB_SIZE
        assert all(item.token_id < VOCAB_SIZE for item in request.sampling.logit_bias)
        assert request.sampling.temperature == 1.0 and request.max_tokens == 40
