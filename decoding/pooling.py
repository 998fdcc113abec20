"""Two opinions on the next token in one: the decoder's, from predicted states, and the draft model's own.

They are different networks and err in different places, so their log-linear pool ranks outcomes better than the decoder
alone, which is what the paper asks (section 4.2). It changes which outcomes are pre-drafted, never the text.
"""

import torch
from jaxtyping import Float
from torch import Tensor

DRAFT_SHARE = 0.3
"""Weight of the draft model's log-probability beside the decoder's, which counts one (docs/experiments.md)."""


def pooled_outlook(
    log_p: Float[Tensor, "slots candidates_vocab"],
    drafter: Float[Tensor, "drafts candidates_vocab"] | None,
    share: float = DRAFT_SHARE,
) -> Float[Tensor, "slots candidates_vocab"]:
    """Foresight's log-probabilities of the token after each row, pooled with the draft model's logits (each row up to
    a constant) where it drafted that token: log p̂ + share · log q, normalised.

    The last row, after which nothing was drafted, stays the decoder's; so do all of them without `drafter`.
    """
    if drafter is None:
        return log_p
    num_drafts = drafter.shape[0]
    pooled = (log_p[:num_drafts] + share * drafter.float()).log_softmax(-1)
    return torch.cat((pooled, log_p[num_drafts:]))
