"""The measurement: some prompts on one server, plain and drafted in turn. Knows a server only by what it can do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from evaluation.bench.client import Generation
from evaluation.bench.counters import Counters
from server.tokenizer import Tokenizer

CaseKind = Literal["short", "long", "no thinking"]

NUM_NOTES = 40
NUM_EXTRA_CASES = 2
WARM_UP_TOKENS = 16
FIRST_SEED = 1000


class Subject(Protocol):
    """A server that can be asked, and that counts; `options` are further fields of the request."""

    def generate(self, prompt_token_ids: list[int], max_tokens: int, **options: object) -> Generation: ...
    def counters(self) -> Counters: ...


@dataclass(frozen=True)
class Case:
    """One prompt. The extra kinds repeat a short one: behind a long text, or with thinking switched off."""

    kind: CaseKind
    token_ids: list[int]


@dataclass(frozen=True)
class Reading:
    """One answer, and what the server counted meanwhile."""

    generation: Generation
    counters: Counters


@dataclass(frozen=True)
class Comparison:
    """One prompt, answered without drafts and with them."""

    case: Case
    plain: Reading
    drafted: Reading

    @property
    def speedup(self) -> float | None:
        """Drafted against plain; None for a text too short to time."""
        plain, drafted = self.plain.generation.tokens_per_s, self.drafted.generation.tokens_per_s
        return None if plain is None or drafted is None else drafted / plain

    @property
    def is_same_text(self) -> bool:
        """What must always hold."""
        return self.plain.generation.token_ids == self.drafted.generation.token_ids


def make_cases(prompts: Sequence[str], tokenizer: Tokenizer, *, has_thinking: bool, limit: int) -> list[Case]:
    """Short prompts, then the first ones again in the other kinds; prompts of more than `limit` tokens are left out."""

    def encode(prompt: str, **options: object) -> list[int]:
        if tokenizer.chat_template is None:
            return tokenizer.encode(prompt)
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.render_chat(messages, add_generation_prompt=True, **options)
        return tokenizer.encode(text, add_special_tokens=False)

    repeated = prompts[:NUM_EXTRA_CASES]
    cases = [Case("short", encode(prompt)) for prompt in prompts]
    cases += [Case("long", encode(_behind_notes(prompt))) for prompt in repeated]
    if has_thinking:
        cases += [Case("no thinking", encode(prompt, enable_thinking=False)) for prompt in repeated]
    return [case for case in cases if len(case.token_ids) <= limit]


def _behind_notes(prompt: str) -> str:
    """The same question at the end of a prompt of some hundred tokens."""
    notes = [
        f"Note {number}: shelf {number % 7 + 1} of room {number % 3 + 1} holds {(number * 37) % 90 + 5} boxes."
        for number in range(1, NUM_NOTES + 1)
    ]
    return "\n".join([*notes, "", "The notes are for later. Now answer this:", prompt])


def measure(
    subject: Subject,
    cases: Sequence[Case],
    max_tokens: int,
    temperature: float,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Comparison]:
    """Every case both ways, the first way in turn, so that what disturbs the machine disturbs both.

    Raises `ContestantFailed` when the server does not answer.
    """

    def read(case: Case, seed: int, num_tokens: int, *, is_speculative: bool) -> Reading:
        before = subject.counters()
        options = {"temperature": temperature, "seed": seed, "speculative": is_speculative}
        generation = subject.generate(case.token_ids, num_tokens, **options)
        return Reading(generation, subject.counters() - before)

    for is_speculative in (False, True):
        read(cases[0], FIRST_SEED, min(WARM_UP_TOKENS, max_tokens), is_speculative=is_speculative)
    compared = []
    for number, case in enumerate(cases):
        progress(f"prompt {number + 1} of {len(cases)} ({case.kind}, {len(case.token_ids)} tokens)")
        order = (False, True) if number % 2 == 0 else (True, False)
        readings = {way: read(case, FIRST_SEED + number, max_tokens, is_speculative=way) for way in order}
        compared.append(Comparison(case, readings[False], readings[True]))
    return compared
