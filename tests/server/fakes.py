"""A verifier that plays a script, and a tiny model folder: what the server's tests need instead of the workers."""

import asyncio
import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from protocol.channel import AsyncChannel
from protocol.fields import TokenLogprobs, TopLogprob
from protocol.messages import (
    Abort,
    Failed,
    Finished,
    FrontendMessage,
    PromptLogprobs,
    RoundResult,
    Stop,
    Submit,
    VerifierReady,
    VerifierStatus,
)

MAX_MODEL_LEN = 512
NUM_DRAFT_TOKENS = 8
END_OF_TURN = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model_folder(folder: Path) -> Path:
    """A folder the server accepts: a tokenizer with one token per byte, and a configuration without weights to load."""
    folder.mkdir(parents=True, exist_ok=True)
    special = ["<|endoftext|>", "<|im_start|>", END_OF_TURN]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(vocab) + 5,  # padded, as real models are
        "max_position_embeddings": MAX_MODEL_LEN,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": {"content": END_OF_TURN}, "name_or_path": "/home"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@dataclass
class Plan:
    """What the fake verifier does with the sequences it gets."""

    tokens: Callable[[Submit], Sequence[int]]
    block: int = 4
    round_s: float = 0.0
    fail_after: int | None = None
    die_after: int | None = None
    silent_after: int | None = None
    never_drafts: bool = False
    loses_drafter: bool = False
    reject: Failed | None = None
    prompt_chunk: int = 3


def made_up_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """A ranking that is a function of the token: it stands at rank 1, 2 or 3, with others around it."""
    rank = 1 + token_id % 3
    others = [other for other in range(100, 100 + num_top + 3) if other != token_id]
    ranked = [*others[: rank - 1], token_id, *others[rank - 1 :]][:num_top]
    top = [TopLogprob(token_id=item, logprob=-0.5 * place) for place, item in enumerate(ranked, 1)]
    return TokenLogprobs(token_id=token_id, logprob=-0.5 * rank, rank=rank, top=top)


@dataclass
class FakeVerifier:
    """Speaks the verifier's side of the frontend link; every sequence is a task that commits its script in blocks."""

    channel: AsyncChannel[FrontendMessage]
    plan: Plan
    heartbeat_s: float = 0.05
    aborted: list[int] = field(default_factory=list)
    submitted: list[Submit] = field(default_factory=list)
    num_rounds: int = 0

    def __post_init__(self) -> None:
        self._sequences: dict[int, asyncio.Task[None]] = {}
        self._outbox: deque[FrontendMessage] = deque()
        self.is_silent = False

    async def run(self) -> None:
        """Announce, then serve until told to stop."""
        while not self.channel.send(self._ready()):
            await asyncio.sleep(0.01)
        heartbeat = asyncio.create_task(self._heartbeat())
        try:
            while True:
                received = await self.channel.receive(None)
                assert received is not None
                if isinstance(received.message, Stop):
                    return
                self._handle(received.message)
        finally:
            heartbeat.cancel()
            for task in self._sequences.values():
                task.cancel()

    def _ready(self) -> VerifierReady:
        return VerifierReady(
            pid=os.getpid(),
            model_name="fake",
            vocab_size=264,
            max_model_len=MAX_MODEL_LEN,
            num_draft_tokens=NUM_DRAFT_TOKENS,
            dtype="float32",
            num_layers=2,
            autoregressive_rows=1,
        )

    def _handle(self, message: FrontendMessage) -> None:
        if isinstance(message, Submit):
            self.submitted.append(message)
            self._sequences[message.sequence_id] = asyncio.create_task(self._play(message))
        elif isinstance(message, Abort):
            task = self._sequences.pop(message.sequence_id, None)
            if task is not None:
                task.cancel()
                self.aborted.append(message.sequence_id)
                self._send(self._finished(message.sequence_id, "abort", None, 1, 0))

    async def _play(self, submit: Submit) -> None:
        if self.plan.reject is not None:
            self._send(self.plan.reject.model_copy(update={"sequence_id": submit.sequence_id}))
        else:
            await self._commit_all(submit)
        self._sequences.pop(submit.sequence_id, None)

    async def _commit_all(self, submit: Submit) -> None:
        """Rounds as the real verifier makes them: the first token alone, then blocks, cut at stop ids and the limit."""
        tokens = list(self.plan.tokens(submit))
        self._send_prompt_logprobs(submit)
        position = 0
        num_rounds = 0
        while True:
            await asyncio.sleep(self.plan.round_s)
            if self.plan.fail_after is not None and position >= self.plan.fail_after:
                failed = Failed(sequence_id=submit.sequence_id, code="internal_error", message="a made-up fault")
                self._send(failed)
                return
            if self.plan.die_after is not None and position >= self.plan.die_after:
                os._exit(3)
            if self.plan.silent_after is not None and position >= self.plan.silent_after:
                self.is_silent = True
                await asyncio.Event().wait()
            block = tokens[position : position + (self.plan.block if position and submit.speculative else 1)]
            ending = self._cut(submit, block, position)
            self._send(self._round(submit, num_rounds, ending.kept))
            position += len(ending.kept)
            num_rounds += 1
            if ending.reason is not None:
                num_generated = position + (ending.stop_token_id is not None)
                num_prompt = len(submit.prompt_token_ids)
                message = self._finished(
                    submit.sequence_id, ending.reason, ending.stop_token_id, num_prompt, num_generated
                )
                self._send(message)
                return

    def _send_prompt_logprobs(self, submit: Submit) -> None:
        num_top, prompt = submit.num_prompt_logprobs, submit.prompt_token_ids
        if num_top is None:
            return
        for start in range(1, len(prompt), self.plan.prompt_chunk):
            entries = [
                made_up_logprobs(token_id, num_top) for token_id in prompt[start : start + self.plan.prompt_chunk]
            ]
            self._send(PromptLogprobs(sequence_id=submit.sequence_id, start=start, entries=entries))

    def _cut(self, submit: Submit, block: list[int], position: int) -> "Cut":
        for index, token_id in enumerate(block):
            if token_id in submit.stop_token_ids and position + index >= submit.min_tokens:
                return Cut(block[:index], "stop", token_id)
            if position + index + 1 == submit.max_tokens:
                return Cut(block[: index + 1], "length", None)
        # A script that ends before the limit runs into silence; tests give scripts that are long enough.
        assert block, "the script is too short"
        return Cut(block, None, None)

    def _round(self, submit: Submit, number: int, kept: list[int]) -> RoundResult:
        self.num_rounds += 1
        is_drafted = number > 0 and submit.speculative and not self.plan.never_drafts
        outcome = "prefill" if number == 0 else "miss" if is_drafted else "autoregressive"
        if is_drafted and number > 1:
            outcome = ("hit", "late_hit", "miss")[number % 3]
        num_top = submit.num_logprobs
        return RoundResult(
            sequence_id=submit.sequence_id,
            round=number,
            token_ids=kept,
            num_drafts=NUM_DRAFT_TOKENS if is_drafted else 0,
            num_accepted=self.plan.block - 1 if is_drafted else 0,
            outcome=outcome,  # type: ignore[arg-type]
            verify_s=0.006,
            exposed_s=0.0007 if is_drafted else 0.0,
            num_cached=4 if is_drafted else 0,
            cache_version=1 if is_drafted else 0,
            draft_s=0.003 if is_drafted and number > 1 else None,
            fallback_s=0.004 if outcome == "miss" else None,
            queue_s=0.001 if outcome == "prefill" else None,
            transport_s=0.0002 if outcome in ("miss", "late_hit") else None,
            alone_because=None if outcome != "autoregressive" else "timeout" if submit.speculative else "switched_off",
            logprobs=None if num_top is None else [made_up_logprobs(token_id, num_top) for token_id in kept],
        )

    def _finished(
        self, sequence_id: int, reason: str, stop_token_id: int | None, num_prompt: int, num_generated: int
    ) -> Finished:
        return Finished(
            sequence_id=sequence_id,
            reason=reason,  # type: ignore[arg-type]
            stop_token_id=stop_token_id,
            num_prompt_tokens=num_prompt,
            num_generated_tokens=num_generated,
            queue_s=0.001,
            prefill_s=0.002,
            decode_s=0.003,
        )

    def _send(self, message: FrontendMessage) -> None:
        """In order, and what the link does not take now goes out later, as from the real verifier."""
        if not self.is_silent:
            self._outbox.append(message)
            self._flush()

    def _flush(self) -> None:
        while self._outbox and self.channel.send(self._outbox[0]):
            self._outbox.popleft()

    async def _heartbeat(self) -> None:
        while True:
            self._flush()
            num_running = len(self._sequences)
            self._send(
                VerifierStatus(
                    num_running=num_running,
                    num_waiting=0,
                    kv_tokens_used=10 * num_running,
                    kv_tokens_total=1000,
                    num_rounds=self.num_rounds,
                    stale_messages=0,
                    num_cache_entries=4 * num_running,
                    drafter_connected=not (self.plan.loses_drafter and self.num_rounds > 0),
                )
            )
            await asyncio.sleep(self.heartbeat_s)


@dataclass(frozen=True)
class Cut:
    """A block after the verifier's own cuts."""

    kept: list[int]
    reason: str | None
    stop_token_id: int | None
