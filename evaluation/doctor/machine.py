"""What this machine gives the two workers: devices, cores, number format, kernels, and who else is using it."""

import os
from collections.abc import Iterator

import torch

from evaluation.doctor.findings import Finding, note, ok, problem
from modeling.kernels.build import load_kernels
from modeling.kernels.int8 import has_int8
from modeling.runtime import choose_dtype, prefers_bfloat16
from server.config import ConfigError, PinnedCores, ServeConfig

CROWDED = 0.5
"""Running programs for each core, above which times are not those of a quiet machine."""


def check_machine(config: ServeConfig, cores: PinnedCores) -> Iterator[Finding]:
    """Devices first; raises `ConfigError` for one that torch does not know."""
    verify, draft = (
        device_of(name, value)
        for name, value in (("--verify-device", config.verify_device), ("--draft-device", config.draft_device))
    )
    yield from _devices(verify, draft)
    if "cpu" in (verify.type, draft.type):
        yield from _cores(len(os.sched_getaffinity(0)), cores, shares=verify.type == draft.type)
        yield _load(os.getloadavg()[0], os.cpu_count() or 1)
        yield _kernels(load_kernels() is not None, has_int8())
    yield _dtype(choose_dtype(config.dtype, verify), verify, prefers_bfloat16())


def device_of(flag: str, text: str) -> torch.device:
    """The device a flag names; raises `ConfigError`."""
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ConfigError(f"{flag}: {str(error).splitlines()[0]}") from None


def _devices(verify: torch.device, draft: torch.device) -> Iterator[Finding]:
    num_gpus = torch.cuda.device_count()
    for flag, device in (("--verify-device", verify), ("--draft-device", draft)):
        if device.type == "cuda" and (device.index or 0) >= num_gpus:
            yield problem("devices", f"{flag} {device}: torch sees {num_gpus} CUDA devices")
            return
    if verify.type == "cuda" and verify == draft:
        yield note("devices", f"verifier and drafter share {verify}: they take turns on it instead of working at once")
    else:
        yield ok("devices", f"verifier on {verify}, drafter on {draft}")


def _cores(num_cores: int, cores: PinnedCores, *, shares: bool) -> Iterator[Finding]:
    if num_cores == 1 and shares:
        yield problem(
            "cores", "one core: verifier and drafter take turns, so drafting is not hidden; give this process two"
        )
    elif cores.verify is None or (shares and cores.draft is None):
        yield note("cores", f"{num_cores} cores, and the workers are not pinned to them: they may meet on one")
    else:
        yield ok("cores", f"verifier on core {cores.verify}, drafter on core {cores.draft}, of {num_cores}")


def _load(load: float, num_cores: int) -> Finding:
    if load > CROWDED * num_cores:
        text = f"{load:.1f} programs run on {num_cores} cores already: times and hit rate suffer"
        return note("load", text)
    return ok("load", f"{load:.1f} programs run on {num_cores} cores")


def _kernels(is_compiled: bool, is_int8: bool) -> Finding:
    if not is_compiled:
        text = (
            "torch's: a verification of several rows costs more than with our own, which need AVX2 or AVX-512, and a C"
            " compiler"
        )
        return note("kernels", text)
    drafting = "int8 for drafting" if is_int8 else "without int8, since the CPU has no VNNI"
    return ok("kernels", f"our own, compiled for this CPU, {drafting}")


def _dtype(dtype: torch.dtype, device: torch.device, is_fast_bfloat16: bool) -> Finding:
    name = str(dtype).removeprefix("torch.")
    if device.type != "cpu":
        return ok("dtype", name)
    if dtype == torch.float32 and is_fast_bfloat16:
        return note("dtype", "float32, though this CPU is fast with bf16: bfloat16 reads half the bytes")
    if dtype == torch.bfloat16 and not is_fast_bfloat16:
        return note("dtype", "bfloat16, which this CPU only emulates: float32 is faster here")
    return ok("dtype", name)
