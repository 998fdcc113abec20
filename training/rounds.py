"""Rounds of the served algorithm in one process: every verification's end beside what the drafter had foreseen.

The same code drafts as in the server (`draft_worker.round`), run to the end of its plan before each verification, so
that what is observed does not depend on timing. It does not know what is fitted to the rounds.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from decoding.acceptance import accept
from decoding.observation import ObservedRound, RoundOutcome, compact_round
from decoding.plan import PassPlan
from decoding.sampling import SamplingParameters, draw
from decoding.uniforms import noise_generator
from draft_worker.networks import DraftNetworks, assemble
from draft_worker.round import DraftRound, SelectionRule, fallback_block
from draft_worker.sequence import DraftSequence, SequenceMemory, new_memory
from modeling.adapter import load_adapter
from modeling.cache import KeyValueCache
from modeling.decoder import decoder_layer_ids
from modeling.draft_model import load_draft_model
from modeling.target import Target, TargetBlock, TargetRunner


@dataclass(frozen=True)
class Bench:
    """A target and its drafter in one process, with the memory of one sequence."""

    runner: TargetRunner
    networks: DraftNetworks
    memory: SequenceMemory
    num_draft_tokens: int
    plan: PassPlan
    stop_token_ids: frozenset[int]
    max_tokens: int

    @property
    def max_prompt_tokens(self) -> int:
        return self.runner.num_positions - self.max_tokens - 2 * (self.num_draft_tokens + 1)


def open_bench(
    target: Target,
    draft_folder: Path,
    adapter_folder: Path,
    num_draft_tokens: int,
    plan: PassPlan,
    stop_token_ids: Collection[int],
    num_positions: int,
    max_tokens: int,
) -> Bench:
    """Load a drafter for a loaded target. Raises `UnsupportedModel` naming what does not fit."""
    loaded = load_draft_model(draft_folder, target.dtype, target.device)
    adapter = load_adapter(adapter_folder, target.dtype, target.device)
    networks = assemble(target, loaded.model, loaded.token_ids, adapter, num_positions)
    runner = TargetRunner(target, networks.config.tap_layers, num_positions)
    memory = new_memory(networks, num_positions, num_draft_tokens, plan.cache_size)
    return Bench(runner, networks, memory, num_draft_tokens, plan, frozenset(stop_token_ids), max_tokens)


def observe_text(
    bench: Bench, prompt_token_ids: Sequence[int], sampling: SamplingParameters, noise_id: int
) -> Iterator[ObservedRound]:
    """Answer one prompt speculatively and yield every round but the one that ends the text."""
    prompt, cache = list(prompt_token_ids), bench.runner.new_cache()
    rows = bench.runner.forward([TargetBlock(cache, 0, prompt)], last_row_only=True)
    sequence = DraftSequence(bench.networks, bench.memory, prompt)
    sequence.install(rows.taps, _decoder_rows(bench, cache, 0, len(prompt)))
    anchor = draw(rows.logits[0], sampling, len(prompt))
    if anchor in bench.stop_token_ids:
        return
    sequence.token_ids.append(anchor)
    generator = noise_generator(0, noise_id)
    rule = SelectionRule(None, None, bench.stop_token_ids)
    block = fallback_block(sequence, bench.num_draft_tokens, generator)
    while True:
        drafting = DraftRound(sequence, block, bench.plan, rule, generator)
        for _ in drafting.steps():
            pass
        start = sequence.num_rows
        rows = bench.runner.forward([TargetBlock(cache, start, [sequence.token_ids[-1], *block.token_ids])])
        outcome = accept(rows.logits, block.token_ids, sampling, start + 1)
        committed = [*block.token_ids[: outcome.num_accepted], outcome.anchor]
        num_generated = len(sequence.token_ids) + len(committed) - len(prompt)
        if not bench.stop_token_ids.isdisjoint(committed):
            return
        yield _observed(bench, drafting, outcome.num_accepted, outcome.anchor)
        if num_generated >= bench.max_tokens:
            return
        sequence.token_ids += committed
        stop = start + len(committed)
        sequence.install(rows.taps[: len(committed)], _decoder_rows(bench, cache, start, stop))
        prepared = drafting.find(outcome.num_accepted, outcome.anchor)
        block = prepared or fallback_block(sequence, bench.num_draft_tokens, generator)


def _decoder_rows(bench: Bench, cache: KeyValueCache, start: int, stop: int) -> Tensor:
    """Keys and values of the layers above the deepest tap: [rows, layers, 2, kv_heads, dim]."""
    shape = bench.networks.target
    layers = list(decoder_layer_ids(bench.networks.config.tap_layers[-1], shape.num_layers))
    pair = torch.stack((cache.key[layers, :, start:stop], cache.value[layers, :, start:stop]), dim=1)
    return pair.permute(3, 0, 1, 2, 4)


def _observed(bench: Bench, drafting: DraftRound, num_accepted: int, anchor: int) -> ObservedRound:
    assert drafting.foresight is not None, "the round ran to its end"
    networks = bench.networks
    return compact_round(
        drafting.outlook(drafting.foresight),
        networks.to_columns(drafting.block.token_ids),
        torch.tensor(drafting.block.confidences),
        RoundOutcome(
            num_accepted,
            networks.head.column(anchor),
            networks.to_columns(sorted(bench.stop_token_ids)),
        ),
    )
