"""The engine against a verifier that is slow, silent, gone, or forgetful."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from protocol.memory_channel import AsyncMemoryChannel, FaultPlan, memory_pair
from protocol.messages import (
    FRONTEND_MESSAGES,
    DrafterRejected,
    Finished,
    FrontendMessage,
    RoundResult,
    SamplingFields,
    VerifierStatus,
)
from server.engine import (
    Engine,
    EngineDead,
    EngineUnavailable,
    GenerationRequest,
    QueueFull,
    RequestFailed,
)
from server.metrics import Metrics
from tests.server.fakes import FakeVerifier, Plan

RUN_ID = "1" * 32
GREEDY = SamplingFields(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def request(max_tokens: int = 20) -> GenerationRequest:
    return GenerationRequest([5, 6, 7], GREEDY, max_tokens, [2])


class Pair:
    """An engine and its fake verifier."""

    def __init__(self, watchdog_timeout_s: float, faults: FaultPlan) -> None:
        ours, theirs = memory_pair(RUN_ID, FRONTEND_MESSAGES, faults)
        self.metrics = Metrics(8)
        self.channel: AsyncMemoryChannel[FrontendMessage] = AsyncMemoryChannel(theirs)
        self.verifier = FakeVerifier(self.channel, Plan(tokens=lambda submit: [10 + index for index in range(200)]))
        self.engine = Engine(
            AsyncMemoryChannel(ours),
            self.metrics,
            max_num_seqs=2,
            max_num_queued=1,
            watchdog_timeout_s=watchdog_timeout_s,
        )


@asynccontextmanager
async def running(watchdog_timeout_s: float = 30.0, faults: FaultPlan | None = None) -> AsyncIterator[Pair]:
    pair = Pair(watchdog_timeout_s, faults or FaultPlan())
    await pair.engine.start()
    task = asyncio.create_task(pair.verifier.run())
    await pair.engine.wait_until_ready(10.0)
    try:
        yield pair
    finally:
        await pair.engine.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def tokens_of(engine: Engine, wanted: GenerationRequest) -> list[int]:
    committed: list[int] = []
    async for event in engine.generate(wanted):
        if isinstance(event, RoundResult):
            committed += event.token_ids
    return committed


async def test_rounds_then_finished() -> None:
    async with running() as pair:
        events = [event async for event in pair.engine.generate(request(10))]
        assert [type(event) for event in events] == [*[RoundResult] * (len(events) - 1), Finished]
        assert [token for event in events[:-1] for token in event.token_ids] == list(range(10, 20))  # type: ignore[union-attr]
        assert pair.engine.num_live == 0


async def test_before_the_verifier_is_ready() -> None:
    ours, _ = memory_pair(RUN_ID, FRONTEND_MESSAGES)
    engine = Engine(AsyncMemoryChannel(ours), Metrics(8), max_num_seqs=1, max_num_queued=1, watchdog_timeout_s=30.0)
    await engine.start()
    with pytest.raises(EngineUnavailable):
        engine.submit(request())
    with pytest.raises(EngineDead, match="not ready within"):
        await engine.wait_until_ready(0.05)
    await engine.stop()


async def test_capacity_is_running_plus_waiting() -> None:
    async with running() as pair:
        pair.verifier.plan.round_s = 0.01
        generations = [pair.engine.submit(request()) for _ in range(3)]
        with pytest.raises(QueueFull):
            pair.engine.submit(request())
        generations[0].close()
        pair.engine.submit(request()).close()
        for generation in generations:
            generation.close()
        assert pair.engine.num_live == 0


async def test_closing_a_generator_aborts_the_sequence() -> None:
    async with running() as pair:
        pair.verifier.plan.round_s = 0.005
        events = pair.engine.generate(request(200))
        async for _ in events:
            break
        await events.aclose()  # type: ignore[attr-defined]
        while not pair.verifier.aborted:
            await asyncio.sleep(0.005)
        assert pair.verifier.aborted == [0]


async def test_sequences_of_a_generation_are_taken_all_or_none() -> None:
    async with running() as pair:
        pair.verifier.plan.round_s = 0.002
        first = pair.engine.submit(request())
        with pytest.raises(QueueFull):
            pair.engine.submit(request(), request(), request())
        both = pair.engine.submit(request(8), request(12))
        tokens: dict[int, list[int]] = {0: [], 1: []}
        endings: list[int] = []
        async for item in both:
            if isinstance(item.event, RoundResult):
                tokens[item.index] += item.event.token_ids
            else:
                endings.append(item.index)
        assert tokens == {0: list(range(10, 18)), 1: list(range(10, 22))}
        assert sorted(endings) == [0, 1]
        assert len(pair.verifier.submitted) == 3, "of the refused ones none was sent"
        first.close()


async def test_a_broken_link_takes_no_sequence_of_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as pair:
        channel = pair.engine._channel
        sent: list[FrontendMessage] = []

        def send(message: FrontendMessage) -> bool:
            sent.append(message)
            return len(sent) != 2

        monkeypatch.setattr(channel, "send", send)
        with pytest.raises(EngineUnavailable):
            pair.engine.submit(request(), request())
        assert pair.engine.num_live == 0
        assert [message.kind for message in sent] == ["submit", "submit", "abort"]


async def test_one_sequence_of_a_generation_ends_early_and_the_other_goes_on() -> None:
    async with running() as pair:
        pair.verifier.plan.round_s = 0.002
        generation = pair.engine.submit(request(100), request(30))
        before: list[int] = []
        after: list[int] = []
        async for item in generation:
            (before if len(before) < 4 else after).append(item.index)
            if len(before) == 4 and not after:
                generation.end(0)
        assert set(before) == {0, 1}
        assert set(after) == {1}
        while not pair.verifier.aborted:
            await asyncio.sleep(0.005)
        assert pair.verifier.aborted == [0]


async def test_one_failure_ends_the_other_sequences_of_a_generation() -> None:
    async with running() as pair:
        pair.verifier.plan.round_s = 0.002
        pair.verifier.plan.fail_after = 20
        generation = pair.engine.submit(request(100), request(100))
        with pytest.raises(RequestFailed):
            async for _ in generation:
                pass
        assert pair.engine.num_live == 0
        assert [item async for item in generation] == []


async def test_failed_request_raises_with_its_code() -> None:
    async with running() as pair:
        pair.verifier.plan.fail_after = 5
        with pytest.raises(RequestFailed) as caught:
            await tokens_of(pair.engine, request())
        assert caught.value.code == "internal_error"
        assert pair.engine.failure is None


async def test_failure_ends_every_sequence_and_refuses_new_ones() -> None:
    async with running() as pair:
        pair.verifier.plan.round_s = 0.01
        waiting = [asyncio.create_task(tokens_of(pair.engine, request(100))) for _ in range(3)]
        await asyncio.sleep(0.03)
        pair.engine.fail("it is gone")
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(result) for result in results] == ["it is gone"] * 3
        with pytest.raises(EngineDead):
            pair.engine.submit(request())
        assert pair.metrics.registry.get_sample_value("jetspec_num_requests_running") == 0


async def test_silent_verifier_is_noticed() -> None:
    async with running(watchdog_timeout_s=0.3) as pair:
        pair.verifier.plan.silent_after = 5
        with pytest.raises(EngineDead, match="no progress"):
            await tokens_of(pair.engine, request())
        assert not pair.engine.is_serving


async def test_heartbeats_without_progress_are_noticed_while_something_runs() -> None:
    async with running(watchdog_timeout_s=0.3) as pair:
        pair.verifier.plan.round_s = 1000.0
        with pytest.raises(EngineDead, match="no progress"):
            await tokens_of(pair.engine, request())


async def test_idle_verifier_is_not_taken_for_a_stuck_one() -> None:
    async with running(watchdog_timeout_s=0.3) as pair:
        await asyncio.sleep(0.7)
        assert pair.engine.failure is None
        assert await tokens_of(pair.engine, request(5)) == [10, 11, 12, 13, 14]


async def test_lost_submission_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.engine.LOST_SEQUENCE_TIMEOUT_S", 0.2)
    async with running() as pair:
        monkeypatch.setattr(pair.verifier, "_handle", lambda message: None)
        with pytest.raises(RequestFailed, match="lost"):
            await tokens_of(pair.engine, request())


async def test_status_that_is_read_late_condemns_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.engine.LOST_SEQUENCE_TIMEOUT_S", 0.2)
    async with running() as pair:
        pair.verifier.heartbeat_s = 1000.0
        await asyncio.sleep(0.1)  # the heartbeat that is under way is the last one
        generation = pair.engine.submit(request(10))
        pair.channel.send(
            VerifierStatus(
                num_running=0,
                num_waiting=0,
                kv_tokens_used=0,
                kv_tokens_total=1,
                num_rounds=0,
                stale_messages=0,
                drafter_connected=True,
            )
        )
        time.sleep(0.3)  # this process is busy; the verifier has not read the submission when it sends its status
        events = [item.event async for item in generation]
        assert isinstance(events[-1], Finished) and events[-1].num_generated_tokens == 10


async def test_duplicated_messages_do_not_end_another_sequence() -> None:
    async with running(faults=FaultPlan(seed=3, delay_s=0.002)) as pair:
        found = await asyncio.gather(*(tokens_of(pair.engine, request(30)) for _ in range(3)))
        assert found == [list(range(10, 40))] * 3


async def test_messages_about_unknown_sequences_are_ignored() -> None:
    async with running() as pair:
        generation = pair.engine.submit(request(50))
        generation.close()
        await asyncio.sleep(0.05)
        assert await tokens_of(pair.engine, request(5)) == [10, 11, 12, 13, 14]


async def test_drafter_rejection_is_kept() -> None:
    async with running() as pair:
        pair.channel.send(DrafterRejected(reason="another vocabulary"))
        await asyncio.wait_for(pair.engine.drafter_rejected.wait(), 10.0)
        assert pair.engine.rejection == "another vocabulary"


async def test_too_many_rounds_are_a_fault_of_the_peer() -> None:
    async with running() as pair:
        pair.verifier.plan.round_s = 1000.0
        generation = pair.engine.submit(request(2))
        result = RoundResult(
            sequence_id=0,
            round=0,
            token_ids=[1],
            num_drafts=0,
            num_accepted=0,
            outcome="autoregressive",
            verify_s=0.0,
            exposed_s=0.0,
            num_cached=0,
            cache_version=0,
        )
        for _ in range(20):
            pair.channel.send(result)
        await asyncio.sleep(0.1)
        with pytest.raises(RequestFailed, match="more rounds"):
            async for _ in generation:
                pass
