"""The gate over all sampling parameters: any combination gives the same text with speculation as without, whatever the
drafter; then the bugs that other servers had, one by one (S08 to S13 and S19 of the log of public bug reports)."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from protocol.fields import ChoiceGrammar, Grammar, JsonSchemaGrammar, RegexGrammar
from protocol.messages import PeerHello
from tests.tiny.drafters import Adversary, Oracle
from tests.tiny.engine import Engine, EngineOptions, Job, MakeDrafter, RecordingChannel, Text
from tests.tiny.models import VOCAB_SIZE, TinyModels

END = VOCAB_SIZE - 1
SPACES = tuple((token_id, -30.0) for token_id in (94, 95, 100))  # blanks that a random target would repeat for ever
SCHEMAS: list[object] = [
    {"type": "boolean"},
    {"enum": ["bad", "ba", {"a": None}, 12]},
    {"type": "array", "items": {"enum": [1, 20, "x"]}, "minItems": 1, "maxItems": 4},
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "string", "maxLength": 5}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 120}}, "required": ["n"]},
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}]},
]
GRAMMARS: list[Grammar] = [
    *(JsonSchemaGrammar(schema_text=json.dumps(schema)) for schema in SCHEMAS),
    RegexGrammar(pattern="[a-h]{3,12}(!|\\?)"),
    ChoiceGrammar(choices=["abc", "abcd", 'say "no"']),
]


class Informed:
    """An engine whose drafter may know the text: oracles get every plain text before the speculative run."""

    def __init__(self, engine: Engine, drafter: str) -> None:
        self.engine = engine
        self.known: dict[int, list[int]] = {}
        if drafter == "adversary":
            engine.attach(Adversary)
        elif drafter in ("trained", "random"):
            engine.attach_real(drafter)  # type: ignore[arg-type]
        else:
            engine.attach(self._oracle(float(drafter)))

    def _oracle(self, correctness: float) -> MakeDrafter:
        def make(channel: RecordingChannel, hello: PeerHello) -> Oracle:
            return Oracle(channel, hello, self.known, correctness)

        return make

    def speculate(self, job: Job, believed: list[int]) -> Text:
        """One request whose drafter, if it is an oracle, believes in this text."""
        self.known[self.engine.next_id] = [*job.prompt, *believed]
        return self.engine.generate(job)

    def compare(self, jobs: list[Job]) -> list[Text]:
        """As `Engine.compare`."""
        expected = [self.engine.plain(job) for job in jobs]
        for index, (job, text) in enumerate(zip(jobs, expected, strict=True)):
            self.known[self.engine.next_id + index] = [*job.prompt, *text.token_ids]
        found = self.engine.finish(*[self.engine.submit(job) for job in jobs])
        for job, ours, theirs in zip(jobs, found, expected, strict=True):
            assert ours.ending == theirs.ending, job
            assert ours.logprobs == theirs.logprobs, job
            assert ours.prompt_logprobs == theirs.prompt_logprobs, job
        return found


@pytest.fixture(scope="module", params=["trained", "random", "0.6", "0.0", "adversary"])
def informed(models: TinyModels, request: pytest.FixtureRequest) -> Iterator[Informed]:
    """One engine for all examples of one drafter."""
    with Engine(models) as engine:
        yield Informed(engine, request.param)


token_ids = st.integers(0, VOCAB_SIZE - 1)
any_job = st.builds(
    Job,
    prompt=st.lists(token_ids, min_size=1, max_size=12).map(tuple),
    max_tokens=st.integers(1, 16),
    temperature=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 1 << 62),
    stop_token_ids=st.lists(token_ids, max_size=30).map(tuple),
    min_tokens=st.sampled_from([0, 0, 3, 20]),
    presence_penalty=st.sampled_from([0.0, 2.0, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 2.0, -0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.lists(st.tuples(token_ids, st.floats(-100, 100)), max_size=5).map(tuple),
    num_logprobs=st.sampled_from([None, 0, 5]),
    num_prompt_logprobs=st.sampled_from([None, 2]),
    grammar=st.sampled_from([None, None, *GRAMMARS]),
)


# The engine's threads, whose types are checked at random places, draw from `random` while the examples are made.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(jobs=st.lists(any_job, min_size=3, max_size=4))
def test_any_combination_of_parameters(informed: Informed, jobs: list[Job]) -> None:
    for job, text in zip(jobs, informed.compare(jobs), strict=True):
        stops = set(job.stop_token_ids)
        assert not stops & set(text.token_ids)
        assert text.end.stop_token_id is None or text.end.stop_token_id in stops
        if text.end.reason == "stop" and job.grammar is None:
            assert text.end.num_generated_tokens > job.min_tokens


JOB = Job(prompt=(1, 2, 3, 9, 17), max_tokens=24)


def free_text(engine: Engine) -> list[int]:
    """The greedy text, longer than what is compared with it."""
    return engine.plain(replace(JOB, max_tokens=40)).token_ids


# A penalty may rightly do nothing to a text that does not repeat itself, so the prompt is what the text would say.
@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_penalties_are_applied_under_speculation(models: TinyModels, name: str) -> None:
    """S08."""
    with Engine(models) as engine:
        said = free_text(engine)[:8]
        job = replace(JOB, prompt=(*JOB.prompt, *said, *JOB.prompt), logit_bias=tuple((token, 6.0) for token in said))
        plain = engine.plain(job).token_ids
        penalised = replace(job, **{name: 2.0})  # type: ignore[arg-type]
        (text,) = Informed(engine, "1.0").compare([penalised])
    assert text.token_ids != plain
    assert any(result.num_accepted > 1 for result in text.rounds)


def test_rejected_drafts_leave_no_trace_in_the_penalties(models: TinyModels) -> None:
    """S09: every block has a wrong token, and what is drafted is penalised if it counts."""
    job = replace(JOB, repetition_penalty=1.3, frequency_penalty=1.0, presence_penalty=0.5)
    with Engine(models) as engine:
        informed = Informed(engine, "0.0")
        (text,) = informed.compare([job])
        free = informed.speculate(job, [*text.token_ids[:1], *[77, 78, 79] * 20])
    assert {result.num_accepted for result in text.rounds[1:-1]} <= {0, 1, 2, 3}
    assert free.token_ids == text.token_ids


@pytest.mark.parametrize("index", range(1, 11))
def test_a_bias_works_in_the_middle_of_a_block(models: TinyModels, index: int) -> None:
    """S10: a token that the drafts hold and the target would accept, struck at every place of a block."""
    with Engine(models) as engine:
        informed = Informed(engine, "1.0")
        free = free_text(engine)
        struck = replace(JOB, logit_bias=((free[index], -100.0),))
        text = informed.speculate(struck, free)
        assert text.ending == engine.plain(struck).ending
        raised = replace(JOB, logit_bias=((free[index + 3], 100.0),))
        assert set(informed.speculate(raised, free).token_ids) == {free[index + 3]}
    assert free[index] not in text.token_ids
    assert text.token_ids[: free.index(free[index])] == free[: free.index(free[index])]


def test_min_p_filters_every_row(models: TinyModels) -> None:
    """S10: with min_p 1 only the likeliest token is left, at any temperature."""
    job = replace(JOB, temperature=1.5, min_p=1.0)
    with Engine(models) as engine:
        informed = Informed(engine, "0.5")
        free = free_text(engine)
        assert informed.speculate(job, free).token_ids == free[: job.max_tokens]
        informed.compare([replace(JOB, temperature=1.0, min_p=0.5, seed=seed) for seed in range(3)])


@pytest.mark.parametrize("index", [0, 2, 5, 7])
def test_a_stop_token_in_the_drafts_waits_for_min_tokens(models: TinyModels, index: int) -> None:
    """S11: the free text has the stop token at `index`, and the drafter proposes it there."""
    with Engine(models) as engine:
        informed = Informed(engine, "1.0")
        free = free_text(engine)
        job = replace(JOB, stop_token_ids=(free[index],), min_tokens=20, max_tokens=30)
        plain = engine.plain(job)
        texts = [informed.speculate(job, believed) for believed in (free, plain.token_ids)]
    for text in texts:
        assert text.ending == plain.ending
        assert free[index] not in text.token_ids and len(text.token_ids) >= 20


def test_ids_without_a_text_are_never_generated(models: TinyModels) -> None:
    """S13: the head is padded, the text would leave the tokenizer's ids, and the drafts do."""
    size = 100
    jobs = [
        Job(prompt=(seed, 5), max_tokens=16, temperature=2.0, seed=seed, num_logprobs=5, num_prompt_logprobs=5)
        for seed in range(2)
    ]
    with Engine(models) as engine:
        assert any(max(engine.plain(job).token_ids) >= size for job in jobs)
    with Engine(models, "llama", EngineOptions(num_token_ids=size)) as engine:
        assert engine.generate(jobs[0]).end and engine.ready is not None and engine.ready.vocab_size == size
        texts = Informed(engine, "adversary").compare(jobs)
    for text in texts:
        assert max(text.token_ids) < size
        entries = [*text.logprobs, *text.prompt_logprobs]
        assert max(top.token_id for entry in entries for top in entry.top) < size


@pytest.mark.parametrize("drafter", ["1.0", "0.5", "trained"])
def test_json_of_a_schema_is_valid_and_the_same(models: TinyModels, drafter: str) -> None:
    """S19: greedy and drawn, with and without an end of text to draw."""
    tokenizer = Tokenizer.from_file(str(models.tokenizer() / "tokenizer.json"))
    jobs = [
        Job(
            prompt=(40, 41, index),
            max_tokens=60,
            temperature=temperature,
            stop_token_ids=stops,
            grammar=JsonSchemaGrammar(schema_text=json.dumps(schema)),
            logit_bias=SPACES,
            seed=index,
        )
        for index, schema in enumerate(SCHEMAS)
        for temperature, stops in ((0.0, (END,)), (1.0, (END,)), (1.0, ()))
    ]
    with Engine(models) as engine:
        texts = Informed(engine, drafter).compare(jobs)
    for job, text in zip(jobs, texts, strict=True):
        assert text.end.reason == "stop", job
        json.loads(tokenizer.decode(text.token_ids))
        assert text.end.stop_token_id in (None, *job.stop_token_ids)


def test_drafts_beyond_the_end_of_a_grammar_change_nothing(models: TinyModels) -> None:
    """S19: the drafter goes on after the last token that the grammar allows, inside one block."""
    tokenizer = Tokenizer.from_file(str(models.tokenizer() / "tokenizer.json"))
    job = replace(JOB, grammar=ChoiceGrammar(choices=["zxy", "zxyw"]), logit_bias=((86, 20.0),), stop_token_ids=(END,))
    with Engine(models) as engine:
        informed = Informed(engine, "1.0")
        plain = engine.plain(job)
        text = informed.speculate(job, [*plain.token_ids, 5, 6, 7, 8, 9])
        refused = informed.speculate(job, [*plain.token_ids[:2], END, END, END, END, END])
    assert tokenizer.decode(plain.token_ids) == "zxyw"
    assert plain.ending == (plain.token_ids, "stop", None, 4)  # nothing can follow: no end of text is drawn
    assert text.ending == refused.ending == plain.ending
    assert [result.token_ids for result in text.rounds] == [plain.token_ids[:1], plain.token_ids[1:]]


def test_a_grammar_outlives_min_tokens_and_ignored_ends(models: TinyModels) -> None:
    """A complete text ends whatever else was asked for; an end of text inside it is never drawn."""
    job = replace(JOB, grammar=ChoiceGrammar(choices=["ab", "ba"]), min_tokens=10, temperature=1.0)
    with Engine(models) as engine:
        for stops in ((), (END,)):
            text = engine.generate(replace(job, stop_token_ids=stops, logit_bias=((END, 100.0),)))
            assert (len(text.token_ids), text.end.reason, text.end.stop_token_id) == (2, "stop", None)
