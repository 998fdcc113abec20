"""What the training of a draft model begins with: its shape, its weights, its vocabulary, its mask.

Every method whose network is a draft model starts here. What an earlier run of the same output decided stays.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from modeling.architecture import Architecture, read_json
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
from modeling.target import Target
from training.corpus import Corpus, frequent_tokens
from training.draft import start_from_target
from training.errors import InputError
from training.output import FixedSettings, check_settings, read_settings, write_settings
from training.session import TargetFiles, TrainingOptions

DEFAULT_LAYERS = 3
DEFAULT_BLOCK_SIZE = 16
DEFAULT_DRAFT_VOCAB = 8192
NUM_TAPS = 5


@dataclass(frozen=True)
class BackboneOptions(TrainingOptions):
    """Flags of every draft model. None: as in the checkpoint that the training starts from, else the default."""

    layers: int | None
    start_layers: tuple[int, ...] | None
    tap_layers: tuple[int, ...] | None
    init: Path | None
    slots: Slots | None
    mask_token_id: int | None
    block_size: int | None
    anchors: int
    draft_vocab: int | None


@dataclass(frozen=True)
class Method:
    """What a method fixes of its draft model; None: as in the checkpoint, else causal and reading tokens."""

    name: str
    causal: bool | None = None
    inputs: Inputs | None = None


@dataclass(frozen=True)
class Start:
    """The network before its first step of this run, and its vocabulary (None: the full one)."""

    model: DraftModel
    token_ids: Tensor | None


def prepare_start(
    method: Method, options: BackboneOptions, files: TargetFiles, target: Target, corpus: Corpus
) -> Start:
    """The network of an earlier run of this output, of `--init`, or a new one, and the settings that stay fixed.

    Raises `InputError` or `UnsupportedModel`.
    """
    stored = read_settings(options.output, method.name)
    has_state = (options.output / "state").exists()
    base = _checkpoint(method, options, has_state=has_state, has_settings=stored is not None)
    if stored is not None:
        config = draft_config_from_json(stored.settings["draft"])
    elif base is not None:
        config = base.model.config
    else:
        config = new_config(target.architecture, options)
    config = with_flags(config, method, options)
    if config.inputs == "mask" and config.mask_token_id is None:
        config = replace(config, mask_token_id=choose_mask(files, corpus, target.architecture.vocab_size))
    check_draft_fits(config, target.architecture)
    kept = None if base is None else base.token_ids
    token_ids = draft_vocabulary(options.draft_vocab, stored, kept, corpus, files, target.architecture)
    settings = {
        "kind": method.name,
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
        chosen = start_layers(options.start_layers, config.architecture.num_layers, target.architecture)
        start_from_target(model, files.folder, chosen)
    if stored is None:
        tensors = {} if token_ids is None else {"token_ids": token_ids}
        write_settings(options.output, FixedSettings(settings, tensors))
    return Start(model, token_ids)


def new_config(target: Architecture, options: BackboneOptions) -> DraftConfig:
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


def with_flags(config: DraftConfig, method: Method, options: BackboneOptions) -> DraftConfig:
    """The method's traits and the given flags over a checkpoint's or the default config.

    Raises `InputError` for what cannot change.
    """
    if options.layers is not None and options.layers != config.architecture.num_layers:
        raise InputError(f"--layers {options.layers}: the checkpoint has {config.architecture.num_layers} layers")
    if options.tap_layers is not None and options.tap_layers != config.tap_layers:
        raise InputError(f"--tap-layers {options.tap_layers}: the checkpoint reads layers {config.tap_layers}")
    inputs = method.inputs or config.inputs
    mask = config.mask_token_id if options.mask_token_id is None else options.mask_token_id
    if mask is not None and not 0 <= mask < config.architecture.vocab_size:
        raise InputError(f"--mask-token-id {mask}: the target has {config.architecture.vocab_size} tokens")
    return replace(
        config,
        causal=config.causal if method.causal is None else method.causal,
        slots=options.slots or config.slots,
        inputs=inputs,
        mask_token_id=mask if inputs == "mask" else None,
        block_size=options.block_size or config.block_size,
    )


def start_layers(given: Sequence[int] | None, count: int, target: Architecture) -> tuple[int, ...]:
    """Target layers that `count` new layers are copied from: the first, the last, and evenly spaced ones between."""
    if given is None:
        spread = (index * (target.num_layers - 1) / max(1, count - 1) for index in range(count))
        return tuple(math.floor(place + 0.5) for place in spread)
    if len(given) != count or any(not 0 <= layer < target.num_layers for layer in given):
        raise InputError(f"--start-layers {list(given)}: {count} layers below {target.num_layers} are needed")
    return tuple(given)


def choose_mask(files: TargetFiles, corpus: Corpus, vocab_size: int) -> int:
    """A token that no text of the corpus holds and that has no meaning of its own, so that it can stand for "unknown".

    First an embedding row without a token, then a special token without a role, then any token the corpus lacks, and
    only then the end of the text, whose meaning a drafter would have to unlearn.
    """
    if files.tokenizer.vocab_size < vocab_size:
        return files.tokenizer.vocab_size
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sequence in corpus.sequences:
        counts += np.bincount(sequence.token_ids, minlength=vocab_size)
    added = read_json(files.folder / "tokenizer.json").get("added_tokens") or []
    settings_file = files.folder / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.exists() else {}
    roles = {_spelling(settings.get(f"{role}_token")) for role in ("bos", "eos", "pad", "unk")}
    with_role = {token["id"] for token in added if token["content"] in roles} | set(files.tokenizer.eos_token_ids)
    free = [index for index in range(vocab_size) if counts[index] == 0 and index not in with_role]
    special = {token["id"] for token in added if token.get("special")}
    unused_special = [index for index in free if index in special]
    if unused_special:
        return unused_special[0]
    return free[-1] if free else min(files.tokenizer.eos_token_ids, default=0)


def _spelling(token: object) -> object:
    """A special token is a string, or an object that holds it."""
    return token.get("content") if isinstance(token, dict) else token


def _checkpoint(method: Method, options: BackboneOptions, *, has_state: bool, has_settings: bool) -> LoadedDraft | None:
    """Where shape and weights come from when they are not stored: a new training's `--init`, an old state's draft."""
    served = options.output / method.name
    if has_state and not has_settings and served.exists():
        return load_draft_model(served, torch.float32, torch.device("cpu"))
    if has_state or options.init is None:
        return None
    return load_draft_model(options.init, torch.float32, torch.device("cpu"))


def draft_vocabulary(
    wanted: int | None,
    stored: FixedSettings | None,
    kept: Tensor | None,
    corpus: Corpus,
    files: TargetFiles,
    target: Architecture,
) -> Tensor | None:
    """Token ids of the drafting head, None for all. Once a training has begun they stay, whatever its corpus becomes.

    `kept`: those of a checkpoint to start from. `wanted`: how many the user asks for, 0 for all.
    """
    if stored is not None:
        kept = stored.tensors.get("token_ids")
    if kept is not None and wanted in (None, kept.numel()):
        return kept
    if stored is not None and wanted in (None, 0):
        return None
    size = min(DEFAULT_DRAFT_VOCAB if wanted is None else wanted, target.vocab_size)
    if size in (0, target.vocab_size):
        return None
    special = {0, *files.tokenizer.eos_token_ids}
    return frequent_tokens(corpus, size, target.vocab_size, sorted(special))
