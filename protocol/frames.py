"""Messages as bytes: a msgpack header with the envelope, then one raw part for each tensor frame.

Knows nothing of sockets and of run ids beyond their form. Whatever bytes arrive, `decode` returns a checked message or
raises `MalformedMessage`, and nothing else.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, NoReturn, TypeVar

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from protocol.errors import MalformedMessage, MessageTooLarge
from protocol.fields import MAX_GRAMMAR_CHARACTERS, MAX_PROMPT_TOKENS, WireModel
from protocol.messages import PROTOCOL_VERSION, WireMessage

DType = Literal["float32", "bfloat16", "float16", "int64", "int32", "uint8"]
Part = bytes | memoryview
MessageT = TypeVar("MessageT", bound=WireMessage)
MessageT_co = TypeVar("MessageT_co", bound=WireMessage, covariant=True)

ITEM_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}
MAX_DIMENSIONS = 8
MAX_FRAMES = 8
MAX_HEADER_BYTES = 8 << 20
MAX_STRING_BYTES = 4 * MAX_GRAMMAR_CHARACTERS  # of UTF-8, for the longest text that a message may hold
MAX_MESSAGE_BYTES = 64 << 20
RUN_ID_PATTERN = "^[0-9a-f]{32}$"


@dataclass(frozen=True, slots=True)
class TensorFrame:
    """A tensor as contiguous bytes of a declared type and shape; raises `MalformedMessage` when they do not agree."""

    dtype: DType
    shape: tuple[int, ...]
    data: Part = field(repr=False)

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise MalformedMessage("unknown tensor dtype")
        if len(self.shape) > MAX_DIMENSIONS or any(size < 0 for size in self.shape):
            raise MalformedMessage(f"a tensor has at most {MAX_DIMENSIONS} dimensions, none negative")
        if isinstance(self.data, memoryview) and not self.data.c_contiguous:
            raise MalformedMessage("tensor data is not contiguous")
        num_bytes = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if num_bytes != part_bytes(self.data):
            raise MalformedMessage(
                f"a {self.dtype} tensor of shape {self.shape} does not have {part_bytes(self.data)} bytes"
            )


@dataclass(frozen=True, slots=True)
class Envelope(Generic[MessageT_co]):
    """What is wrapped around every message: which protocol and which run of the server it belongs to."""

    run_id: str
    message: MessageT_co
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Received(Generic[MessageT_co]):
    """A message that passed every check of its form. Frames may be views onto the received bytes."""

    run_id: str
    message: MessageT_co
    frames: tuple[TensorFrame, ...]


class _FrameHeader(WireModel):
    dtype: DType
    shape: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 40)]], Field(max_length=MAX_DIMENSIONS)]


class _Header(WireModel):
    version: Annotated[int, Field(ge=0, lt=1 << 31)]
    run_id: Annotated[str, Field(pattern=RUN_ID_PATTERN)]
    message: dict[str, Any]
    frames: Annotated[list[_FrameHeader], Field(max_length=MAX_FRAMES)]


def part_bytes(part: Part) -> int:
    """Length in bytes; `len` of a memoryview counts items of its first dimension instead."""
    return part.nbytes if isinstance(part, memoryview) else len(part)


def encode(
    envelope: Envelope[WireMessage], frames: Sequence[TensorFrame] = (), max_bytes: int = MAX_MESSAGE_BYTES
) -> list[Part]:
    """Parts to send, tensor data uncopied. Raises `MessageTooLarge`, or `MalformedMessage` for unfitting frames."""
    _check_frames(envelope.message, frames)
    header = {
        "version": envelope.version,
        "run_id": envelope.run_id,
        "message": envelope.message.model_dump(),
        "frames": [{"dtype": frame.dtype, "shape": frame.shape} for frame in frames],
    }
    packed: bytes = msgpack.packb(header)
    if len(packed) > MAX_HEADER_BYTES:
        raise MessageTooLarge(len(packed), MAX_HEADER_BYTES)
    parts: list[Part] = [packed, *(frame.data for frame in frames)]
    num_bytes = sum(map(part_bytes, parts))
    if num_bytes > max_bytes:
        raise MessageTooLarge(num_bytes, max_bytes)
    return parts


def decode(
    parts: Sequence[Part], incoming: TypeAdapter[MessageT], max_bytes: int = MAX_MESSAGE_BYTES
) -> Received[MessageT]:
    """The message in `parts`, one of the union `incoming`; raises `MalformedMessage` for anything else."""
    if not 1 <= len(parts) <= 1 + MAX_FRAMES:
        raise MalformedMessage(f"{len(parts)} parts")
    if sum(map(part_bytes, parts)) > max_bytes:
        raise MalformedMessage(f"more than {max_bytes} bytes")
    unpacked = _unpack(parts[0])
    try:
        header = _Header.model_validate(unpacked)
        message = incoming.validate_python(header.message)
    except ValidationError as error:
        raise MalformedMessage(_describe(error)) from None
    if header.version != PROTOCOL_VERSION and not message.any_version:
        raise MalformedMessage(f"protocol version {header.version} instead of {PROTOCOL_VERSION}")
    if len(header.frames) != len(parts) - 1:
        raise MalformedMessage(f"{len(header.frames)} frames declared, {len(parts) - 1} received")
    frames = tuple(
        TensorFrame(declared.dtype, tuple(declared.shape), part)
        for declared, part in zip(header.frames, parts[1:], strict=True)
    )
    _check_frames(message, frames)
    return Received(header.run_id, message, frames)


def _unpack(part: Part) -> object:
    """One msgpack value from one part. Extension types are refused, hence no timestamps either."""
    if part_bytes(part) > MAX_HEADER_BYTES:
        raise MalformedMessage(f"a header of more than {MAX_HEADER_BYTES} bytes")
    try:
        unpacked: object = msgpack.unpackb(
            part,
            raw=False,
            strict_map_key=True,
            max_str_len=MAX_STRING_BYTES,
            max_bin_len=0,
            max_array_len=MAX_PROMPT_TOKENS,
            max_map_len=64,
            max_ext_len=0,
            ext_hook=_refuse_extension,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not msgpack within the limits: {type(error).__name__}") from None
    return unpacked


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code} of {len(data)} bytes")


def _check_frames(message: WireMessage, frames: Sequence[TensorFrame]) -> None:
    if len(frames) != message.num_frames:
        raise MalformedMessage(f"{type(message).__name__} has {message.num_frames} frames, not {len(frames)}")
    num_rows = message.num_frame_rows
    for frame in frames:
        if not frame.shape or frame.shape[0] != num_rows:
            raise MalformedMessage(f"a frame of shape {frame.shape} where {num_rows} rows are announced")


def _describe(error: ValidationError) -> str:
    """The first fault, by field and rule. The rejected value is left out: it may be long, or a user's text."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part)[:40] for part in first["loc"][:6]) or "message"
    return f"{where}: {first['type']}"
