"""`jetspecpp train draft`: a draft model, a corpus and the loop put together, resumed from what an output holds."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from modeling.adapter import check_adapter_fits, load_adapter
from modeling.draft_model import DraftConfig, Inputs
from modeling.layers import RotaryTable
from modeling.target import Target
from modeling.vocabulary import DraftHead
from training.blocks import Blocks
from training.corpus import Batch
from training.draft import (
    DraftRun,
    PrefixSchedule,
    SlotWeights,
    draft_batches,
    draft_loss,
    evaluate_draft,
    save_draft,
)
from training.foreseen import StatePredictor
from training.loop import Trainer
from training.output import StopRequest, exclusive
from training.session import open_corpus, open_target, prepare_data, reporter
from training.start import BackboneOptions, Method, prepare_start

BlockLoss = Callable[[Batch, Blocks], Tensor]
MAX_PASSES = 3


@dataclass(frozen=True)
class DraftOptions(BackboneOptions):
    """The command's flags. `adapter`: predicts states for most blocks; None: they read true ones."""

    inputs: Inputs | None
    schedule: PrefixSchedule
    slot_weights: SlotWeights
    adapter: Path | None


def train_draft(options: DraftOptions) -> None:
    """Train until the minutes are used up. Raises `InputError`, `UnsupportedModel` or OSError."""
    method = Method("draft", inputs=options.inputs)
    train_draft_model(
        method, options, options.schedule, equation_nine, MAX_PASSES, options.slot_weights, options.adapter
    )


def equation_nine(run: DraftRun, seed: int) -> BlockLoss:
    """The loss of equation 9: from the target's distribution, slots weighted as the run says."""
    generator = np.random.default_rng(seed)
    return lambda batch, blocks: draft_loss(run, batch, blocks, generator)


def train_draft_model(
    method: Method,
    options: BackboneOptions,
    schedule: PrefixSchedule,
    loss_of: Callable[[DraftRun, int], BlockLoss],
    max_passes: int,
    slot_weights: SlotWeights = "uniform",
    adapter: Path | None = None,
) -> None:
    """Train one kind of draft model by a loss; its evaluations go up to J = `max_passes`. Raises as `train_draft`."""
    device = options.place.prepare()
    files = open_target(options.model)
    with exclusive(options.output):
        target = files.load(device)
        corpus = open_corpus(options.corpus, files, target)
        start = prepare_start(method, options, files, target, corpus)
        config = start.model.config
        data = prepare_data(options, corpus, files, target, config.tap_layers)
        loop = options.loop_config(device)
        run = DraftRun(
            model=start.model.to(device).train().requires_grad_(True),
            target=target,
            head=DraftHead(target.head, start.token_ids),
            rotary=RotaryTable(config.architecture, corpus.longest, target.dtype, device),
            num_slots=config.block_size,
            num_anchors=options.anchors,
            schedule=schedule,
            slot_weights=slot_weights,
            predictor=None
            if adapter is None
            else open_predictor(adapter, config, target, corpus.longest, loop.bfloat16),
        )
        trainer = Trainer(run.model, loop, options.output)
        seed = options.seed + trainer.state.step

        def evaluate() -> str:
            line = evaluate_draft(run, data.store, data.held_out, max_passes).line()
            save_draft(run.model, start.token_ids, options.output / method.name)
            return line

        stop = StopRequest()
        with stop.listening():
            trainer.run(
                draft_batches(run, data.store, data.training, options.batch_tokens, seed),
                loss_of(run, seed + 1),
                evaluate,
                reporter(options.output),
                stop,
            )


def open_predictor(
    folder: Path, config: DraftConfig, target: Target, num_positions: int, bfloat16: bool
) -> StatePredictor:
    """An adapter for the draft model's taps. Raises `UnsupportedModel` naming what does not fit."""
    adapter = load_adapter(folder, torch.float32, target.device)
    check_adapter_fits(adapter.config, config.tap_layers, target.architecture)
    rotary = RotaryTable(target.architecture, num_positions, target.dtype, target.device)
    return StatePredictor(adapter, target, rotary, bfloat16)
