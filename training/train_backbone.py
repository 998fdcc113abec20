"""`jetspecpp train dflash | jetspec`: the draft models that read masks, bidirectional or causal in their block."""

from dataclasses import dataclass

from training.baselines import LabelRule, Labels, default_slot_decay, dflash_loss
from training.draft import DraftRun
from training.start import BackboneOptions, Method
from training.train_draft import BlockLoss, equation_nine, train_draft_model

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


def train_dflash(options: DflashOptions) -> None:
    """Cross-entropy, later drafts weighing less. Raises `InputError`, `UnsupportedModel` or OSError."""

    def loss_of(run: DraftRun, seed: int) -> BlockLoss:
        rule = LabelRule(options.labels, options.slot_decay or default_slot_decay(run.model.config))
        return lambda batch, blocks: dflash_loss(run, batch, blocks, rule)

    train_draft_model(DFLASH, options, "noise", loss_of, max_passes=0)


def train_jetspec(options: JetspecOptions) -> None:
    """Forward KL from the target's distribution, all slots alike. Raises as `train_dflash` does."""
    train_draft_model(JETSPEC, options, "noise", equation_nine, max_passes=0)
