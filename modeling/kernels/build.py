"""Compiles the C kernels once per machine into the user's cache folder and loads them.

No compiler, another CPU or a failed build is no error: callers get None and use torch.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

logger = logging.getLogger("jetspec.kernels")

SOURCE = Path(__file__).with_name("linear.c")
HEADERS = (
    "lanes",
    "lanes_avx512",
    "lanes_avx2",
    "pool",
    "layer_body",
    "int8",
    "attention",
    "attention_body",
    "likeliest_body",
    "stack_body",
)
PARTS = (SOURCE, *(SOURCE.with_name(f"{name}.h") for name in HEADERS))
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-pthread", "-std=gnu11")
INSTRUCTION_SETS = {
    "avx512": (("avx512_f", "avx512_bw", "avx512_vl"), ()),
    "avx2": (("avx2", "fma3"), ("-mno-avx512f",)),
}
"""What the kernels can be compiled for, best first: the CPU's capabilities that it takes, and compiler flags."""
COMPILE_LIMIT_S = 120

PANEL = 32
"""Outputs of a packed weight that lie side by side, as linear.c reads them."""


def cache_folder() -> Path:
    """Where compiled kernels are kept; JETSPEC_KERNEL_DIR overrides the user's cache."""
    chosen = os.environ.get("JETSPEC_KERNEL_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jetspec-pp" / "kernels"


@functools.cache
def load_kernels() -> ctypes.CDLL | None:
    """The compiled library, or None where it cannot be had.

    JETSPEC_KERNELS=0 switches it off; a name of `INSTRUCTION_SETS` allows that one alone.
    """
    flags = _flags(os.environ.get("JETSPEC_KERNELS", ""))
    if flags is None:
        return None
    try:
        cpu_name = str(torch.cpu.get_capabilities().get("cpu_name"))
        return _declare(ctypes.CDLL(str(_compiled((*FLAGS, *flags), cpu_name))))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("own kernels are not available, using torch's: %s", error)
        return None


def _flags(choice: str) -> tuple[str, ...] | None:
    """Compiler flags for the best instruction set that this CPU has and `choice` allows, None without one."""
    if choice == "0" or platform.machine() not in ("x86_64", "AMD64"):
        return None
    capabilities = torch.cpu.get_capabilities()
    for name, (needed, flags) in INSTRUCTION_SETS.items():
        is_allowed = choice == name or choice not in INSTRUCTION_SETS
        if is_allowed and all(capabilities.get(capability) for capability in needed):
            return flags
    return None


def _compiled(flags: Sequence[str], cpu_name: str) -> Path:
    """Path of the library for this source, compiler flags and CPU, compiled if it is not there yet."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    key = hashlib.sha256(b"".join(part.read_bytes() for part in PARTS) + repr((flags, cpu_name)).encode()).hexdigest()[
        :16
    ]
    folder = cache_folder()
    library = folder / f"linear-{key}.so"
    if library.exists():
        return library
    if compiler is None:
        raise OSError("no C compiler found")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        built = Path(temporary) / library.name
        command = [compiler, *flags, "-o", str(built), str(SOURCE), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
        if done.returncode != 0:
            raise OSError(f"{' '.join(command[:1])} failed: {done.stderr.strip()[-400:]}")
        built.rename(library)
    return library


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_long
    has_int8 = hasattr(library, "jetspec_linear_fp32_int8")  # compiled in where the CPU has VNNI
    for kernel in ("bf16", "fp32", *(("bf16_int8", "fp32_int8") if has_int8 else ())):
        product = getattr(library, f"jetspec_linear_{kernel}")
        project, finish = getattr(library, f"jetspec_project_{kernel}"), getattr(library, f"jetspec_finish_{kernel}")
        product.argtypes = [pointer, number, number, pointer, number, pointer, number]
        project.argtypes = [pointer, pointer, number, pointer, pointer, pointer]
        finish.argtypes = [pointer, pointer, pointer, number, pointer]
        product.restype = project.restype = finish.restype = ctypes.c_int
        stack = getattr(library, f"jetspec_stack_{kernel}")
        context = getattr(library, f"jetspec_stack_context_{kernel}")
        stack.argtypes = [pointer, pointer, number, pointer, pointer]
        context.argtypes = [pointer, pointer, number, pointer]
        stack.restype = context.restype = ctypes.c_int
    for attend in (library.jetspec_attend_bf16, library.jetspec_attend_fp32):
        attend.argtypes = [pointer, pointer, pointer, number, number, pointer]
        attend.restype = ctypes.c_int
    for likeliest in (library.jetspec_likeliest_bf16, library.jetspec_likeliest_fp32):
        likeliest.argtypes, likeliest.restype = [pointer, number, number, pointer, pointer], None
    library.jetspec_set_threads.argtypes, library.jetspec_set_threads.restype = [ctypes.c_int], ctypes.c_int
    library.jetspec_pack_mask.argtypes = [pointer, number, number, pointer]
    library.jetspec_store.argtypes = [pointer, number, number, pointer, number, pointer, number]
    library.jetspec_pack_mask.restype = library.jetspec_store.restype = None
    return library
