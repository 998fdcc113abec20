"""A model folder's weights as a bf16 GGUF file, so that llama.cpp runs the very numbers we serve.

Matrices are bf16, vectors fp32, as llama.cpp wants them. The tokenizer is written for completeness; the benchmark
speaks to llama.cpp in token ids.
"""

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from modeling.architecture import UnsupportedModel, architecture_from_config, read_json
from modeling.runtime import model_fingerprint

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
FORMAT_VERSION = 1
SUFFIXES = (".weight", ".bias")


def cached_gguf(folder: Path, cache: Path) -> Path:
    """The file of a model folder below `cache`, written when it is not there. Raises `UnsupportedModel`."""
    path = cache / "gguf" / f"{folder.name}-{model_fingerprint(folder)[:12]}-v{FORMAT_VERSION}-bf16.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.part")
        try:
            write_gguf(folder, unfinished)
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)
    return path


def write_gguf(folder: Path, path: Path) -> None:
    """Write one file. Raises `UnsupportedModel` for a model of another kind or with a tensor of unknown name."""
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise UnsupportedModel(f"no GGUF is written for model_type {kind!r}")
    architecture = ARCHITECTURES[kind]
    shape = architecture_from_config(config)
    if shape.rope["rope_type"] != "default":
        raise UnsupportedModel(f"no GGUF is written for rope type {shape.rope['rope_type']!r}")
    names = gguf.get_tensor_name_map(architecture, shape.num_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_settings(writer, config)
    _add_tokenizer(writer, folder, shape.vocab_size)
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found = names.get_name(name, try_suffixes=SUFFIXES)
            if found is None:
                raise UnsupportedModel(f"{file}: no GGUF name is known for {name}")
            if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = shape.num_heads if name.endswith("q_proj.weight") else shape.num_kv_heads
                tensor = interleave_halves(tensor, heads)
            _add_tensor(writer, found, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a query or key projection [heads * dim, in], from rotated halves to the neighbouring pairs of GGUF's
    llama."""
    width = weight.shape[0] // num_heads
    halves = weight.reshape(num_heads, 2, width // 2, -1)  # [heads, 2, dim / 2, in]
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor) -> None:
    if tensor.dim() == 1:
        writer.add_tensor(name, tensor.float().numpy())
        return
    data = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _add_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    shape = architecture_from_config(config)
    writer.add_name(str(config.get("_name_or_path") or config["model_type"]))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(float(shape.rope["rope_theta"]))
    writer.add_layer_norm_rms_eps(shape.rms_eps)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> None:
    """Tokens by id with their kinds, merges, and the ids that open and end a text."""
    path = folder / "tokenizer.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary: dict[str, int] = content["model"]["vocab"]
        merges = content["model"]["merges"]
        special = {item["id"]: item["content"] for item in content.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedModel(f"{path}: not a byte-pair tokenizer: {error!r}") from error
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    kinds = [int(gguf.TokenType.UNUSED)] * vocab_size
    for token, number in vocabulary.items():
        tokens[number], kinds[number] = token, int(gguf.TokenType.NORMAL)
    for number, token in special.items():
        tokens[number], kinds[number] = token, int(gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if _splits_digits(content) else "default")
    writer.add_token_list(tokens)
    writer.add_token_types(np.array(kinds, dtype=np.int32).tolist())
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    generation = folder / "generation_config.json"
    ends = (read_json(generation) if generation.is_file() else read_json(folder / "config.json")).get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    if isinstance(end, int):
        writer.add_eos_token_id(end)


def _splits_digits(tokenizer: dict[str, Any]) -> bool:
    parts = (tokenizer.get("pre_tokenizer") or {}).get("pretokenizers") or ()
    return any(part.get("type") == "Digits" for part in parts)
