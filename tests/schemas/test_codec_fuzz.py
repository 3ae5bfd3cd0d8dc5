"""Whatever arrives, on whatever decoder: a frame, or `Refused` with a code; nothing else ever escapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.schemas.codec import (
    FRAME_BYTES_MAX,
    REQUEST_BYTES_MAX,
    Decoder,
    decode_request,
    encode,
    is_json,
    split_array,
)
from moorage.schemas.errors import CODES, MoorageError, Problem, Refused, problem, refuse
from moorage.schemas.frames import (
    VERSION,
    Accepted,
    Answer,
    Device,
    End,
    Event,
    Events,
    FactAck,
    FactFrame,
    FleetFrame,
    Goodbye,
    Hello,
    Join,
    Joined,
    Load,
    Look,
    Looked,
    Output,
    Place,
    Renew,
    Renewed,
    RollCall,
    Standing,
    Start,
    Wanted,
)

KINDS: list[Any] = [
    Hello, Load, FleetFrame, Join, Joined, Renew, Renewed, FactFrame, FactAck, Goodbye, Wanted, RollCall, Accepted,
    Event, Events, Answer, Output, Problem, Standing, Look, Looked, Join | Goodbye | FactFrame | Renew, dict[str, Any],
]  # fmt: skip
DECODERS = [*(Decoder[Any](kind) for kind in KINDS), decode_request]


def survives(payload: bytes) -> None:
    told: list[Problem] = []
    readers: list[Callable[[bytes], Any]] = [*DECODERS, split_array]
    for decoder in readers:
        try:
            frame = decoder(payload)
        except Refused as refused:
            told.append(refused.problem)
            continue
        assert encode(frame, json=False), "what was read can be answered and recorded in either form"
    assert {problem.code for problem in told} <= {"invalid-argument", "too-large", "unknown-version"}
    assert {problem.fault for problem in told} <= {"caller"}
    assert encode(told)


@given(st.binary(max_size=300))
def test_random_bytes(payload: bytes) -> None:
    survives(payload)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_random_json(value: Any) -> None:
    survives(json.dumps(value).encode())


@given(json_values)
def test_random_msgpack(value: Any) -> None:
    try:
        payload = msgspec.msgpack.encode(value)
    except OverflowError:
        return
    survives(payload)


FRAMES: list[Any] = [
    Hello("w", "b", gpu_pool=[Device(0, "nvidia", "H100", "GPU-0")]),
    Load("w", "b", 1, 1),
    Join("m", "b", 1, Hello("w", "b")),
    Renew("s", 1),
    FactFrame("s", 1, []),
    Goodbye("s"),
    Standing("s1", "0.3.0", 2, 7, settings={"lease_s": 20}),
    Look(1, 2),
    Wanted(
        "w", "s", 1,
        place=[Place("t", "j", 0, 1, 9, [0], "exclusive", False, b"{}")],
        start=[Start("t", "j", 0, 1, 9, "a", 1, 2)],
        end=[End("t", "j", 0, 1, 9, "why")],
    ),
]  # fmt: skip


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
@pytest.mark.parametrize("as_json", [True, False])
def test_frames_round_trip_in_both_encodings(frame: Any, as_json: bool) -> None:
    payload = encode(frame, json=as_json)
    assert is_json(payload) is as_json
    assert Decoder[Any](type(frame))(payload) == frame


@settings(max_examples=150)
@given(st.sampled_from(FRAMES), st.booleans(), st.data())
def test_frames_damaged_in_one_place(frame: Any, as_json: bool, data: st.DataObject) -> None:
    payload = bytearray(encode(frame, json=as_json))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] = data.draw(st.integers(0, 255))
    survives(bytes(payload))
    survives(bytes(payload[: data.draw(st.integers(0, len(payload)))]))


@pytest.mark.slow
@settings(max_examples=150)
@given(st.sampled_from(FRAMES), st.data())
def test_a_field_of_a_wrong_type(frame: Any, data: st.DataObject) -> None:
    fields = msgspec.to_builtins(frame)
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = data.draw(json_values | st.just(2**70) | st.just(-(2**70)))
    survives(json.dumps(fields).encode())


@pytest.mark.parametrize("number", [2**64, 2**200])
@pytest.mark.parametrize(
    "frame",
    [
        {"kind": "standing", "scheduler": "s", "release": "0.3.0", "level": 2, "ledger": "N"},
        {"kind": "standing", "scheduler": "s", "release": "0.3.0", "level": 2, "ledger": 1, "settings": {"a": "N"}},
        {"kind": "look", "ask": "N", "reign": 1},
        {"run": {"argv": ["x"]}, "driver_config": {"handler": {"input": ["N"]}}},
        {"run": {"argv": ["x"]}, "resource_requirements": {"gpu": {"count": "N"}}},
        {"worker": "w0", "slots": ["N"]},
    ],
)
def test_a_number_over_64_bits_is_refused_where_it_is_read(frame: dict[str, Any], number: int) -> None:
    """JSON has such numbers. What was to go on in msgpack with one failed: a submit, `fleet`, a worker's audit."""
    text = json.dumps(frame).replace('"N"', str(number)).encode()
    kind = {"standing": Standing, "look": Look}.get(frame.get("kind", ""), dict[str, Any])
    with pytest.raises(Refused) as refused:
        (decode_request if "run" in frame else Decoder[Any](kind))(text)
    assert refused.value.problem.code == "invalid-argument"
    assert refused.value.problem.message == "a number does not fit into 64 bits"
    assert refused.value.problem.next == "write it as a text, in quotes"
    assert refused.value.problem.field in (
        "$.ledger", "$.settings.a", "$.ask", "$.driver_config.handler.input[0]", "$.resource_requirements.gpu.count",
        "$.slots[0]",
    )  # fmt: skip


@pytest.mark.parametrize("depth", [65, 1_000, 5_000, 100_000, 400_000])
@pytest.mark.parametrize("brackets", [(b"[", b"]"), (b'{"a":', b"}"), (b"\x91", b""), (b"\x81\xa1a", b"")])
def test_deep_nesting(depth: int, brackets: tuple[bytes, bytes]) -> None:
    survives(brackets[0] * depth + (b"1" if brackets[1] else b"\x01") + brackets[1] * depth)


@pytest.mark.parametrize(
    "payload",
    [
        b"", b" ", b"\xff" * 10, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xffa",
        b"\x81\xa4kind\xa1\xff", b'{"kind":"renew","kind":"hello"}', b'{"kind":5}', b'{"v":2}',
        b"{" + b" " * 1000, b"\x00",
        b'"\\ud800"', b'{"a":"\\ud83d"}', b"\xc7\x05\x01abcde", b"\xd6\xff\xff\xff\xff\xff", b'{"a":1e99999}', b"-",
        b"--", b"1.",
    ],
)  # fmt: skip
def test_known_monsters(payload: bytes) -> None:
    survives(payload)


def test_bounds_in_bytes() -> None:
    for decoder, most in ((Decoder[Any](dict[str, Any]), FRAME_BYTES_MAX), (decode_request, REQUEST_BYTES_MAX)):
        with pytest.raises(Refused) as caught:
            decoder(b"{" + b" " * most)
        assert (caught.value.code, caught.value.problem.found) == ("too-large", str(most + 1))
    with pytest.raises(Refused) as caught:
        split_array(b"[" + b" " * FRAME_BYTES_MAX)
    assert caught.value.code == "too-large"


@pytest.mark.parametrize("version", [0, 2, -1, 2**70])
def test_another_version_is_told_so_before_anything_else(version: int) -> None:
    body = b'{"kind":"renew","session":"s","n":1,"v":%d}' % version
    with pytest.raises(Refused) as caught:
        Decoder[Renew](Renew)(body)
    assert (caught.value.code, caught.value.problem.field, caught.value.problem.allowed) == (
        "unknown-version",
        "$.v",
        str(VERSION),
    )


def test_frames_are_lenient_with_fields_of_a_newer_release() -> None:
    assert Decoder[Renew](Renew)(b'{"kind":"renew","session":"s","n":1,"novelty":[1,{"a":2}]}') == Renew("s", 1)


@pytest.mark.parametrize(
    ("body", "field", "found", "allowed"),
    [
        (b'{"run":{"argv":["x"]},"replicas":"two"}', "$.replicas", "str", "int | object"),
        (b'{"run":{"argv":["x"]},"gpu":{"count":0}}', "$.gpu.count", "0", "1..64"),
        (b'{"run":{"argv":["x"]},"gpu":{"cuont":2}}', "$.gpu.cuont", "", ""),
        (b'{"run":{"argv":["x"]},"typo":2}', "$.typo", "", ""),
        (b'{"run":{"argv":["x",5]}}', "$.run.argv[1]", "int", "str"),
        (b'{"run":5}', "$.run", "int", "object | null"),
    ],
)
def test_messages_name_field_found_and_allowed(body: bytes, field: str, found: str, allowed: str) -> None:
    with pytest.raises(Refused) as caught:
        decode_request(body)
    told = caught.value.problem
    assert (told.field, told.found, told.allowed) == (field, found, allowed)


def test_arrays_are_split_and_each_part_is_still_encoded() -> None:
    assert [*map(bytes, split_array(b' [{"a":1}, 2 ,"x"]'))] == [b'{"a":1}', b"2", b'"x"']
    parts = [*map(bytes, split_array(msgspec.msgpack.encode([{"a": 1}, 2])))]
    assert [msgspec.msgpack.decode(part) for part in parts] == [{"a": 1}, 2]


def test_every_code_has_a_fault_and_a_sentence() -> None:
    for code, (fault, text) in CODES.items():
        assert fault in ("caller", "fleet", "moorage")
        assert text[0].islower()
        assert not text.endswith(".")
        assert problem(code, "x").fault == fault
    with pytest.raises(KeyError):
        problem("no-such-code", "x")
    error = refuse("conflict", "twice", job="j", found="x" * 500)
    assert isinstance(error, MoorageError)
    assert len(error.problem.found) == 120
