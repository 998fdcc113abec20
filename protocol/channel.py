"""Channels between two processes: messages in order, never blocking the sender, over ZeroMQ DEALER sockets.

The only module that imports zmq. Knows nothing of what the messages mean, and nothing of handshakes: a channel says
whether a message left, not whether anyone acted on it. A channel belongs to the thread that uses it.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import zmq
from pydantic import TypeAdapter
from zmq.auth.thread import ThreadAuthenticator

from protocol.codec import Codec, CodecCounters
from protocol.endpoints import CurveKeys, check_endpoint, ipc_endpoint, runtime_directory
from protocol.errors import ChannelClosed, EndpointUnavailable
from protocol.frames import MAX_MESSAGE_BYTES, MessageT, Part, Received, TensorFrame

__all__ = [
    "AsyncChannel",
    "AsyncZmqChannel",
    "Channel",
    "ChannelOptions",
    "CurveKeys",
    "ZmqChannel",
    "ipc_endpoint",
    "new_curve_keys",
    "runtime_directory",
    "wait_any",
]

MAX_SKIPPED_MESSAGES = 1000
VIEW_BYTES = 16 << 10
POLL_INTERVAL_S = 0.001


class Counters(Protocol):
    """What a channel counts instead of failing; `CodecCounters` says what each is."""

    @property
    def num_stale(self) -> int: ...
    @property
    def num_malformed(self) -> int: ...
    @property
    def num_dropped(self) -> int: ...


class Channel(Counters, Protocol[MessageT]):
    """One end of a link."""

    def send(self, message: MessageT, frames: Sequence[TensorFrame] = ()) -> bool:
        """Send without blocking. False, and counted, when the peer is gone or the queue is full.

        Frame data may be overwritten as soon as this returns. Raises `MessageTooLarge`, and `MalformedMessage` when the
        frames do not fit the message: both are faults of the caller.
        """

    def receive(self, timeout_s: float) -> Received[MessageT] | None:
        """The next good message, or None after `timeout_s`; bad ones are counted and skipped.

        Raises `ChannelClosed`.
        """

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether something is there to be received (it may turn out malformed or stale)."""

    def close(self, flush_s: float = 0.0) -> None:
        """Release the channel. Unsent messages are dropped, unless `flush_s` gives them time to leave.

        A connected end loses what it has not read when the bound end closes; a bound end still gets everything that its
        peer flushed. So the bound end closes last where a last message matters.
        """


class AsyncChannel(Counters, Protocol[MessageT]):
    """One end of a link, for one event loop: as `Channel`, but waiting lets the loop go on."""

    def send(self, message: MessageT, frames: Sequence[TensorFrame] = ()) -> bool:
        """As `Channel.send`."""

    async def receive(self, timeout_s: float | None = None) -> Received[MessageT] | None:
        """As `Channel.receive`; waits without limit when `timeout_s` is None. One task receives at a time."""

    def close(self, flush_s: float = 0.0) -> None:
        """As `Channel.close`; a task that waits in `receive` gets `ChannelClosed`."""


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """Limits of one socket. Each end queues up to `high_water_mark` messages; what exceeds it is not sent."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    high_water_mark: int = 1000
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 5.0
    reconnect_interval_s: float = 0.05
    max_reconnect_interval_s: float = 0.5


DEFAULT_OPTIONS = ChannelOptions()


class ZmqChannel(CodecCounters[MessageT]):
    """A `Channel` over a DEALER socket with a context of its own; made by `bind` or `connect`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        codec: Codec[MessageT],
        authenticator: ThreadAuthenticator | None,
    ) -> None:
        super().__init__(codec)
        self._context = context
        self._socket = socket
        self._authenticator = authenticator

    @classmethod
    def bind(
        cls,
        endpoint: str,
        run_id: str,
        incoming: TypeAdapter[MessageT],
        options: ChannelOptions = DEFAULT_OPTIONS,
        curve: CurveKeys | None = None,
    ) -> Self:
        """Listen at `endpoint`; raises `InsecureEndpoint` or `EndpointUnavailable`."""
        return cls._open(endpoint, Codec(run_id, incoming, options.max_message_bytes), options, curve, listen=True)

    @classmethod
    def connect(
        cls,
        endpoint: str,
        run_id: str,
        incoming: TypeAdapter[MessageT],
        options: ChannelOptions = DEFAULT_OPTIONS,
        curve: CurveKeys | None = None,
    ) -> Self:
        """Connect to `endpoint`, now or whenever someone listens there; raises as `bind` does."""
        return cls._open(endpoint, Codec(run_id, incoming, options.max_message_bytes), options, curve, listen=False)

    @classmethod
    def _open(
        cls, endpoint: str, codec: Codec[MessageT], options: ChannelOptions, curve: CurveKeys | None, listen: bool
    ) -> Self:
        check_endpoint(endpoint, curve)
        context = zmq.Context[zmq.Socket[bytes]]()
        authenticator = _authenticator(context, curve) if curve is not None and listen else None
        channel = cls(context, context.socket(zmq.DEALER), codec, authenticator)
        try:
            _configure(channel._socket, options)
            if curve is not None:
                _secure(channel._socket, curve, listen)
            if listen:
                channel._socket.bind(endpoint)
            else:
                channel._socket.connect(endpoint)
        except zmq.ZMQError as error:
            channel.close()
            raise EndpointUnavailable(endpoint, error.strerror or str(error)) from None
        return channel

    @property
    def closed(self) -> bool:
        return self._socket.closed

    @property
    def codec(self) -> Codec[MessageT]:
        """What wraps and checks the messages of this end, with its counters."""
        return self._codec

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The socket underneath, for waiting on several channels and for checks of its options."""
        return self._socket

    def send(self, message: MessageT, frames: Sequence[TensorFrame] = ()) -> bool:
        parts = self._codec.pack(message, frames)
        sent = not self._socket.closed and self._send_parts(parts)
        self._codec.num_dropped += not sent
        return sent

    def receive(self, timeout_s: float) -> Received[MessageT] | None:
        deadline = time.monotonic() + timeout_s
        for _ in range(MAX_SKIPPED_MESSAGES):
            parts = self._receive_parts()
            if parts is None:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0.0 or not self.poll(remaining_s):
                    return None
            elif (received := self._codec.unpack(parts)) is not None:
                return received
        return None

    def poll(self, timeout_s: float = 0.0) -> bool:
        if self._socket.closed:
            raise ChannelClosed
        if timeout_s <= 0.0:
            return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        return bool(self._socket.poll(_milliseconds(timeout_s), zmq.POLLIN))

    def close(self, flush_s: float = 0.0) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._socket.close(linger=_milliseconds(flush_s))
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _send_parts(self, parts: Sequence[Part]) -> bool:
        """Hand all parts over, or none.

        The bytes are copied: a worker may reuse its buffers before the I/O thread has written them, and copying a few
        hundred KB takes tens of microseconds. A connection lost between two parts leaves the socket waiting for the
        end of this message; the rest is handed over all the same, lest the next message be taken for it.
        """
        sent = True
        for index, part in enumerate(parts):
            more = zmq.SNDMORE if index + 1 < len(parts) else 0
            try:
                self._socket.send(part, zmq.DONTWAIT | more)
            except zmq.Again:
                sent = False
                if index == 0:
                    break
        return sent

    def _receive_parts(self) -> list[Part] | None:
        if self._socket.closed:
            raise ChannelClosed
        try:
            return [_part(frame) for frame in self._socket.recv_multipart(zmq.DONTWAIT, copy=False)]
        except zmq.Again:
            return None


class AsyncZmqChannel(CodecCounters[MessageT]):
    """A `ZmqChannel` for one event loop.

    The descriptor of a ZeroMQ socket signals once and only says that something may have changed; any operation, a send
    included, may consume the signal. So every signal and every send looks at the socket's state and wakes the reader.
    """

    def __init__(self, channel: ZmqChannel[MessageT]) -> None:
        super().__init__(channel.codec)
        self._channel = channel
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._descriptor = int(channel.socket.getsockopt(zmq.FD))

    @classmethod
    def bind(
        cls,
        endpoint: str,
        run_id: str,
        incoming: TypeAdapter[MessageT],
        options: ChannelOptions = DEFAULT_OPTIONS,
        curve: CurveKeys | None = None,
    ) -> Self:
        """As `ZmqChannel.bind`; needs no running loop yet."""
        return cls(ZmqChannel.bind(endpoint, run_id, incoming, options, curve))

    @classmethod
    def connect(
        cls,
        endpoint: str,
        run_id: str,
        incoming: TypeAdapter[MessageT],
        options: ChannelOptions = DEFAULT_OPTIONS,
        curve: CurveKeys | None = None,
    ) -> Self:
        """As `ZmqChannel.connect`; needs no running loop yet."""
        return cls(ZmqChannel.connect(endpoint, run_id, incoming, options, curve))

    @property
    def closed(self) -> bool:
        return self._channel.closed

    def send(self, message: MessageT, frames: Sequence[TensorFrame] = ()) -> bool:
        sent = self._channel.send(message, frames)
        self._look()
        return sent

    async def receive(self, timeout_s: float | None = None) -> Received[MessageT] | None:
        """As `AsyncChannel.receive`. Lets other tasks run even while messages are waiting."""
        self._watch()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        await asyncio.sleep(0)
        while True:
            self._wake.clear()
            received = self._channel.receive(0.0)
            if received is not None:
                return received
            self._look()
            try:
                async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                    await asyncio.sleep(0)
                    await self._wake.wait()
            except TimeoutError:
                return None

    def close(self, flush_s: float = 0.0) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._loop = None
        self._channel.close(flush_s)
        self._wake.set()

    def _watch(self) -> None:
        if self._loop is None and not self._channel.closed:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._descriptor, self._look)

    def _look(self) -> None:
        if not self._channel.closed and self._channel.poll():
            self._wake.set()


def wait_any(channels: Sequence[Channel[Any]], timeout_s: float) -> bool:
    """Wait until one of the channels has something to receive, or until `timeout_s` is over; says which."""
    sockets = [channel.socket for channel in channels if isinstance(channel, ZmqChannel)]
    if len(sockets) == len(channels):
        if any(socket.closed for socket in sockets):
            raise ChannelClosed
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        return bool(poller.poll(_milliseconds(timeout_s)))
    deadline = time.monotonic() + timeout_s
    while not any(channel.poll() for channel in channels):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_INTERVAL_S)
    return True


def new_curve_keys() -> tuple[CurveKeys, CurveKeys]:
    """Fresh keys for the binding and for the connecting side of one link."""
    bind_public, bind_secret = (key.decode("ascii") for key in zmq.curve_keypair())
    connect_public, connect_secret = (key.decode("ascii") for key in zmq.curve_keypair())
    return (
        CurveKeys(bind_public, bind_secret, peer_public_key=connect_public),
        CurveKeys(connect_public, connect_secret, peer_public_key=bind_public),
    )


def _configure(socket: zmq.Socket[bytes], options: ChannelOptions) -> None:
    """Every option whose default would queue without bound, hang at exit, or take a dead peer for a live one."""
    settings = {
        zmq.MAXMSGSIZE: options.max_message_bytes,
        zmq.SNDHWM: options.high_water_mark,
        zmq.RCVHWM: options.high_water_mark,
        zmq.LINGER: 0,
        zmq.IMMEDIATE: 1,
        zmq.HEARTBEAT_IVL: _milliseconds(options.heartbeat_interval_s),
        zmq.HEARTBEAT_TIMEOUT: _milliseconds(options.heartbeat_timeout_s),
        zmq.HANDSHAKE_IVL: _milliseconds(options.heartbeat_timeout_s),
        zmq.RECONNECT_IVL: _milliseconds(options.reconnect_interval_s),
        zmq.RECONNECT_IVL_MAX: _milliseconds(options.max_reconnect_interval_s),
    }
    for option, value in settings.items():
        socket.setsockopt(option, value)


def _secure(socket: zmq.Socket[bytes], curve: CurveKeys, listen: bool) -> None:
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, curve.public_key)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, curve.secret_key)
    if listen:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
    else:
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, curve.peer_public_key)


@dataclass(frozen=True, slots=True)
class _OnlyPeer:
    """Credentials check of the authenticator: CURVE alone lets in whoever knows the listener's public key."""

    public_key: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.public_key


def _authenticator(context: zmq.Context[zmq.Socket[bytes]], curve: CurveKeys) -> ThreadAuthenticator:
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", _OnlyPeer(curve.peer_public_key.encode("ascii")))
    return authenticator


def _part(frame: zmq.Frame) -> Part:
    """A view onto a large part; a copy of a small one, which lies unaligned in a buffer shared with its neighbours."""
    return frame.buffer if len(frame) >= VIEW_BYTES else memoryview(bytearray(frame.buffer))


def _milliseconds(seconds: float) -> int:
    """Rounded up: a wait shorter than a millisecond must not become a busy loop."""
    return max(0, -int(-seconds * 1000.0 // 1.0))
