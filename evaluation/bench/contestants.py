"""Who takes part: methods of our server and peers, and with how many drafts a block each of them runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from evaluation.bench.errors import WrongInput
from protocol.worker_config import MethodName

BASELINE = "ar"
CACHED_METHOD = "jetspec++"
"""The method whose hit rate is measured against the cache size."""
TWO_CORES = "ar (2 cores)"
ALL = "all"

PeerKind = Literal["transformers", "llama.cpp-bf16", "llama.cpp-q4_1"]
PEER_KINDS: tuple[PeerKind, ...] = get_args(PeerKind)
LOOKUP_SUFFIX = " + prompt lookup"
PEER_GAMMAS = (2, 4, 10)
"""Tried for prompt lookup where no number is given: 10 and 2 are the libraries' own advice for GPUs and CPUs."""


@dataclass(frozen=True)
class Contestant:
    """One row of the table.

    gamma: drafts a block, None where nothing is drafted or the server's default is meant. flags: further ones of
    `jetspecpp serve`. is_required: asked for by name, so that a failure to start is an error, not a line.
    """

    name: str
    method: str
    peer: PeerKind | None = None
    gamma: int | None = None
    flags: tuple[str, ...] = ()
    cache_size: int | None = None
    is_required: bool = True

    @property
    def drafts(self) -> bool:
        """Whether it proposes tokens, so that a number of drafts has to be chosen."""
        return self.method != BASELINE

    @property
    def is_same_target(self) -> bool:
        """Whether its text must be that of `ar`, token for token; peers compute in another order."""
        return self.peer is None

    def with_gamma(self, gamma: int) -> "Contestant":
        """The same with so many drafts a block."""
        return replace(self, gamma=gamma)

    def serve_flags(self) -> list[str]:
        """Its own flags of `jetspecpp serve`."""
        gamma = [] if self.gamma is None else ["--num-speculative-tokens", str(self.gamma)]
        cache = [] if self.cache_size is None else ["--cache-size", str(self.cache_size)]
        return ["--method", self.method, *gamma, *cache, *self.flags]


def method_names() -> list[str]:
    """All methods of the server, plain decoding first."""
    names = list(_literals(MethodName))
    return [BASELINE, *(name for name in names if name != BASELINE)]


def choose_methods(text: str) -> list[Contestant]:
    """The methods of a comma-separated list, or all; `ar` is always among them. Raises `WrongInput`."""
    known = method_names()
    names = known if text == ALL else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in (*known, TWO_CORES):
            raise WrongInput(f"--methods: unknown method {name!r}; known: {', '.join(known)}, {ALL}")
    named = dict.fromkeys([BASELINE, *names])
    if text == ALL:
        named[TWO_CORES] = None
    return [
        two_cores() if name == TWO_CORES else Contestant(name, name, is_required=text != ALL or name == BASELINE)
        for name in named
    ]


def two_cores() -> Contestant:
    """Plain decoding with both cores for the verifier: what the second core is worth without a drafter."""
    flags = ("--verify-threads", "2", "--verify-core", "none")
    return Contestant(TWO_CORES, BASELINE, flags=flags, is_required=False)


def with_cache_sizes(sizes: Sequence[int], gamma: int | None) -> list[Contestant]:
    """The foresight method with fixed cache sizes, for the hit rate against B."""
    return [
        Contestant(f"{CACHED_METHOD} (B={size})", CACHED_METHOD, gamma=gamma, cache_size=size, is_required=False)
        for size in sizes
    ]


def peers() -> list[Contestant]:
    """Every peer, plain and with its own prompt-lookup drafter."""
    return [
        contestant
        for kind in PEER_KINDS
        for contestant in (
            Contestant(kind, BASELINE, peer=kind, is_required=False),
            Contestant(kind + LOOKUP_SUFFIX, "prompt lookup", peer=kind, is_required=False),
        )
    ]


def _literals(annotation: Any) -> list[str]:
    """The strings of a Literal, or of a union of them."""
    return [s for item in get_args(annotation) for s in ([item] if isinstance(item, str) else _literals(item))]
