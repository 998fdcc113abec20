"""Methods that draft in one go: scripted ones by hand, `ssd` against its own sequences."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from draft_worker.block import DraftBlock
from draft_worker.branching import BranchRound
from draft_worker.fan_out import FanOutStatistics
from draft_worker.loading import MethodSettings, speculative_method
from draft_worker.methods import OpenedSequence
from evaluation.baselines import AutoregressiveReplay, replay_fallbacks
from evaluation.rounds import Ending, ReplayedRound, Tally, verify
from evaluation.texts import TargetText
from modeling.autoregressive import AutoregressiveRunner, load_autoregressive
from tests.evaluation.recorded import PROMPTS, recorded, scripted_text
from tests.tiny.models import CPU, VOCAB_SIZE, TinyModels

GAMMA = 3
NO_STOPS: frozenset[int] = frozenset()


class Scripted:
    """A method that drafts what a function of the committed tokens says."""

    tap_layers = ()
    decoder_layers = ()
    plan = None
    device = CPU
    dtype = torch.float32

    def __init__(self, say: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self.say = say

    def open(self, opened: OpenedSequence) -> "ScriptedSequence":
        return ScriptedSequence(self, list(opened.prompt_token_ids))

    def observe_phase(self, phase: str, seconds: float, plan: object) -> None: ...

    def observe_verification(self, seconds: float) -> None: ...


class ScriptedSequence:
    def __init__(self, method: Scripted, token_ids: list[int]) -> None:
        self.method, self.token_ids, self.num_rows = method, token_ids, 0

    def commit(self, accepted: Sequence[int], anchor: int) -> None:
        self.token_ids += [*accepted, anchor]

    def install(self, taps: Tensor, decoder_kv: Tensor) -> None:
        self.num_rows += taps.shape[0]
        assert self.num_rows <= len(self.token_ids)

    def fallback(self) -> DraftBlock:
        assert self.num_rows == len(self.token_ids) - 1, "all rows but the anchor's are there"
        return DraftBlock(tuple(self.method.say(self.token_ids)), (0.5,) * GAMMA)

    def begin_round(self, block: DraftBlock, *, was_hit: bool) -> None: ...


def replayed(text: TargetText, say: Callable[[Sequence[int]], Sequence[int]]) -> list[ReplayedRound]:
    return replay_fallbacks(Scripted(say), text, GAMMA, NO_STOPS, 0)


def test_tau_of_a_script_by_hand() -> None:
    """Rounds of 4, 1 and 3 tokens after the prefill's: 10 | 11 12 13 14 | 15 | 16 17 18, then the end of the record."""
    text = scripted_text([1, 2], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19])
    script = {10: [11, 12, 13], 14: [0, 16, 17], 15: [16, 17, 0], 18: [19, 0, 0]}
    rounds = replayed(text, lambda tokens: script[tokens[-1]])
    assert [r.ending.num_committed for r in rounds] == [4, 1, 3]
    assert Tally.of(rounds).tau == pytest.approx(8 / 3)


def test_an_oracle_gets_every_token_and_an_adversary_one_a_round() -> None:
    text = scripted_text([1, 2], list(range(10, 31)))
    oracle = Tally.of(replayed(text, lambda tokens: [tokens[-1] + 1, tokens[-1] + 2, tokens[-1] + 3]))
    adversary = Tally.of(replayed(text, lambda tokens: [0, 0, 0]))
    assert oracle.tau == GAMMA + 1 and oracle.acceptance == [1.0, 1.0, 1.0]
    assert adversary.tau == 1 and adversary.acceptance == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_the_stop_token_ends_the_last_round(length: int) -> None:
    """All but the prefill's token is committed, whether the stop token was drafted or is the bonus."""
    text = scripted_text([1, 2], list(range(10, 10 + length)), stop_token_id=10 + length)
    rounds = replayed(text, lambda tokens: [tokens[-1] + 1, tokens[-1] + 2, tokens[-1] + 3])
    assert sum(r.ending.num_committed for r in rounds) == length
    assert rounds[-1].ending.anchor is None


def test_a_text_of_nothing_but_the_stop_token_has_no_round() -> None:
    assert replayed(scripted_text([1, 2], [], stop_token_id=3), lambda tokens: [0, 0, 0]) == []


@pytest.fixture(scope="module")
def runner(models: TinyModels) -> AutoregressiveRunner:
    return AutoregressiveRunner(load_autoregressive(models.drafter(), models.target(), torch.float32, CPU), 256)


def sequence_rounds(runner: AutoregressiveRunner, text: TargetText, num_drafts: int) -> list[tuple[Ending, int | None]]:
    """Endings and anchor ranks of the method's own sequence, drafted token by token."""
    settings = MethodSettings(num_drafts, 256, cache_size=4, num_passes=0, num_refreshes=0)
    method = speculative_method(runner, settings)
    sequence = method.open(OpenedSequence(0, 0, text.prompt_token_ids))
    tokens, start = text.drawn_token_ids, len(text.prompt_token_ids)
    accepted: list[int] = []
    found: list[tuple[Ending, int | None]] = []
    while start + 1 < len(tokens):
        rows = text.states((), (), sequence.num_rows, start)
        sequence.install(rows.taps, rows.decoder_kv)
        sequence.commit(accepted, tokens[start])
        block = sequence.fallback()
        round_ = sequence.begin_round(block, was_hit=False)
        assert isinstance(round_, BranchRound)
        for _ in round_.steps():
            pass
        ending = verify(block.token_ids, text.following(start, num_drafts))
        if ending is None:
            break
        rank = None if ending.anchor is None else round_.anchor_rank(ending.num_accepted, ending.anchor)
        found.append((ending, rank))
        accepted = list(block.token_ids[: ending.num_accepted])
        start += ending.num_accepted + 1
    return found


@pytest.mark.parametrize("num_drafts", [2, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_pass_over_the_text_is_as_good_as_drafting_it(
    models: TinyModels, runner: AutoregressiveRunner, temperature: float, num_drafts: int
) -> None:
    ranks: list[int] = []

    class Watched(FanOutStatistics):
        def observe(self, num_accepted: int, anchor_rank: int, *, was_hit: bool) -> None:
            ranks.append(anchor_rank)

    accepted = 0
    for text in recorded(models, temperature):
        ranks.clear()
        rounds = AutoregressiveReplay(runner, text).rounds(num_drafts, Watched())
        expected = sequence_rounds(runner, text, num_drafts)
        assert [r.ending for r in rounds] == [ending for ending, _ in expected]
        assert ranks == [rank for _, rank in expected]
        accepted += sum(r.ending.num_accepted for r in rounds)
    assert accepted and len(PROMPTS) == 3


def test_the_fan_out_holds_the_anchors_it_has_room_for(models: TinyModels, runner: AutoregressiveRunner) -> None:
    class Fixed(FanOutStatistics):
        def sizes(self, num_draft_tokens: int, budget: int, *, was_hit: bool) -> tuple[int, ...]:
            return (budget // 2,) * (num_draft_tokens + 1)

    ranks: list[int] = []

    class Watched(Fixed):
        def observe(self, num_accepted: int, anchor_rank: int, *, was_hit: bool) -> None:
            ranks.append(anchor_rank)

    text = recorded(models, 1.0)[0]
    rounds = AutoregressiveReplay(runner, text).rounds(GAMMA, Watched())
    held = [r.held_by for r in rounds if r.held_by is not None]
    assert held == [{size for size in (2, 4, 8, 16) if rank <= size // 2} for rank in ranks]
    assert 1 <= min(ranks) <= max(ranks) <= VOCAB_SIZE
