"""Exact-match acceptance is lossless: the text is the target's, whatever the drafts were."""

import random
from collections.abc import Callable

import pytest
import torch

from decoding.acceptance import Outcome, accept
from decoding.sampling import SamplingParameters, draw
from decoding.uniforms import uniform

VOCAB = 13
Drafter = Callable[[list[int]], list[int]]


def one_hot_rows(*token_ids: int) -> torch.Tensor:
    rows = torch.zeros(len(token_ids), VOCAB)
    for row, token_id in enumerate(token_ids):
        rows[row, token_id] = 9.0
    return rows


GREEDY = SamplingParameters(temperature=0.0)


def test_a_fully_accepted_block_ends_with_the_token_of_the_last_row() -> None:
    assert accept(one_hot_rows(4, 5, 6), [4, 5], GREEDY, 10) == Outcome(2, 6)


def test_the_first_mismatch_ends_the_block_even_when_later_drafts_match() -> None:
    assert accept(one_hot_rows(4, 5, 6, 7), [4, 0, 6], GREEDY, 10) == Outcome(1, 5)


def test_an_empty_block_commits_one_token() -> None:
    assert accept(one_hot_rows(8), [], GREEDY, 10) == Outcome(0, 8)


def test_rows_beyond_the_block_are_padding() -> None:
    assert accept(one_hot_rows(4, 5, 6, 6, 6), [4], GREEDY, 10) == Outcome(1, 5)


def test_missing_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows"):
        accept(one_hot_rows(4, 5), [4, 5], GREEDY, 10)


def test_rows_behind_the_first_mismatch_are_not_read() -> None:
    rows = one_hot_rows(4, 5, 6)
    rows[1:] = torch.nan  # a read of these would raise
    assert accept(rows, [3, 5], GREEDY, 10) == Outcome(0, 4)


def test_row_i_is_drawn_at_first_position_plus_i() -> None:
    rows = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    parameters = SamplingParameters(seed=21)
    drawn = [draw(rows[row], parameters, 40 + row) for row in range(3)]
    assert accept(rows, drawn[:2], parameters, 40) == Outcome(2, drawn[2])


class MarkovTarget:
    """A second-order random target: the next token's logits depend on the last two tokens."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._table = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator) * 2.5

    def logits(self, text: list[int]) -> torch.Tensor:
        return self._table[text[-2], text[-1]]

    def autoregressive(self, prompt: list[int], length: int, parameters: SamplingParameters) -> list[int]:
        text = list(prompt)
        while len(text) < length:
            text.append(draw(self.logits(text), parameters, len(text)))
        return text

    def speculative(
        self, prompt: list[int], length: int, parameters: SamplingParameters, drafter: Drafter
    ) -> list[int]:
        text = list(prompt)
        while len(text) < length:
            drafts = drafter(text)
            rows = torch.stack([self.logits(text + drafts[:row]) for row in range(len(drafts) + 1)])
            outcome = accept(rows, drafts, parameters, len(text))
            text += [*drafts[: outcome.num_accepted], outcome.anchor]
        return text[:length]


@pytest.mark.parametrize(
    "parameters",
    [
        SamplingParameters(temperature=0.0),
        SamplingParameters(temperature=1.0, seed=5),
        SamplingParameters(temperature=0.7, top_k=6, top_p=0.9, min_p=0.02, seed=6),
    ],
)
@pytest.mark.parametrize("quality", [0.0, 0.6, 1.0])
def test_speculative_text_equals_autoregressive_text(parameters: SamplingParameters, quality: float) -> None:
    target = MarkovTarget(seed=1)
    expected = target.autoregressive([1, 2], 150, parameters)
    dice = random.Random(7)
    num_blocks = 0

    def drafter(text: list[int]) -> list[int]:
        nonlocal num_blocks
        num_blocks += 1
        true_tokens = (expected + [0] * 8)[len(text) : len(text) + dice.randint(0, 7)]
        return [token if dice.random() < quality else dice.randrange(VOCAB) for token in true_tokens]

    assert target.speculative([1, 2], 150, parameters, drafter) == expected
    assert quality < 1.0 or num_blocks < 60  # an oracle's drafts are accepted, not only corrected


def test_the_text_of_a_sampled_request_depends_on_its_seed() -> None:
    target = MarkovTarget(seed=1)
    texts = {tuple(target.autoregressive([1, 2], 30, SamplingParameters(seed=seed))) for seed in range(5)}
    assert len(texts) == 5


# --- why the draft's probabilities are not used (appendix F.3; the 0.9 / 0.6 example)

NUM_TRIALS = 4000
CHI_SQUARE_LIMIT = 10.83  # 1 degree of freedom, p = 0.001
TARGET = torch.tensor([0.6, 0.4])
DRAFT = torch.tensor([0.9, 0.1])


def chi_square(num_first: int) -> float:
    expected = (0.6 * NUM_TRIALS, 0.4 * NUM_TRIALS)
    observed = (num_first, NUM_TRIALS - num_first)
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in zip(observed, expected, strict=True))


def ratio_rule(draft: int, seed: int) -> int:
    """The p/q rule with the draft's softmax as q: right for a sampled draft, not for an argmax."""
    if uniform(seed, 0) < float(TARGET[draft] / DRAFT[draft]):
        return draft
    residual = (TARGET - DRAFT).clamp(min=0)
    return draw(residual.log(), SamplingParameters(seed=seed), 1)


def test_the_ratio_rule_is_biased_with_an_argmax_draft() -> None:
    argmax_draft = int(DRAFT.argmax())
    num_first = sum(ratio_rule(argmax_draft, seed) == 0 for seed in range(NUM_TRIALS))
    assert num_first / NUM_TRIALS == pytest.approx(2 / 3, abs=0.02)
    assert chi_square(num_first) > CHI_SQUARE_LIMIT


@pytest.mark.parametrize("draft", [0, 1])
def test_exact_match_is_unbiased_with_any_fixed_draft(draft: int) -> None:
    rows = torch.stack([TARGET, TARGET]).log()
    num_first = 0
    for seed in range(NUM_TRIALS):
        outcome = accept(rows, [draft], SamplingParameters(seed=seed), 0)
        committed = draft if outcome.num_accepted == 1 else outcome.anchor
        num_first += committed == 0
    assert chi_square(num_first) < CHI_SQUARE_LIMIT
