"""lm-evaluation-harness: a task of its own, without any download; log-likelihoods against transformers itself."""

import json
import subprocess
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from tests.clients.servers import ROOT, SERVER_PYTHON, Server

PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a small green frog"),
    ("One, two, three,", " four, five, six"),
    ("Water boils at", " 100 degrees"),
]

# Runs where torch is. Reads pairs of token ids from stdin: context, continuation.
DIRECT = """
import json, sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
scores = []
for context, continuation in json.load(sys.stdin):
    with torch.no_grad():
        rows = model(torch.tensor([context + continuation])).logits[0].log_softmax(-1)
    rows = rows[len(context) - 1 : -1]
    chosen = rows.gather(1, torch.tensor(continuation)[:, None])
    scores.append([float(chosen.sum()), rows.argmax(-1).tolist() == continuation])
print(json.dumps(scores))
"""


def run_python(*arguments: str, text: str = "") -> str:
    """What a program prints in the project's environment."""
    return subprocess.run(
        [SERVER_PYTHON, *arguments], cwd=ROOT, input=text, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture
def model(server: Server) -> Any:
    """Tokenises at the server, as no tokenizer can be downloaded."""
    return LocalCompletionsAPI(
        model="demo",
        base_url=f"{server.base_url}/completions",
        tokenizer_backend="remote",
        max_length=512,
        max_retries=1,
        num_concurrent=1,
        batch_size=2,
    )


def test_log_likelihoods_are_those_of_transformers(model: Any) -> None:
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=index) for index, pair in enumerate(PAIRS)
    ]
    found = model.loglikelihood(requests)
    token_ids = [model._encode_pair(context, continuation) for context, continuation in PAIRS]
    folder = run_python("-m", "modeling.demo").strip()
    expected = json.loads(run_python("-c", DIRECT, folder, text=json.dumps(token_ids)))
    for (score, is_greedy), (expected_score, expected_greedy) in zip(found, expected, strict=True):
        assert score == pytest.approx(expected_score, abs=1e-3)
        assert bool(is_greedy) == expected_greedy
    assert found[0][1] and not found[1][1]


GENERATION_TASK = """\
task: jetspec_capitals
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "The capital of {{country}} is"
doc_to_target: "{{capital}}"
generation_kwargs: {until: [".", ",", "\\n"], max_gen_toks: 6, do_sample: false, temperature: 0.0}
filter_list: [{name: first, filter: [{function: regex, regex_pattern: "([A-Z][a-z]+)"}, {function: take_first}]}]
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}]
metadata: {version: 1}
"""
CAPITALS = {"France": "Paris", "Italy": "Rome"}


def test_a_generation_task(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "capitals.json"
    data.write_text("\n".join(json.dumps({"country": key, "capital": CAPITALS[key]}) for key in CAPITALS))
    (tmp_path / "capitals.yaml").write_text(GENERATION_TASK.replace("DATA", str(data)))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = lm_eval.simple_evaluate(model=model, tasks=["jetspec_capitals"], task_manager=tasks, bootstrap_iters=0)
    assert results is not None
    samples = results["samples"]["jetspec_capitals"]
    assert [sample["resps"][0][0].strip() != "" for sample in samples] == [True, True]
    assert "Paris" in samples[0]["resps"][0][0]
    assert results["results"]["jetspec_capitals"]["exact_match,first"] > 0
