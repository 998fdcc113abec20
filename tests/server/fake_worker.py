"""A worker process for the server's tests: `python -m tests.server.fake_worker verifier|drafter --config FILE`.

What it does is set by variables: FAKE_TEXT, FAKE_ROUND_S, FAKE_DIE_AFTER, FAKE_SILENT_AFTER, FAKE_REJECT, FAKE_LOAD_S,
FAKE_DIFFERS, FAKE_NO_DRAFTS, FAKE_UNUSABLE, FAKE_LOSES_DRAFTER.
"""

import asyncio
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from protocol.channel import AsyncZmqChannel
from protocol.messages import (
    CONTROL_MESSAGES,
    FRONTEND_MESSAGES,
    DrafterReady,
    DrafterRejected,
    DrafterStatus,
    PhaseTiming,
    Stop,
)
from protocol.worker_config import EXIT_UNUSABLE_FILES, WorkerConfig
from server.tokenizer import Tokenizer
from tests.server.fakes import FakeVerifier, Plan

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """As the real workers do (`modeling.runtime`, which would load torch): a killed server leaves no fake behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the server is gone")


def number(name: str) -> int | None:
    text = os.environ.get(name)
    return None if text is None else int(text)


async def verifier(config: WorkerConfig) -> None:
    text = os.environ.get("FAKE_TEXT", "abcdefgh")
    tokens = Tokenizer.load(Path(config.model_path)).encode(text) * 100
    other = [*tokens[:5], *tokens] if "FAKE_DIFFERS" in os.environ else tokens
    plan = Plan(
        tokens=lambda submit: other if submit.speculative else tokens,
        round_s=float(os.environ.get("FAKE_ROUND_S", "0")),
        die_after=number("FAKE_DIE_AFTER"),
        silent_after=number("FAKE_SILENT_AFTER"),
        never_drafts="FAKE_NO_DRAFTS" in os.environ,
        loses_drafter="FAKE_LOSES_DRAFTER" in os.environ,
    )
    channel = AsyncZmqChannel.connect(config.frontend_endpoint, config.run_id, FRONTEND_MESSAGES)
    reason = os.environ.get("FAKE_REJECT")
    if reason is not None:
        while not channel.send(DrafterRejected(reason=reason)):
            await asyncio.sleep(0.01)
    await FakeVerifier(channel, plan).run()
    channel.close()


async def drafter(config: WorkerConfig) -> None:
    if "FAKE_UNUSABLE" in os.environ:
        sys.exit(EXIT_UNUSABLE_FILES)
    channel = AsyncZmqChannel.connect(config.control_endpoint, config.run_id, CONTROL_MESSAGES)
    ready = DrafterReady(pid=os.getpid(), plan_passes=1, plan_refreshes=1, cache_size=4)
    while not channel.send(ready):
        await asyncio.sleep(0.01)
    while True:
        received = await channel.receive(0.1)
        if received is not None and isinstance(received.message, Stop):
            break
        phases = [PhaseTiming(phase="foresight", count=3, total_s=0.5)]
        channel.send(DrafterStatus(num_sequences=0, stale_messages=0, phases=phases))
    channel.close()


if __name__ == "__main__":
    worker_config = WorkerConfig.from_json(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    die_with_parent(worker_config.parent_pid)
    print("fake", sys.argv[1], "started", flush=True)
    time.sleep(float(os.environ.get("FAKE_LOAD_S", "0")))
    asyncio.run((verifier if sys.argv[1] == "verifier" else drafter)(worker_config))
