"""What goes wrong with one request is the end of that request only: bad ids, bad grammars, no numbers, no memory."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from modeling.cache import KeyValueCache
from modeling.invariance import RowPolicy
from modeling.kernels.build import load_kernels
from modeling.target import TargetBlock, TargetRows
from protocol.fields import JsonSchemaGrammar, RegexGrammar
from tests.tiny.engine import Engine, EngineOptions, Job, Text
from tests.tiny.models import TAP_LAYERS, TinyModels
from tests.tiny.sequences import sequence_for
from verify_worker.verifier import Failure, Verifier

JOB = Job(prompt=(3, 4), max_tokens=16, temperature=1.0)
VICTIM = replace(JOB, prompt=(90, 91, 92), seed=8)
MEMORY_ERROR = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"prompt": (1, 100)}, "prompt_token_ids"),
        ({"stop_token_ids": (2**31 - 1,)}, "stop_token_ids"),
        ({"logit_bias": ((100, 1.0),)}, "logit_bias"),
        ({"grammar": JsonSchemaGrammar(schema_text='{"type": "objekt"}')}, "grammar"),
        ({"grammar": RegexGrammar(pattern="(")}, "grammar"),
    ],
)
def test_a_request_that_cannot_be_served_names_its_fault(
    models: TinyModels, changes: dict[str, object], parameter: str
) -> None:
    with Engine(models, "llama", EngineOptions(num_token_ids=100)) as engine:
        bad = engine.submit(replace(JOB, **changes))  # type: ignore[arg-type]
        (failed, good) = engine.finish(bad, engine.submit(JOB))
    assert failed.failed is not None
    assert (failed.failed.code, failed.failed.parameter) == ("invalid_request", parameter)
    assert good.end.reason == "length"


def test_a_request_can_be_aborted_while_its_grammar_is_compiled(models: TinyModels) -> None:
    with Engine(models) as engine:
        sequence_id = engine.submit(replace(JOB, grammar=RegexGrammar(pattern="[a-z]{40}")))
        engine.abort(sequence_id)
        (text,) = engine.finish(sequence_id)
        assert text.end.reason == "abort"
        assert engine.generate(JOB).end.reason == "length"


class Trouble:
    """Makes forwards that hold one prompt's sequence fail from a position on, as a broken kernel or a full device."""

    def __init__(self, engine: Engine, from_position: int, kind: str) -> None:
        self.forward = engine.runner.forward
        self.from_position, self.kind = from_position, kind
        self.victim: KeyValueCache | None = None

    def __call__(self, blocks: Sequence[TargetBlock], *, last_row_only: bool = False) -> TargetRows:
        for block in blocks:
            if block.start == 0 and tuple(block.token_ids) == VICTIM.prompt:
                self.victim = block.cache
        struck = [block for block in blocks if block.cache is self.victim and block.start >= self.from_position]
        if struck and self.kind == "memory":
            raise RuntimeError(MEMORY_ERROR)
        rows = self.forward(blocks, last_row_only=last_row_only)
        first = 0
        logits = rows.logits.clone()
        for block in blocks:
            count = 1 if last_row_only else len(block.token_ids)
            if block in struck:
                logits[first : first + count] = torch.nan
                block.cache.value[:, :, block.start : block.start + len(block.token_ids)] = torch.nan
                self.victim = None
            first += count
        return TargetRows(logits, rows.taps, rows.hidden)


@pytest.fixture
def torch_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel of our own, which skips masked keys: torch multiplies their values by 0, and 0 times NaN is NaN."""
    monkeypatch.setenv("JETSPEC_KERNELS", "0")
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


@pytest.mark.usefixtures("torch_attention")
@pytest.mark.parametrize("from_position", [0, 5])
@pytest.mark.parametrize(("kind", "code"), [("numbers", "internal_error"), ("memory", "overloaded")])
def test_trouble_of_one_request_leaves_the_others_alone(
    models: TinyModels, from_position: int, kind: str, code: str
) -> None:
    jobs = [replace(JOB, seed=seed) for seed in range(3)]
    with Engine(models) as engine:
        expected = [engine.plain(job).token_ids for job in jobs]
        trouble = Trouble(engine, from_position, kind)
        engine.runner.forward = trouble  # type: ignore[method-assign]
        engine.attach_real("trained")
        others = [engine.submit(job) for job in jobs]
        (failed,) = engine.finish(engine.submit(VICTIM))
        texts = engine.finish(*others)
        engine.runner.forward = trouble.forward  # type: ignore[method-assign]
        later = engine.finish(*[engine.submit(job) for job in (*jobs, jobs[0])])  # in all slots, the failed one's too
    assert failed.failed is not None and failed.failed.code == code
    assert [text.token_ids for text in texts] == expected
    assert [text.token_ids for text in later] == [*expected, expected[0]]


def test_a_pass_that_does_not_fit_is_run_block_by_block(models: TinyModels) -> None:
    runner = models.runner("llama")
    forward, num_blocks = runner.forward, []
    sequences = [sequence_for([5, 6 + index], runner.new_cache(), []) for index in range(3)]
    for sequence in sequences:
        forward([TargetBlock(sequence.cache, 0, sequence.request.prompt_token_ids[:1])])

    def small(blocks: Sequence[TargetBlock], *, last_row_only: bool = False) -> TargetRows:
        num_blocks.append(len(blocks))
        if len(blocks) > 1 or blocks[0].cache is sequences[1].cache:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(blocks, last_row_only=last_row_only)

    runner.forward = small  # type: ignore[method-assign]
    verdicts = Verifier(runner, RowPolicy(1, 5, 20), TAP_LAYERS[-1] + 1).verify(sequences)
    assert num_blocks == [3, 1, 1, 1]
    assert [isinstance(verdict, Failure) for verdict in verdicts] == [False, True, False]


def test_any_other_error_is_not_hidden(models: TinyModels) -> None:
    def broken(blocks: Sequence[TargetBlock], *, last_row_only: bool = False) -> TargetRows:
        raise RuntimeError("a fault of the program")

    engine = Engine(models)
    engine.runner.forward = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a fault of the program"), engine:
        engine.plain(JOB)


def only_failure(text: Text) -> str:
    assert text.failed is not None
    return text.failed.code


def test_a_slot_that_does_not_fit_fails_its_request(models: TinyModels) -> None:
    with Engine(models) as engine:
        before = engine.runner.new_cache

        def no_room() -> KeyValueCache:
            raise torch.OutOfMemoryError("CUDA out of memory")

        engine.runner.new_cache = no_room  # type: ignore[method-assign]
        assert only_failure(engine.finish(engine.submit(JOB))[0]) == "overloaded"
        engine.runner.new_cache = before  # type: ignore[method-assign]
        assert engine.generate(JOB).end.reason == "length"
