"""Training of adapters: the decoder's context, the report, and that it learns."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from modeling.adapter import load_adapter
from modeling.decoder import decoder_of
from modeling.layers import RotaryTable
from modeling.target import Target, TargetRunner
from modeling.vocabulary import DraftHead
from tests.tiny.models import TAP_LAYERS, make_adapter, true_rows
from tests.training.texts import CPU, States
from training.adapter import (
    AdapterRun,
    adapter_batches,
    adapter_loss,
    decoder_contexts,
    evaluate_adapter,
    initial_layers,
    measure_tap_scale,
    new_adapter,
    save_adapter,
)


@pytest.fixture
def run(states: States, target: Target) -> AdapterRun:
    head = DraftHead(target.head, None)
    return AdapterRun(
        adapter=make_adapter(target.architecture, scale=0.1),
        decoder=decoder_of(target, TAP_LAYERS[-1], head),
        target=target,
        head=head,
        rotary=RotaryTable(target.architecture, 64, torch.float32, CPU),
        tap_scale=measure_tap_scale(states.store, states.corpus.sequences[:10], CPU),
        num_slots=4,
        kl_weight=0.3,
    )


def test_initial_layers_end_at_each_tap() -> None:
    assert initial_layers((1, 8, 14), (1, 2, 3)) == [[1], [7, 8], [12, 13, 14]]


def test_a_new_adapter_is_made_of_target_layers(target_folder: Path, target: Target) -> None:
    adapter = new_adapter(target_folder, target, TAP_LAYERS, (1, 2))
    sources = [TAP_LAYERS[0], TAP_LAYERS[1] - 1, TAP_LAYERS[1]]
    for placed, source in zip(adapter.placed_layers(), sources, strict=True):
        assert torch.equal(placed.layer.state_dict()["down"], target.layer(source).state_dict()["down"])


def test_tap_scale_is_the_root_mean_square(states: States) -> None:
    sequences = states.corpus.sequences[:3]
    scale = measure_tap_scale(states.store, sequences, CPU)
    batch = states.store.batch(sequences, CPU)
    rows = torch.cat([batch.taps[row, 2:length] for row, length in enumerate(batch.lengths)])
    torch.testing.assert_close(scale[:, 0], rows.square().mean(dim=(0, 2)).sqrt())


def test_decoder_context_is_the_targets_own(run: AdapterRun, states: States, target_runner: TargetRunner) -> None:
    sequence = states.corpus.sequences[0]
    batch = states.store.batch([sequence], CPU)
    kept = true_rows(target_runner, sequence.token_ids.tolist()).decoder_kv
    for index, context in enumerate(decoder_contexts(run, batch)):
        torch.testing.assert_close(context.key[0], kept[:, index, 0], rtol=0.03, atol=0.03)
        torch.testing.assert_close(context.value[0], kept[:, index, 1], rtol=0.03, atol=0.03)


@pytest.mark.parametrize("kl_weight", [0.0, 0.3])
def test_training_lowers_the_loss_and_closes_the_gap(run: AdapterRun, states: States, kl_weight: float) -> None:
    run = replace(run, kl_weight=kl_weight)
    before = evaluate_adapter(run, states.store, states.corpus.sequences[:12])
    optimizer = torch.optim.AdamW(run.adapter.parameters(), lr=3e-3)
    losses = []
    source = adapter_batches(run, states.store, states.corpus.sequences[12:], 200, 0)
    for _, (batch, blocks) in zip(range(50), source, strict=False):
        loss = adapter_loss(run, batch, blocks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    after = evaluate_adapter(run, states.store, states.corpus.sequences[:12])
    assert after.kl < before.kl
    assert np.mean(after.gap_closed) > np.mean(before.gap_closed) + 0.1
    assert np.mean(after.gap_closed) < 1


def test_the_report_has_a_number_per_slot_and_tap(run: AdapterRun, states: States) -> None:
    report = evaluate_adapter(run, states.store, states.corpus.sequences[:4])
    assert len(report.agreement) == 4
    assert [len(by_slot) for by_slot in report.gap_closed] == [4] * len(TAP_LAYERS)
    assert all(0 <= share <= 1 for share in report.agreement)
    assert "agreement" in report.line() and "gap closed" in report.line()


def test_the_served_form_loads(run: AdapterRun, tmp_path: Path) -> None:
    save_adapter(run.adapter, tmp_path / "adapter")
    loaded = load_adapter(tmp_path / "adapter", torch.float32, CPU)
    assert loaded.config.tap_layers == TAP_LAYERS
    for mine, theirs in zip(run.adapter.parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(mine.bfloat16().float(), theirs)
