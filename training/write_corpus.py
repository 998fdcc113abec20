"""`jetspecpp train corpus`: prompts in, the target's own answers out, resumable."""

import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from decoding.sampling import SamplingParameters
from modeling.target import TargetRunner
from server.tokenizer import Tokenizer
from training.errors import InputError
from training.output import StopRequest, exclusive
from training.prompts import Prompt, is_permitted, read_prompts, without
from training.responses import Request, Response, respond
from training.session import Place, note, open_target
from training.shards import ShardWriter, answered_ids

PROGRESS_INTERVAL_S = 2.0


@dataclass(frozen=True)
class CorpusOptions:
    """The command's flags."""

    prompts: tuple[Path, ...]
    exclude: tuple[Path, ...]
    output: Path
    model: str
    dtype: str
    temperature_one_share: float
    suffix: str
    suffix_share: float
    max_tokens: int
    max_prompt_tokens: int
    max_prompts: int
    batch_rows: int
    shard_size: int
    flush_minutes: float
    minutes: float | None
    allow_all_licences: bool
    threads: int | None
    core: int | None
    device: str
    seed: int


@dataclass
class Progress:
    """What has been answered in this run."""

    num_prompts: int
    is_terminal: bool
    num_answered: int = 0
    num_tokens: int = 0
    started_at: float = 0.0
    shown_at: float = 0.0

    def add(self, response: Response) -> None:
        """Count an answer and show the line now and then."""
        self.num_answered += 1
        self.num_tokens += len(response.token_ids)
        now = time.monotonic()
        if now - self.shown_at > (PROGRESS_INTERVAL_S if self.is_terminal else 15 * PROGRESS_INTERVAL_S):
            self.shown_at = now
            self.show(end="\r" if self.is_terminal else "\n")

    def show(self, end: str = "\n") -> None:
        """The line itself."""
        seconds = max(time.monotonic() - self.started_at, 1e-9)
        share = self.num_answered / max(1, self.num_prompts)
        bar = ("#" * int(20 * share)).ljust(20, ".")
        speed = f"{self.num_tokens / seconds:.0f} tok/s"
        print(
            f"[{bar}] {self.num_answered}/{self.num_prompts} answers, {speed}  ", end=end, file=sys.stderr, flush=True
        )


def write_corpus(options: CorpusOptions) -> None:
    """Answer every permitted prompt that has no answer yet. Raises `InputError`, `UnsupportedModel` or OSError."""
    device = Place(options.device, options.core, options.threads, options.seed).prepare()
    files = open_target(options.model)
    if not files.tokenizer.eos_token_ids:
        raise InputError(f"--model {options.model}: no end of text is known, so no answer would end")
    with exclusive(options.output):
        prompts = choose_prompts(options, answered_ids(options.output))
        target = files.load(device, options.dtype)
        num_positions = min(options.max_prompt_tokens + options.max_tokens, target.architecture.max_positions)
        if num_positions <= options.max_tokens:
            raise InputError(f"--max-tokens {options.max_tokens}: the target holds {num_positions} tokens in all")
        runner = TargetRunner(target, (), num_positions)
        writer = ShardWriter(options.output, target.architecture.vocab_size, files.tokenizer_hash, options.shard_size)
        progress = Progress(len(prompts), sys.stderr.isatty(), started_at=time.monotonic())
        stop = StopRequest()
        with stop.listening():
            requests = make_requests(prompts, files.tokenizer, options, num_positions - options.max_tokens)
            end_at = float("inf") if options.minutes is None else progress.started_at + 60 * options.minutes
            answers = respond(
                runner,
                requests,
                files.tokenizer.eos_token_ids,
                options.max_tokens,
                options.batch_rows,
                lambda: stop() or time.monotonic() > end_at,
            )
            _collect(answers, writer, progress, options.flush_minutes)
        progress.show()
        print(f"{progress.num_answered} answers, {progress.num_tokens} tokens, in {options.output}")


def _collect(answers: Iterator[Response], writer: ShardWriter, progress: Progress, flush_minutes: float) -> None:
    flushed_at = time.monotonic()
    for response in answers:
        writer.add(response)
        progress.add(response)
        now = time.monotonic()
        if now - flushed_at > 60 * flush_minutes:
            writer.flush()
            flushed_at = now
    writer.flush()


def choose_prompts(options: CorpusOptions, answered: set[str]) -> list[Prompt]:
    """Permitted prompts without an answer, in file order. Raises `InputError` when nothing is permitted."""
    found = [prompt for path in options.prompts for prompt in read_prompts(path)]
    permitted = [prompt for prompt in found if options.allow_all_licences or is_permitted(prompt)]
    if len(permitted) < len(found):
        left_out = sorted({prompt.source_set or "evaluation" for prompt in found if not is_permitted(prompt)})
        note(
            f"left out {len(found) - len(permitted)} prompts whose licence or use in evaluation forbids it: {left_out}"
        )
    excluded = [prompt for path in options.exclude for prompt in read_prompts(path)]
    chosen = without(permitted, excluded)
    if not chosen:
        raise InputError("no prompt is left: every one is excluded, or its licence does not allow training")
    waiting = [prompt for prompt in chosen if prompt.prompt_id not in answered]
    note(f"{len(chosen)} prompts, {len(chosen) - len(waiting)} of them answered already")
    return waiting[: options.max_prompts] if options.max_prompts else waiting


def make_requests(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, options: CorpusOptions, max_prompt_tokens: int
) -> Iterator[Request]:
    """Requests in the model's chat template. What a prompt gets depends on its id and the seed, not on its company."""
    limit = min(max_prompt_tokens, options.max_prompt_tokens)
    num_long = 0
    for prompt in prompts:
        suffix = options.suffix if _share(prompt, options, "suffix") < options.suffix_share else ""
        message = {"role": "user", "content": prompt.text + suffix}
        text = tokenizer.render_chat([message], add_generation_prompt=True)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        if len(token_ids) > limit:
            num_long += 1
            continue
        is_sampled = _share(prompt, options, "temperature") < options.temperature_one_share
        sampling = SamplingParameters(float(is_sampled), seed=int(_share(prompt, options, "seed") * 2**53))
        yield Request(prompt.prompt_id, token_ids, sampling)
    if num_long:
        note(f"left out {num_long} prompts of more than {limit} tokens")


def _share(prompt: Prompt, options: CorpusOptions, purpose: str) -> float:
    """A number in [0, 1) for a prompt and a purpose, the same in every run with this seed."""
    digest = hashlib.blake2b(f"{options.seed}/{purpose}/{prompt.prompt_id}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53
