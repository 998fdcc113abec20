"""The target's answers: where they end, and that company does not change them."""

import pytest

from decoding.loops import is_loop
from decoding.sampling import SamplingParameters, draw
from modeling.target import TargetBlock, TargetRunner
from tests.tiny.models import VOCAB_SIZE
from training.responses import Request, Response, respond

GREEDY = SamplingParameters(0.0)


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([7] * 24, True),
        ([7] * 23, False),  # too short
        ([1, 2] * 12, True),
        (list(range(8)) * 3, True),
        (list(range(8)) * 2 + list(range(7)), False),
        (list(range(40)) * 3, True),
        (list(range(41)) * 3, False),  # the period is too long
        ([*range(100, 150), *list(range(20)) * 3], True),
        ([*list(range(20)) * 3, 99], False),  # it has gone on to something else
        (list(range(20)) * 2 + list(range(19)), False),
        ([], False),
    ],
)
def test_loops(token_ids: list[int], expected: bool) -> None:
    assert is_loop(token_ids) == expected


def alone(runner: TargetRunner, request: Request, max_tokens: int) -> list[int]:
    """One request, recomputed from the start for every token."""
    tokens = list(request.prompt_token_ids)
    for _ in range(max_tokens):
        rows = runner.forward([TargetBlock(runner.new_cache(), 0, tokens)])
        tokens.append(draw(rows.logits[-1], request.sampling, len(tokens)))
    return tokens[len(request.prompt_token_ids) :]


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [
        Request(
            f"p{number}",
            [5 + 7 * number, 9, 11 + number][: 1 + number % 3],
            SamplingParameters(float(number % 2), seed=number),
        )
        for number in range(7)
    ]


@pytest.fixture(scope="module")
def answers(target_runner: TargetRunner, requests: list[Request]) -> dict[str, Response]:
    found = {answer.request.prompt_id: answer for answer in respond(target_runner, requests, (), 20, 3)}
    assert len(found) == len(requests)
    return found


def test_answers_are_what_the_target_says_alone(
    target_runner: TargetRunner, requests: list[Request], answers: dict[str, Response]
) -> None:
    for request in requests[:4]:
        assert answers[request.prompt_id].token_ids == alone(target_runner, request, 20)
        assert answers[request.prompt_id].ending == "length"


def test_the_number_of_rows_changes_nothing(
    target_runner: TargetRunner, requests: list[Request], answers: dict[str, Response]
) -> None:
    for num_rows in (1, 7):
        for answer in respond(target_runner, requests, (), 20, num_rows):
            assert answer.token_ids == answers[answer.request.prompt_id].token_ids


def test_an_answer_ends_with_the_first_end_token(
    target_runner: TargetRunner, requests: list[Request], answers: dict[str, Response]
) -> None:
    """With an end token from the middle of an answer, that answer is the same up to it, and others follow it."""
    ends = {answers["p0"].token_ids[6]}
    for answer in respond(target_runner, requests, ends, 20, 2):
        free = answers[answer.request.prompt_id].token_ids
        places = [index for index, token_id in enumerate(free) if token_id in ends]
        assert answer.token_ids == (free[: places[0] + 1] if places else free)
        assert answer.ending == ("stop" if places else "length")


def test_an_answer_ends_at_the_onset_of_a_loop(target_runner: TargetRunner, requests: list[Request]) -> None:
    greedy = [Request(f"g{first}", [first], GREEDY) for first in range(5, 12)]
    answers = list(respond(target_runner, greedy, (), 200, 4))
    looped = [answer for answer in answers if answer.ending == "loop"]
    assert looped, "a small random target repeats itself sooner or later"
    for answer in looped:
        assert is_loop(answer.token_ids)
        assert not is_loop(answer.token_ids[:-1])


def test_stopping_drops_what_is_unfinished(target_runner: TargetRunner, requests: list[Request]) -> None:
    assert list(respond(target_runner, requests, (), 20, 3, lambda: True)) == []
    assert list(respond(target_runner, [], (), 20, 3)) == []


def test_tokens_are_in_the_vocabulary(answers: dict[str, Response]) -> None:
    assert all(0 <= token_id < VOCAB_SIZE for answer in answers.values() for token_id in answer.token_ids)
