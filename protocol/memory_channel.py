"""The in-memory stand-in for a ZeroMQ channel: same interface, same bytes, and faults on demand.

For tests, across threads or within one. Knows nothing of sockets. Faults are drawn from the plan's seed, so a failure
can be repeated; only their timing depends on the machine.
"""

import asyncio
import heapq
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from protocol.codec import Codec, CodecCounters
from protocol.errors import ChannelClosed
from protocol.frames import MessageT, Part, Received, TensorFrame

ASYNC_POLL_INTERVAL_S = 0.001


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What goes wrong with each message: four probabilities, and delays in seconds.

    A delay is drawn uniformly from [0, delay_s] and keeps the order; a reordered message is held back for `reorder_s`,
    so that later ones overtake it. A truncated message loses the end of one part, or the part altogether.
    """

    seed: int = 0
    drop: float = 0.0
    delay_s: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    truncate: float = 0.0
    reorder_s: float = 0.02

    def __post_init__(self) -> None:
        for name in ("drop", "duplicate", "reorder", "truncate"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is a probability")
        if self.delay_s < 0.0 or self.reorder_s < 0.0:
            raise ValueError("delays are not negative")


NO_FAULTS = FaultPlan()


@dataclass(order=True, slots=True)
class _InFlight:
    due: float
    order: int
    parts: list[Part] = field(compare=False)


class _Wire:
    """One direction: messages become visible to the reader when they are due."""

    def __init__(self, faults: FaultPlan, direction: str, capacity: int) -> None:
        self._faults = faults
        self._random = random.Random(f"{faults.seed}:{direction}")
        self._capacity = capacity
        self._messages: list[_InFlight] = []
        self._num_put = 0
        self._latest_due = 0.0
        self._changed = threading.Condition()
        self._sender_open = True
        self._receiver_open = True

    def put(self, parts: Sequence[Part]) -> bool:
        """Take a message over, and perhaps lose it; False when it cannot even be taken over."""
        faults, draw = self._faults, self._random.random
        with self._changed:
            if not self._sender_open or not self._receiver_open or len(self._messages) >= self._capacity:
                return False
            lost, twice, overtaken, cut = (
                draw() < probability for probability in (faults.drop, faults.duplicate, faults.reorder, faults.truncate)
            )
            delay_s = draw() * faults.delay_s
            copies = [] if lost else [parts, parts] if twice else [parts]
            for copy in copies:
                self._push(self._truncated(copy) if cut else copy, delay_s, overtaken)
            self._changed.notify_all()
        return True

    def wait(self, timeout_s: float) -> bool:
        """Whether a message is due, waiting up to `timeout_s` for one."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if not self._receiver_open:
                    raise ChannelClosed
                now = time.monotonic()
                if self._messages and self._messages[0].due <= now:
                    return True
                if now >= deadline:
                    return False
                until = min(deadline, self._messages[0].due) if self._messages else deadline
                self._changed.wait(until - now)

    def take(self) -> list[Part]:
        """The message that `wait` announced."""
        with self._changed:
            return heapq.heappop(self._messages).parts

    def close_sender(self) -> None:
        with self._changed:
            self._sender_open = False

    def close_receiver(self) -> None:
        with self._changed:
            self._receiver_open = False
            self._messages.clear()
            self._changed.notify_all()

    def _push(self, parts: Sequence[Part], delay_s: float, overtaken: bool) -> None:
        due = max(time.monotonic() + delay_s, self._latest_due)
        if overtaken:
            due += self._faults.reorder_s
        else:
            self._latest_due = due
        copied: list[Part] = [memoryview(bytearray(part)) for part in parts]
        heapq.heappush(self._messages, _InFlight(due, self._num_put, copied))
        self._num_put += 1

    def _truncated(self, parts: Sequence[Part]) -> list[Part]:
        cut = list(parts)
        index = self._random.randrange(len(cut))
        data = bytes(cut[index])
        if not data or (index > 0 and self._random.random() < 0.5):
            del cut[index]
        else:
            cut[index] = data[: self._random.randrange(len(data))]
        return cut


class MemoryChannel(CodecCounters[MessageT]):
    """A `Channel` whose peer is in the same process; made by `memory_pair`."""

    def __init__(self, codec: Codec[MessageT], outgoing: _Wire, incoming: _Wire) -> None:
        super().__init__(codec)
        self._outgoing = outgoing
        self._incoming = incoming

    @property
    def codec(self) -> Codec[MessageT]:
        """What wraps and checks the messages of this end, with its counters."""
        return self._codec

    def send(self, message: MessageT, frames: Sequence[TensorFrame] = ()) -> bool:
        """As `Channel.send`; a message that the fault plan loses counts as sent."""
        sent = self._outgoing.put(self._codec.pack(message, frames))
        self._codec.num_dropped += not sent
        return sent

    def receive(self, timeout_s: float) -> Received[MessageT] | None:
        """As `Channel.receive`."""
        deadline = time.monotonic() + timeout_s
        while self._incoming.wait(deadline - time.monotonic()):
            received = self._codec.unpack(self._incoming.take())
            if received is not None:
                return received
        return None

    def poll(self, timeout_s: float = 0.0) -> bool:
        """As `Channel.poll`."""
        return self._incoming.wait(timeout_s)

    def close(self, flush_s: float = 0.0) -> None:
        """As `Channel.close`; what was sent before can still be received by the peer."""
        self._outgoing.close_sender()
        self._incoming.close_receiver()


class AsyncMemoryChannel(CodecCounters[MessageT]):
    """An `AsyncChannel` over a `MemoryChannel`, by polling."""

    def __init__(self, channel: MemoryChannel[MessageT]) -> None:
        super().__init__(channel.codec)
        self._channel = channel

    def send(self, message: MessageT, frames: Sequence[TensorFrame] = ()) -> bool:
        """As `Channel.send`."""
        return self._channel.send(message, frames)

    async def receive(self, timeout_s: float | None = None) -> Received[MessageT] | None:
        """As `AsyncChannel.receive`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            await asyncio.sleep(0)
            received = self._channel.receive(0.0)
            if received is not None or (deadline is not None and time.monotonic() >= deadline):
                return received
            await asyncio.sleep(ASYNC_POLL_INTERVAL_S)

    def close(self, flush_s: float = 0.0) -> None:
        """As `AsyncChannel.close`."""
        self._channel.close(flush_s)


def memory_pair(
    run_id: str,
    incoming: TypeAdapter[MessageT],
    faults: FaultPlan = NO_FAULTS,
    *,
    peer_run_id: str | None = None,
    capacity: int = 1000,
) -> tuple[MemoryChannel[MessageT], MemoryChannel[MessageT]]:
    """Both ends of a link. The faults strike both directions, drawn independently.

    With another `peer_run_id` either end takes the messages of the other for stale ones.
    """
    there, back = _Wire(faults, "there", capacity), _Wire(faults, "back", capacity)
    return (
        MemoryChannel(Codec(run_id, incoming), outgoing=there, incoming=back),
        MemoryChannel(Codec(peer_run_id or run_id, incoming), outgoing=back, incoming=there),
    )
