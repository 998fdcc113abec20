"""The trace of a real engine: who did what in which round, and the picture of it."""

from pathlib import Path

import pytest

from evaluation.trace import main
from evaluation.trace_picture import colour_of
from evaluation.trace_spans import Span, choose_rounds, spans_of
from protocol.trace import TraceFileError, create_trace_file, finish_trace_file, read_trace_file
from tests.tiny.engine import Engine, EngineOptions, Job, Text
from tests.tiny.models import TinyModels

PASSES = ["foresight", "J0", "push", "refresh", "J1", "push"]


@pytest.fixture(scope="module")
def traced(models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Text]:
    """A request of 40 tokens served with a trace, each verification gated until the drafter is done."""
    path = create_trace_file(tmp_path_factory.mktemp("traces"), "trace-1")
    with Engine(models, options=EngineOptions(trace_path=path)) as engine:
        engine.attach_real(passes=1, refreshes=1)
        engine.gate_on_version(2)
        text = engine.generate(Job(max_tokens=40))
    finish_trace_file(path)
    return path, text


def spans_of_file(path: Path) -> list[Span]:
    return spans_of(read_trace_file(path))


def test_every_round_is_there_with_its_outcome(traced: tuple[Path, Text]) -> None:
    path, text = traced
    spans = spans_of_file(path)
    rounds = text.rounds[1:]  # the first is the prefill
    verified = [span.details for span in spans if span.name == "verify"]
    assert [(d["source"], d["drafts"], d["accepted"]) for d in verified] == [
        (r.outcome, r.num_drafts, r.num_accepted) for r in rounds
    ]
    exposed = [span for span in spans if span.name == "exposed"]
    for span, result in zip(exposed, rounds, strict=True):
        assert span.end_ms - span.start_ms == pytest.approx(1e3 * result.exposed_s, abs=0.001)
    assert sum(span.details["rows"] for span in spans if span.name == "prefill") == len(Job().prompt)


def test_the_drafter_works_under_the_verification_of_its_round(traced: tuple[Path, Text]) -> None:
    spans = spans_of_file(traced[0])
    verifications = [span for span in spans if span.name == "verify" and span.process == "verifier"]
    drafting = [span for span in spans if span.process == "drafter"]
    gated = [v for v in verifications[:-1] if v.details["drafts"]]
    assert len(gated) > 3
    for verification in gated:
        number = verification.details["round"]
        own = [s for s in drafting if s.details.get("round") == number and s.name != "fallback"]
        assert [s.name for s in own] == [name for name in PASSES if name != "push"]
        # The gate lets a verification end only after the last version was sent; drafting may begin a message earlier.
        assert own[-1].end_ms <= verification.end_ms
        assert own[-1].end_ms > verification.start_ms
    names = [span.name for span in drafting]
    assert names.count("fallback") == sum(v.details["source"] == "miss" for v in verifications)
    assert names.count("install") >= len(gated) and names.count("push") >= 2 * len(gated)


def test_picture(traced: tuple[Path, Text], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = traced
    picture = tmp_path / "pictures" / "rounds.png"
    assert main([str(path.parent), "--output", str(picture), "--rounds", "4"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"{path}" in capsys.readouterr().out


def test_rounds_are_chosen(traced: tuple[Path, Text]) -> None:
    spans = spans_of_file(traced[0])
    numbers = [span.details["round"] for span in spans if span.name == "verify"]
    excerpt = choose_rounds(spans, 4)
    assert (excerpt.first_round, excerpt.last_round) == (numbers[3], numbers[6])
    assert {span.process for span in excerpt.spans} == {"verifier", "drafter"}
    assert choose_rounds(spans, 2, first_round=numbers[1]).last_round == numbers[2]
    assert choose_rounds(spans, 1000).first_round == numbers[0]  # too few to leave any out
    with pytest.raises(TraceFileError, match="sequence 77"):
        choose_rounds(spans, 4, sequence_id=77)
    with pytest.raises(TraceFileError, match="no round 1000"):
        choose_rounds(spans, 4, first_round=1000)
    with pytest.raises(TraceFileError, match="no verification"):
        choose_rounds([], 4)


def test_colours_tell_outcomes_and_passes_apart() -> None:
    def span(name: str, **details: object) -> Span:
        return Span("verifier", name, 0.0, 1.0, dict(details))

    kinds = [span("verify", source=source) for source in ("hit", "late_hit", "miss", "autoregressive")]
    others = [span(name) for name in ("foresight", "J0", "refresh", "J1", "push", "exposed", "fallback", "J9")]
    colours = [colour_of(item) for item in (*kinds, *others)]
    assert len(set(colours)) == len(colours)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[\n{"ph":"X","name":"verify"},\n{"ph":"X","name":"verify"}\n', "lacks 'pid'"),
        ("[\nbroken\n{}\n", "trace-1.json:2"),
        ("[\n", "no verification"),
    ],
)
def test_wrong_input(content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace-1.json"
    file.write_text(content)
    assert main([str(file), "--output", str(tmp_path / "x.png")]) == 2
    assert message in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere"), "--output", str(tmp_path / "x.png")]) == 2


def test_a_folder_without_traces_and_an_unknown_format(
    traced: tuple[Path, Text], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--output", str(tmp_path / "x.png")]) == 2
    assert "holds no trace" in capsys.readouterr().err
    assert main([str(traced[0]), "--output", str(tmp_path / "x.docx")]) == 1
    assert "x.docx" in capsys.readouterr().err
