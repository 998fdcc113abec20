"""What a worker process sets up before it loads a model: threads, core, dtype, device, death of its parent."""

import ctypes
import hashlib
import os
import signal
from pathlib import Path

import torch

from modeling.kernels.build import load_kernels
from modeling.kernels.threads import set_num_threads as set_kernel_threads

_PR_SET_PDEATHSIG = 1
_SAMPLE_BYTES = 1 << 20


def pin(core: int | None, num_threads: int = 1) -> None:
    """Bind this process to a core, and torch and the kernels of our own to its threads: two workers that share cores
    fight over them."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(num_threads)
    set_kernel_threads(num_threads)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to end this process when its parent ends; ends at once if the parent is gone already."""
    if hasattr(os, "uname") and os.uname().sysname == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit("the parent process is gone")


def has_fast_bfloat16() -> bool:
    """Whether this CPU has bfloat16 dot-product instructions, which torch's own products need to be fast."""
    return bool(torch.cpu.get_capabilities().get("avx512_bf16") or torch.cpu.get_capabilities().get("bf16"))


def prefers_bfloat16() -> bool:
    """Whether bf16 is the faster type here: by the CPU's instructions, or by our kernels, which read half the bytes."""
    return has_fast_bfloat16() or load_kernels() is not None


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bf16 on a GPU and where a CPU is fast with it, else fp32."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or prefers_bfloat16() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def model_fingerprint(folder: Path) -> str:
    """Hash of config and of the size, head and tail of each weight file: enough to tell two checkpoints apart."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
