"""Randomness keyed by what it is for, never by when it is asked for.

The verifier's uniform at a position depends on the request's seed and that position alone, so the
text of a request does not depend on which drafts were right. The drafter's noise has its own
domain: nothing it draws can be correlated with the draws that verify its block. Knows nothing of
distributions.
"""

from hashlib import blake2b

import torch

_VERIFIER_DOMAIN = b"jetspec.verify"
_NOISE_DOMAIN = b"jetspec.noise"
_MANTISSA_BITS = 53


def _keyed_bits(domain: bytes, first: int, second: int) -> int:
    key = first.to_bytes(8, "little") + second.to_bytes(8, "little")
    return int.from_bytes(blake2b(key, digest_size=8, person=domain).digest(), "little")


def uniform(seed: int, position: int) -> float:
    """The uniform in [0, 1) of one position of one request, exact to 53 bits.

    Both arguments lie in [0, 2**64); OverflowError otherwise.
    """
    bits = _keyed_bits(_VERIFIER_DOMAIN, seed, position) >> (64 - _MANTISSA_BITS)
    return bits / (1 << _MANTISSA_BITS)


def noise_generator(seed: int, sequence_id: int) -> torch.Generator:
    """A CPU generator for the noise tokens of one sequence, independent of every `uniform`."""
    generator = torch.Generator(device="cpu")
    generator.manual_seed(_keyed_bits(_NOISE_DOMAIN, seed, sequence_id) >> 1)
    return generator
