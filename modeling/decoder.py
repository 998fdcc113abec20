"""The decoder: the target's own frozen layers above the deepest tap, its final norm, and a head (section 4.2, Decoder).

On predicted states of the deepest tap it gives the distribution of the next token after every prefix of a block,
always at
temperature 1. It reads the verified context through the target's own keys and values of these layers.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from modeling.layers import DecoderLayer, rms_norm
from modeling.target import Target
from modeling.vocabulary import DraftHead


@dataclass(frozen=True)
class Decoder:
    """Layers `first_layer`.. of the target, its norm, and the head rows that drafting uses."""

    layers: tuple[DecoderLayer, ...]
    first_layer: int
    norm: Tensor
    rms_eps: float
    head: DraftHead

    def placed_layers(self) -> Iterable[tuple[int, DecoderLayer]]:
        return enumerate(self.layers)

    def final(self, hidden: Tensor) -> Tensor:
        """Final norm; its rows go to the head."""
        return rms_norm(hidden, self.norm, self.rms_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., W] of the decoder's last layer's rows [..., hidden]."""
        return self.head.logits(self.final(hidden))


def decoder_layer_ids(deepest_tap: int, num_layers: int) -> tuple[int, ...]:
    """The target's layers above the deepest tap."""
    return tuple(range(deepest_tap + 1, num_layers))


def decoder_of(target: Target, deepest_tap: int, head: DraftHead) -> Decoder:
    """Slice a decoder off a loaded target; it shares the target's tensors."""
    shape = target.architecture
    layers = tuple(target.layer(index) for index in decoder_layer_ids(deepest_tap, shape.num_layers))
    return Decoder(layers, deepest_tap + 1, target.norm, shape.rms_eps, head)
