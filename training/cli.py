"""The command line of training: `jetspecpp train corpus | draft | adapter | calibrate`, and a command per baseline.

Only parsing and the last word on errors happen here. Exit status: 0 done, 1 failed, 2 wrong input.
"""

import argparse
import errno
import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

EXIT_FAILURE = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130


Checked = Callable[[str], Any]


def _checked(convert: Checked, accepts: Callable[[Any], bool], wanted: str) -> Checked:
    """A converter whose refusal says what is wanted."""

    def read(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not accepts(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return read


_number = _checked(int, lambda value: bool(value >= 0), "a whole number of 0 or more")
_count = _checked(int, lambda value: bool(value >= 1), "a whole number of 1 or more")
_positive = _checked(float, lambda value: 0 < value < math.inf, "a positive number")
_weight = _checked(float, lambda value: 0 <= value < math.inf, "a number of 0 or more")
_share = _checked(float, lambda value: bool(0 <= value <= 1), "a number from 0 to 1")
_open_share = _checked(float, lambda value: bool(0 < value < 1), "a number between 0 and 1")
_layers = _checked(
    lambda text: tuple(int(part) for part in text.split(",")),
    lambda layers: all(layer >= 0 for layer in layers),
    "a list of layers, by commas",
)


class _Formatter(argparse.HelpFormatter):
    """Adds the default to a flag's help where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        told = action.help or ""
        is_plain = action.default in (None, "", (), False, argparse.SUPPRESS)
        return told if is_plain else told + " (default: %(default)s)"


def build_parser() -> argparse.ArgumentParser:
    """The parser of all training commands."""
    parser = argparse.ArgumentParser(
        prog="jetspecpp train", description="Train the drafting networks for a target, from its own texts."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, told, add in (
        ("corpus", "let the target answer prompts", _add_corpus),
        ("draft", "train a draft model on a corpus", _add_draft),
        ("adapter", "train an adapter on a corpus", _add_adapter),
        ("dflash", "train DFlash's draft model: masks, bidirectional, cross-entropy", _add_dflash),
        ("jetspec", "train JetSpec's draft model: masks, causal, forward KL", _add_backbone),
        ("dspark", "train DSpark's Markov head over a DFlash draft model", _add_dspark),
        ("domino", "train Domino's GRU head over a DFlash draft model", _add_domino),
        ("ssd", "train SSD's autoregressive drafter", _add_ssd),
        ("calibrate", "fit the outcome scores on held-out prompts", _add_calibrate),
    ):
        add(commands.add_parser(name, help=told, description=told, formatter_class=_Formatter))
    return parser


def _add_corpus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help='JSON lines {"id", "turns"}, or .gz')
    parser.add_argument("--exclude", type=Path, nargs="+", default=(), help="files whose prompts are left out")
    parser.add_argument("--output", type=Path, required=True, help="folder of the corpus")
    _add_place(parser)
    _add_dtype(parser)
    parser.add_argument("--temperature-one-share", type=_share, default=0.3, help="share answered at temperature 1")
    parser.add_argument("--suffix", type=_escaped, default="", help="text after the prompt (\\n is a line break)")
    parser.add_argument("--suffix-share", type=_share, default=1.0, help="share of the prompts that get it")
    parser.add_argument("--max-tokens", type=_count, default=384, help="longest answer")
    parser.add_argument("--max-prompt-tokens", type=_count, default=384, help="longer prompts are left out")
    parser.add_argument("--max-prompts", type=_number, default=0, help="prompts answered in this run (0: all)")
    parser.add_argument("--batch-rows", type=_count, default=16, help="answers written at the same time")
    parser.add_argument("--shard-size", type=_count, default=500, help="answers in a file")
    parser.add_argument("--flush-minutes", type=_positive, default=5.0, help="an unfinished file is written after this")
    parser.add_argument("--minutes", type=_positive, help="time limit of this run (default: none)")
    parser.add_argument(
        "--allow-all-licences",
        action="store_true",
        help="also use sets that are non-commercial or of unknown licence, and evaluation prompts",
    )


def _add_draft(parser: argparse.ArgumentParser) -> None:
    _add_backbone(parser)
    parser.add_argument("--inputs", choices=("tokens", "mask"), help="what undrafted slots read (default: tokens)")
    parser.add_argument(
        "--schedule",
        choices=("half_zero", "geometric", "noise"),
        default="half_zero",
        help="how many true tokens a block begins with",
    )
    parser.add_argument(
        "--slot-weights",
        choices=("uniform", "reach"),
        default="uniform",
        help="what a slot counts: all alike, or as often as a round gets so far",
    )
    parser.add_argument(
        "--adapter",
        type=Path,
        help="let most blocks read the states that it predicts, as they will (default: true ones)",
    )


def _add_backbone(parser: argparse.ArgumentParser) -> None:
    """The flags of every draft model."""
    _add_training(parser, learning_rate=1e-3, batch_tokens=2000, held_out=64)
    shape = parser.add_argument_group("draft model", "defaults: as in --init or in an earlier run, else as given here")
    shape.add_argument("--init", type=Path, help="draft model to start from (default: target layers)")
    shape.add_argument("--layers", type=_count, help="number of layers (3)")
    shape.add_argument("--start-layers", type=_layers, help="target layers to start from, by commas (evenly spread)")
    shape.add_argument("--tap-layers", type=_layers, help="target layers it reads, by commas (five, evenly spread)")
    shape.add_argument("--slots", choices=("shifted", "in_place"), help="what a slot predicts (shifted)")
    shape.add_argument("--mask-token-id", type=_number, help="the mask, with mask inputs (a token without a meaning)")
    shape.add_argument("--block-size", type=_count, help="slots of a block, anchor included (16)")
    shape.add_argument("--draft-vocab", type=_number, help="most frequent tokens it proposes, 0: all (8192)")
    parser.add_argument("--anchors", type=_count, default=24, help="blocks in a sequence")


def _add_labels(parser: argparse.ArgumentParser, published: str) -> None:
    parser.add_argument("--labels", choices=("corpus", "greedy"), default="corpus", help="the text, or the top token")
    parser.add_argument("--slot-decay", type=_positive, help=f"drafts until a slot weighs 1/e (default: {published})")


def _add_dflash(parser: argparse.ArgumentParser) -> None:
    _add_backbone(parser)
    _add_labels(parser, "4, 5 from block size 10, 7 from 16")


def _add_head(parser: argparse.ArgumentParser, published: str) -> None:
    """The flags of every head."""
    _add_training(parser, learning_rate=1e-3, batch_tokens=2000, held_out=64)
    parser.add_argument("--backbone", type=Path, required=True, help="draft model under the head (train dflash)")
    parser.add_argument("--freeze-backbone", action="store_true", help="train and store the head alone")
    parser.add_argument("--anchors", type=_count, default=24, help="blocks in a sequence")
    _add_labels(parser, published)


def _add_dspark(parser: argparse.ArgumentParser) -> None:
    _add_head(parser, "4")
    parser.add_argument("--rank", type=_count, default=96, help="rank of the Markov head")


def _add_domino(parser: argparse.ArgumentParser) -> None:
    _add_head(parser, "4, 5 from block size 10, 7 from 16")
    parser.add_argument("--state-size", type=_count, default=256, help="width of the GRU")
    parser.add_argument("--bottleneck", type=_count, default=128, help="width between GRU and vocabulary")


def _add_ssd(parser: argparse.ArgumentParser) -> None:
    _add_training(parser, learning_rate=1e-3, batch_tokens=2000, held_out=64)
    parser.add_argument("--layers", type=_count, help="number of layers (default: as in an earlier run, else 2)")
    parser.add_argument("--start-layers", type=_layers, help="target layers to start from (default: the first)")
    parser.add_argument("--tap-layers", type=_layers, help="states to share (default: those draft models read)")
    parser.add_argument("--draft-vocab", type=_number, help="most frequent tokens it proposes, 0: all (default: 8192)")
    parser.add_argument("--num-draft-tokens", type=_count, default=8, help="drafts of a block in an evaluation")


def _add_adapter(parser: argparse.ArgumentParser) -> None:
    _add_training(parser, learning_rate=1e-3, batch_tokens=1500, held_out=24)
    parser.add_argument("--draft", type=Path, required=True, help="draft model: its taps and vocabulary are used")
    parser.add_argument("--init", type=Path, help="adapter to start from (default: target layers)")
    parser.add_argument("--layers-per-tap", type=_layers, help="layers for each tap, by commas (default: 1,2,2,..)")
    parser.add_argument("--kl-weight", type=_weight, default=0.3, help="weight of the KL through the decoder")
    parser.add_argument("--block-size", type=_count, default=12, help="slots of a block")


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help='JSON lines {"id", "turns"}, or .gz')
    parser.add_argument("--output", type=Path, required=True, help="folder for budget-N.json")
    _add_place(parser)
    _add_dtype(parser)
    parser.add_argument("--draft", type=Path, help="draft model (default: the one shipped for the model)")
    parser.add_argument("--adapter", type=Path, help="adapter (default: the one shipped for the model)")
    parser.add_argument("--num-draft-tokens", type=_count, default=4, help="draft tokens in a block; N is one more")
    parser.add_argument("--passes", type=_number, default=1, help="refinement passes J")
    parser.add_argument("--refreshes", type=_number, default=1, help="context refreshes R, at most J")
    parser.add_argument("--cache-size", type=_count, default=4, help="outcomes drafted ahead in a round")
    parser.add_argument("--prompts-per-file", type=_count, default=8, help="prompts of each file")
    parser.add_argument("--skip", type=_number, default=128, help="prompts of a file's shuffle left for evaluation")
    parser.add_argument("--max-tokens", type=_count, default=128, help="tokens of an answer")
    parser.add_argument("--max-prompt-tokens", type=_count, default=512, help="longer prompts are left out")
    parser.add_argument("--target-rate", type=_open_share, default=0.9, help="coverage the threshold aims at")
    parser.add_argument("--minutes", type=_positive, help="time limit of the rounds (default: none)")


def _add_training(parser: argparse.ArgumentParser, learning_rate: float, batch_tokens: int, held_out: int) -> None:
    parser.add_argument("--corpus", type=Path, required=True, help="folder of .npz files (train corpus)")
    parser.add_argument("--output", type=Path, required=True, help="folder of the training; resumes what it holds")
    _add_place(parser)
    parser.add_argument("--minutes", type=_positive, default=60.0, help="length of this run")
    parser.add_argument(
        "--total-minutes", type=_positive, help="length of all runs, for the cosine (default: this one)"
    )
    parser.add_argument("--steps", type=_count, help="most steps of this run (default: no limit)")
    parser.add_argument("--learning-rate", type=_positive, default=learning_rate, help="peak learning rate")
    parser.add_argument("--warmup-steps", type=_number, default=60, help="steps of linear warm-up")
    parser.add_argument("--batch-tokens", type=_count, default=batch_tokens, help="tokens in a batch, padding included")
    parser.add_argument("--max-sequences", type=_number, default=0, help="sequences to train on (0: all)")
    parser.add_argument("--skip-sequences", type=_number, default=0, help="sequences to pass over before those")
    parser.add_argument("--held-out", type=_count, default=held_out, help="sequences to evaluate on, at most 64")
    parser.add_argument("--states-dir", type=Path, default=_states_folder(), help="where target states are kept")
    parser.add_argument("--evaluate-minutes", type=_positive, default=5.0, help="time between evaluations")
    parser.add_argument("--bfloat16", choices=("auto", "on", "off"), default="auto", help="bf16 autocast")


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="target: demo, a folder or a hub id")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--core", type=_number, help="CPU core to stay on (default: any)")
    parser.add_argument("--threads", type=_count, help="CPU threads (default: 1 with --core, else all)")
    parser.add_argument("--seed", type=_number, default=0, help="seed of everything random")


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="number format")


def _states_folder() -> Path:
    from modeling.demo import cache_folder

    return cache_folder() / "states"


def _escaped(text: str) -> str:
    return text.replace("\\n", "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parsed = build_parser().parse_args(arguments)
    from modeling.architecture import UnsupportedModel
    from server.models import ModelError
    from server.tokenizer import TokenizerError
    from training.errors import InputError

    try:
        _command(parsed)()
    except (InputError, UnsupportedModel, ModelError, TokenizerError) as error:
        print(f"jetspecpp train {parsed.command}: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    except OSError as error:
        print(f"jetspecpp train {parsed.command}: {_explain(error)}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _command(parsed: argparse.Namespace) -> Callable[[], None]:
    """The command with its flags; networks are imported only now, so that help and mistakes are answered at once."""
    module, function, options = {
        "corpus": ("training.write_corpus", "write_corpus", "CorpusOptions"),
        "draft": ("training.train_draft", "train_draft", "DraftOptions"),
        "adapter": ("training.train_adapter", "train_adapter", "AdapterOptions"),
        "dflash": ("training.train_backbone", "train_dflash", "DflashOptions"),
        "jetspec": ("training.train_backbone", "train_jetspec", "JetspecOptions"),
        "dspark": ("training.train_head", "train_dspark", "DsparkOptions"),
        "domino": ("training.train_head", "train_domino", "DominoOptions"),
        "ssd": ("training.train_ssd", "train_ssd", "SsdOptions"),
        "calibrate": ("training.calibrate", "calibrate", "CalibrateOptions"),
    }[parsed.command]
    loaded = importlib.import_module(module)
    kind: Any = getattr(loaded, options)
    values = {field.name: getattr(parsed, field.name) for field in fields(kind)}
    made = kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    run: Callable[[Any], None] = getattr(loaded, function)
    return lambda: run(made)


def _explain(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full{where}; what was saved before is intact"
    return f"{os.strerror(error.errno) if error.errno else error}{where}"
