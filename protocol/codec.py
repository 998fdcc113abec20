"""What every channel does with a message, whatever carries it: wrap it, check it, count what is dropped.

Knows nothing of sockets and queues. One codec belongs to one channel, since its counters are the channel's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from pydantic import TypeAdapter

from protocol.errors import MalformedMessage
from protocol.frames import MAX_MESSAGE_BYTES, Envelope, MessageT, Part, Received, TensorFrame, decode, encode
from protocol.messages import WireMessage


@dataclass(slots=True)
class Codec(Generic[MessageT]):
    """Bytes to messages of one link and back, for one run of the server."""

    run_id: str
    incoming: TypeAdapter[MessageT]
    max_message_bytes: int = MAX_MESSAGE_BYTES
    num_stale: int = 0
    num_malformed: int = 0
    num_dropped: int = 0
    last_fault: str = ""

    def pack(self, message: WireMessage, frames: Sequence[TensorFrame]) -> list[Part]:
        """Parts to send; raises `MessageTooLarge` before the receiver would drop the connection."""
        return encode(Envelope(self.run_id, message), frames, self.max_message_bytes)

    def unpack(self, parts: Sequence[Part]) -> Received[MessageT] | None:
        """The message, or None when it was dropped and counted as malformed or as left over from another run."""
        try:
            received = decode(parts, self.incoming, self.max_message_bytes)
        except MalformedMessage as error:
            self.num_malformed += 1
            self.last_fault = error.reason
            return None
        if received.run_id != self.run_id:
            self.num_stale += 1
            return None
        return received


class CodecCounters(Generic[MessageT]):
    """The counters of a channel, kept by its codec."""

    def __init__(self, codec: Codec[MessageT]) -> None:
        self._codec = codec

    @property
    def num_stale(self) -> int:
        """Messages of another run that were dropped on receipt."""
        return self._codec.num_stale

    @property
    def num_malformed(self) -> int:
        """Messages that did not follow the protocol and were dropped on receipt."""
        return self._codec.num_malformed

    @property
    def num_dropped(self) -> int:
        """Messages that could not be sent."""
        return self._codec.num_dropped

    @property
    def last_fault(self) -> str:
        """Why the latest malformed message was dropped, for a log line; never quotes the message."""
        return self._codec.last_fault
