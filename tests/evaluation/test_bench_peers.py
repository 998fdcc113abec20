"""Peers in processes of their own: the same weights, the same tokens, and a clear line for what is not installed."""

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from evaluation.bench.contestants import Contestant, peers
from evaluation.bench.errors import ContestantFailed
from evaluation.bench.gguf_file import cached_gguf, interleave_halves, write_gguf
from evaluation.bench.peer_worker import Request, answer
from evaluation.bench.peers import PeerMissing, PeerProcess, PeerSetup, check_library, model_file
from modeling.architecture import UnsupportedModel
from tests.tiny.engine import Engine, Job
from tests.tiny.models import VOCAB_SIZE, TargetKind, TinyModels, target_config

PLAIN = Contestant("transformers", "ar", peer="transformers")
LOOKUP = Contestant("transformers + prompt lookup", "prompt lookup", peer="transformers", gamma=4)
LLAMA = Contestant("llama.cpp-bf16", "ar", peer="llama.cpp-bf16")


def setup_of(folder: Path, python: str = sys.executable, stop_token_ids: Sequence[int] = ()) -> PeerSetup:
    return PeerSetup(folder, False, "float32", list(stop_token_ids), None, python)


def with_tokenizer(models: TinyModels, kind: TargetKind, folder: Path) -> Path:
    """A copy of a tiny target with a byte-pair tokenizer that is complete enough to be converted."""
    shutil.copytree(models.target(kind), folder)
    vocabulary = {f"t{number}": number for number in range(VOCAB_SIZE - 1)}
    content = {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [["t", "1"], "t 2"]},
        "added_tokens": [{"id": 0, "content": "<end>", "special": True}],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 3]}')
    return folder


# --- processes


def test_transformers_writes_our_text_plain_and_with_prompt_lookup(models: TinyModels) -> None:
    """fp32 and a tiny model: no tie is near enough for another order of additions to matter."""
    folder = models.target("llama")
    prompt = [1, 2, 3, 9, 17, 2, 3]
    with Engine(models) as engine:
        expected = engine.plain(Job(prompt=tuple(prompt), max_tokens=24)).token_ids
    for contestant in (PLAIN, LOOKUP):
        with PeerProcess(contestant, setup_of(folder), folder) as process:
            generation = process.generate(prompt, 24, contestant.gamma)
            assert generation.token_ids == tuple(expected)
            assert (generation.num_tokens, generation.num_first) == (24, 1)
            assert 0 < generation.first_s < generation.end_s
            again = process.generate(prompt, 5, contestant.gamma)
            assert again.token_ids == tuple(expected[:5])
            assert process._process is not None
            process._process.kill()
            process._process.wait()
            with pytest.raises(ContestantFailed):
                process.generate(prompt, 4, None)


def test_a_peer_that_breaks_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(PeerMissing, match="the process ended with 3: no such model"):
        PeerProcess(PLAIN, setup_of(tmp_path, str(broken)), tmp_path).__enter__()


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without any installed package
    python.chmod(0o755)
    with pytest.raises(PeerMissing, match=r"llama-cpp-python .* is not installed"):
        check_library(LLAMA, setup_of(tmp_path, str(python)))
    with pytest.raises(PeerMissing, match="nowhere"):
        check_library(LLAMA, setup_of(tmp_path, str(tmp_path / "nowhere")))
    check_library(PLAIN, setup_of(tmp_path))


def test_counts_of_an_answer() -> None:
    def steps(request: Request) -> Iterator[list[int]]:
        yield [5]
        yield [6, 7, 8]
        yield [9, 2]

    def ask(max_tokens: int) -> dict[str, object]:
        found = answer(steps, Request([1], max_tokens, [2], None))
        return {name: value for name, value in found.items() if not name.endswith("_s")}

    # 2 ends the text
    assert ask(10) == {"token_ids": [5, 6, 7, 8, 9], "num_tokens": 6, "num_first": 1}
    assert ask(3) == {"token_ids": [5, 6, 7], "num_tokens": 3, "num_first": 1}


def test_each_peer_is_there_plain_and_with_lookup() -> None:
    assert [(c.name, c.drafts) for c in peers()] == [
        (name + suffix, bool(suffix))
        for name in ("transformers", "llama.cpp-bf16", "llama.cpp-q4_1")
        for suffix in ("", " + prompt lookup")
    ]
    assert not any(c.is_required or c.is_same_target for c in peers())


def test_only_the_demo_target_has_the_original_file(tmp_path: Path) -> None:
    with pytest.raises(PeerMissing, match="Q4_1"):
        model_file("llama.cpp-q4_1", setup_of(tmp_path), lambda folder: folder)
    assert model_file("llama.cpp-bf16", setup_of(tmp_path), lambda folder: folder / "x") == tmp_path / "x"


# --- the GGUF file


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_gguf_holds_the_weights(models: TinyModels, kind: TargetKind, tmp_path: Path) -> None:
    folder = with_tokenizer(models, kind, tmp_path / "model")
    path = tmp_path / "tiny.gguf"
    write_gguf(folder, path)
    reader = gguf.GGUFReader(path)
    config = target_config(kind)
    names = gguf.get_tensor_name_map(
        {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[kind],
        config["num_hidden_layers"],
    )
    written = {tensor.name: tensor for tensor in reader.tensors}
    weights = load_file(folder / "model.safetensors")
    assert len(written) == len(weights)
    for name, weight in weights.items():
        found = written[str(names.get_name(name, try_suffixes=(".weight", ".bias")))]
        raw = torch.from_numpy(np.array(found.data).view(np.uint8).copy())
        stored = raw.view(torch.float32) if weight.dim() == 1 else raw.view(torch.bfloat16)
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            stored = stored.reshape(-1, config["head_dim"] // 2, 2, config["hidden_size"]).transpose(1, 2)
        torch.testing.assert_close(
            stored.reshape(weight.shape).float(), weight.to(stored.dtype).float(), rtol=0, atol=0
        )
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert (tokens[0], tokens[5], tokens[VOCAB_SIZE - 1]) == ("<end>", "t5", f"[PAD{VOCAB_SIZE - 1}]")
    assert reader.fields["tokenizer.ggml.merges"].contents() == ["t 1", "t 2"]
    assert reader.fields["tokenizer.ggml.pre"].contents() == "smollm"
    assert reader.fields["tokenizer.ggml.eos_token_id"].contents() == 0


def test_another_reader_finds_the_same_model(models: TinyModels, tmp_path: Path) -> None:
    """transformers' own GGUF reader undoes the order of rows that llama.cpp wants."""
    folder = with_tokenizer(models, "llama", tmp_path / "model")
    write_gguf(folder, tmp_path / "tiny.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    state = model.state_dict()
    for name, weight in load_file(folder / "model.safetensors").items():
        kept = weight if weight.dim() == 1 else weight.to(torch.bfloat16)
        torch.testing.assert_close(state[name].float(), kept.float(), rtol=0, atol=0)
    config = target_config("llama")
    for field in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
        assert getattr(model.config, field) == config[field]
    assert model.config.rms_norm_eps == pytest.approx(config["rms_norm_eps"])


def test_halves_become_pairs() -> None:
    rows = torch.arange(8.0)[:, None]
    assert interleave_halves(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_gguf_is_written_once(models: TinyModels, tmp_path: Path) -> None:
    folder = with_tokenizer(models, "llama", tmp_path / "model")
    path = cached_gguf(folder, tmp_path)
    before = path.stat().st_mtime_ns
    assert cached_gguf(folder, tmp_path) == path and path.stat().st_mtime_ns == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"model_type": "gpt2"}, "gpt2"), ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear")],
)
def test_what_cannot_be_written(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(target_config("llama") | changes))
    with pytest.raises(UnsupportedModel, match=message):
        write_gguf(tmp_path, tmp_path / "x.gguf")
