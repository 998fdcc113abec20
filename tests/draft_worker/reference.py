"""One J1-R1 round written straight from design.md section 4: no caches, no packing, no shared masks.

Every row is drafted alone; context grows by torch.cat; attention is spelled out head by head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draft_worker.networks import DraftNetworks
from modeling.layers import DecoderLayer, Heads, Rotary
from tests.tiny.models import TrueRows


@dataclass
class Predicted:
    """Foresight over some tokens: tapped states [rows, taps, hidden], log p [rows, W], the decoder's own keys and
    values."""

    taps: Tensor
    log_p: Tensor
    decoder_heads: list[Heads] = field(default_factory=list)


@dataclass(frozen=True)
class RowDraft:
    """A row after J0, after the refresh and after J1; `first` is the slot of the new anchor."""

    initial: list[int]
    refreshed: list[int]
    first: int
    final: list[int]


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """query [rows, heads, dim]; key, value [keys, kv_heads, dim]; visible [rows, keys]; returns [rows, heads*dim]."""
    group = query.shape[1] // key.shape[1]
    outputs = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // group].T / query.shape[-1] ** 0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        outputs.append(weights @ value[:, head // group])
    return torch.cat(outputs, dim=-1)


class Reference:
    """A sequence as the equations see it: verified tokens, and the true states of all of them but the anchor."""

    def __init__(self, networks: DraftNetworks, rows: TrueRows, token_ids: Sequence[int]) -> None:
        assert networks.adapter is not None
        self.networks, self.adapter = networks, networks.adapter
        self.n = len(token_ids) - 1
        self.anchor = token_ids[-1]
        self.taps, self.decoder_kv = rows.taps[: self.n], rows.decoder_kv[: self.n]

    def foresee(self, token_ids: Sequence[int], start: int, block: Predicted | None = None) -> Predicted:
        """Adapter and decoder over tokens at positions start..; `block` holds the predicted rows between n and
        start."""
        networks = self.networks
        positions = torch.arange(start, start + len(token_ids))
        rotary = networks.rotary.at(positions)
        before = networks.rotary.at(torch.arange(start))
        context_taps = self.taps if block is None else torch.cat((self.taps, block.taps[: start - self.n]))
        hidden = networks.embedding[torch.tensor(token_ids)]
        predicted = []
        for placed in self.adapter.placed_layers():
            context = placed.layer.context(context_taps[:, placed.tap], before, normalise=True)
            hidden, _ = self._layer(placed.layer, hidden, rotary, context, causal=True)
            if placed.is_last:
                predicted.append(hidden)
        own_heads = []
        for index, layer in networks.decoder.placed_layers():
            key, value = self.decoder_kv[:, index, 0], self.decoder_kv[:, index, 1]
            if block is not None:
                key = torch.cat((key, block.decoder_heads[index].key[: start - self.n]))
                value = torch.cat((value, block.decoder_heads[index].value[: start - self.n]))
            hidden, heads = self._layer(layer, hidden, rotary, Heads(key[:, :0], key, value), causal=True)
            own_heads.append(heads)
        return Predicted(torch.stack(predicted, 1), networks.decoder.logits(hidden).log_softmax(-1), own_heads)

    def draft(self, context_taps: Tensor, token_ids: Sequence[int]) -> list[int]:
        """One parallel draft: slots read `token_ids`, context are the states of all positions before the first slot."""
        networks, start = self.networks, context_taps.shape[0]
        feature = networks.model.feature(context_taps)
        rotary = networks.draft_rotary.at(torch.arange(start, start + len(token_ids)))
        before = networks.draft_rotary.at(torch.arange(start))
        hidden = networks.embedding[torch.tensor(token_ids)]
        for layer in networks.model.decoder_layers():
            context = networks.model.context(layer, feature, before)
            hidden, _ = self._layer(layer, hidden, rotary, context, causal=networks.config.causal)
        columns = networks.head.logits(networks.model.final(hidden)).argmax(-1)
        tokens: list[int] = networks.head.token_ids[columns].tolist()
        return tokens if networks.config.slots == "shifted" else tokens[1:]

    def fallback(self, noise: Sequence[int]) -> list[int]:
        """The block of a miss."""
        return self.draft(self.taps, self._slots(self.anchor, noise))

    def prepare(self, block: Predicted, num_accepted: int, anchor: int, noise: Sequence[int]) -> RowDraft:
        """J0, R1 and J1 for one outcome, `block` being the foresight on the block under verification."""
        context = torch.cat((self.taps, block.taps[: num_accepted + 1]))
        initial = self.draft(context, self._slots(anchor, noise))
        row = self.foresee(self._slots(anchor, initial), context.shape[0], block)
        refreshed, first = list(initial), len(initial) + 1
        for number in range(1, len(initial) + 1):
            decoded = int(self.networks.head.token_ids[row.log_p[number - 1].argmax()])
            if decoded != initial[number - 1]:
                refreshed[number - 1], first = decoded, number
                break
        slots = [anchor, *refreshed]
        final = list(refreshed)
        if first < len(slots) - 1 or (self.networks.config.slots == "shifted" and first < len(slots)):
            open_slots = slots[first:] if self.networks.config.slots == "in_place" else slots[first:-1]
            if open_slots:
                final[first:] = self.draft(torch.cat((context, row.taps[:first])), open_slots)
        return RowDraft(initial, refreshed, first, final)

    def _slots(self, anchor: int, drafts: Sequence[int]) -> list[int]:
        return [anchor, *drafts][: self.networks.config.num_slots(len(drafts))]

    def _layer(
        self, layer: DecoderLayer, hidden: Tensor, rotary: Rotary, context: Heads, *, causal: bool
    ) -> tuple[Tensor, Heads]:
        heads = layer.project(hidden, rotary)
        own = torch.ones(hidden.shape[0], hidden.shape[0], dtype=torch.bool)
        visible = torch.cat(
            (torch.ones(hidden.shape[0], context.key.shape[0], dtype=torch.bool), own.tril() if causal else own), dim=1
        )
        key, value = torch.cat((context.key, heads.key)), torch.cat((context.value, heads.value))
        return layer.finish(hidden, attention(heads.query, key, value, visible)), heads
