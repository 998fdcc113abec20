"""A request as its client sees it: tokens, counts, and every way a stream can fail."""

import pytest

from evaluation.bench.client import Client, Generation
from evaluation.bench.errors import ContestantFailed
from tests.evaluation.bench_servers import FakeServer, running


def ask(fake: FakeServer, max_tokens: int = 50) -> Generation:
    with running(fake):
        client = Client(fake.url)
        try:
            return client.generate([1, 2, 3], max_tokens)
        finally:
            client.close()


def test_tokens_and_the_one_that_ends_the_text() -> None:
    fake = FakeServer()
    generation = ask(fake)
    assert generation.token_ids == fake.text
    assert (generation.num_tokens, generation.num_first) == (21, 1)
    assert 0 < generation.first_s <= generation.end_s
    (body,) = fake.bodies
    assert (body["prompt"], body["max_tokens"], body["temperature"], body["stream"]) == ([1, 2, 3], 50, 0, True)
    assert ask(FakeServer(), max_tokens=5).num_tokens == 5


def test_speed_leaves_the_first_piece_out() -> None:
    generation = Generation((1, 2, 3, 4), num_tokens=5, num_first=1, first_s=10.0, end_s=12.0)
    assert generation.tokens_per_s == 2.0
    assert Generation((1,), num_tokens=1, num_first=1, first_s=0.5, end_s=0.5).tokens_per_s is None


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (FakeServer(fails_after=0), "HTTP 500"),
        (FakeServer(breaks_off=True), "ended early"),
        (FakeServer(reports_error=True), "the engine is lost"),
    ],
)
def test_failures(fake: FakeServer, message: str) -> None:
    with pytest.raises(ContestantFailed, match=message):
        ask(fake)


def test_a_server_that_is_gone() -> None:
    with running(FakeServer()) as fake:
        client = Client(fake.url)
        assert client.is_ready()
        assert client.tokenize("ab") == [97, 98]
    assert not client.is_ready()
    for call in (client.counters, lambda: client.tokenize("a"), lambda: client.generate([1], 4)):
        with pytest.raises(ContestantFailed):
            call()
    client.close()
