"""What decoders make of the worst that arrives, and what their refusals say; `tests/release/fuzz` has what chance
makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from moorage.schemas.codec import (
    FRAME_BYTES_MAX,
    REQUEST_BYTES_MAX,
    Decoder,
    decode_request,
    encode,
    named_twice,
    split_array,
)
from moorage.schemas.errors import CODES, MoorageError, Problem, Refused, problem, refuse
from moorage.schemas.frames import (
    VERSION,
    Goodbye,
    Join,
    Look,
    Renew,
    ReportFrame,
    Standing,
    Wanted,
)

READERS: list[Callable[[bytes], Any]] = [
    *(Decoder[Any](kind) for kind in (Wanted, Join | Goodbye | ReportFrame | Renew, dict[str, Any])),
    decode_request,
    split_array,
]


def survives(payload: bytes) -> None:
    told: list[Problem] = []
    for decoder in READERS:
        try:
            frame = decoder(payload)
        except Refused as refused:
            told.append(refused.problem)
            continue
        assert encode(frame, json=False), "what was read can be answered and recorded in either form"
    assert {problem.code for problem in told} <= {"invalid-argument", "too-large", "unknown-version"}
    assert {problem.fault for problem in told} <= {"caller"}
    assert encode(told)


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


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"gpu":{"count":1},"gpu":{"count":2}}', "gpu"),
        (b'{"run":{"env":{"A":"1","A" : "2"}}}', "A"),
        (b'{"priority":1,"pri\\u006frity":2}', "priority"),
        (b'{"run":{"items":[{"lr":1},{"lr":2}]},"after":[{"job":"a"}],"job":"b"}', ""),
        (b'{"run":{"argv":["\\"a\\":", "a:", "b\\":1,\\"b\\":2"]}}', ""),
        (b'{"a":1,"a":', ""),  # the decoder has the word
        (b"\x82\xa1a\x01\xa1b\x02", ""),
    ],
)
def test_a_key_that_an_object_has_twice_is_found(body: bytes, key: str) -> None:
    assert named_twice(body) == key


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
