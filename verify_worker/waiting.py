"""Requests that do not run yet: first come first served, but one whose grammar is being compiled lets others pass."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from verify_worker.grammar import GrammarError, Matcher
from verify_worker.sequence import Request


@dataclass(frozen=True)
class Waiting:
    """A request in the line. `grammar` is what its grammar is being compiled to."""

    request: Request
    grammar: "Future[Matcher] | None" = None
    arrived_at: float = field(default_factory=time.perf_counter)

    @property
    def is_ready(self) -> bool:
        return self.grammar is None or self.grammar.done()

    @property
    def problem(self) -> GrammarError | None:
        """Why the grammar cannot be compiled, once that is known."""
        if self.grammar is None or not self.grammar.done():
            return None
        error = self.grammar.exception()
        if error is not None and not isinstance(error, GrammarError):
            raise error
        return error


class WaitingLine:
    """All waiting requests, oldest first."""

    def __init__(self) -> None:
        self._entries: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._entries)

    def add(self, entry: Waiting) -> None:
        self._entries.append(entry)

    def remove(self, sequence_id: int) -> Waiting | None:
        """Take a request out, if it is here."""
        for entry in self._entries:
            if entry.request.sequence_id == sequence_id:
                self._entries.remove(entry)
                return entry
        return None

    def next_ready(self) -> Waiting | None:
        """Take the oldest request out that can start."""
        for entry in self._entries:
            if entry.is_ready:
                self._entries.remove(entry)
                return entry
        return None

    @property
    def is_compiling(self) -> bool:
        """Whether a grammar is on its way."""
        return not all(entry.is_ready for entry in self._entries)
