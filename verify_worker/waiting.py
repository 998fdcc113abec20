"""Requests that do not run yet: first come first served, but one whose grammar is being compiled lets others pass."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from verify_worker.grammar import GrammarError, Matcher
from verify_worker.sequence import Request


@dataclass
class Waiting:
    """A request in the line; `compilation` is its grammar on the way, `grammar` or `problem` what became of it."""

    request: Request
    compilation: "Future[Matcher] | None" = None
    arrived_at: float = field(default_factory=time.perf_counter)
    grammar: Matcher | None = None
    problem: GrammarError | None = None

    def settle(self) -> None:
        """Look once whether the grammar is compiled: it may be finished at any moment, in another thread."""
        if self.compilation is None or not self.compilation.done():
            return
        try:
            self.grammar = self.compilation.result()
        except GrammarError as error:
            self.problem = error
        self.compilation = None


class WaitingLine:
    """All waiting requests, oldest first."""

    def __init__(self) -> None:
        self._entries: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence_id: int) -> bool:
        return any(entry.request.sequence_id == sequence_id for entry in self._entries)

    def add(self, entry: Waiting) -> None:
        self._entries.append(entry)

    def remove(self, sequence_id: int) -> Waiting | None:
        """Take a request out, if it is here."""
        return self._take(lambda entry: entry.request.sequence_id == sequence_id)

    def settle(self) -> None:
        """Take over the grammars that are compiled by now."""
        for entry in self._entries:
            entry.settle()

    def take_broken(self) -> list[Waiting]:
        """Take the requests out whose grammar cannot be compiled."""
        broken = [entry for entry in self._entries if entry.problem is not None]
        self._entries = [entry for entry in self._entries if entry.problem is None]
        return broken

    def next_ready(self) -> Waiting | None:
        """Take the oldest request out that can start."""
        return self._take(lambda entry: entry.compilation is None and entry.problem is None)

    @property
    def is_compiling(self) -> bool:
        """Whether a grammar is on its way."""
        return any(entry.compilation is not None for entry in self._entries)

    def _take(self, is_wanted: Callable[[Waiting], bool]) -> Waiting | None:
        entry = next(filter(is_wanted, self._entries), None)
        if entry is not None:
            self._entries.remove(entry)
        return entry
