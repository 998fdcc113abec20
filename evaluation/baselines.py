"""Rounds of the methods that draft in one go, on a recorded text: from true states, or from the text alone."""

import torch

from draft_worker.branching import block_logits
from draft_worker.fan_out import FanOutStatistics
from draft_worker.methods import DraftMethod, OpenedSequence
from evaluation.rounds import CACHE_SIZES, Ending, ReplayedRound, verify
from evaluation.texts import TargetText
from modeling.autoregressive import AutoregressiveRunner


def replay_fallbacks(
    method: DraftMethod, text: TargetText, num_draft_tokens: int, stop_token_ids: frozenset[int], sequence_id: int
) -> list[ReplayedRound]:
    """All rounds of a synchronous method: every block is a fallback block.

    A method that prepares blocks is drafted with only after verification here.
    """
    tokens, start = text.drawn_token_ids, len(text.prompt_token_ids)
    sequence = method.open(OpenedSequence(sequence_id, 0, text.prompt_token_ids, stop_token_ids))
    rounds: list[ReplayedRound] = []

    def install(stop: int) -> None:
        rows = text.states(method.tap_layers, method.decoder_layers, sequence.num_rows, stop)
        sequence.install(rows.taps, rows.decoder_kv)

    install(start)
    if start < len(tokens):
        sequence.commit((), tokens[start])
    while start + 1 < len(tokens):
        drafts = sequence.fallback().token_ids
        ending = verify(drafts, text.following(start, num_draft_tokens))
        if ending is None:
            break
        rounds.append(ReplayedRound(ending, was_hit=False))
        if ending.anchor is None:
            break
        start += ending.num_accepted + 1
        sequence.commit(drafts[: ending.num_accepted], ending.anchor)
        install(start)
    return rounds


class AutoregressiveReplay:
    """Rounds of `ssd` on one text, at any budget.

    A draft counts only where all before it were accepted, and accepted drafts are the text itself. So one pass over the
    text gives every draft that can matter: after each token the drafter's likeliest next one.
    """

    def __init__(self, runner: AutoregressiveRunner, text: TargetText) -> None:
        self._text = text
        self._first = len(text.prompt_token_ids)
        tokens = text.drawn_token_ids
        logits = block_logits(runner, runner.new_cache(len(tokens)), 0, tokens)[
            self._first :
        ].cpu()  # after each drawn token
        self._drafts: list[int] = runner.head.token_ids[logits.argmax(dim=1)].tolist()
        drawn = tokens[self._first + 1 :]
        columns = torch.tensor([runner.head.column(token_id) for token_id in drawn], dtype=torch.long)
        scores = logits[: len(drawn)].gather(1, columns.clamp(min=0)[:, None])
        # Anchors that come before the realised one; where the vocabulary lacks it, all of them.
        before = (logits[: len(drawn)] > scores).sum(dim=1)
        self._num_before: list[int] = torch.where(columns < 0, logits.shape[1], before).tolist()

    def rounds(self, num_draft_tokens: int, statistics: FanOutStatistics) -> list[ReplayedRound]:
        """All rounds at one budget. `statistics` give the fan-out, and learn from every round."""
        found: list[ReplayedRound] = []
        start, length = self._first, len(self._text.drawn_token_ids)
        was_hit = dict.fromkeys(CACHE_SIZES, False)
        largest = max(CACHE_SIZES)
        while start + 1 < length:
            index = start - self._first
            drafts = self._drafts[index : index + num_draft_tokens]
            ending = verify(drafts, self._text.following(start, num_draft_tokens))
            if ending is None:
                break
            if ending.anchor is None:
                found.append(ReplayedRound(ending, was_hit[largest]))
                break
            rank = self._anchor_rank(index, ending, num_draft_tokens)
            held_by = frozenset(
                size
                for size in CACHE_SIZES
                if rank <= statistics.sizes(num_draft_tokens, size, was_hit=was_hit[size])[ending.num_accepted]
            )
            found.append(ReplayedRound(ending, was_hit[largest], held_by))
            statistics.observe(ending.num_accepted, rank, was_hit=was_hit[largest])
            was_hit = {size: size in held_by for size in CACHE_SIZES}
            start += ending.num_accepted + 1
        return found

    def _anchor_rank(self, index: int, ending: Ending, num_draft_tokens: int) -> int:
        """Place, from 1, of the realised anchor among those of its length; the rejected draft is none of them."""
        num_before = self._num_before[index + ending.num_accepted]
        return max(1, num_before + (ending.num_accepted == num_draft_tokens))
