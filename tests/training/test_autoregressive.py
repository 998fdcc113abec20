"""Training of the autoregressive drafter: its loss against a plain loop, its examination against real drafting."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.autoregressive import AutoregressiveRunner, load_autoregressive
from modeling.layers import RotaryTable
from modeling.target import Target
from modeling.vocabulary import DraftHead
from tests.tiny.models import VOCAB_SIZE, randomise
from tests.training.texts import CPU, States
from training.autoregressive import (
    AutoregressiveRun,
    autoregressive_loss,
    evaluate_autoregressive,
    new_stack,
    save_autoregressive,
    start_from_target,
    text_batches,
    text_hidden,
)
from training.blocks import random_anchors
from training.corpus import batches

KEPT = torch.arange(3, VOCAB_SIZE)


def make_run(target: Target, vocabulary: Tensor | None = None, num_layers: int = 2) -> AutoregressiveRun:
    torch.manual_seed(0)
    stack = new_stack(target.architecture, num_layers)
    rotary = RotaryTable(stack.architecture, 64, torch.float32, CPU)
    return AutoregressiveRun(stack, target, DraftHead(target.head, vocabulary), rotary, num_drafts=3)


@pytest.mark.parametrize("vocabulary", [None, KEPT], ids=["full", "trimmed"])
def test_loss_against_a_plain_loop(states: States, target: Target, vocabulary: Tensor | None) -> None:
    run = make_run(target, vocabulary)
    batch = states.store.batch(states.corpus.sequences[:3], CPU)
    with torch.no_grad():
        hidden = text_hidden(run, batch)
        losses = []
        for row, (prompt, length) in enumerate(zip(batch.prompt_lens, batch.lengths, strict=True)):
            for place in range(prompt - 1, length - 1):
                teacher = F.linear(batch.last[row, place], target.head[run.head.token_ids]).log_softmax(-1)
                student = F.linear(hidden[row, place], target.head[run.head.token_ids]).log_softmax(-1)
                losses.append((teacher.exp() * (teacher - student)).sum())
        torch.testing.assert_close(autoregressive_loss(run, batch), torch.stack(losses).mean(), rtol=1e-4, atol=1e-5)


def test_all_layers_of_the_target_are_the_target(states: States, target: Target, target_folder: Path) -> None:
    run = make_run(target, num_layers=target.architecture.num_layers)
    start_from_target(run.stack, target_folder, range(target.architecture.num_layers), norm_scale=1.0)
    with torch.no_grad():
        loss = autoregressive_loss(run, states.store.batch(states.corpus.sequences[:3], CPU))
    assert loss.item() < 1e-4  # the states are kept in bf16


def test_rows_read_no_later_token(states: States, target: Target) -> None:
    run = make_run(target)
    batch = states.store.batch(states.corpus.sequences[:1], CPU)
    changed = replace(batch, token_ids=batch.token_ids.clone())
    changed.token_ids[0, 8] += 1
    with torch.no_grad():
        before, after = text_hidden(run, batch), text_hidden(run, changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert (before[:, 8:] - after[:, 8:]).abs().amax() > 1e-3


def test_training_raises_the_acceptance_and_drafting_confirms_it(
    states: States, target: Target, target_folder: Path, tmp_path: Path
) -> None:
    """The served form, loaded and drafting token by token with its cache, commits as many tokens as was reported."""
    run = make_run(target, KEPT)
    randomise(run.stack, torch.Generator().manual_seed(1), 0.3)  # small layers would pass the rule through
    held_out = states.corpus.sequences[:10]
    before = evaluate_autoregressive(run, states.store, held_out)
    optimizer = torch.optim.AdamW(run.stack.parameters(), lr=3e-3)
    losses = []
    for _, (batch,) in zip(
        range(40), text_batches(states.store, states.corpus.sequences[20:], 200, 0, CPU), strict=False
    ):
        loss = autoregressive_loss(run, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])
    for parameter in run.stack.parameters():
        parameter.data.copy_(parameter.data.bfloat16())  # as it is served
    after = evaluate_autoregressive(run, states.store, held_out)
    assert after.tau[0] > before.tau[0] + 0.3

    save_autoregressive(run.stack, KEPT, tmp_path / "ssd")
    runner = AutoregressiveRunner(load_autoregressive(tmp_path / "ssd", target_folder, torch.float32, CPU), 64)
    assert torch.equal(runner.head.token_ids, KEPT)
    committed, count = 0, 0
    generator = np.random.default_rng(7)
    for group in batches(held_out, 2500, np.random.default_rng(3)):
        batch = states.store.batch(group, CPU)
        anchors, valid = random_anchors(batch, 24, generator)
        for row, length in enumerate(batch.lengths):
            text = batch.token_ids[row].tolist()
            for anchor in anchors[row][valid[row]].tolist():
                if anchor + 3 >= length:
                    continue
                cache = runner.new_cache(0)
                logits = runner.extend(cache, 0, text[: anchor + 1])
                count, committed = count + 1, committed + 1
                for draft in range(1, 4):
                    token = int(runner.head.token_ids[logits.argmax()])
                    if token != text[anchor + draft]:
                        break
                    committed += 1
                    logits = runner.extend(cache, anchor + draft, [token])
    assert committed / count == pytest.approx(after.tau[0])
