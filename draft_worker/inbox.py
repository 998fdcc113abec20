"""Puts the verifier's outcomes of one sequence in order: late ones wait for the missing one, old and double ones are
dropped."""

from dataclasses import dataclass, field

from protocol.frames import TensorFrame
from protocol.messages import OutcomeRows

MAX_WAITING = 4


@dataclass(frozen=True)
class OutcomeArrival:
    """An outcome message with its frames and its time of arrival."""

    message: OutcomeRows
    frames: tuple[TensorFrame, ...]
    arrived_at: float


@dataclass
class OutcomeInbox:
    """Outcomes of one sequence by round."""

    next_round: int = 0
    num_stale: int = 0
    waiting: dict[int, OutcomeArrival] = field(default_factory=dict)

    def put(self, arrival: OutcomeArrival) -> None:
        """Keep an outcome unless its round is over or already waiting."""
        number = arrival.message.round
        if number < self.next_round or number in self.waiting:
            self.num_stale += 1
            return
        self.waiting[number] = arrival

    def take(self) -> OutcomeArrival | None:
        """The next outcome in order, if it is here."""
        arrival = self.waiting.pop(self.next_round, None)
        if arrival is not None:
            self.next_round += 1
        return arrival

    @property
    def is_lost(self) -> bool:
        """Whether so many later outcomes wait that the missing one will not come."""
        return len(self.waiting) > MAX_WAITING
