"""`jetspecpp train ssd`: SSD's autoregressive drafter, a corpus and the loop put together."""

from dataclasses import dataclass

from modeling.autoregressive import CausalStack
from modeling.draft_model import tap_layers_for
from modeling.layers import RotaryTable
from modeling.target import Target
from modeling.vocabulary import DraftHead
from training.autoregressive import (
    AutoregressiveRun,
    autoregressive_loss,
    evaluate_autoregressive,
    new_stack,
    save_autoregressive,
    start_from_target,
    text_batches,
)
from training.corpus import Corpus
from training.loop import Trainer
from training.output import FixedSettings, StopRequest, check_settings, exclusive, read_settings, write_settings
from training.session import TargetFiles, TrainingOptions, open_corpus, open_target, prepare_data, reporter
from training.start import NUM_TAPS, draft_vocabulary, start_layers

DEFAULT_LAYERS = 2


@dataclass(frozen=True)
class SsdOptions(TrainingOptions):
    """The command's flags. None: as in an earlier run, else the default."""

    layers: int | None
    start_layers: tuple[int, ...] | None
    tap_layers: tuple[int, ...] | None
    draft_vocab: int | None
    num_draft_tokens: int


@dataclass(frozen=True)
class SsdStart:
    """The drafter before its first step of this run, on its vocabulary."""

    stack: CausalStack
    head: DraftHead


def train_ssd(options: SsdOptions) -> None:
    """Train until the minutes are used up. Raises `InputError`, `UnsupportedModel` or OSError."""
    device = options.place.prepare()
    files = open_target(options.model)
    with exclusive(options.output):
        target = files.load(device)
        corpus = open_corpus(options.corpus, files, target)
        start = prepare_start(options, files, target, corpus)
        # The drafter reads no taps; asking for those that draft models read shares their states.
        taps = options.tap_layers or tap_layers_for(NUM_TAPS, target.architecture.num_layers)
        data = prepare_data(options, corpus, files, target, taps)
        run = AutoregressiveRun(
            stack=start.stack.to(device).train(),
            target=target,
            head=start.head,
            rotary=RotaryTable(start.stack.architecture, corpus.longest, target.dtype, device),
            num_drafts=options.num_draft_tokens,
        )
        trainer = Trainer(run.stack, options.loop_config(device), options.output)
        token_ids = None if run.head.is_full else run.head.token_ids

        def evaluate() -> str:
            line = evaluate_autoregressive(run, data.store, data.held_out).line()
            save_autoregressive(run.stack, token_ids, options.output / "ssd")
            return line

        stop = StopRequest()
        with stop.listening():
            trainer.run(
                text_batches(
                    data.store, data.training, options.batch_tokens, options.seed + trainer.state.step, device
                ),
                lambda batch: autoregressive_loss(run, batch),
                evaluate,
                reporter(options.output),
                stop,
            )


def prepare_start(options: SsdOptions, files: TargetFiles, target: Target, corpus: Corpus) -> SsdStart:
    """Layers as new or to be resumed, and the settings that stay fixed. Raises `InputError`."""
    stored = read_settings(options.output, "ssd")
    num_layers = options.layers or (DEFAULT_LAYERS if stored is None else int(stored.settings["layers"]))
    first_layers = tuple(range(min(num_layers, target.architecture.num_layers)))
    sources = start_layers(options.start_layers or first_layers, num_layers, target.architecture)
    token_ids = draft_vocabulary(options.draft_vocab, stored, None, corpus, files, target.architecture)
    settings = {
        "kind": "ssd",
        "target": files.fingerprint,
        "layers": num_layers,
        "draft_vocab": target.architecture.vocab_size if token_ids is None else token_ids.numel(),
    }
    if stored is not None:
        check_settings(options.output, stored.settings, settings)
    stack = new_stack(target.architecture, num_layers)
    if not (options.output / "state").exists():
        start_from_target(stack, files.folder, sources)
    if stored is None:
        tensors = {} if token_ids is None else {"token_ids": token_ids}
        write_settings(options.output, FixedSettings(settings, tensors))
    return SsdStart(stack, DraftHead(target.head, token_ids))
