"""Everything that can go wrong on the wire, grouped by what the caller can do about it.

`MalformedMessage` concerns one message: drop it, count it, go on. `MessageTooLarge` is a fault of the sender: send less
at a time. `InsecureEndpoint`, `InsecureKeyFile` and `EndpointUnavailable` concern the configuration: report them and
stop. `ChannelClosed` ends the loop that was reading. A peer that is gone is no error: `send` returns False.
"""

from pathlib import Path


class ProtocolError(Exception):
    """Base of every error raised by this package."""


class MalformedMessage(ProtocolError):
    """A message, or a tensor frame, that does not follow the protocol. `reason` never quotes the payload."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class MessageTooLarge(ProtocolError):
    """A message over the limit that the receiver would answer by dropping the connection."""

    def __init__(self, num_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"a message of {num_bytes} bytes exceeds the limit of {limit_bytes} bytes")
        self.num_bytes = num_bytes
        self.limit_bytes = limit_bytes


class EndpointError(ProtocolError):
    """An endpoint that cannot be used as it is configured."""

    def __init__(self, endpoint: str, reason: str) -> None:
        super().__init__(f"{endpoint}: {reason}")
        self.endpoint = endpoint
        self.reason = reason


class InsecureEndpoint(EndpointError):
    """An endpoint that another user or another machine could reach without proving who it is."""


class EndpointUnavailable(EndpointError):
    """An endpoint that is well formed and cannot be bound or connected."""


class InsecureKeyFile(ProtocolError):
    """A key file that others can read, or that holds no usable keys."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class ChannelClosed(ProtocolError):
    """Reading from a channel that this process has closed."""
