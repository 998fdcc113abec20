"""`jetspecpp train draft`: a draft model, a corpus and the loop put together, resumed from what an output holds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from modeling.architecture import Architecture
from modeling.draft_model import (
    DraftConfig,
    DraftModel,
    Inputs,
    LoadedDraft,
    Slots,
    check_draft_fits,
    draft_config_from_json,
    draft_config_to_json,
    load_draft_model,
    tap_layers_for,
)
from modeling.layers import RotaryTable
from modeling.target import Target
from modeling.vocabulary import DraftHead
from training.corpus import Corpus, frequent_tokens
from training.draft import (
    DraftRun,
    PrefixSchedule,
    draft_batches,
    draft_loss,
    evaluate_draft,
    save_draft,
    start_from_target,
)
from training.errors import InputError
from training.loop import Trainer
from training.output import FixedSettings, StopRequest, check_settings, exclusive, read_settings, write_settings
from training.session import (
    TargetFiles,
    TrainingOptions,
    open_corpus,
    open_target,
    prepare_data,
    reporter,
)

DEFAULT_LAYERS = 3
DEFAULT_BLOCK_SIZE = 16
DEFAULT_DRAFT_VOCAB = 8192
NUM_TAPS = 5


@dataclass(frozen=True)
class DraftOptions(TrainingOptions):
    """The command's flags. None: as in the checkpoint that the training starts from, else the default."""

    layers: int | None
    start_layers: tuple[int, ...] | None
    tap_layers: tuple[int, ...] | None
    init: Path | None
    slots: Slots | None
    inputs: Inputs | None
    mask_token_id: int | None
    schedule: PrefixSchedule
    block_size: int | None
    anchors: int
    draft_vocab: int | None


@dataclass(frozen=True)
class Start:
    """The network before its first step of this run, and its vocabulary (None: the full one)."""

    model: DraftModel
    token_ids: Tensor | None


def train_draft(options: DraftOptions) -> None:
    """Train until the minutes are used up. Raises `InputError`, `UnsupportedModel` or OSError."""
    device = options.place.prepare()
    files = open_target(options.model)
    with exclusive(options.output):
        target = files.load(device)
        corpus = open_corpus(options.corpus, files, target)
        start = prepare_start(options, files, target, corpus)
        config = start.model.config
        data = prepare_data(options, corpus, files, target, config.tap_layers)
        longest = max(sequence.length for sequence in corpus.sequences)
        run = DraftRun(
            model=start.model.to(device).train().requires_grad_(True),
            target=target,
            head=DraftHead(target.head, start.token_ids),
            rotary=RotaryTable(config.architecture, longest, target.dtype, device),
            num_slots=config.block_size,
            num_anchors=options.anchors,
            schedule=options.schedule,
        )
        trainer = Trainer(run.model, options.loop_config(device), options.output)
        seed = options.seed + trainer.state.step
        generator = np.random.default_rng(seed + 1)

        def evaluate() -> str:
            line = evaluate_draft(run, data.store, data.held_out).line()
            save_draft(run.model, start.token_ids, options.output / "draft")
            return line

        stop = StopRequest()
        with stop.listening():
            trainer.run(
                draft_batches(run, data.store, data.training, options.batch_tokens, seed),
                lambda batch, blocks: draft_loss(run, batch, blocks, generator),
                evaluate,
                reporter(options.output),
                stop,
            )


def prepare_start(options: DraftOptions, files: TargetFiles, target: Target, corpus: Corpus) -> Start:
    """The network of an earlier run of this output, of `--init`, or a new one, and the settings that stay fixed."""
    stored = read_settings(options.output, "draft")
    has_state = (options.output / "state").exists()
    base = _checkpoint(options, has_state=has_state, has_settings=stored is not None)
    if stored is not None:
        config = draft_config_from_json(stored.settings["draft"])
    elif base is not None:
        config = base.model.config
    else:
        config = new_config(target.architecture, options)
    config = with_flags(config, options, files)
    check_draft_fits(config, target.architecture)
    token_ids = _vocabulary(options, stored, base, corpus, files, target.architecture)
    settings = {
        "kind": "draft",
        "target": files.fingerprint,
        "draft": draft_config_to_json(config),
        "draft_vocab": target.architecture.vocab_size if token_ids is None else token_ids.numel(),
    }
    if stored is not None:
        check_settings(options.output, stored.settings, settings)
    model = DraftModel(config)
    if base is not None:
        model.load_state_dict(base.model.state_dict())
    elif not has_state:
        start_from_target(model, files.folder, start_layers(options.start_layers, config, target.architecture))
    if stored is None:
        tensors = {} if token_ids is None else {"token_ids": token_ids}
        write_settings(options.output, FixedSettings(settings, tensors))
    return Start(model, token_ids)


def new_config(target: Architecture, options: DraftOptions) -> DraftConfig:
    """The shape of a new draft model for a target."""
    rope = {"rope_type": "default", "rope_theta": target.rope["rope_theta"]}
    num_layers = options.layers or DEFAULT_LAYERS
    return DraftConfig(
        architecture=replace(target, num_layers=num_layers, qk_norm=True, attention_bias=False, rope=rope),
        tap_layers=options.tap_layers or tap_layers_for(NUM_TAPS, target.num_layers),
        block_size=DEFAULT_BLOCK_SIZE,
        num_target_layers=target.num_layers,
        slots="shifted",
        inputs="tokens",
    )


def with_flags(config: DraftConfig, options: DraftOptions, files: TargetFiles) -> DraftConfig:
    """The given flags over a checkpoint's or the default config. Raises `InputError` for what cannot change."""
    if options.layers is not None and options.layers != config.architecture.num_layers:
        raise InputError(f"--layers {options.layers}: the checkpoint has {config.architecture.num_layers} layers")
    if options.tap_layers is not None and options.tap_layers != config.tap_layers:
        raise InputError(f"--tap-layers {options.tap_layers}: the checkpoint reads layers {config.tap_layers}")
    inputs = options.inputs or config.inputs
    mask = config.mask_token_id if options.mask_token_id is None else options.mask_token_id
    if inputs == "mask" and mask is None:
        mask = min(files.tokenizer.eos_token_ids, default=0)
    if mask is not None and not 0 <= mask < config.architecture.vocab_size:
        raise InputError(f"--mask-token-id {mask}: the target has {config.architecture.vocab_size} tokens")
    return replace(
        config,
        slots=options.slots or config.slots,
        inputs=inputs,
        mask_token_id=mask if inputs == "mask" else None,
        block_size=options.block_size or config.block_size,
    )


def start_layers(given: Sequence[int] | None, config: DraftConfig, target: Architecture) -> tuple[int, ...]:
    """Target layers that a new draft model is copied from: the first, the last, and evenly spaced ones between."""
    count = config.architecture.num_layers
    if given is None:
        spread = (index * (target.num_layers - 1) / max(1, count - 1) for index in range(count))
        return tuple(math.floor(place + 0.5) for place in spread)
    if len(given) != count or any(not 0 <= layer < target.num_layers for layer in given):
        raise InputError(f"--start-layers {list(given)}: {count} layers below {target.num_layers} are needed")
    return tuple(given)


def _checkpoint(options: DraftOptions, *, has_state: bool, has_settings: bool) -> LoadedDraft | None:
    """Where shape and weights come from when they are not stored: a new training's `--init`, an old state's draft."""
    served = options.output / "draft"
    if has_state and not has_settings and served.exists():
        return load_draft_model(served, torch.float32, torch.device("cpu"))
    if has_state or options.init is None:
        return None
    return load_draft_model(options.init, torch.float32, torch.device("cpu"))


def _vocabulary(
    options: DraftOptions,
    stored: FixedSettings | None,
    base: LoadedDraft | None,
    corpus: Corpus,
    files: TargetFiles,
    target: Architecture,
) -> Tensor | None:
    """Token ids of the drafting head. Once a training has begun they stay, whatever its corpus becomes."""
    kept = None if base is None else base.token_ids
    if stored is not None:
        kept = stored.tensors.get("token_ids")
    wanted = options.draft_vocab
    if kept is not None and wanted in (None, kept.numel()):
        return kept
    if stored is not None and wanted in (None, 0):
        return None
    size = min(DEFAULT_DRAFT_VOCAB if wanted is None else wanted, target.vocab_size)
    if size in (0, target.vocab_size):
        return None
    special = {0, *files.tokenizer.eos_token_ids}
    return frequent_tokens(corpus, size, target.vocab_size, sorted(special))
