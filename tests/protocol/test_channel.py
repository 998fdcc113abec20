"""ZeroMQ channels: options, faults on the wire, and peers that are absent, dead, hung or strangers."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import zmq

from protocol.channel import (
    AsyncZmqChannel,
    ChannelOptions,
    ZmqChannel,
    ipc_endpoint,
    new_curve_keys,
    wait_any,
)
from protocol.errors import ChannelClosed, EndpointUnavailable, MalformedMessage, MessageTooLarge
from protocol.frames import Envelope, TensorFrame, encode
from protocol.messages import (
    PEER_MESSAGES,
    CloseSequence,
    ContextRows,
    OpenSequence,
    PeerAccepted,
    PeerMessage,
    PeerRejected,
)

RUN_ID = "a" * 32
OLD_RUN_ID = "b" * 32
PATIENCE_S = 20.0

PEER_PROGRAM = """
import sys, time
from protocol.channel import ZmqChannel
from protocol.messages import PEER_MESSAGES, PeerAccepted
channel = ZmqChannel.connect(sys.argv[1], sys.argv[2], PEER_MESSAGES)
while not channel.send(PeerAccepted()):
    time.sleep(0.01)
time.sleep(60)
"""


@pytest.fixture
def endpoint() -> Iterator[str]:
    with TemporaryDirectory(prefix="jetspec-test-", dir="/tmp") as name:
        yield ipc_endpoint(Path(name), "peer")


@contextmanager
def linked(
    endpoint: str, options: ChannelOptions | None = None
) -> Iterator[tuple[ZmqChannel[PeerMessage], ZmqChannel[PeerMessage]]]:
    """A bound and a connected channel that have found each other."""
    chosen = options or ChannelOptions()
    with (
        ZmqChannel.bind(endpoint, RUN_ID, PEER_MESSAGES, chosen) as bound,
        ZmqChannel.connect(endpoint, RUN_ID, PEER_MESSAGES, chosen) as connected,
    ):
        exchange(connected, bound)
        exchange(bound, connected)
        yield bound, connected


@contextmanager
def raw_peer(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    """A socket that sends whatever it likes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDTIMEO, int(PATIENCE_S * 1000))
        socket.connect(endpoint)
        yield socket


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.005)
    return True


def exchange(sender: ZmqChannel[PeerMessage], receiver: ZmqChannel[PeerMessage]) -> None:
    assert eventually(lambda: sender.send(PeerAccepted()))
    received = receiver.receive(PATIENCE_S)
    assert received is not None
    assert received.message == PeerAccepted()


def test_every_option_with_a_dangerous_default_is_set(endpoint: str) -> None:
    with linked(endpoint) as channels:
        for channel in channels:
            options = {
                name: channel.socket.getsockopt(getattr(zmq, name))
                for name in (
                    "MAXMSGSIZE",
                    "SNDHWM",
                    "RCVHWM",
                    "LINGER",
                    "IMMEDIATE",
                    "HEARTBEAT_IVL",
                    "HEARTBEAT_TIMEOUT",
                )
            }
            assert options == {
                "MAXMSGSIZE": 64 << 20,
                "SNDHWM": 1000,
                "RCVHWM": 1000,
                "LINGER": 0,
                "IMMEDIATE": 1,
                "HEARTBEAT_IVL": 1000,
                "HEARTBEAT_TIMEOUT": 5000,
            }


def test_messages_arrive_in_order_with_their_frames(endpoint: str) -> None:
    with linked(endpoint) as (bound, connected):
        for index in range(50):
            data = bytes([index]) * (9 * 4 * 1000)
            frames = [TensorFrame("float32", (9, 1000), data), TensorFrame("bfloat16", (9, 0), b"")]
            assert bound.send(ContextRows(sequence_id=index, start=0, num_rows=9), frames)
        for index in range(50):
            received = connected.receive(PATIENCE_S)
            assert received is not None
            assert received.message == ContextRows(sequence_id=index, start=0, num_rows=9)
            assert bytes(received.frames[0].data) == bytes([index]) * (9 * 4 * 1000)
        assert not connected.poll()


def test_received_frames_can_be_written_to(endpoint: str) -> None:
    message = ContextRows(sequence_id=0, start=0, num_rows=2)
    with linked(endpoint) as (bound, connected):
        assert bound.send(
            message, [TensorFrame("uint8", (2, 100_000), bytes(200_000)), TensorFrame("uint8", (2,), b"xy")]
        )
        received = connected.receive(PATIENCE_S)
        assert received is not None
        for frame in received.frames:
            assert isinstance(frame.data, memoryview)
            assert not frame.data.readonly
        assert bytes(received.frames[1].data) == b"xy"


def test_the_senders_buffer_may_be_reused_at_once(endpoint: str) -> None:
    buffer = bytearray(b"\x01" * 1_000_000)
    message = ContextRows(sequence_id=0, start=0, num_rows=1)
    frames = [TensorFrame("uint8", (1, 1_000_000), memoryview(buffer)), TensorFrame("uint8", (1,), b"x")]
    with linked(endpoint) as (bound, connected):
        assert bound.send(message, frames)
        buffer[:] = b"\x02" * 1_000_000
        received = connected.receive(PATIENCE_S)
        assert received is not None
        assert bytes(received.frames[0].data) == b"\x01" * 1_000_000


def test_an_absent_peer_does_not_block_the_sender(endpoint: str) -> None:
    for make in (ZmqChannel.bind, ZmqChannel.connect):
        with make(endpoint, RUN_ID, PEER_MESSAGES) as channel:
            assert not any(channel.send(CloseSequence(sequence_id=1)) for _ in range(10))
            assert channel.num_dropped == 10


@pytest.mark.parametrize("gone", ["bound", "connected"])
def test_a_peer_that_closes_does_not_block_the_sender(endpoint: str, gone: str) -> None:
    with linked(endpoint) as (bound, connected):
        leaver, stayer = (bound, connected) if gone == "bound" else (connected, bound)
        num_dropped = stayer.num_dropped
        leaver.close()
        assert eventually(lambda: not stayer.send(CloseSequence(sequence_id=1)))
        assert stayer.num_dropped == num_dropped + 1


def test_a_peer_that_never_reads_does_not_block_the_sender(endpoint: str) -> None:
    message = OpenSequence(sequence_id=1, slot=0, prompt_token_ids=[1 << 30] * 20_000, stop_token_ids=[])
    with linked(endpoint, ChannelOptions(high_water_mark=4)) as (bound, connected):
        num_sent, num_dropped = 0, bound.num_dropped
        while num_sent < 1000 and bound.send(message):
            num_sent += 1
        assert num_sent < 1000
        assert bound.num_dropped == num_dropped + 1
        for _ in range(num_sent):
            assert connected.receive(PATIENCE_S) is not None
        exchange(bound, connected)


@pytest.fixture
def peer_process(endpoint: str) -> Iterator[tuple[ZmqChannel[PeerMessage], subprocess.Popen[bytes]]]:
    """A bound channel with a live peer in another process."""
    options = ChannelOptions(heartbeat_interval_s=0.1, heartbeat_timeout_s=1.0, high_water_mark=10_000)
    with ZmqChannel.bind(endpoint, RUN_ID, PEER_MESSAGES, options) as channel:
        process = subprocess.Popen([sys.executable, "-c", PEER_PROGRAM, endpoint, RUN_ID])
        try:
            received = channel.receive(PATIENCE_S)
            assert received is not None
            yield channel, process
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_hung_peer_does_not_block_the_sender(
    peer_process: tuple[ZmqChannel[PeerMessage], subprocess.Popen[bytes]], blow: signal.Signals
) -> None:
    channel, process = peer_process
    assert channel.send(CloseSequence(sequence_id=1))
    process.send_signal(blow)
    assert eventually(lambda: not channel.send(CloseSequence(sequence_id=1)))
    assert channel.num_dropped == 1


def test_a_restarted_peer_gets_no_messages_meant_for_the_one_before(endpoint: str) -> None:
    with ZmqChannel.bind(endpoint, RUN_ID, PEER_MESSAGES) as bound:
        with ZmqChannel.connect(endpoint, RUN_ID, PEER_MESSAGES) as first:
            exchange(first, bound)
        assert eventually(lambda: not bound.send(CloseSequence(sequence_id=1)))
        with ZmqChannel.connect(endpoint, RUN_ID, PEER_MESSAGES) as second:
            exchange(second, bound)
            exchange(bound, second)


def test_messages_of_another_run_are_counted_and_dropped(endpoint: str) -> None:
    with (
        ZmqChannel.bind(endpoint, RUN_ID, PEER_MESSAGES) as bound,
        ZmqChannel.connect(endpoint, OLD_RUN_ID, PEER_MESSAGES) as old,
        ZmqChannel.connect(endpoint, RUN_ID, PEER_MESSAGES) as new,
    ):
        assert eventually(lambda: old.send(CloseSequence(sequence_id=1)))
        assert old.send(CloseSequence(sequence_id=2))
        assert eventually(bound.poll)
        assert bound.receive(0.0) is None
        exchange(new, bound)
        assert (bound.num_stale, bound.num_malformed) == (2, 0)


def test_malformed_messages_are_counted_and_the_next_good_one_gets_through(endpoint: str) -> None:
    good = [bytes(part) for part in encode(Envelope(RUN_ID, CloseSequence(sequence_id=5)))]
    with ZmqChannel.bind(endpoint, RUN_ID, PEER_MESSAGES) as bound, raw_peer(endpoint) as socket:
        bad: list[list[bytes]] = [[b""], [b"garbage"], [*good, b"extra"], [good[0][:-1]], [b"x"] * 100]
        for parts in [*bad, good]:
            socket.send_multipart(parts)
        received = bound.receive(PATIENCE_S)
        assert received is not None
        assert received.message == CloseSequence(sequence_id=5)
        assert bound.num_malformed == len(bad)
        assert bound.last_fault


def test_oversized_messages_are_refused_at_the_sender(endpoint: str) -> None:
    message = ContextRows(sequence_id=0, start=0, num_rows=1)
    frames = [TensorFrame("uint8", (1, 100_000), bytes(100_000)), TensorFrame("uint8", (1,), b"x")]
    with linked(endpoint, ChannelOptions(max_message_bytes=100_000)) as (bound, connected):
        with pytest.raises(MessageTooLarge):
            bound.send(message, frames)
        exchange(bound, connected)


def test_oversized_messages_do_not_reach_the_receiver(endpoint: str) -> None:
    options = ChannelOptions(max_message_bytes=1000)
    good = encode(Envelope(RUN_ID, CloseSequence(sequence_id=5)))
    with ZmqChannel.bind(endpoint, RUN_ID, PEER_MESSAGES, options) as bound:
        with raw_peer(endpoint) as socket:
            socket.send_multipart([*good, bytes(1001)])
        with raw_peer(endpoint) as socket:
            socket.send_multipart([bytes(600), bytes(600)])
            socket.send_multipart(good)
            received = bound.receive(PATIENCE_S)
        assert received is not None
        assert received.message == CloseSequence(sequence_id=5)
        assert bound.num_malformed == 1


def test_frames_that_do_not_fit_are_the_senders_fault(endpoint: str) -> None:
    with linked(endpoint) as (bound, _), pytest.raises(MalformedMessage):
        bound.send(ContextRows(sequence_id=0, start=0, num_rows=1), [])


def test_receive_ends_with_its_timeout(endpoint: str) -> None:
    with linked(endpoint) as (bound, _):
        assert bound.receive(0.0) is None
        assert bound.receive(0.01) is None
        assert not bound.poll(0.001)


def test_what_is_flushed_on_close_arrives(endpoint: str) -> None:
    with linked(endpoint) as (bound, connected):
        for _ in range(100):
            assert connected.send(PeerRejected(reason="another target"))
        connected.close(flush_s=PATIENCE_S)
        for _ in range(100):
            received = bound.receive(PATIENCE_S)
            assert received is not None
            assert received.message == PeerRejected(reason="another target")


def test_a_closed_channel_takes_and_gives_nothing(endpoint: str) -> None:
    with linked(endpoint) as (bound, connected):
        num_dropped = bound.num_dropped
        bound.close()
        bound.close()
        assert bound.closed
        assert not bound.send(PeerAccepted())
        assert bound.num_dropped == num_dropped + 1
        for use in (lambda: bound.receive(1.0), bound.poll, lambda: wait_any([bound, connected], 1.0)):
            with pytest.raises(ChannelClosed):
                use()


def test_closing_does_not_wait_for_a_peer_that_never_came(endpoint: str) -> None:
    channel = ZmqChannel.connect(endpoint, RUN_ID, PEER_MESSAGES)
    channel.send(PeerAccepted())
    closing = threading.Thread(target=channel.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_an_endpoint_that_cannot_be_bound_is_reported(endpoint: str) -> None:
    Path(endpoint.removeprefix("ipc://")).mkdir()
    with pytest.raises(EndpointUnavailable):
        ZmqChannel.bind(endpoint, RUN_ID, PEER_MESSAGES)


def test_waiting_for_any_of_several_channels(endpoint: str) -> None:
    other = endpoint + "-other"
    with linked(endpoint) as (first, first_peer), linked(other) as (second, second_peer):
        assert not wait_any([first, second], 0.01)
        for peer, channel in ((first_peer, first), (second_peer, second)):
            assert peer.send(PeerAccepted())
            assert wait_any([first, second], PATIENCE_S)
            assert channel.receive(0.0) is not None
            assert not wait_any([first, second], 0.0)


def free_port() -> int:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        return socket.bind_to_random_port("tcp://127.0.0.1")


def test_tcp_with_keys_lets_in_the_peer_and_nobody_else() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    bind_keys, connect_keys = new_curve_keys()
    stranger_keys = replace(new_curve_keys()[0], peer_public_key=bind_keys.public_key)
    with (
        ZmqChannel.bind(address, RUN_ID, PEER_MESSAGES, curve=bind_keys) as bound,
        ZmqChannel.connect(address, RUN_ID, PEER_MESSAGES, curve=stranger_keys) as stranger,
    ):
        time.sleep(0.3)
        assert not stranger.send(PeerAccepted())
        with ZmqChannel.connect(address, RUN_ID, PEER_MESSAGES, curve=connect_keys) as connected:
            exchange(connected, bound)
            exchange(bound, connected)
            assert not stranger.send(PeerAccepted())


async def test_async_messages_arrive_in_order_under_cross_traffic(endpoint: str) -> None:
    bound = AsyncZmqChannel.bind(endpoint, RUN_ID, PEER_MESSAGES)
    connected = AsyncZmqChannel.connect(endpoint, RUN_ID, PEER_MESSAGES)
    num_messages = 500

    async def chatter(channel: AsyncZmqChannel[PeerMessage]) -> None:
        for index in range(num_messages):
            while not channel.send(CloseSequence(sequence_id=index)):
                await asyncio.sleep(0.001)
            if index % 7 == 0:
                await asyncio.sleep(0.0005)

    async def collect(channel: AsyncZmqChannel[PeerMessage]) -> list[int]:
        received = [await channel.receive(PATIENCE_S) for _ in range(num_messages)]
        return [
            item.message.sequence_id
            for item in received
            if item is not None and isinstance(item.message, CloseSequence)
        ]

    try:
        _, _, first, second = await asyncio.gather(
            chatter(bound), chatter(connected), collect(bound), collect(connected)
        )
    finally:
        bound.close()
        connected.close()
    assert first == second == list(range(num_messages))


async def test_async_receive_wakes_when_a_send_consumed_the_signal(endpoint: str) -> None:
    """A reader waits; the message arrives while the loop is busy; a send then looks at the socket first."""
    channel = AsyncZmqChannel.bind(endpoint, RUN_ID, PEER_MESSAGES)
    with ZmqChannel.connect(endpoint, RUN_ID, PEER_MESSAGES) as peer:
        while not peer.send(PeerAccepted()):
            await asyncio.sleep(0.001)
        assert await channel.receive(PATIENCE_S) is not None
        for index in range(20):
            reader = asyncio.create_task(channel.receive(PATIENCE_S))
            await asyncio.sleep(0.002)
            assert peer.send(CloseSequence(sequence_id=index))
            time.sleep(0.002)
            assert channel.send(PeerAccepted())
            received = await reader
            assert received is not None
            assert received.message == CloseSequence(sequence_id=index)
    channel.close()


async def test_async_receive_ends_with_its_timeout_and_with_the_channel(endpoint: str) -> None:
    channel = AsyncZmqChannel.bind(endpoint, RUN_ID, PEER_MESSAGES)
    assert await channel.receive(0.0) is None
    assert await channel.receive(0.01) is None
    assert not channel.send(PeerAccepted())
    assert channel.num_dropped == 1
    reader = asyncio.create_task(channel.receive())
    await asyncio.sleep(0.01)
    channel.close()
    with pytest.raises(ChannelClosed):
        await reader


async def test_async_receive_lets_other_tasks_run_while_messages_wait(endpoint: str) -> None:
    channel = AsyncZmqChannel.bind(endpoint, RUN_ID, PEER_MESSAGES)
    turns = 0

    async def bystander() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    with ZmqChannel.connect(endpoint, RUN_ID, PEER_MESSAGES) as peer:
        assert eventually(lambda: peer.send(PeerAccepted()))
        for _ in range(99):
            assert peer.send(PeerAccepted())
        task = asyncio.create_task(bystander())
        for _ in range(100):
            before = turns
            assert await channel.receive(PATIENCE_S) is not None
            assert turns > before
        task.cancel()
    channel.close()


async def test_a_cancelled_async_receive_loses_no_message(endpoint: str) -> None:
    channel = AsyncZmqChannel.bind(endpoint, RUN_ID, PEER_MESSAGES)
    with ZmqChannel.connect(endpoint, RUN_ID, PEER_MESSAGES) as peer:
        reader = asyncio.create_task(channel.receive())
        await asyncio.sleep(0.01)
        reader.cancel()
        assert eventually(lambda: peer.send(CloseSequence(sequence_id=1)))
        with pytest.raises(asyncio.CancelledError):
            await reader
        received = await channel.receive(PATIENCE_S)
        assert received is not None
        assert received.message == CloseSequence(sequence_id=1)
    channel.close()
