"""Encoding and decoding: tensors come back byte for byte, and no bytes do worse than `MalformedMessage`."""

import array
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import MalformedMessage, MessageTooLarge
from protocol.frames import (
    ITEM_BYTES,
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    DType,
    Envelope,
    Part,
    TensorFrame,
    decode,
    encode,
)
from protocol.messages import (
    FRONTEND_MESSAGES,
    PEER_MESSAGES,
    PROTOCOL_VERSION,
    Abort,
    Block,
    ContextRows,
    PeerHello,
    PeerRejected,
    Stop,
)

RUN_ID = "f" * 32
ROWS = ContextRows(sequence_id=3, start=16, num_rows=2)
BLOCK = Block(sequence_id=3, round=1, anchor=5, drafts=[6, 7], source="fallback")
HELLO = PeerHello(
    role="verifier",
    pid=1,
    protocol_version=PROTOCOL_VERSION + 1,
    target_fingerprint="",
    vocab_size=1,
    hidden_size=1,
    tap_layers=[],
    decoder_layers=[],
    num_draft_tokens=0,
    dtype="float32",
    max_model_len=1,
    max_num_seqs=1,
)


def row_frames() -> list[TensorFrame]:
    return [TensorFrame("float32", (2, 3), bytes(range(24))), TensorFrame("uint8", (2, 0, 2), b"")]


def row_parts() -> list[Part]:
    return encode(Envelope(RUN_ID, ROWS), row_frames())


def header(**changes: object) -> bytes:
    fields: dict[str, object] = {
        "version": PROTOCOL_VERSION,
        "run_id": RUN_ID,
        "message": BLOCK.model_dump(),
        "frames": [],
    }
    packed: bytes = msgpack.packb({**fields, **changes})
    return packed


def test_the_untouched_header_is_good() -> None:
    assert decode([header()], PEER_MESSAGES).message == BLOCK


def test_every_dtype_has_a_size() -> None:
    assert set(ITEM_BYTES) == set(get_args(DType))


def test_tensor_data_is_not_copied() -> None:
    data = bytearray(24)
    parts = encode(Envelope(RUN_ID, ROWS), [TensorFrame("float32", (2, 3), memoryview(data)), row_frames()[1]])
    data[0] = 7
    assert parts[1][0] == 7
    received = decode(parts, PEER_MESSAGES)
    data[1] = 8
    assert bytes(received.frames[0].data[:2]) == b"\x07\x08"


def test_a_frame_takes_a_view_of_any_shape() -> None:
    numbers = memoryview(array.array("i", range(6))).cast("B").cast("i", (2, 3))
    frame = TensorFrame("int32", (2, 3), numbers)
    received = decode(encode(Envelope(RUN_ID, ROWS), [frame, row_frames()[1]]), PEER_MESSAGES)
    assert bytes(received.frames[0].data) == array.array("i", range(6)).tobytes()


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [
        ("float32", (2, 3), bytes(23)),
        ("float32", (2, 3), bytes(25)),
        ("float64", (1,), bytes(8)),
        ("uint8", (-1, -1), bytes(1)),
        ("uint8", (1,) * 9, bytes(1)),
        ("uint8", (4,), memoryview(bytes(8))[::2]),
    ],
)
def test_a_frame_that_contradicts_itself_is_refused(dtype: Any, shape: tuple[int, ...], data: Part) -> None:
    with pytest.raises(MalformedMessage):
        TensorFrame(dtype, shape, data)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        row_frames()[:1],
        [*row_frames(), row_frames()[0]],
        [row_frames()[0], TensorFrame("uint8", (3, 0), b"")],
        [row_frames()[0], TensorFrame("uint8", (), b"x")],
    ],
)
def test_frames_must_be_those_the_message_announces(frames: list[TensorFrame]) -> None:
    with pytest.raises(MalformedMessage):
        encode(Envelope(RUN_ID, ROWS), frames)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b""],
        [header()[:-1]],
        [header() + b"\x00"],
        [header(), b""],
        [header()] + [b""] * (MAX_FRAMES + 1),
        [header(version=PROTOCOL_VERSION + 1)],
        [header(version="1")],
        [header(run_id="F" * 32)],
        [header(run_id="f" * 31)],
        [header(run_id="f" * 32 + "\n")],
        [header(extra=1)],
        [header(message=[])],
        [header(message={**BLOCK.model_dump(), "kind": "shutdown"})],
        [header(message={**BLOCK.model_dump(), "round": -1})],
        [header(message={**BLOCK.model_dump(), "drafts": [1 << 40]})],
        [header(message={**BLOCK.model_dump(), "anchor": msgpack.ExtType(5, b"x")})],
        [header(message={**BLOCK.model_dump(), "anchor": msgpack.Timestamp(1)})],
        [header(message={**BLOCK.model_dump(), "anchor": b"x"})],
        [header(message={1: 2})],
        [header(frames=[{"dtype": "uint8", "shape": [1]}]), b"x"],
        [msgpack.packb({"version": PROTOCOL_VERSION})],
        [b"\x91" * 5000 + b"\xc0"],
        [b"\xc1"],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\xa2\xff\xff"],
    ],
)
def test_malformed_messages_are_refused(parts: list[Part]) -> None:
    with pytest.raises(MalformedMessage):
        decode(parts, PEER_MESSAGES)


def test_an_ext_type_is_refused_whatever_its_code() -> None:
    for code in range(-128, 128):
        with pytest.raises(MalformedMessage, match="msgpack"):
            decode([b"\xd4" + code.to_bytes(1, "big", signed=True) + b"x"], PEER_MESSAGES)
        with pytest.raises(MalformedMessage, match="msgpack"):
            decode([b"\xc7\x00" + code.to_bytes(1, "big", signed=True)], PEER_MESSAGES)


@pytest.mark.parametrize("message", [HELLO, PeerRejected(reason="upgrade first")])
def test_the_handshake_is_read_whatever_its_version(message: PeerHello | PeerRejected) -> None:
    parts = encode(Envelope(RUN_ID, message, version=PROTOCOL_VERSION + 1))
    assert decode(parts, PEER_MESSAGES).message == message


def test_truncating_any_part_is_noticed() -> None:
    parts = row_parts()
    for index in range(len(parts)):
        with pytest.raises(MalformedMessage):
            decode(parts[:index] + parts[index + 1 :], PEER_MESSAGES)
        for length in range(len(parts[index])):
            with pytest.raises(MalformedMessage):
                decode([*parts[:index], parts[index][:length], *parts[index + 1 :]], PEER_MESSAGES)


def test_oversized_messages_are_refused_on_both_sides() -> None:
    parts = row_parts()
    num_bytes = sum(map(len, parts))
    assert decode(parts, PEER_MESSAGES, max_bytes=num_bytes).message == ROWS
    with pytest.raises(MalformedMessage, match="more than"):
        decode(parts, PEER_MESSAGES, max_bytes=num_bytes - 1)
    encode(Envelope(RUN_ID, ROWS), row_frames(), max_bytes=num_bytes)
    with pytest.raises(MessageTooLarge) as caught:
        encode(Envelope(RUN_ID, ROWS), row_frames(), max_bytes=num_bytes - 1)
    assert (caught.value.num_bytes, caught.value.limit_bytes) == (num_bytes, num_bytes - 1)


def test_an_oversized_header_is_not_even_unpacked() -> None:
    with pytest.raises(MalformedMessage, match="header"):
        decode([b"\xc0" * (MAX_HEADER_BYTES + 1)], PEER_MESSAGES)


def test_the_reason_does_not_quote_the_message() -> None:
    secret = "a user's own words"
    with pytest.raises(MalformedMessage) as caught:
        decode([header(message={**BLOCK.model_dump(), "source": secret, "anchor": secret})], PEER_MESSAGES)
    assert secret not in caught.value.reason
    assert "anchor" in caught.value.reason


def test_a_long_faulty_list_is_reported_by_its_first_fault() -> None:
    fields = {**BLOCK.model_dump(), "drafts": [-1] * 60}
    with pytest.raises(MalformedMessage, match=r"drafts\.0"):
        decode([header(message=fields)], PEER_MESSAGES)


JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=64), max_size=4))
def test_any_bytes_are_refused_in_one_way(parts: list[bytes]) -> None:
    with pytest.raises(MalformedMessage):
        decode(parts, PEER_MESSAGES)


@settings(max_examples=200, deadline=None)
@given(JSON_LIKE, st.sampled_from(["version", "run_id", "message", "frames"]))
def test_any_value_in_any_place_is_refused_in_one_way(value: object, place: str) -> None:
    try:
        received = decode([header(**{place: value})], PEER_MESSAGES)
    except MalformedMessage:
        return
    assert value == {"version": PROTOCOL_VERSION, "run_id": RUN_ID, "message": received.message, "frames": []}[place]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_flipped_byte_is_refused_or_still_a_checked_message(data: st.DataObject) -> None:
    parts = [bytearray(part) for part in row_parts()]
    part = parts[data.draw(st.integers(0, 1))]
    part[data.draw(st.integers(0, len(part) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        received = decode([bytes(part) for part in parts], PEER_MESSAGES)
    except MalformedMessage:
        return
    assert PEER_MESSAGES.validate_python(received.message.model_dump()) == received.message
    assert len(received.frames) == received.message.num_frames


@settings(max_examples=50, deadline=None)
@given(
    dtype=st.sampled_from(get_args(DType)),
    shape=st.lists(st.integers(0, 4), max_size=4),
    num_rows=st.integers(1, 4),
    data=st.data(),
)
def test_any_tensor_comes_back_as_it_was(dtype: DType, shape: list[int], num_rows: int, data: st.DataObject) -> None:
    full_shape = (num_rows, *shape)
    num_bytes = ITEM_BYTES[dtype]
    for size in full_shape:
        num_bytes *= size
    frame = TensorFrame(dtype, full_shape, data.draw(st.randoms(use_true_random=False)).randbytes(num_bytes))
    message = ContextRows(sequence_id=0, start=0, num_rows=num_rows)
    received = decode(encode(Envelope(RUN_ID, message), [frame, frame]), PEER_MESSAGES)
    assert received.frames == (frame, frame)


@given(st.integers(0, (1 << 63) - 1))
@settings(max_examples=50, deadline=None)
def test_any_sequence_id_comes_back_as_it_was(sequence_id: int) -> None:
    parts = encode(Envelope(RUN_ID, Abort(sequence_id=sequence_id)))
    assert decode(parts, FRONTEND_MESSAGES).message == Abort(sequence_id=sequence_id)


def test_a_message_without_frames_is_one_part() -> None:
    assert len(encode(Envelope(RUN_ID, Stop()))) == 1
