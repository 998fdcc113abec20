"""From the events of a trace to the rounds somebody wants to look at; knows nothing of pictures."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protocol.trace import TraceFileError

SETTLED_AFTER_ROUNDS = 3
"""Rounds left out at the beginning where nobody asks for them: the first is always a fallback."""


@dataclass(frozen=True)
class Span:
    """One thing a worker did; times in ms of the machine's monotonic clock."""

    process: str
    name: str
    start_ms: float
    end_ms: float
    details: dict[str, Any]

    @property
    def sequence_id(self) -> int | None:
        return self.details.get("sequence")


@dataclass(frozen=True)
class Excerpt:
    """Consecutive rounds of one sequence, with everything both workers did in that time."""

    sequence_id: int
    first_round: int
    last_round: int
    spans: list[Span]


def spans_of(events: Sequence[dict[str, Any]]) -> list[Span]:
    """The lasting events of a trace, by start. Raises `TraceFileError` for one that lacks a field."""
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    try:
        found = [
            Span(
                process=str(names.get(event["pid"], event["pid"])),
                name=str(event["name"]),
                start_ms=event["ts"] / 1e3,
                end_ms=(event["ts"] + event["dur"]) / 1e3,
                details=dict(event.get("args", {})),
            )
            for event in events
            if event["ph"] == "X"
        ]
    except (KeyError, TypeError) as error:
        raise TraceFileError(f"a trace event lacks {error}") from None
    return sorted(found, key=lambda span: span.start_ms)


def choose_rounds(
    spans: Sequence[Span], num_rounds: int, sequence_id: int | None = None, first_round: int | None = None
) -> Excerpt:
    """Rounds of a sequence, by default of the longest one and from its fourth round on; raises `TraceFileError`."""
    verifications = [span for span in spans if span.process == "verifier" and span.name == "verify"]
    if not verifications:
        raise TraceFileError("the trace holds no verification; was a request served while it was written?")
    if sequence_id is None:
        sequence_id = Counter(span.sequence_id for span in verifications).most_common(1)[0][0]
    own = [span for span in verifications if span.sequence_id == sequence_id]
    if not own:
        raise TraceFileError(f"the trace holds no verification of sequence {sequence_id}")
    if first_round is None:
        skipped = max(0, min(SETTLED_AFTER_ROUNDS, len(own) - num_rounds))
        chosen = own[skipped : skipped + num_rounds]
    else:
        chosen = [span for span in own if span.details["round"] >= first_round][:num_rounds]
    if not chosen:
        raise TraceFileError(
            f"sequence {sequence_id} has no round {first_round}; its last is {own[-1].details['round']}"
        )
    start_ms, end_ms = chosen[0].start_ms, chosen[-1].end_ms
    inside = [span for span in spans if span.end_ms > start_ms and span.start_ms < end_ms]
    return Excerpt(sequence_id or 0, chosen[0].details["round"], chosen[-1].details["round"], inside)
