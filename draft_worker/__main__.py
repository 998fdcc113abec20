"""`python -m draft_worker --config FILE`: load, connect, draft."""

import argparse
import logging
import math
import os
import sys
from pathlib import Path

import torch

from decoding.calibration import Calibration
from draft_worker.networks import load_networks
from draft_worker.timing import NO_TIMES, PlanChooser, measure_phases
from draft_worker.worker import DrafterLimits, DrafterRefused, DraftWorker
from modeling.architecture import UnsupportedModel
from modeling.kernels.int8 import choose_quantization
from modeling.runtime import choose_dtype, die_with_parent, model_fingerprint, pin
from modeling.target import read_architecture
from modeling.tensors import DTYPE_NAMES
from protocol.channel import ZmqChannel
from protocol.messages import CONTROL_MESSAGES, PEER_MESSAGES, PROTOCOL_VERSION, PeerHello
from protocol.trace import Trace
from protocol.worker_config import WorkerConfig

logger = logging.getLogger("jetspec.drafter")

AUTO_CACHE_SIZES = (1, 2, 4, 8)


def run(config: WorkerConfig) -> None:
    """Build the worker from its config and run it until it is told to stop."""
    assert config.draft_path is not None, "a drafter is started only where there is a draft model"
    device = torch.device(config.device_draft)
    dtype = choose_dtype(config.dtype, torch.device(config.device_verify))
    target_folder = Path(config.model_path)
    target = read_architecture(target_folder)
    max_model_len = min(config.max_model_len or target.max_positions, target.max_positions)
    sizes = AUTO_CACHE_SIZES if config.cache_size is None else (config.cache_size,)
    limits = DrafterLimits(config.num_draft_tokens, max_model_len, config.max_num_seqs, max(sizes))
    networks = load_networks(
        target_folder,
        Path(config.draft_path),
        None if config.adapter_path is None else Path(config.adapter_path),
        dtype,
        device,
        limits.num_positions,
        choose_quantization(config.draft_quantization, device),
    )
    calibration = None
    if config.calibration_path is not None:
        calibration = Calibration.from_json(Path(config.calibration_path).read_text(encoding="utf-8"))
    times = measure_phases(networks, config.num_draft_tokens, sizes) if networks.adapter is not None else {1: NO_TIMES}
    for size, measured in times.items():
        logger.info("phase times at B=%d: %s", size, measured)
    hello = PeerHello(
        role="drafter",
        pid=os.getpid(),
        protocol_version=PROTOCOL_VERSION,
        target_fingerprint=model_fingerprint(target_folder),
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        tap_layers=list(networks.config.tap_layers),
        decoder_layers=list(range(networks.decoder.first_layer, target.num_layers)),
        num_draft_tokens=config.num_draft_tokens,
        dtype=DTYPE_NAMES[dtype],
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
    )
    peer = ZmqChannel.connect(config.peer_endpoint, config.run_id, PEER_MESSAGES)
    control = ZmqChannel.connect(config.control_endpoint, config.run_id, CONTROL_MESSAGES)
    threshold = math.log(config.cache_threshold) if config.cache_threshold else None
    trace = Trace(None if config.trace_path is None else Path(config.trace_path), "drafter")
    with peer, control, trace:
        DraftWorker(
            networks,
            limits,
            hello,
            PlanChooser(times, config.cache_size, config.num_passes, config.num_refreshes),
            calibration,
            threshold,
            peer,
            control,
            trace,
        ).run()


def main() -> int:
    """Entry point; the exit status is 0 after a stop, 1 after a failure."""
    parser = argparse.ArgumentParser(prog="draft_worker")
    parser.add_argument("--config", required=True, type=Path)
    config = WorkerConfig.from_json(parser.parse_args().config.read_text(encoding="utf-8"))
    logging.basicConfig(level=config.log_level.upper(), stream=sys.stderr, format="%(levelname)s %(message)s")
    die_with_parent(config.parent_pid)
    pin(config.core_draft)
    try:
        run(config)
    except (UnsupportedModel, DrafterRefused) as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
