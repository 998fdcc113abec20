"""Log-probabilities to report: of the token that stands at a position, and of the likeliest ones there.

Raw ones, as vLLM's `raw_logprobs`: of the target's own distribution, before anything that a request does to it. Knows
nothing of prompts, drafts and positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.sampling import DegenerateDistribution


@dataclass(frozen=True, slots=True)
class RankedToken:
    """A token with its log-probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenReport:
    """A token's log-probability; its rank, 1 + the number of likelier tokens; the likeliest ones, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[RankedToken, ...]


def report_tokens(
    rows: Float[Tensor, "rows width"], token_ids: Sequence[int], num_top: int, vocab_size: int
) -> list[TokenReport]:
    """What `rows` of logits say of the tokens drawn from them, one report a row.

    Normalised over the whole width; ranked and listed are the tokenizer's ids only, equals in the order of their ids.
    Raises DegenerateDistribution when a row holds NaN or +inf.
    """
    logprobs = torch.log_softmax(rows.to(torch.float32), dim=-1)
    chosen = torch.tensor(token_ids, dtype=torch.long, device=rows.device)[:, None]
    chosen_logprobs = logprobs.gather(1, chosen)
    logprobs = logprobs[:, :vocab_size]
    ranks = (logprobs > chosen_logprobs).sum(dim=1) + 1
    if bool(chosen_logprobs.isnan().any()):  # a NaN or +inf anywhere makes the whole row NaN
        raise DegenerateDistribution("a logit is not a number, or infinite")
    return [
        TokenReport(token_id, logprob, rank, _top(row, num_top))
        for token_id, logprob, rank, row in zip(
            token_ids, chosen_logprobs.flatten().tolist(), ranks.tolist(), logprobs, strict=True
        )
    ]


def _top(row: Tensor, count: int) -> tuple[RankedToken, ...]:
    if count == 0:
        return ()
    boundary = torch.topk(row, min(count, row.shape[0])).values[-1]
    candidates = (row >= boundary).nonzero().flatten()  # in the order of ids, more than wanted where there are equals
    order = torch.sort(row[candidates], descending=True, stable=True).indices[:count]
    chosen = candidates[order]
    return tuple(RankedToken(*pair) for pair in zip(chosen.tolist(), row[chosen].tolist(), strict=True))
