"""`python -m draft_worker --config FILE`: load, connect, draft."""

import argparse
import logging
import math
import os
import sys
from pathlib import Path

import torch

from decoding.calibration import InvalidCalibration
from draft_worker.loading import MethodFiles, MethodSettings, load_method
from draft_worker.worker import DrafterLimits, DrafterRefused, DraftWorker
from modeling.architecture import UnsupportedModel
from modeling.kernels.int8 import choose_quantization
from modeling.runtime import choose_dtype, die_with_parent, model_fingerprint, pin
from modeling.target import read_architecture
from modeling.tensors import DTYPE_NAMES
from protocol.channel import ZmqChannel
from protocol.messages import CONTROL_MESSAGES, PEER_MESSAGES, PROTOCOL_VERSION, PeerHello
from protocol.trace import Trace
from protocol.worker_config import EXIT_UNUSABLE_FILES, WorkerConfig

logger = logging.getLogger("jetspec.drafter")


def run(config: WorkerConfig) -> None:
    """Build the worker from its config and run it until it is told to stop."""
    assert config.method != "ar", "plain decoding has no drafter"
    device = torch.device(config.device_draft)
    dtype = choose_dtype(config.dtype, torch.device(config.device_verify))
    target_folder = Path(config.model_path)
    target = read_architecture(target_folder)
    max_model_len = min(config.max_model_len or target.max_positions, target.max_positions)
    limits = DrafterLimits(config.num_draft_tokens, max_model_len, config.max_num_seqs)
    method = load_method(config.method, _files(config), _settings(config, limits.num_positions, device), dtype, device)
    hello = PeerHello(
        role="drafter",
        pid=os.getpid(),
        protocol_version=PROTOCOL_VERSION,
        target_fingerprint=model_fingerprint(target_folder),
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        tap_layers=list(method.tap_layers),
        decoder_layers=list(method.decoder_layers),
        num_draft_tokens=config.num_draft_tokens,
        dtype=DTYPE_NAMES[dtype],
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
    )
    peer = ZmqChannel.connect(config.peer_endpoint, config.run_id, PEER_MESSAGES)
    control = ZmqChannel.connect(config.control_endpoint, config.run_id, CONTROL_MESSAGES)
    trace = Trace(None if config.trace_path is None else Path(config.trace_path), "drafter")
    with peer, control, trace:
        DraftWorker(method, limits, hello, peer, control, trace).run()


def _files(config: WorkerConfig) -> MethodFiles:
    assert config.draft_path is not None, "a drafter is started only where there is a draft model"
    return MethodFiles(
        target=Path(config.model_path),
        draft=Path(config.draft_path),
        adapter=None if config.adapter_path is None else Path(config.adapter_path),
        calibration=None if config.calibration_path is None else Path(config.calibration_path),
    )


def _settings(config: WorkerConfig, num_positions: int, device: torch.device) -> MethodSettings:
    return MethodSettings(
        num_draft_tokens=config.num_draft_tokens,
        num_positions=num_positions,
        quantization=choose_quantization(config.draft_quantization, device),
        cache_size=config.cache_size,
        num_passes=config.num_passes,
        num_refreshes=config.num_refreshes,
        threshold=math.log(config.cache_threshold) if config.cache_threshold else None,
    )


def main() -> int:
    """Entry point; the exit status is 0 after a stop, 1 after a failure, `EXIT_UNUSABLE_FILES` for wrong files."""
    parser = argparse.ArgumentParser(prog="draft_worker")
    parser.add_argument("--config", required=True, type=Path)
    config = WorkerConfig.from_json(parser.parse_args().config.read_text(encoding="utf-8"))
    logging.basicConfig(level=config.log_level.upper(), stream=sys.stderr, format="%(levelname)s %(message)s")
    die_with_parent(config.parent_pid)
    pin(config.core_draft)
    try:
        run(config)
    except (UnsupportedModel, InvalidCalibration) as error:
        logger.error("%s", error)
        return EXIT_UNUSABLE_FILES
    except DrafterRefused as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
