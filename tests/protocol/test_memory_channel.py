"""The in-memory channel: as the real one without faults, and each fault does what it says."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.channel import AsyncChannel, Channel, wait_any
from protocol.errors import ChannelClosed, MessageTooLarge
from protocol.frames import Received, TensorFrame
from protocol.memory_channel import AsyncMemoryChannel, FaultPlan, MemoryChannel, memory_pair
from protocol.messages import PEER_MESSAGES, CloseSequence, ContextRows, PeerAccepted, PeerMessage

RUN_ID = "a" * 32
PATIENCE_S = 20.0
FRAMES = [TensorFrame("uint8", (2, 3), b"abcdef"), TensorFrame("uint8", (2,), b"gh")]


def rows(index: int) -> ContextRows:
    return ContextRows(sequence_id=index, start=0, num_rows=2)


def arrivals(faults: FaultPlan, num_messages: int) -> tuple[list[int], MemoryChannel[PeerMessage]]:
    """Which messages arrive, in order, and the channel they arrived at; every one that does is intact."""
    sender, receiver = memory_pair(RUN_ID, PEER_MESSAGES, faults)
    for index in range(num_messages):
        assert sender.send(rows(index), FRAMES)
    indices: list[int] = []
    while (received := receiver.receive(faults.delay_s + faults.reorder_s)) is not None:
        assert isinstance(received.message, ContextRows)
        assert [bytes(frame.data) for frame in received.frames] == [b"abcdef", b"gh"]
        indices.append(received.message.sequence_id)
    return indices, receiver


def test_without_faults_everything_arrives_in_order_both_ways() -> None:
    first, second = memory_pair(RUN_ID, PEER_MESSAGES)
    for sender, receiver in ((first, second), (second, first)):
        for index in range(20):
            assert sender.send(rows(index), FRAMES)
        received = [receiver.receive(0.0) for _ in range(20)]
        assert [item and item.message for item in received] == [rows(index) for index in range(20)]
        assert receiver.receive(0.0) is None
        assert (receiver.num_malformed, receiver.num_stale, sender.num_dropped) == (0, 0, 0)


def test_it_stands_in_for_the_real_channel() -> None:
    first, _ = memory_pair(RUN_ID, PEER_MESSAGES)
    channel: Channel[PeerMessage] = first
    asynchronous: AsyncChannel[PeerMessage] = AsyncMemoryChannel(first)
    assert channel.send(PeerAccepted())
    assert asynchronous.send(PeerAccepted())


def test_dropped_messages_count_as_sent() -> None:
    indices, receiver = arrivals(FaultPlan(drop=1.0), 20)
    assert indices == []
    assert receiver.num_malformed == 0
    indices, _ = arrivals(FaultPlan(seed=1, drop=0.5), 100)
    assert 0 < len(indices) < 100
    assert indices == sorted(indices)


def test_the_seed_decides_which_messages_are_lost() -> None:
    once, again, other = (arrivals(FaultPlan(seed=seed, drop=0.5), 100)[0] for seed in (3, 3, 4))
    assert once == again
    assert once != other


def test_duplicated_messages_arrive_twice() -> None:
    assert arrivals(FaultPlan(duplicate=1.0), 5)[0] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_reordered_messages_arrive_late_but_arrive() -> None:
    indices, _ = arrivals(FaultPlan(reorder=0.3, reorder_s=0.2), 50)
    assert sorted(indices) == list(range(50))
    assert indices != sorted(indices)


def test_delayed_messages_keep_their_order() -> None:
    indices, _ = arrivals(FaultPlan(delay_s=0.05), 50)
    assert indices == list(range(50))


def test_a_delayed_message_is_not_there_at_once() -> None:
    sender, receiver = memory_pair(RUN_ID, PEER_MESSAGES, FaultPlan(reorder=1.0, reorder_s=3600.0))
    assert sender.send(PeerAccepted())
    assert not receiver.poll()
    assert receiver.receive(0.01) is None


def test_truncated_messages_are_malformed() -> None:
    indices, receiver = arrivals(FaultPlan(truncate=1.0), 100)
    assert indices == []
    assert receiver.num_malformed == 100


@settings(max_examples=15, deadline=None)
@given(
    st.builds(
        FaultPlan,
        seed=st.integers(0, 1000),
        drop=st.floats(0, 0.5),
        duplicate=st.floats(0, 0.5),
        reorder=st.floats(0, 0.5),
        truncate=st.floats(0, 0.5),
        reorder_s=st.just(0.002),
    )
)
def test_under_any_faults_only_intact_messages_arrive(faults: FaultPlan) -> None:
    indices, receiver = arrivals(faults, 30)
    assert set(indices) <= set(range(30))
    assert len(indices) + receiver.num_malformed <= 60


def test_messages_of_another_run_are_stale() -> None:
    first, second = memory_pair(RUN_ID, PEER_MESSAGES, peer_run_id="b" * 32)
    assert first.send(PeerAccepted())
    assert second.receive(0.0) is None
    assert second.num_stale == 1


def test_a_full_queue_refuses_more() -> None:
    sender, receiver = memory_pair(RUN_ID, PEER_MESSAGES, capacity=3)
    assert [sender.send(PeerAccepted()) for _ in range(5)] == [True, True, True, False, False]
    assert sender.num_dropped == 2
    assert receiver.receive(0.0) is not None
    assert sender.send(PeerAccepted())


def test_a_closed_peer_takes_nothing_more_and_loses_nothing_sent() -> None:
    first, second = memory_pair(RUN_ID, PEER_MESSAGES)
    assert first.send(PeerAccepted())
    first.close()
    first.close()
    assert second.receive(0.0) is not None
    assert second.receive(0.0) is None
    assert not second.send(PeerAccepted())
    assert not first.send(PeerAccepted())
    assert (first.num_dropped, second.num_dropped) == (1, 1)
    for use in (lambda: first.receive(1.0), first.poll):
        with pytest.raises(ChannelClosed):
            use()


def test_a_message_wakes_a_waiting_thread_and_closing_ends_its_wait() -> None:
    sender, receiver = memory_pair(RUN_ID, PEER_MESSAGES)
    received: list[Received[PeerMessage] | None] = []
    ended: list[bool] = []

    def read() -> None:
        received.append(receiver.receive(PATIENCE_S))
        with pytest.raises(ChannelClosed):
            receiver.receive(PATIENCE_S)
        ended.append(True)

    thread = threading.Thread(target=read)
    thread.start()
    assert sender.send(CloseSequence(sequence_id=9))
    while not received:
        thread.join(0.01)
    receiver.close()
    thread.join(PATIENCE_S)
    assert received[0] is not None
    assert received[0].message == CloseSequence(sequence_id=9)
    assert ended == [True]


def test_the_size_limit_is_the_real_one() -> None:
    sender, _ = memory_pair(RUN_ID, PEER_MESSAGES)
    large = [TensorFrame("uint8", (1, 64 << 20), bytes(64 << 20)), TensorFrame("uint8", (1,), b"x")]
    with pytest.raises(MessageTooLarge):
        sender.send(ContextRows(sequence_id=0, start=0, num_rows=1), large)


def test_later_changes_of_the_senders_buffer_do_not_show() -> None:
    sender, receiver = memory_pair(RUN_ID, PEER_MESSAGES)
    buffer = bytearray(b"abcdef")
    assert sender.send(rows(0), [TensorFrame("uint8", (2, 3), memoryview(buffer)), FRAMES[1]])
    buffer[:] = b"zzzzzz"
    received = receiver.receive(0.0)
    assert received is not None
    assert bytes(received.frames[0].data) == b"abcdef"


def test_waiting_for_any_of_several_channels() -> None:
    first, first_peer = memory_pair(RUN_ID, PEER_MESSAGES)
    second, second_peer = memory_pair(RUN_ID, PEER_MESSAGES)
    assert not wait_any([first, second], 0.01)
    for peer, channel in ((first_peer, first), (second_peer, second)):
        assert peer.send(PeerAccepted())
        assert wait_any([first, second], PATIENCE_S)
        assert channel.receive(0.0) is not None


async def test_the_asynchronous_end() -> None:
    first, second = memory_pair(RUN_ID, PEER_MESSAGES)
    channel = AsyncMemoryChannel(second)
    assert await channel.receive(0.0) is None
    assert first.send(CloseSequence(sequence_id=9))
    received = await channel.receive(PATIENCE_S)
    assert received is not None
    assert received.message == CloseSequence(sequence_id=9)
    assert channel.send(PeerAccepted())
    assert first.receive(0.0) is not None
    channel.close()
    with pytest.raises(ChannelClosed):
        await channel.receive()


@pytest.mark.parametrize("fault", [{"drop": 1.1}, {"truncate": -0.1}, {"delay_s": -1.0}])
def test_an_impossible_fault_plan_is_refused(fault: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"probability|negative"):
        FaultPlan(**fault)  # type: ignore[arg-type]
