"""`jetspecpp doctor` over the shipped files, with a fake where it measures: what it asks, finds, and how it ends."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.bench.client import Client, Generation
from evaluation.bench.counters import Counters
from evaluation.bench.errors import ContestantFailed, WrongInput
from evaluation.doctor import machine
from evaluation.doctor.cli import main
from evaluation.doctor.pair import has_thinking_mode
from evaluation.doctor.trial import Subject, make_cases
from server.config import PinnedCores
from server.tokenizer import Tokenizer
from tests.evaluation.bench_servers import FakeServer, exposition, running
from tests.server.fakes import CHAT_TEMPLATE, make_model_folder

ROOT = Path(__file__).parents[2]
WEIGHTS = ROOT / "weights" / "smollm2-135m"
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
THINKING = CHAT_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


@dataclass
class FakeSubject:
    """Counts as the real server does; drafted answers take `drafted_s`, plain ones a second."""

    drafted_s: float = 0.5
    differs: bool = False
    fails: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    num_plain: int = 0
    num_drafted: int = 0

    def generate(self, prompt_token_ids: list[int], max_tokens: int, **options: object) -> Generation:
        if self.fails:
            raise ContestantFailed("HTTP 500")
        self.asked.append({"num_prompt_tokens": len(prompt_token_ids), "max_tokens": max_tokens, **options})
        is_drafted = options["speculative"] is True
        self.num_drafted += is_drafted
        self.num_plain += not is_drafted
        text = (1, 2, 4) if self.differs and is_drafted else (1, 2, 3)
        return Generation(text, 21, 1, 0.1, 0.1 + (self.drafted_s if is_drafted else 1.0))

    def counters(self) -> Counters:
        plain = Counters.parse(exposition(self.num_plain, is_plain=True))
        drafted = Counters.parse(exposition(self.num_drafted))
        return Counters({key: value + plain.samples[key] for key, value in drafted.samples.items()})


@dataclass
class Opened:
    """Stands for the server that is started: remembers its flags."""

    subject: FakeSubject = field(default_factory=FakeSubject)
    flags: list[str] = field(default_factory=list)
    refusal: str | None = None

    @contextmanager
    def __call__(self, flags: Sequence[str]) -> Iterator[Subject]:
        self.flags += flags
        if self.refusal is not None:
            raise WrongInput(self.refusal)
        yield self.subject


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the demo target's shape and a byte tokenizer."""
    folder = make_model_folder(tmp_path / "target")
    (folder / "config.json").write_text(json.dumps(TARGET))
    return folder


@pytest.fixture(autouse=True)
def two_quiet_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 0.1, 0.1))
    monkeypatch.setattr("os.cpu_count", lambda: 2)


def flags(model: Path, *more: str, draft: Path = WEIGHTS / "draft") -> list[str]:
    adapter, calibration = str(WEIGHTS / "adapter"), str(WEIGHTS / "calibration")
    files = ("--draft-model", str(draft), "--adapter", adapter, "--calibration", calibration)
    return ["--model", str(model), *files, *more]


def test_a_healthy_pair(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = Opened()
    report = tmp_path / "report.json"
    arguments = flags(model, "--num-prompts", "3", "--max-tokens", "40", "--dtype", "float32", "--json", str(report))
    assert main(arguments, opened) == 0
    out = capsys.readouterr().out
    assert "3 layers on taps [1, 8, 14, 20, 27], shifted slots, tokens inputs" in out
    assert "2.00 over plain decoding" in out and "drafts are short: τ 2.5 of at most 5" in out
    assert "misses cost 1.8 ms a round: 20% of the blocks, 10.0 ms each" in out
    assert opened.flags[:2] == ["--model", str(model)] and "--num-prompts" not in opened.flags
    content = json.loads(report.read_text())
    assert content["figures"]["speedup"] == 2.0
    assert {finding["severity"] for finding in content["findings"]} <= {"ok", "note"}


def test_every_prompt_is_answered_both_ways_in_turn(model: Path) -> None:
    opened = Opened()
    assert main(flags(model, "--num-prompts", "2", "--max-tokens", "40", "--temperature", "0.7"), opened) == 0
    asked = opened.subject.asked[2:]  # after the warm-up
    assert [item["speculative"] for item in asked] == [False, True, True, False] * 2
    for one, other in zip(asked[::2], asked[1::2], strict=True):
        assert (one["seed"], one["num_prompt_tokens"]) == (other["seed"], other["num_prompt_tokens"])
        assert one["temperature"] == 0.7
    assert asked[4]["num_prompt_tokens"] > asked[0]["num_prompt_tokens"] + 500


@pytest.mark.parametrize(
    ("opened", "words"),
    [
        (Opened(FakeSubject(drafted_s=1.25)), "0.80: slower than plain decoding"),
        (Opened(FakeSubject(differs=True)), "texts differ with speculation"),
        (Opened(FakeSubject(fails=True)), "it failed under the trial: HTTP 500"),
        (Opened(refusal="the server runs without its drafter: no"), "the server runs without its drafter: no"),
    ],
)
def test_problems_of_a_server(model: Path, opened: Opened, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags(model, "--num-prompts", "1"), opened) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("PROBLEM")]
    assert words in line


@pytest.mark.parametrize(
    ("file", "name", "value", "words"),
    [
        ("target", "num_hidden_layers", 28, "num_target_layers is 30, the target's is 28"),
        ("draft", "vocab_size", 100, "vocab_size is 100, the target's is 49152"),
        ("target", "vocab_size", 200, "tokenizer"),
    ],
)
def test_a_pair_that_does_not_fit_is_not_measured(
    model: Path, tmp_path: Path, file: str, name: str, value: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(WEIGHTS / "draft", draft)
    path = {"target": model, "draft": draft}[file] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    opened = Opened()
    assert main(flags(model, draft=draft), opened) == 1
    assert any(words in line for line in capsys.readouterr().out.splitlines() if line.startswith("PROBLEM"))
    assert opened.flags == []


def test_limits_of_a_draft_model_that_fits(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = flags(model, "--num-speculative-tokens", "12", "--no-measure")
    del arguments[arguments.index("--calibration") : arguments.index("--calibration") + 2]
    assert main(arguments, Opened()) == 0
    out = capsys.readouterr().out
    assert "it was trained to write 8 drafts, later ones are guesses" in out
    assert "none for a budget of 13 rows" in out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--method", "ar"), "--method: ar drafts nothing"),
        (("--max-tokens", "x"), "--max-tokens: expected a number, got 'x'"),
        (("--num-prompts", "0"), "--num-prompts: must be between 1 and"),
        (("--temperature", "nan"), "--temperature: must be between 0 and 2"),
        (("--max-tokens", "9000"), "--max-tokens: no prompt fits"),
        (("--verify-device", "tpu9"), "--verify-device"),
        (("--verify-core", "7"), "--verify-core: core 7"),
        (("--calibration", "/does/not/exist"), "--calibration: /does/not/exist does not exist"),
        (("--wibble",), "--wibble"),
        (("--no-measure", "--json", "/does/not/exist/a.json"), "--json: /does/not/exist/a.json"),
    ],
)
def test_wrong_input(model: Path, more: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(model), *more] if "ar" in more else flags(model, *more)
    assert main(arguments, Opened()) == 2
    assert words in capsys.readouterr().err


def test_no_such_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "/does/not/exist"], Opened()) == 2
    assert "/does/not/exist" in capsys.readouterr().err


def test_one_core_is_a_problem(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert main(flags(model, "--no-measure"), Opened()) == 1
    assert "one core: verifier and drafter take turns" in capsys.readouterr().out


def test_machines() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    assert "torch sees" in next(machine._devices(gpu, torch.device("cuda:99"))).text
    assert machine._load(3.0, 2).severity == "note" and machine._load(0.5, 2).severity == "ok"
    assert machine._kernels(False, False).severity == "note" and "int8" in machine._kernels(True, True).text
    assert "fast with bf16" in machine._dtype(torch.float32, cpu, True).text
    assert "emulates" in machine._dtype(torch.bfloat16, cpu, False).text
    assert [machine._dtype(torch.bfloat16, device, True).severity for device in (cpu, gpu)] == ["ok", "ok"]
    (unpinned,) = machine._cores(4, PinnedCores(None, None), shares=True)
    assert unpinned.severity == "note"


def test_thinking_mode_is_tried_both_ways(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": THINKING}))
    tokenizer = Tokenizer.load(model)
    assert has_thinking_mode(tokenizer)
    cases = make_cases(["a", "b", "c"], tokenizer, has_thinking=True, limit=10**6)
    assert [case.kind for case in cases] == ["short"] * 3 + ["long"] * 2 + ["no thinking"] * 2
    assert tokenizer.decode(cases[-1].token_ids).endswith("<think></think>")
    assert main(flags(model, "--no-measure"), Opened()) == 0
    assert "it has a thinking mode" in capsys.readouterr().out


def test_cases_that_do_not_fit_are_left_out(model: Path) -> None:
    cases = make_cases(["a", "b"], Tokenizer.load(model), has_thinking=False, limit=100)
    assert [case.kind for case in cases] == ["short", "short"]


def test_options_reach_the_server() -> None:
    with running(FakeServer()) as fake:
        client = Client(fake.url)
        client.generate([1], 4, speculative=False, temperature=0.5)
        client.close()
    assert (fake.bodies[0]["speculative"], fake.bodies[0]["temperature"]) == (False, 0.5)
