"""How a verification ends: exact-match acceptance of a block.

Every committed token is the target's own draw; a draft token only decides whether the next row
may be used. The draft's probabilities are never consulted: with an argmax draft they would bias
the text (paper, appendix F.3). Knows nothing of length limits, and of rules and ends of the text
only that an editor has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from decoding.editing import RowEditor
from decoding.sampling import SamplingParameters, draw


@dataclass(frozen=True, slots=True)
class Outcome:
    """`num_accepted` drafts were accepted; `anchor` is the bonus token committed after them."""

    num_accepted: int
    anchor: int


def accept(
    rows: Float[Tensor, "rows vocab"],
    drafts: Sequence[int],
    parameters: SamplingParameters,
    first_position: int,
    editor: RowEditor | None = None,
) -> Outcome:
    """The outcome of a block [y0, d_1..d_γ] whose anchor y0 stands at `first_position` - 1.

    Row i holds the target's logits after [y0..d_i], so its draw is the token at
    `first_position` + i. Rows beyond len(drafts) + 1 are padding and ignored; so are, unread, the
    rows behind the first mismatch. An `editor` sees every row before the draw and every drawn token
    after it, and no other token; where it says that the text ends, that token is the anchor, right
    draft or not. Raises ValueError when rows are missing.
    """
    if rows.shape[0] < len(drafts) + 1:
        raise ValueError(f"{len(drafts)} drafts need {len(drafts) + 1} rows, got {rows.shape[0]}")
    num_accepted = 0
    while True:
        row = rows[num_accepted] if editor is None else editor.edit(rows[num_accepted])
        token_id = draw(row, parameters, first_position + num_accepted)
        goes_on = editor is None or editor.advance(token_id)
        if not goes_on or num_accepted == len(drafts) or token_id != drafts[num_accepted]:
            return Outcome(num_accepted, token_id)
        num_accepted += 1
