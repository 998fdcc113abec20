"""Heads that correct the slots of a parallel block from left to right: DSpark's Markov head and Domino's GRU head.

A backbone proposes all slots at once, so a slot does not know which token the slot before it became. A head adds to a
slot's logits what that token, or all tokens since the anchor, make more likely (facts.md 1.2 and 1.3). Drafts are
counted from 0 here, whatever the slot convention: draft 0 follows the anchor. It does not know how a token is chosen.

Tensors and config fields are named as in the published DSpark (DeepSpec) and Domino checkpoints.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling.architecture import UnsupportedModel
from modeling.kernels.int8 import Quantization
from modeling.kernels.packed import PackedWeight, can_pack, linear, pack_parameters, unpacked
from modeling.layers import fill_parameter
from modeling.vocabulary import DraftHead


@dataclass(frozen=True)
class MarkovConfig:
    """DSpark: a bias of rank `rank` from the token before the slot."""

    rank: int


@dataclass(frozen=True)
class GruConfig:
    """Domino: a GRU over the tokens since the anchor; `bottleneck` is the width between it and the vocabulary.

    The first `num_uncorrected` drafts keep the backbone's logits.
    """

    state_size: int
    bottleneck: int
    num_uncorrected: int = 1


HeadConfig = MarkovConfig | GruConfig


@dataclass(frozen=True)
class PreviousTokens:
    """The token before each slot: id [...], column [...] in the draft vocabulary (-1: not in it), embedding
    [..., hidden]."""

    token_ids: Tensor
    columns: Tensor
    embedding: Tensor

    def slot(self, index: int) -> "PreviousTokens":
        """One slot of tokens [rows, slots]."""
        return PreviousTokens(self.token_ids[:, index], self.columns[:, index], self.embedding[:, index])


class CorrectionHead(nn.Module, ABC):
    """What all heads have in common: a state per row that realised tokens move on, and a correction made from it."""

    num_uncorrected: int = 0

    @property
    @abstractmethod
    def config(self) -> HeadConfig: ...

    @property
    @abstractmethod
    def num_columns(self) -> int:
        """Tokens whose logits are corrected."""

    @abstractmethod
    def begin(self, num_rows: int) -> Tensor:
        """States [num_rows, state] before the anchor."""

    @abstractmethod
    def advance(self, state: Tensor, previous: PreviousTokens) -> Tensor:
        """States [rows, state] after one more token of each row."""

    @abstractmethod
    def correction(self, state: Tensor, hidden: Tensor, previous: PreviousTokens) -> Tensor:
        """What to add to logits [..., W], from states [..., state] and the backbone's rows [..., hidden]."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Tensors under published names."""

    @abstractmethod
    def pack(self, quantization: Quantization = "none") -> None:
        """Freeze the head for inference in the layout of the row-independent kernel, where there is one."""


class MarkovHead(CorrectionHead):
    """Bias W2·E1[previous token]. E1 has a row for every token of the target, or one for every column and one for all
    other tokens."""

    second: nn.Parameter | PackedWeight

    def __init__(
        self, config: MarkovConfig, num_columns: int, num_embeddings: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self._config = config
        self.first = nn.Parameter(torch.empty(num_embeddings, config.rank, dtype=dtype))
        self.second = nn.Parameter(torch.zeros(num_columns, config.rank, dtype=dtype))
        nn.init.normal_(self.first, std=0.02)

    @property
    def config(self) -> MarkovConfig:
        return self._config

    @property
    def num_columns(self) -> int:
        return self.second.shape[0]

    def begin(self, num_rows: int) -> Tensor:
        return self.first.new_empty(num_rows, 0)

    def advance(self, state: Tensor, previous: PreviousTokens) -> Tensor:
        return state

    def correction(self, state: Tensor, hidden: Tensor, previous: PreviousTokens) -> Tensor:
        if self.first.shape[0] == self.num_columns + 1:
            rows = previous.columns.where(previous.columns >= 0, self.num_columns)
        else:
            rows = previous.token_ids
        return linear(F.embedding(rows, self.first), self.second)

    def tensors(self) -> dict[str, Tensor]:
        return {
            "markov_head.markov_w1.weight": self.first.data,
            "markov_head.markov_w2.weight": unpacked(self.second).data,
        }

    def pack(self, quantization: Quantization = "none") -> None:
        if isinstance(self.second, nn.Parameter) and can_pack(self.second):
            pack_parameters(self, ("second",), quantization)


class GruHead(CorrectionHead):
    """Correction W2·SiLU(W1·[z; s]): z the backbone's row, s a GRU's state after the anchor and the drafts so far."""

    input_gates: nn.Parameter | PackedWeight
    state_gates: nn.Parameter | PackedWeight
    first: nn.Parameter | PackedWeight
    second: nn.Parameter | PackedWeight

    def __init__(
        self, config: GruConfig, num_columns: int, hidden_size: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self._config = config
        self.num_uncorrected = config.num_uncorrected
        size = config.state_size
        self.input_gates = nn.Parameter(torch.empty(3 * size, hidden_size, dtype=dtype))
        self.state_gates = nn.Parameter(torch.empty(3 * size, size, dtype=dtype))
        self.first = nn.Parameter(torch.empty(config.bottleneck, hidden_size + size, dtype=dtype))
        self.second = nn.Parameter(torch.zeros(num_columns, config.bottleneck, dtype=dtype))
        for gates in (self.input_gates, self.state_gates):
            nn.init.uniform_(unpacked(gates), -1 / math.sqrt(size), 1 / math.sqrt(size))
        nn.init.normal_(unpacked(self.first), std=0.02)

    @property
    def config(self) -> GruConfig:
        return self._config

    @property
    def num_columns(self) -> int:
        return self.second.shape[0]

    def begin(self, num_rows: int) -> Tensor:
        device = None if isinstance(self.input_gates, PackedWeight) else self.input_gates.device
        return torch.zeros(num_rows, self._config.state_size, dtype=self.input_gates.dtype, device=device)

    def advance(self, state: Tensor, previous: PreviousTokens) -> Tensor:
        from_input = linear(previous.embedding, self.input_gates).chunk(3, dim=-1)
        from_state = linear(state, self.state_gates).chunk(3, dim=-1)
        reset = torch.sigmoid(from_input[0] + from_state[0])
        update = torch.sigmoid(from_input[1] + from_state[1])
        candidate = torch.tanh(from_input[2] + reset * from_state[2])
        return candidate + update * (state - candidate)

    def correction(self, state: Tensor, hidden: Tensor, previous: PreviousTokens) -> Tensor:
        joined = torch.cat((hidden, state), dim=-1)
        return linear(F.silu(linear(joined, self.first)), self.second)

    def tensors(self) -> dict[str, Tensor]:
        return {
            "prefix_gru.weight_ih_l0": unpacked(self.input_gates).data,
            "prefix_gru.weight_hh_l0": unpacked(self.state_gates).data,
            "embed_proj.0.weight": unpacked(self.first).data,
            "embed_proj.2.weight": unpacked(self.second).data,
        }

    def pack(self, quantization: Quantization = "none") -> None:
        if isinstance(self.second, nn.Parameter) and can_pack(self.second):
            pack_parameters(self, ("input_gates", "state_gates", "first", "second"), quantization)


@dataclass(frozen=True)
class CorrectedSlot:
    """Corrected logits [rows, W] of one draft, and the states [rows, state] to go on with."""

    logits: Tensor
    state: Tensor


class SlotCorrector:
    """A head on its draft vocabulary and the target's embedding.

    Raises `UnsupportedModel` when the head was made for another vocabulary.
    """

    def __init__(self, head: CorrectionHead, vocabulary: DraftHead, embedding: Tensor) -> None:
        if head.num_columns != vocabulary.token_ids.numel():
            raise UnsupportedModel(
                f"the head corrects {head.num_columns} tokens, the draft vocabulary has {vocabulary.token_ids.numel()}"
            )
        if isinstance(head, MarkovHead) and head.first.shape[0] not in (embedding.shape[0], head.num_columns + 1):
            raise UnsupportedModel(
                f"the Markov head knows {head.first.shape[0]} previous tokens, the target has {embedding.shape[0]}"
            )
        self.head = head
        self._columns = vocabulary.columns
        self._embedding = embedding

    def begin(self, num_rows: int) -> Tensor:
        """States of rows whose anchor has not been read."""
        return self.head.begin(num_rows)

    def correct(
        self, draft_index: int, logits: Tensor, hidden: Tensor, previous_token_ids: Tensor, state: Tensor
    ) -> CorrectedSlot:
        """One draft of R rows: logits [R, W] and rows [R, hidden] of the backbone, the R tokens before the slot.

        Drafts are asked for in order from 0, whose previous token is the anchor.
        """
        previous = self._previous(previous_token_ids)
        state = self.head.advance(state, previous)
        if draft_index < self.head.num_uncorrected:
            return CorrectedSlot(logits, state)
        return CorrectedSlot(logits + self.head.correction(state, hidden, previous), state)

    def correct_all(self, logits: Tensor, hidden: Tensor, previous_token_ids: Tensor) -> Tensor:
        """All drafts [rows, drafts, W] at once, where the tokens before them [rows, drafts] are known (training)."""
        previous = self._previous(previous_token_ids)
        num_rows, num_drafts = previous_token_ids.shape
        states, state = [], self.begin(num_rows)
        for index in range(num_drafts):
            state = self.head.advance(state, previous.slot(index))
            states.append(state)
        correction = self.head.correction(torch.stack(states, dim=1), hidden, previous)
        skipped = self.head.num_uncorrected
        return torch.cat((logits[:, :skipped], logits[:, skipped:] + correction[:, skipped:]), dim=1)

    def _previous(self, token_ids: Tensor) -> PreviousTokens:
        return PreviousTokens(token_ids, self._columns[token_ids], F.embedding(token_ids, self._embedding))


def head_config_from_json(config: Mapping[str, Any]) -> HeadConfig | None:
    """The head that a checkpoint's `config.json` names, None for a plain backbone. Raises `UnsupportedModel`."""
    extra = config.get("dflash_config") or {}
    rank = config.get("markov_rank") or extra.get("markov_rank")
    projector = extra.get("projector_type")
    if rank:
        kind = config.get("markov_head_type", extra.get("markov_head_type", "vanilla"))
        if kind != "vanilla":
            raise UnsupportedModel(f"markov_head_type {kind!r} is not supported; only vanilla is")
        return MarkovConfig(_positive(rank, "markov_rank"))
    if projector == "domino":
        return GruConfig(
            state_size=_positive(extra.get("gru_hidden_dim"), "dflash_config.gru_hidden_dim"),
            bottleneck=_positive(extra.get("emb_dim", config.get("emb_dim")), "dflash_config.emb_dim"),
            num_uncorrected=int(extra.get("pure_draft_prefix_len", 0)),
        )
    if projector is not None:
        raise UnsupportedModel(f"dflash_config.projector_type {projector!r} is not supported; only domino is")
    return None


def with_head(config: Mapping[str, Any], head: HeadConfig) -> dict[str, Any]:
    """A `config.json` that also names the head: the inverse of `head_config_from_json`."""
    if isinstance(head, MarkovConfig):
        return {**config, "markov_rank": head.rank, "markov_head_type": "vanilla"}
    extra = {
        **config.get("dflash_config", {}),
        "projector_type": "domino",
        "gru_hidden_dim": head.state_size,
        "emb_dim": head.bottleneck,
        "pure_draft_prefix_len": head.num_uncorrected,
    }
    return {**config, "dflash_config": extra}


def load_head(
    config: HeadConfig, tensors: Mapping[str, Tensor], hidden_size: int, dtype: torch.dtype
) -> CorrectionHead:
    """A head from published tensors; raises KeyError naming a missing one, ValueError one of another shape."""
    last = tensors["markov_head.markov_w2.weight" if isinstance(config, MarkovConfig) else "embed_proj.2.weight"]
    head: CorrectionHead
    if isinstance(config, MarkovConfig):
        num_embeddings = tensors["markov_head.markov_w1.weight"].shape[0]
        head = MarkovHead(config, last.shape[0], num_embeddings, dtype)
    else:
        head = GruHead(config, last.shape[0], hidden_size, dtype)
    for name, tensor in head.tensors().items():
        fill_parameter(tensor, tensors[name], name)
    return head


def _positive(value: object, name: str) -> int:
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {name} is {value!r}, not a whole number of 1 or more")
    return value
