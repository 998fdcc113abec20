"""A look at the part of a drafter's caches that outlives a round."""

from collections.abc import Iterator

from torch import Tensor

from draft_worker.sequence import SequenceMemory


def permanent(memory: SequenceMemory) -> Iterator[tuple[str, Tensor]]:
    """Keys and values of all verified positions, by cache."""
    caches = {"draft": memory.draft, "adapter": memory.adapter, "decoder": memory.decoder}
    for name, cache in caches.items():
        assert cache is not None
        yield f"{name} keys", cache.key[:, :, cache.num_scratch :]
        yield f"{name} values", cache.value[:, :, cache.num_scratch :]
