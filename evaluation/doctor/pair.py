"""Whether target, draft model, adapter, calibration and chat template go together; reads configurations, no weights."""

from collections.abc import Iterator
from pathlib import Path

from decoding.calibration import Calibration, InvalidCalibration
from evaluation.doctor.findings import Finding, note, ok, problem
from modeling.adapter import adapter_config_from_json, check_adapter_fits
from modeling.architecture import Architecture, UnsupportedModel, architecture_from_config, read_json
from modeling.draft_model import DraftConfig, check_draft_fits, read_draft_config
from modeling.target import read_architecture
from server.config import ServeConfig
from server.draft_files import DraftFiles
from server.models import ResolvedModel
from server.tokenizer import Tokenizer, TokenizerError

QUESTION = ({"role": "user", "content": "Why?"},)


def check_pair(config: ServeConfig, model: ResolvedModel, files: DraftFiles) -> Iterator[Finding]:
    """Target and drafting files, in the order in which a fault in one spoils the next."""
    try:
        target = read_architecture(model.folder)
        yield ok(
            "target", f"{model.name}: {model.model_type}, {target.num_layers} layers, {target.max_positions} positions"
        )
        assert files.draft is not None, "a method that drafts has files"
        if config.method == "ssd":
            yield _autoregressive_drafter(files.draft, target)
            return
        draft = read_draft_config(files.draft)
        check_draft_fits(draft, target)
        yield ok("draft model", f"{files.draft}: {_shape(draft)}")
        yield from _draft_limits(config, draft, target)
        if files.adapter is not None:
            adapter = adapter_config_from_json(read_json(files.adapter / "config.json"))
            check_adapter_fits(adapter, draft.tap_layers, target)
            yield ok("adapter", f"{files.adapter}: {sum(adapter.layers_per_tap)} layers")
            yield _calibration(config, files)
    except UnsupportedModel as error:
        yield problem("files", str(error))


def _shape(draft: DraftConfig) -> str:
    slots = draft.slots.replace("_", " ")
    return (
        f"{draft.architecture.num_layers} layers on taps {list(draft.tap_layers)}, {slots} slots, {draft.inputs} inputs"
    )


def _autoregressive_drafter(folder: Path, target: Architecture) -> Finding:
    draft = architecture_from_config(read_json(folder / "config.json"))
    if draft.vocab_size != target.vocab_size:
        text = f"{folder}: vocab_size is {draft.vocab_size}, the target's is {target.vocab_size}"
        return problem("draft model", text)
    return ok("draft model", f"{folder}: autoregressive, {draft.num_layers} layers")


def _draft_limits(config: ServeConfig, draft: DraftConfig, target: Architecture) -> Iterator[Finding]:
    """What a draft model that fits was still not trained for."""
    num_trained = draft.block_size if draft.slots == "shifted" else draft.block_size - 1
    gamma = config.num_speculative_tokens
    if gamma > num_trained:
        text = f"--num-speculative-tokens {gamma}: it was trained to write {num_trained} drafts, later ones are guesses"
        yield note("draft model", text)
    served = min(target.max_positions, config.max_model_len or target.max_positions)
    if served > draft.architecture.max_positions:
        text = f"sequences may have {served} tokens; it was made for {draft.architecture.max_positions}"
        yield note("draft model", text)
    if config.method == "jetspec++" and draft.inputs == "mask" and config.passes != 0:
        yield note(
            "draft model",
            "it was trained on masks: refinement passes, which show it drafts, may spoil them; try --passes 0",
        )


def _calibration(config: ServeConfig, files: DraftFiles) -> Finding:
    budget = config.num_speculative_tokens + 1
    if files.calibration is None:
        text = f"none for a budget of {budget} rows: outcomes are ranked uncalibrated"
        return note("calibration", text)
    try:
        Calibration.from_json(files.calibration.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, InvalidCalibration) as error:
        return problem("calibration", f"{files.calibration}: {error}")
    return ok("calibration", str(files.calibration))


def has_thinking_mode(tokenizer: Tokenizer) -> bool:
    """Whether the chat template writes another prompt when thinking is switched off."""
    on, off = (
        tokenizer.render_chat(QUESTION, add_generation_prompt=True, enable_thinking=value) for value in (True, False)
    )
    return on != off


def check_template(model: ResolvedModel, tokenizer: Tokenizer) -> Finding:
    """The chat template, and the two modes some have."""
    if tokenizer.vocab_size > model.vocab_size:
        text = f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the target {model.vocab_size} rows"
        return problem("tokenizer", text)
    if not model.eos_token_ids and not tokenizer.eos_token_ids:
        return problem("tokenizer", "no end token is known: every answer runs to its limit")
    if tokenizer.chat_template is None:
        return note(
            "template", "the model has no chat template: /v1/chat/completions refuses, and prompts are plain text"
        )
    try:
        if has_thinking_mode(tokenizer):
            return note(
                "template",
                "it has a thinking mode, on unless a request says "
                '"chat_template_kwargs": {"enable_thinking": false}; drafters know the mode they were trained in',
            )
    except TokenizerError as error:
        return problem("template", str(error))
    return ok("template", "the model's own, without a thinking mode")
