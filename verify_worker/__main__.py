"""`python -m verify_worker --config FILE`: load the target, connect, serve."""

import argparse
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from modeling.architecture import Architecture, UnsupportedModel
from modeling.decoder import decoder_layer_ids
from modeling.draft_model import check_draft_fits, read_draft_config
from modeling.invariance import choose_policy
from modeling.kernels.threads import set_num_threads
from modeling.runtime import choose_dtype, die_with_parent, model_fingerprint, pin
from modeling.target import TargetRunner, load_target
from modeling.tensors import DTYPE_NAMES
from protocol.channel import ZmqChannel
from protocol.messages import FRONTEND_MESSAGES, PEER_MESSAGES, PROTOCOL_VERSION, PeerHello
from protocol.trace import Trace
from protocol.worker_config import WorkerConfig
from verify_worker.grammar import GrammarCompiler
from verify_worker.verifier import Verifier
from verify_worker.vocabulary import read_vocabulary
from verify_worker.worker import VerifierSettings, VerifyWorker

logger = logging.getLogger("jetspec.verifier")


@dataclass(frozen=True)
class SentStates:
    """What the drafter gets of every verified row: outputs of the tap layers, keys and values of the decoder's."""

    tap_layers: tuple[int, ...] = ()
    decoder_layers: tuple[int, ...] = ()


def states_to_send(config: WorkerConfig, target: Architecture) -> SentStates:
    """The states that the method reads; the drafter must say the same in its hello. Raises `UnsupportedModel`."""
    if config.draft_path is None or config.method == "ssd":  # ssd's drafter reads tokens only
        return SentStates()
    draft = read_draft_config(Path(config.draft_path))
    check_draft_fits(draft, target)
    has_decoder = config.adapter_path is not None
    return SentStates(
        draft.tap_layers, decoder_layer_ids(draft.tap_layers[-1], target.num_layers) if has_decoder else ()
    )


def run(config: WorkerConfig) -> None:
    """Build the worker from its config and run it until it is told to stop."""
    device = torch.device(config.device_verify)
    dtype = choose_dtype(config.dtype, device)
    folder = Path(config.model_path)
    target = load_target(folder, dtype, device)
    shape = target.architecture
    max_model_len = min(config.max_model_len or shape.max_positions, shape.max_positions)
    vocabulary = read_vocabulary(folder, shape.vocab_size)
    states = states_to_send(config, shape)
    runner = TargetRunner(target, states.tap_layers, max_model_len + config.num_draft_tokens + 1)
    policy = choose_policy(runner, config.num_draft_tokens, config.max_num_seqs)
    hello = None
    if config.draft_path is not None:
        hello = PeerHello(
            role="verifier",
            pid=os.getpid(),
            protocol_version=PROTOCOL_VERSION,
            target_fingerprint=model_fingerprint(folder),
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            tap_layers=list(states.tap_layers),
            decoder_layers=list(states.decoder_layers),
            num_draft_tokens=config.num_draft_tokens,
            dtype=DTYPE_NAMES[dtype],
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
        )
    settings = VerifierSettings(
        model_name=folder.name,
        vocab_size=vocabulary.size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_draft_tokens=config.num_draft_tokens,
        prefill_chunk=config.prefill_chunk,
        fallback_timeout_s=config.fallback_timeout_s,
        autoregressive_rows=policy.autoregressive_rows,
    )
    peer = ZmqChannel.bind(config.peer_endpoint, config.run_id, PEER_MESSAGES)
    frontend = ZmqChannel.connect(config.frontend_endpoint, config.run_id, FRONTEND_MESSAGES)
    trace = Trace(None if config.trace_path is None else Path(config.trace_path), "verifier")
    grammars = GrammarCompiler(vocabulary, device)
    with peer, frontend, trace:
        verifier = Verifier(runner, policy, states.decoder_layers[0] if states.decoder_layers else shape.num_layers)
        VerifyWorker(runner, verifier, settings, hello, frontend, peer, grammars, trace).run()


def main() -> int:
    """Entry point; the exit status is 0 after a stop, 1 after a failure."""
    parser = argparse.ArgumentParser(prog="verify_worker")
    parser.add_argument("--config", required=True, type=Path)
    config = WorkerConfig.from_json(parser.parse_args().config.read_text(encoding="utf-8"))
    logging.basicConfig(level=config.log_level.upper(), stream=sys.stderr, format="%(levelname)s %(message)s")
    die_with_parent(config.parent_pid)
    pin(config.core_verify, config.verify_threads)
    if config.verify_threads > 1:
        logger.info("%d threads share the products of a forward", set_num_threads(config.verify_threads))
    try:
        run(config)
    except UnsupportedModel as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
