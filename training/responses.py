"""The target's own answers to many prompts at once: one pass a step over all rows that are still going.

A row ends at the end of the text, where it has begun to repeat itself, or at a limit; its place is given to the next
prompt at once. It does not know where prompts come from or where answers go.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from decoding.loops import is_loop
from decoding.sampling import SamplingParameters, draw
from modeling.cache import KeyValueCache
from modeling.target import TargetBlock, TargetRunner

Ending = Literal["stop", "loop", "length"]


@dataclass(frozen=True)
class Request:
    """One prompt to answer."""

    prompt_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParameters


@dataclass(frozen=True)
class Response:
    """An answer, the token that ended it included."""

    request: Request
    token_ids: list[int]
    ending: Ending


@dataclass
class Row:
    """An answer in the making. `last` is the newest token; it has no keys in the cache yet."""

    request: Request
    cache: KeyValueCache
    token_ids: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where the next token will stand."""
        return len(self.request.prompt_token_ids) + len(self.token_ids)


def respond(
    runner: TargetRunner,
    requests: Iterable[Request],
    stop_token_ids: Collection[int],
    max_tokens: int,
    num_rows: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Response]:
    """Answer all requests, `num_rows` at a time; answers come in the order in which they end.

    `should_stop` is asked before every pass; unfinished answers are dropped then.
    """
    waiting = iter(requests)
    free = [runner.new_cache() for _ in range(num_rows)]
    rows: list[Row] = []
    while True:
        while free and (request := next(waiting, None)) is not None:
            row = Row(request, free.pop())
            block = TargetBlock(row.cache, 0, request.prompt_token_ids)
            _take(row, runner.forward([block], last_row_only=True).logits[0])
            rows.append(row)
        going: list[Row] = []
        for row in rows:
            ending = _ending(row, stop_token_ids, max_tokens)
            if ending is None:
                going.append(row)
            else:
                free.append(row.cache)
                yield Response(row.request, row.token_ids, ending)
        ended = len(going) < len(rows)
        rows = going
        if ended:
            continue
        if not rows or should_stop():
            return
        blocks = [TargetBlock(row.cache, row.position - 1, [row.token_ids[-1]]) for row in rows]
        for row, logits in zip(rows, runner.forward(blocks).logits, strict=True):
            _take(row, logits)


def _take(row: Row, logits: Tensor) -> None:
    row.token_ids.append(draw(logits, row.request.sampling, row.position))


def _ending(row: Row, stop_token_ids: Collection[int], max_tokens: int) -> Ending | None:
    if row.token_ids[-1] in stop_token_ids:
        return "stop"
    if is_loop(row.token_ids):
        return "loop"
    return "length" if len(row.token_ids) >= max_tokens else None
