"""Rounds of `ssd`: branches side by side are what each is alone, and the drafter's cache holds the text and no more."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from draft_worker.block import DraftBlock
from draft_worker.branching import Branch, BranchBatch, block_logits, choose_branches, num_scratch_rows
from draft_worker.loading import MethodFiles, MethodSettings, load_method
from draft_worker.methods import OpenedSequence
from draft_worker.speculative import SpeculativeMethod, SpeculativeSequence
from modeling.autoregressive import AutoregressiveRunner, load_autoregressive
from modeling.cache import KeyValueCache
from tests.tiny.models import CPU, VOCAB_SIZE, TinyModels, successors

GAMMA = 4
PREFIX = [(7 * index + 3) % VOCAB_SIZE for index in range(70)]
ANCHOR = 90
DRAFTS = (12, 77, 5, 110)
NO_STATES = torch.empty(0)
BRANCHES = [Branch(0, 40), Branch(2, 41), Branch(0, 42), Branch(4, 43), Branch(1, 40), Branch(4, 44)]


def open_runner(models: TinyModels, folder: Path | None = None) -> AutoregressiveRunner:
    """The tiny target as a drafter: its layers have a say in what follows."""
    target = models.target()
    return AutoregressiveRunner(load_autoregressive(folder or target, target, torch.float32, CPU), 160)


def new_cache(runner: AutoregressiveRunner) -> KeyValueCache:
    cache = runner.new_cache(num_scratch_rows(GAMMA, len(BRANCHES)))
    runner.extend(cache, 0, PREFIX)
    return cache


def continued(runner: AutoregressiveRunner, token_ids: list[int], count: int) -> list[int]:
    """Greedy continuation, one token at a time, in a cache of its own."""
    cache, text = runner.new_cache(0), list(token_ids)
    logits = runner.extend(cache, 0, text)
    for _ in range(count):
        text.append(int(runner.head.token_ids[logits.argmax()]))
        logits = runner.extend(cache, len(text) - 1, text[-1:])
    return text[len(token_ids) :]


def verified_rows(cache: KeyValueCache, stop: int) -> Tensor:
    return torch.stack((cache.key, cache.value))[:, :, :, cache.num_scratch : cache.num_scratch + stop]


def run(runner: AutoregressiveRunner, branches: list[Branch]) -> list[DraftBlock]:
    cache = new_cache(runner)
    block_logits(runner, cache, len(PREFIX), [ANCHOR, *DRAFTS])
    batch = BranchBatch(runner, cache, len(PREFIX), branches, GAMMA)
    for _ in range(GAMMA):
        batch.step()
    return batch.blocks()


def test_packed_branches_are_what_each_is_alone(models: TinyModels) -> None:
    runner = open_runner(models)
    packed = run(runner, BRANCHES)
    alone = [run(runner, [branch])[0] for branch in BRANCHES]
    assert [block.token_ids for block in packed] == [block.token_ids for block in alone]
    for ours, theirs in zip(packed, alone, strict=True):
        assert ours.confidences == pytest.approx(theirs.confidences, rel=1e-4)


def test_a_branch_continues_the_prefix_the_accepted_drafts_and_its_anchor(models: TinyModels) -> None:
    runner = open_runner(models)
    for branch, block in zip(BRANCHES, run(runner, BRANCHES), strict=True):
        text = [*PREFIX, ANCHOR, *DRAFTS[: branch.num_accepted], branch.anchor]
        assert list(block.token_ids) == continued(runner, text, GAMMA), branch


def test_the_pass_over_a_block_is_the_plain_one(models: TinyModels) -> None:
    runner = open_runner(models)
    logits = block_logits(runner, new_cache(runner), len(PREFIX), [ANCHOR, *DRAFTS])
    for row in range(GAMMA + 1):
        expected = runner.extend(runner.new_cache(0), 0, [*PREFIX, ANCHOR, *DRAFTS[:row]])
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)


def ranked(*rows: list[int]) -> Tensor:
    """Logits whose best tokens of every row are these, in order."""
    logits = torch.zeros(len(rows), VOCAB_SIZE)
    for row, tokens in enumerate(rows):
        logits[row, tokens] = torch.arange(len(tokens), 0, -1.0)
    return logits


def test_anchors_are_the_best_of_each_row_without_the_draft_itself(models: TinyModels) -> None:
    logits = ranked([20, 12, 21], [77, 22, 23], [24, 5, 25], [110, 26, 27], [5, 28, 29])
    block = DraftBlock(DRAFTS, (1.0,) * GAMMA)
    chosen = choose_branches(open_runner(models), logits, block, (2, 1, 0, 1, 3), frozenset())
    assert [(branch.num_accepted, branch.anchor) for branch in chosen] == [
        (0, 20),
        (0, 21),
        (1, 22),
        (3, 26),
        *((4, 5), (4, 28), (4, 29)),
    ]


def test_nothing_is_prepared_for_what_ends_the_text(models: TinyModels) -> None:
    logits = ranked([20, 21], [30, 31], [32, 33], [34, 35], [36, 37])
    block = DraftBlock(DRAFTS, (1.0,) * GAMMA)
    chosen = choose_branches(open_runner(models), logits, block, (1, 1, 1, 1, 1), frozenset({20, DRAFTS[2]}))
    assert [(branch.num_accepted, branch.anchor) for branch in chosen] == [(0, 21), (1, 30), (2, 32)]


@pytest.fixture
def method(models: TinyModels) -> SpeculativeMethod:
    files = MethodFiles(models.target(), models.drafter())
    loaded = load_method("ssd", files, MethodSettings(GAMMA, 160, cache_size=6), torch.float32, CPU)
    assert isinstance(loaded, SpeculativeMethod)
    return loaded


def prefilled(method: SpeculativeMethod, slot: int = 0) -> SpeculativeSequence:
    """A sequence whose prompt came in two chunks, and whose first token is ANCHOR."""
    sequence = method.open(OpenedSequence(slot, slot, list(PREFIX)))
    sequence.install(NO_STATES.expand(40, 0, 0), NO_STATES)
    sequence.install(NO_STATES.expand(29, 0, 0), NO_STATES)
    sequence.commit([], ANCHOR)
    sequence.install(NO_STATES.expand(1, 0, 0), NO_STATES)
    assert sequence.num_rows == len(PREFIX)
    return sequence


def assert_holds_the_text(sequence: SpeculativeSequence, method: SpeculativeMethod, count: int) -> None:
    fresh = method.runner.new_cache(0)
    method.runner.extend(fresh, 0, list(sequence.token_ids[:count]))
    torch.testing.assert_close(verified_rows(sequence._cache, count), verified_rows(fresh, count), rtol=1e-4, atol=1e-4)


def test_a_fallback_continues_the_anchor(method: SpeculativeMethod) -> None:
    block = prefilled(method).fallback()
    assert list(block.token_ids) == continued(method.runner, [*PREFIX, ANCHOR], GAMMA) == successors(ANCHOR, GAMMA)
    assert all(0.0 < confidence <= 1.0 for confidence in block.confidences)


@pytest.mark.parametrize("num_steps", [0, 1, 3, 99])
@pytest.mark.parametrize("num_accepted", [0, 2, GAMMA])
def test_rounds_that_end_at_any_step_leave_the_text_in_the_cache(
    method: SpeculativeMethod, num_steps: int, num_accepted: int
) -> None:
    """The miss that follows is answered from the true anchor."""
    sequence = prefilled(method)
    for number in range(3):
        anchor = (31 * number + 8) % VOCAB_SIZE
        block = sequence.fallback()
        round_ = sequence.begin_round(block, was_hit=False)
        for step, _ in enumerate(round_.steps()):
            if step == num_steps:
                break
        accepted = list(block.token_ids[:num_accepted])
        sequence.commit(accepted, anchor)
        sequence.install(NO_STATES.expand(num_accepted + 1, 0, 0), NO_STATES)
        assert list(sequence.fallback().token_ids) == continued(method.runner, list(sequence.token_ids), GAMMA)
        assert_holds_the_text(sequence, method, sequence.num_rows)


def test_a_finished_round_holds_continuations_of_its_outcomes(method: SpeculativeMethod) -> None:
    sequence = prefilled(method)
    block = sequence.fallback()
    round_ = sequence.begin_round(block, was_hit=False)
    phases = list(round_.steps())
    assert phases == ["foresight", *["draft"] * GAMMA]
    assert round_.version == 1 and len(round_.prepared) == 6
    for entry in round_.prepared:
        text = [*PREFIX, ANCHOR, *block.token_ids[: entry.num_accepted], entry.anchor]
        assert list(entry.block.token_ids) == continued(method.runner, text, GAMMA)
        assert round_.find(entry.num_accepted, entry.anchor) == entry.block
        assert entry.num_accepted == GAMMA or entry.anchor != block.token_ids[entry.num_accepted]
    assert round_.find(0, block.token_ids[0]) is None


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_begun_branch_is_finished_alone(method: SpeculativeMethod, num_steps: int) -> None:
    """An outcome that comes too early for the round, but whose branch is on its way."""
    sequence = prefilled(method)
    block = sequence.fallback()
    round_ = sequence.begin_round(block, was_hit=False)
    for number, _ in enumerate(round_.steps()):
        assert number == 0 or not round_.is_begun(0, 1)
        if number == num_steps + 1:
            break
    branch = round_.branches[-2]
    assert round_.find(branch.num_accepted, branch.anchor) is None
    assert round_.is_begun(branch.num_accepted, branch.anchor)
    accepted = list(block.token_ids[: branch.num_accepted])
    sequence.commit(accepted, branch.anchor)
    rest = round_.finish(branch.num_accepted, branch.anchor)
    assert list(rest.token_ids) == continued(method.runner, list(sequence.token_ids), GAMMA)


def test_before_the_first_step_nothing_is_begun(method: SpeculativeMethod) -> None:
    sequence = prefilled(method)
    round_ = sequence.begin_round(sequence.fallback(), was_hit=False)
    steps = round_.steps()
    next(steps)
    next(steps)
    assert round_.branches and round_.batch is not None
    assert not any(round_.is_begun(branch.num_accepted, branch.anchor) for branch in round_.branches)


def test_the_rank_of_an_anchor_leaves_the_accepted_draft_out(method: SpeculativeMethod) -> None:
    sequence = prefilled(method)
    round_ = sequence.begin_round(DraftBlock(DRAFTS, (1.0,) * GAMMA), was_hit=True)
    assert round_.anchor_rank(0, 1) is None  # nothing has been read yet
    list(round_.steps())
    round_.logits = ranked([12, 20, 21], [20, 77, 21], [20, 21, 5], [110, 20], [20, 21])
    ranks = [round_.anchor_rank(number, 20) for number in range(GAMMA + 1)]
    assert ranks == [1, 1, 1, 1, 1]
    assert [round_.anchor_rank(number, 21) for number in range(3)] == [2, 2, 2]


def test_sequences_do_not_touch_each_other(method: SpeculativeMethod) -> None:
    """A miss of one redrafts nothing of another: its prepared blocks, made before, stay valid."""
    first, second = prefilled(method, 0), prefilled(method, 1)
    round_ = first.begin_round(first.fallback(), was_hit=False)
    list(round_.steps())
    kept = list(round_.prepared)
    second.commit([], 17)
    second.install(NO_STATES.expand(1, 0, 0), NO_STATES)
    second.fallback()
    list(second.begin_round(second.fallback(), was_hit=False).steps())
    assert round_.prepared == kept and round_.version == 1
    assert_holds_the_text(first, method, first.num_rows)
