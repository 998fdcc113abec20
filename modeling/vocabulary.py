"""The head that drafting and foresight use: the target's own rows, all of them or the most frequent tokens only.

A trimmed head costs a sixth of the bytes and touches proposals only: what is committed comes from the target's full
head.
"""

import torch
from torch import Tensor

from modeling.kernels.int8 import Quantization
from modeling.kernels.packed import Weight, can_pack, linear, pack


class DraftHead:
    """Rows of the target's head for `token_ids` [W]; column c stands for token `token_ids[c]`. `packed`: for
    inference, `quantization`: how it is packed."""

    def __init__(
        self,
        weight: Tensor,
        token_ids: Tensor | None,
        *,
        packed: bool = False,
        quantization: Quantization = "none",
    ) -> None:
        vocab_size = weight.shape[0]
        if token_ids is None:
            token_ids = torch.arange(vocab_size)
        if token_ids.numel() == 0 or int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
            raise ValueError(f"draft vocabulary has ids outside the target's {vocab_size} tokens")
        if token_ids.unique().numel() != token_ids.numel():
            raise ValueError("draft vocabulary names a token twice")
        self.is_full = torch.equal(token_ids.cpu(), torch.arange(vocab_size))
        rows = weight if self.is_full else weight[token_ids].contiguous()
        self.weight: Weight = pack(rows, quantization) if packed and can_pack(rows) else rows
        self.token_ids = token_ids.to(weight.device)
        self.columns = torch.full((vocab_size,), -1, dtype=torch.long, device=weight.device)
        self.columns[self.token_ids] = torch.arange(token_ids.numel(), device=weight.device)
        self._column_list: list[int] = self.columns.tolist()

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., W] of normed rows [..., hidden]."""
        return linear(hidden, self.weight)

    def column(self, token_id: int) -> int:
        """Column of a token, -1 when the vocabulary lacks it."""
        return self._column_list[token_id]
