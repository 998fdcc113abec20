"""The frozen settings both workers are started with.

The server writes one JSON file per run; the verifier and the drafter read the same file, so a value they share cannot
differ between them. This module knows names and ranges only: no files are opened and no device is touched here.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DraftMethodName = Literal["dflash", "jetspec", "dspark", "domino", "ssd", "jetspec++"]
MethodName = DraftMethodName | Literal["ar"]
DraftQuantization = Literal["auto", "none", "int8"]
LogLevel = Literal["debug", "info", "warning", "error"]

EXIT_UNUSABLE_FILES = 3
"""Exit status of a drafter whose files do not fit its method or the target: starting it again cannot help."""

_Count = Annotated[int, Field(ge=0)]
_PositiveCount = Annotated[int, Field(ge=1)]


class WorkerConfig(BaseModel):
    """What one run of the two workers is made of. `None` for a pass-plan number means: choose from measured times."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    run_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    model_path: str
    draft_path: str | None = None
    adapter_path: str | None = None
    calibration_path: str | None = None
    method: MethodName = "jetspec++"
    dtype: DtypeName = "auto"
    draft_quantization: DraftQuantization = "auto"
    device_verify: str = "cpu"
    device_draft: str = "cpu"
    core_verify: _Count | None = None
    core_draft: _Count | None = None
    verify_threads: _PositiveCount = 1
    max_model_len: _PositiveCount | None = None
    max_num_seqs: _PositiveCount = 4
    num_draft_tokens: _PositiveCount = 4
    cache_size: _PositiveCount | None = None
    num_passes: _Count | None = None
    num_refreshes: _Count | None = None
    cache_threshold: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    prefill_chunk: _PositiveCount = 64
    fallback_timeout_s: Annotated[float, Field(gt=0.0)] = 0.5
    frontend_endpoint: str
    control_endpoint: str
    peer_endpoint: str
    log_level: LogLevel = "info"
    trace_path: str | None = None
    parent_pid: _PositiveCount

    @classmethod
    def from_json(cls, text: str | bytes) -> "WorkerConfig":
        """Read a configuration file's content; raises pydantic's ValidationError, which names the field."""
        return cls.model_validate_json(text)

    def to_json(self) -> str:
        """The file's content."""
        return self.model_dump_json(indent=2)
