"""`jetspecpp train dspark | domino`: a head over a draft model that `train dflash` made, alone or together with it."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from modeling.draft_model import (
    LoadedDraft,
    check_draft_fits,
    draft_config_to_json,
    draft_model_tensors,
    head_checkpoint_config,
    load_draft_model,
)
from modeling.heads import (
    CorrectionHead,
    GruConfig,
    GruHead,
    HeadConfig,
    MarkovConfig,
    MarkovHead,
    SlotCorrector,
    with_head,
)
from modeling.layers import RotaryTable
from modeling.runtime import model_fingerprint
from modeling.target import Target
from modeling.vocabulary import DraftHead
from training.baselines import (
    LabelRule,
    Labels,
    default_slot_decay,
    domino_loss,
    dspark_loss,
    evaluate_head,
)
from training.blocks import Blocks
from training.corpus import Batch
from training.draft import DraftRun, draft_batches
from training.errors import InputError
from training.loop import Trainer, progress, write_folder
from training.output import FixedSettings, StopRequest, check_settings, exclusive, read_settings, write_settings
from training.session import TargetFiles, TrainingOptions, open_corpus, open_target, prepare_data, reporter

DSPARK_SLOT_DECAY = 4.0


@dataclass(frozen=True)
class HeadOptions(TrainingOptions):
    """Flags of both commands. `slot_decay` None: as published."""

    backbone: Path
    freeze_backbone: bool
    labels: Labels
    slot_decay: float | None
    anchors: int


@dataclass(frozen=True)
class DsparkOptions(HeadOptions):
    """The flags of `train dspark`."""

    rank: int


@dataclass(frozen=True)
class DominoOptions(HeadOptions):
    """The flags of `train domino`."""

    state_size: int
    bottleneck: int


@dataclass(frozen=True)
class HeadRun:
    """A backbone with its head; `trained` holds what learns."""

    draft: DraftRun
    corrector: SlotCorrector
    trained: nn.Module


HeadLoss = Callable[[HeadRun, Trainer], Callable[[Batch, Blocks], Tensor]]


def train_dspark(options: DsparkOptions) -> None:
    """The low-rank Markov head. Raises `InputError`, `UnsupportedModel` or OSError."""
    rule = LabelRule(options.labels, options.slot_decay or DSPARK_SLOT_DECAY)

    def loss_of(run: HeadRun, trainer: Trainer) -> Callable[[Batch, Blocks], Tensor]:
        return lambda batch, blocks: dspark_loss(run.draft, run.corrector, batch, blocks, rule)

    _train("dspark", options, MarkovConfig(options.rank), loss_of)


def train_domino(options: DominoOptions) -> None:
    """The GRU head, on a curriculum from the backbone's own loss to the head's. Raises as `train_dspark` does."""

    def loss_of(run: HeadRun, trainer: Trainer) -> Callable[[Batch, Blocks], Tensor]:
        rule = LabelRule(options.labels, options.slot_decay or default_slot_decay(run.draft.model.config))

        def loss(batch: Batch, blocks: Blocks) -> Tensor:
            # The loss of a frozen backbone is a constant: the curriculum would only hold the head back.
            base_weight = 0.0 if options.freeze_backbone else 1 - progress(trainer.config, trainer.state)
            return domino_loss(run.draft, run.corrector, batch, blocks, rule, base_weight)

        return loss

    _train("domino", options, GruConfig(options.state_size, options.bottleneck), loss_of)


def _train(name: str, options: HeadOptions, head_config: HeadConfig, loss_of: HeadLoss) -> None:
    device = options.place.prepare()
    files = open_target(options.model)
    with exclusive(options.output):
        target = files.load(device)
        backbone = load_draft_model(options.backbone, torch.float32, torch.device("cpu"))
        check_draft_fits(backbone.model.config, target.architecture)
        corpus = open_corpus(options.corpus, files, target)
        data = prepare_data(options, corpus, files, target, backbone.model.config.tap_layers)
        run = prepare_run(name, options, head_config, backbone, files, target, corpus.longest)
        trainer = Trainer(run.trained, options.loop_config(device), options.output)
        frozen_backbone = options.backbone if options.freeze_backbone else None

        def evaluate() -> str:
            line = evaluate_head(run.draft, run.corrector, data.store, data.held_out).line()
            save_head(run, backbone.token_ids, options.output / name, frozen_backbone)
            return line

        stop = StopRequest()
        with stop.listening():
            trainer.run(
                draft_batches(
                    run.draft, data.store, data.training, options.batch_tokens, options.seed + trainer.state.step
                ),
                loss_of(run, trainer),
                evaluate,
                reporter(options.output),
                stop,
            )


def prepare_run(
    name: str,
    options: HeadOptions,
    head_config: HeadConfig,
    backbone: LoadedDraft,
    files: TargetFiles,
    target: Target,
    longest: int,
) -> HeadRun:
    """A new head on the backbone, and the settings that stay fixed. Raises `InputError`."""
    config = backbone.model.config
    if config.inputs != "mask":
        raise InputError(f"--backbone {options.backbone} reads tokens, not masks: train one with `train dflash`")
    if backbone.head is not None:
        raise InputError(f"--backbone {options.backbone} has a head already: name the draft model alone")
    device = target.device
    vocabulary = DraftHead(target.head, backbone.token_ids)
    num_columns = vocabulary.token_ids.numel()
    settings = {
        "kind": name,
        "target": files.fingerprint,
        "head": with_head({}, head_config),
        "freeze_backbone": options.freeze_backbone,
        "backbone": model_fingerprint(options.backbone),
    }
    stored = read_settings(options.output, name)
    if stored is None:
        write_settings(options.output, FixedSettings(settings, {}))
    else:
        check_settings(options.output, stored.settings, settings)
    head = new_head(head_config, num_columns, config.architecture.hidden_size).to(device).train()
    model = backbone.model.to(device).train().requires_grad_(not options.freeze_backbone)
    draft = DraftRun(
        model=model,
        target=target,
        head=vocabulary,
        rotary=RotaryTable(config.architecture, longest, target.dtype, device),
        num_slots=config.block_size,
        num_anchors=options.anchors,
        schedule="noise",
    )
    trained = head if options.freeze_backbone else nn.ModuleDict({"backbone": model, "head": head})
    return HeadRun(draft, SlotCorrector(head, vocabulary, target.embedding), trained)


def new_head(config: HeadConfig, num_columns: int, hidden_size: int) -> CorrectionHead:
    """A head that corrects nothing yet. The Markov head has a row for every draft token and one for all others."""
    if isinstance(config, MarkovConfig):
        return MarkovHead(config, num_columns, num_columns + 1)
    return GruHead(config, num_columns, hidden_size)


def save_head(run: HeadRun, token_ids: Tensor | None, folder: Path, frozen_backbone: Path | None) -> None:
    """Write the served form in bf16: the head alone, naming its frozen backbone, or both where both were trained."""
    head = run.corrector.head
    tensors = head.tensors()
    if frozen_backbone is not None:
        relative = os.path.relpath(frozen_backbone.resolve(), folder.resolve())
        config = head_checkpoint_config(head.config, relative)
    else:
        config = with_head(draft_config_to_json(run.draft.model.config), head.config)
        tensors |= draft_model_tensors(run.draft.model)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    if token_ids is not None:
        tensors["d2t"] = token_ids.cpu().long() - torch.arange(token_ids.numel())
    write_folder(folder, {"config.json": json.dumps(config, indent=1), "model.safetensors": tensors})
