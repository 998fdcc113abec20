"""What a method that reads target states keeps of one sequence: verified tokens and, for true rows only, keys and
values of its three stacks.

True rows arrive after each verification and are appended here; predictions go to the scratch area of the caches and are
never counted. Knows no messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_worker.networks import DraftNetworks
from modeling.cache import KeyValueCache, bucket
from modeling.layers import Heads

KEY_BUCKET = 64


@dataclass(frozen=True)
class SequenceMemory:
    """Caches of one slot: draft model, adapter, decoder. One scratch layout: foresight rows first, then packed rows."""

    draft: KeyValueCache
    adapter: KeyValueCache | None
    decoder: KeyValueCache
    num_foresight_rows: int
    num_positions: int


def new_memory(
    networks: DraftNetworks, num_positions: int, num_draft_tokens: int, max_cache_size: int
) -> SequenceMemory:
    """Allocate the caches of a slot."""
    foresight_rows = num_draft_tokens + 1
    scratch = foresight_rows + max_cache_size * networks.config.num_slots(num_draft_tokens)
    device, dtype = networks.device, networks.dtype
    draft_shape = networks.config.architecture
    adapter = networks.adapter
    return SequenceMemory(
        draft=KeyValueCache(draft_shape, draft_shape.num_layers, num_positions, dtype, device, scratch),
        adapter=None
        if adapter is None
        else KeyValueCache(adapter.config.architecture, adapter.num_layers, num_positions, dtype, device, scratch),
        decoder=KeyValueCache(networks.target, len(networks.decoder.layers), num_positions, dtype, device, scratch),
        num_foresight_rows=foresight_rows,
        num_positions=num_positions,
    )


class MemoryPool:
    """The memories of all slots, each allocated when a sequence first gets the slot."""

    def __init__(self, networks: DraftNetworks, num_draft_tokens: int, max_cache_size: int) -> None:
        self._networks = networks
        self._num_draft_tokens = num_draft_tokens
        self._max_cache_size = max_cache_size
        self._memories: dict[int, SequenceMemory] = {}

    def at(self, slot: int) -> SequenceMemory:
        """A slot's memory, whatever it was used for before."""
        memory = self._memories.get(slot)
        if memory is None:
            networks = self._networks
            memory = new_memory(networks, networks.num_positions, self._num_draft_tokens, self._max_cache_size)
            self._memories[slot] = memory
        return memory


class DraftModelMethod:
    """What methods that draft with a draft model have in common; `max_cache_size`: most outcomes a round prepares."""

    def __init__(self, networks: DraftNetworks, num_draft_tokens: int, max_cache_size: int) -> None:
        self.networks = networks
        self.num_draft_tokens = num_draft_tokens
        self._memories = MemoryPool(networks, num_draft_tokens, max_cache_size)

    @property
    def device(self) -> torch.device:
        return self.networks.device

    @property
    def dtype(self) -> torch.dtype:
        return self.networks.dtype

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.networks.config.tap_layers


class DraftSequence:
    """Verified tokens and true rows of a sequence. `num_rows` = n: the anchor `token_ids[-1]` has no row yet."""

    def __init__(self, networks: DraftNetworks, memory: SequenceMemory, prompt_token_ids: list[int]) -> None:
        self.networks = networks
        self.memory = memory
        self.token_ids = list(prompt_token_ids)
        self.num_rows = 0

    @property
    def num_keys(self) -> int:
        """Verified key rows a pass looks at: the length rounded up, so that few shapes occur."""
        return bucket(self.num_rows, KEY_BUCKET, self.memory.num_positions)

    def commit(self, accepted: Sequence[int], anchor: int) -> None:
        """Append the accepted drafts and the bonus token; their rows come by `install`."""
        self.token_ids += [*accepted, anchor]

    @torch.inference_mode()
    def install(self, taps: Tensor, decoder_kv: Tensor) -> None:
        """Append true rows: taps [rows, taps, hidden], decoder_kv [rows, layers, 2, kv_heads, dim].

        Without an adapter there is no decoder either, and decoder_kv is not looked at.
        """
        networks, memory, start = self.networks, self.memory, self.num_rows
        stop = start + taps.shape[0]
        feature = networks.model.feature(taps)
        rotary = networks.draft_rotary.span(start, stop)
        networks.stacks.draft.lay_verified(feature, rotary, memory.draft, start)
        if networks.stacks.adapter is not None and memory.adapter is not None:
            networks.stacks.adapter.lay_verified(taps, networks.rotary.span(start, stop), memory.adapter, start)
        for index, _ in networks.decoder.placed_layers():
            key, value = decoder_kv[:, index, 0], decoder_kv[:, index, 1]
            memory.decoder.write(index, start, Heads(key[:, :0], key, value))
        self.num_rows = stop
