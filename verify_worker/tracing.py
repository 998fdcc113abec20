"""What the verifier writes into the trace: one track a slot, with prefills, verifications and the time between them."""

import time

from decoding.acceptance import Outcome
from protocol.trace import Trace
from verify_worker.sequence import Sequence


def trace_prefill(trace: Trace, sequence: Sequence, start: int, started_s: float) -> None:
    """A chunk of a prompt has just been processed, from row `start` on."""
    if trace.is_on:
        rows = sequence.num_rows - start
        details = {"sequence": sequence.sequence_id, "rows": rows}
        trace.complete("prefill", started_s, time.perf_counter(), _track(sequence), **details)


def trace_round(trace: Trace, sequence: Sequence, outcome: Outcome, started_s: float, ended_s: float) -> None:
    """A verification has ended; before `sequence.verified_at` and the block are moved on to the next round."""
    if trace.is_on:
        details = {"sequence": sequence.sequence_id, "round": sequence.round, "source": sequence.source}
        trace.complete(
            "exposed", sequence.verified_at, max(sequence.verified_at, started_s), _track(sequence), **details
        )
        counts = {"drafts": len(sequence.drafts), "accepted": outcome.num_accepted}
        trace.complete("verify", started_s, ended_s, _track(sequence), **details, **counts)


def _track(sequence: Sequence) -> str:
    return f"slot {sequence.slot}"
