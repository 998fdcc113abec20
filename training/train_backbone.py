"""`jetspecpp train dflash | jetspec`: the draft models that read masks, bidirectional or causal in their block."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from modeling.layers import RotaryTable
from modeling.vocabulary import DraftHead
from training.baselines import LabelRule, Labels, default_slot_decay, dflash_loss
from training.blocks import Blocks
from training.corpus import Batch
from training.draft import DraftRun, draft_batches, draft_loss, evaluate_draft, save_draft
from training.loop import Trainer
from training.output import StopRequest, exclusive
from training.session import open_corpus, open_target, prepare_data, reporter
from training.start import BackboneOptions, Method, prepare_start

DFLASH = Method("dflash", causal=False, inputs="mask")
JETSPEC = Method("jetspec", causal=True, inputs="mask")


@dataclass(frozen=True)
class JetspecOptions(BackboneOptions):
    """The flags of `train jetspec`."""


@dataclass(frozen=True)
class DflashOptions(BackboneOptions):
    """The flags of `train dflash`. `slot_decay` None: by block size, as published."""

    labels: Labels
    slot_decay: float | None


BlockLoss = Callable[[Batch, Blocks], Tensor]


def train_dflash(options: DflashOptions) -> None:
    """Cross-entropy, later drafts weighing less. Raises `InputError`, `UnsupportedModel` or OSError."""

    def loss_of(run: DraftRun, seed: int) -> BlockLoss:
        rule = LabelRule(options.labels, options.slot_decay or default_slot_decay(run.model.config))
        return lambda batch, blocks: dflash_loss(run, batch, blocks, rule)

    _train(DFLASH, options, loss_of)


def train_jetspec(options: JetspecOptions) -> None:
    """Forward KL from the target's distribution, all slots alike. Raises as `train_dflash` does."""

    def loss_of(run: DraftRun, seed: int) -> BlockLoss:
        generator = np.random.default_rng(seed)
        return lambda batch, blocks: draft_loss(run, batch, blocks, generator)

    _train(JETSPEC, options, loss_of)


def _train(method: Method, options: BackboneOptions, loss_of: Callable[[DraftRun, int], BlockLoss]) -> None:
    device = options.place.prepare()
    files = open_target(options.model)
    with exclusive(options.output):
        target = files.load(device)
        corpus = open_corpus(options.corpus, files, target)
        start = prepare_start(method, options, files, target, corpus)
        config = start.model.config
        data = prepare_data(options, corpus, files, target, config.tap_layers)
        run = DraftRun(
            model=start.model.to(device).train().requires_grad_(True),
            target=target,
            head=DraftHead(target.head, start.token_ids),
            rotary=RotaryTable(config.architecture, corpus.longest, target.dtype, device),
            num_slots=config.block_size,
            num_anchors=options.anchors,
            schedule="noise",
        )
        trainer = Trainer(run.model, options.loop_config(device), options.output)
        seed = options.seed + trainer.state.step

        def evaluate() -> str:
            line = evaluate_draft(run, data.store, data.held_out, max_passes=0).line()
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
