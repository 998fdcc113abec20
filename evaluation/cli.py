"""`jetspecpp eval acceptance`: acceptance lengths and hit rates on benchmark prompts, without a server."""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from decoding.calibration import Calibration, InvalidCalibration
from decoding.sampling import SamplingParameters
from draft_worker.networks import DraftNetworks, load_networks
from evaluation.acceptance import STANDARD_SETTINGS, Row, measure, table
from evaluation.prompts import PromptFileError, load_prompts
from evaluation.texts import TargetText, write_texts
from modeling.architecture import UnsupportedModel
from modeling.chat import ChatFormat, load_chat_format
from modeling.kernels.int8 import QuantizationChoice, choose_quantization
from modeling.runtime import choose_dtype, pin
from modeling.target import TargetRunner, load_target

EXIT_FAILURE = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130
FIRST_SEED = 1000
METHODS = ("jetspec++",)


def build_parser() -> argparse.ArgumentParser:
    """The parser of `jetspecpp eval`."""
    parser = argparse.ArgumentParser(prog="jetspecpp eval", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    acceptance = commands.add_parser("acceptance", help="tokens a round and hit rates, offline")
    acceptance.add_argument("--model", default="demo", help="target: demo or a local folder (default: demo)")
    acceptance.add_argument("--draft-model", type=Path, help="folder of the draft model (default: the shipped one)")
    acceptance.add_argument("--adapter", type=Path, help="folder of the adapter (default: the shipped one)")
    acceptance.add_argument("--calibration", type=Path, help="calibration file (default: the shipped one, if any)")
    acceptance.add_argument("--methods", default="jetspec++", help="comma-separated methods, or all")
    acceptance.add_argument("--datasets", default="gsm8k,math500", help="comma-separated names or JSON-lines files")
    acceptance.add_argument("--prompts-dir", type=Path, default=Path("../shared/prompts"), help="where the files lie")
    acceptance.add_argument("--num-prompts", type=int, default=16)
    acceptance.add_argument("--max-tokens", type=int, default=160)
    acceptance.add_argument("--temperatures", default="0", help="comma-separated, for example 0,1")
    acceptance.add_argument("--num-speculative-tokens", type=int, default=8)
    acceptance.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    acceptance.add_argument("--device", default="cpu")
    acceptance.add_argument(
        "--draft-quantization",
        default="auto",
        choices=get_args(QuantizationChoice),
        help="weights of the drafting networks: int8, none, or auto as the server does (default: auto)",
    )
    acceptance.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a file")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parsed = build_parser().parse_args(arguments)
    try:
        return _acceptance(parsed)
    except (PromptFileError, UnsupportedModel, InvalidCalibration, ValueError) as error:
        print(f"jetspecpp eval: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    except OSError as error:
        print(f"jetspecpp eval: {error}", file=sys.stderr)
        return EXIT_FAILURE


def _acceptance(parsed: argparse.Namespace) -> int:
    methods = METHODS if parsed.methods == "all" else tuple(parsed.methods.split(","))
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise ValueError(f"--methods: unknown method {unknown[0]!r}; known: {', '.join(METHODS)}")
    pin(None)
    folder = model_folder(parsed.model)
    weights = shipped_weights()
    draft = parsed.draft_model or weights / "draft"
    adapter = parsed.adapter or weights / "adapter"
    calibration_path = _calibration_path(parsed, weights)
    calibration = None
    if calibration_path is not None:
        calibration = Calibration.from_json(calibration_path.read_text(encoding="utf-8"))
    device = torch.device(parsed.device)
    dtype = choose_dtype(parsed.dtype, device)
    quantization = choose_quantization(parsed.draft_quantization, device)
    chat = load_chat_format(folder)
    networks = load_networks(folder, draft, adapter, dtype, device, 2048, quantization)
    target = load_target(folder, dtype, device)
    runner = TargetRunner(target, networks.config.tap_layers, min(2048, target.architecture.max_positions))
    rows: list[Row] = []
    status = 0
    try:
        for dataset in parsed.datasets.split(","):
            for temperature in (float(value) for value in parsed.temperatures.split(",")):
                texts = _texts(parsed, dataset, temperature, chat, runner, networks)
                for setting in STANDARD_SETTINGS:
                    row = measure(
                        networks,
                        texts,
                        dataset,
                        temperature,
                        parsed.num_speculative_tokens,
                        setting,
                        calibration,
                        chat.stop_token_ids,
                    )
                    rows.append(row)
                    print(table([row]).splitlines()[1] if len(rows) > 1 else table([row]), flush=True)
    except KeyboardInterrupt:
        print("interrupted; what was measured stands above", file=sys.stderr)
        status = EXIT_INTERRUPTED
    if parsed.json is not None:
        parsed.json.write_text(json.dumps({"rows": [row.as_json() for row in rows]}, indent=1), encoding="utf-8")
    return status


def _texts(
    parsed: argparse.Namespace,
    dataset: str,
    temperature: float,
    chat: ChatFormat,
    runner: TargetRunner,
    networks: DraftNetworks,
) -> list[TargetText]:
    limit = runner.num_positions - parsed.max_tokens - 1
    prompts = [chat.encode(p.text) for p in load_prompts(dataset, parsed.prompts_dir, parsed.num_prompts)]
    sampling = SamplingParameters(temperature=temperature, seed=FIRST_SEED)
    return write_texts(
        runner,
        [prompt for prompt in prompts if len(prompt) <= limit],
        sampling,
        parsed.max_tokens,
        chat.stop_token_ids,
        networks.decoder.first_layer,
    )


def shipped_weights() -> Path:
    """The folder of the demo target's draft weights: in the checkout, else in the installed package."""
    root = Path(__file__).resolve().parent.parent
    checkout = root / "weights" / "smollm2-135m"
    return checkout if checkout.is_dir() else root / "modeling" / "weights" / "smollm2-135m"


def _calibration_path(parsed: argparse.Namespace, weights: Path) -> Path | None:
    """As given, else the shipped one of this budget; that one is fitted to the shipped draft model and to no other."""
    if parsed.calibration is not None or parsed.draft_model is not None:
        given: Path | None = parsed.calibration
        return given
    shipped = weights / "calibration" / f"budget-{parsed.num_speculative_tokens + 1}.json"
    return shipped if shipped.is_file() else None


def model_folder(model: str) -> Path:
    """A local folder, or the demo target, prepared if need be."""
    if model != "demo":
        return Path(model)
    command = [sys.executable, "-m", "modeling.demo"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise UnsupportedModel("the demo target could not be prepared")
    return Path(done.stdout.splitlines()[-1])
