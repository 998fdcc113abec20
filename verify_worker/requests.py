"""From a `Submit` to a request that can run, with the checks that need the target's sizes, and reports as they travel.

Knows nothing of slots, rounds and grammars.
"""

from collections.abc import Sequence as Rows

from decoding.editing import TextRules
from decoding.logprobs import TokenReport
from decoding.penalties import TokenControls
from decoding.sampling import SamplingParameters
from protocol.fields import LOWEST_LOGPROB, TokenLogprobs, TopLogprob
from protocol.messages import Failed, SamplingFields, Submit
from verify_worker.sequence import Request


class Refused(Exception):
    """A request that cannot be served; `answer` says so to the server."""

    def __init__(self, answer: Failed) -> None:
        super().__init__(answer.message)
        self.answer = answer


def request_from(message: Submit, vocab_size: int, max_model_len: int) -> Request:
    """The request, its grammar left out; raises `Refused`. `vocab_size` counts the ids that have a text."""
    if len(message.prompt_token_ids) >= max_model_len:
        raise Refused(
            Failed(
                sequence_id=message.sequence_id,
                code="context_length_exceeded",
                message=f"the prompt has {len(message.prompt_token_ids)} tokens; the maximum context length is "
                f"{max_model_len}",
                parameter="prompt_token_ids",
            )
        )
    sampling = message.sampling
    biased = [item.token_id for item in sampling.logit_bias]
    named = (
        ("prompt_token_ids", message.prompt_token_ids),
        ("stop_token_ids", message.stop_token_ids),
        ("logit_bias", biased),
    )
    for parameter, token_ids in named:
        if max(token_ids, default=0) >= vocab_size:
            raise Refused(
                Failed(
                    sequence_id=message.sequence_id,
                    code="invalid_request",
                    message=f"token id {max(token_ids)} is outside the vocabulary of {vocab_size}",
                    parameter=parameter,
                )
            )
    return Request(
        sequence_id=message.sequence_id,
        prompt_token_ids=list(message.prompt_token_ids),
        max_tokens=message.max_tokens,
        sampling=SamplingParameters(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
        ),
        rules=TextRules(
            vocab_size=vocab_size,
            stop_token_ids=frozenset(message.stop_token_ids),
            min_tokens=message.min_tokens,
            controls=_controls(sampling),
        ),
        speculative=message.speculative,
        num_logprobs=message.num_logprobs,
        num_prompt_logprobs=message.num_prompt_logprobs,
    )


def wire_logprobs(reports: Rows[TokenReport]) -> list[TokenLogprobs]:
    """Reports as they travel."""
    return [
        TokenLogprobs(
            token_id=report.token_id,
            logprob=_finite(report.logprob),
            rank=report.rank,
            top=[TopLogprob(token_id=token.token_id, logprob=_finite(token.logprob)) for token in report.top],
        )
        for report in reports
    ]


def _controls(sampling: SamplingFields) -> TokenControls:
    return TokenControls(
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=tuple((item.token_id, item.bias) for item in sampling.logit_bias),
    )


def _finite(logprob: float) -> float:
    """In the wire's range: rounding may lift a certain token's a hair above 0."""
    return min(0.0, max(LOWEST_LOGPROB, logprob))
