"""`jetspecpp train adapter`: an adapter, a corpus and the loop put together, resumed from what an output holds."""

from dataclasses import dataclass
from pathlib import Path

import torch

from modeling.adapter import Adapter, AdapterConfig, check_adapter_fits, load_adapter
from modeling.architecture import UnsupportedModel
from modeling.decoder import decoder_of
from modeling.draft_model import LoadedDraft, check_draft_fits, load_draft_model
from modeling.layers import RotaryTable
from modeling.target import Target
from modeling.vocabulary import DraftHead
from training.adapter import (
    AdapterRun,
    adapter_batches,
    adapter_loss,
    evaluate_adapter,
    measure_tap_scale,
    new_adapter,
    save_adapter,
)
from training.errors import InputError
from training.loop import Trainer
from training.output import FixedSettings, StopRequest, check_settings, exclusive, read_settings, write_settings
from training.session import (
    TargetFiles,
    TrainingData,
    TrainingOptions,
    open_corpus,
    open_target,
    prepare_data,
    reporter,
)


@dataclass(frozen=True)
class AdapterOptions(TrainingOptions):
    """The command's flags. `layers_per_tap` None: as in an earlier run, else two a tap and one for the lowest."""

    draft: Path
    layers_per_tap: tuple[int, ...] | None
    init: Path | None
    kl_weight: float
    block_size: int


def train_adapter(options: AdapterOptions) -> None:
    """Train until the minutes are used up. Raises `InputError`, `UnsupportedModel` or OSError."""
    device = options.place.prepare()
    files = open_target(options.model)
    with exclusive(options.output):
        target = files.load(device)
        draft = load_draft_model(options.draft, torch.float32, torch.device("cpu"))
        check_draft_fits(draft.model.config, target.architecture)
        corpus = open_corpus(options.corpus, files, target)
        taps = draft.model.config.tap_layers
        data = prepare_data(options, corpus, files, target, taps)
        run = prepare_run(options, files, target, draft, data)
        trainer = Trainer(run.adapter, options.loop_config(device), options.output)

        def evaluate() -> str:
            line = evaluate_adapter(run, data.store, data.held_out).line()
            save_adapter(run.adapter, options.output / "adapter")
            return line

        stop = StopRequest()
        with stop.listening():
            trainer.run(
                adapter_batches(
                    run, data.store, data.training, options.batch_tokens, options.seed + trainer.state.step
                ),
                lambda batch, blocks: adapter_loss(run, batch, blocks),
                evaluate,
                reporter(options.output),
                stop,
            )


def prepare_run(
    options: AdapterOptions, files: TargetFiles, target: Target, draft: LoadedDraft, data: TrainingData
) -> AdapterRun:
    """The adapter as new or to be resumed, and the settings that stay fixed."""
    stored = read_settings(options.output, "adapter")
    taps, device = draft.model.config.tap_layers, target.device
    initial = None if options.init is None else load_adapter(options.init, torch.float32, torch.device("cpu"))
    if initial is not None:
        check_adapter_fits(initial.config, taps, target.architecture)
    counts = options.layers_per_tap
    if counts is None and stored is not None:
        counts = tuple(stored.settings["layers_per_tap"])
    elif counts is None:
        counts = default_layers_per_tap(len(taps)) if initial is None else initial.config.layers_per_tap
    if len(counts) != len(taps) or min(counts) < 1:
        raise InputError(f"--layers-per-tap {list(counts)}: the draft model reads {len(taps)} taps, {list(taps)}")
    settings = {
        "kind": "adapter",
        "target": files.fingerprint,
        "tap_layers": list(taps),
        "layers_per_tap": list(counts),
        "draft_vocab": target.architecture.vocab_size if draft.token_ids is None else draft.token_ids.numel(),
    }
    if initial is not None and counts != initial.config.layers_per_tap:
        raise InputError(f"--init has {list(initial.config.layers_per_tap)} layers a tap, not {list(counts)}")
    if (options.output / "state").exists():
        adapter = Adapter(AdapterConfig(target.architecture, taps, counts))
    elif initial is not None:
        adapter = initial.requires_grad_(True).train()
    else:
        adapter = new_adapter(files.folder, target, taps, counts)
    if stored is None:
        scale = measure_tap_scale(data.store, data.held_out, device)
        write_settings(options.output, FixedSettings(settings, {"tap_scale": scale.cpu()}))
    else:
        check_settings(options.output, stored.settings, settings)
        if "tap_scale" not in stored.tensors:
            raise UnsupportedModel(f"{options.output / 'run' / 'tensors.safetensors'} lacks 'tap_scale'")
        scale = stored.tensors["tap_scale"].to(device)
    head = DraftHead(target.head, draft.token_ids)
    longest = max(sequence.length for sequence in data.corpus.sequences)
    return AdapterRun(
        adapter=adapter.to(device),
        decoder=decoder_of(target, taps[-1], head),
        target=target,
        head=head,
        rotary=RotaryTable(target.architecture, longest, target.dtype, device),
        tap_scale=scale,
        num_slots=options.block_size,
        kl_weight=options.kl_weight,
    )


def default_layers_per_tap(num_taps: int) -> tuple[int, ...]:
    """Two layers a tap; one for the lowest, which sits right above the embeddings."""
    return (1, *(2 for _ in range(num_taps - 1)))
