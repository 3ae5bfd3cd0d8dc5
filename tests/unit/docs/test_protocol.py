"""The protocol page is true: what it shows decodes with the decoders of production, and nothing is left out."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from moorage.schemas import frames, operate
from moorage.schemas.codec import Decoder, decode_request, encode
from moorage.schemas.errors import CODES, Problem, Refused
from moorage.schemas.job import Request
from moorage.schemas.operate import ADMIN_VERBS
from moorage.schemas.subjects import API_VERBS, PREFIX_DEFAULT, Subjects
from moorage.worker.attempt import environment
from tools.examples_of_frames import OF_REQUESTS
from tools.generate import schemas

DOCS: Final = Path(__file__).resolve().parents[3] / "docs"
PAGE: Final = (DOCS / "protocol.md").read_text()
SCHEMAS: Final = {path.stem: json.loads(text) for path, text in schemas().items()}

_BLOCK: Final = re.compile(r"^```(?P<info>[^\n`]+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING: Final = re.compile(r"^#{2,4} `?(?P<name>[\w.-]+)`?$", re.MULTILINE)
_NATS: Final = re.compile(
    r"^nats (?P<verb>req|pub|sub) '?(?P<subject>[\w.*>-]+)'?\s*(?:'(?P<payload>[^']*)')?", re.MULTILINE
)


def blocks(info: str) -> list[tuple[str, str]]:
    """Every JSON block of a title (`sh` for commands), with the heading above it."""
    found = []
    for block in _BLOCK.finditer(PAGE):
        if block["info"] in (f'json title="{info}"', info):
            above = list(_HEADING.finditer(PAGE, 0, block.start()))
            found.append((above[-1]["name"] if above else "", block["body"]))
    return found


def struct_of(name: str) -> type[msgspec.Struct]:
    if name in OF_OPERATORS:
        return OF_OPERATORS[name]
    found: type[msgspec.Struct] = getattr(frames, name)
    return found


#: frames that are not in `schemas.frames`
OF_OPERATORS: Final[dict[str, type[msgspec.Struct]]] = {
    "Problem": Problem,
    "Done": operate.Done,
    "DeadLetter": operate.DeadLetter,
}
FRAMES: Final = blocks("frame")


def test_every_frame_is_shown() -> None:
    tagged = {
        name
        for name, kind in vars(frames).items()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__struct_config__.tag is not None
    }
    assert {name for name, _ in FRAMES} == tagged | set(OF_OPERATORS)


def newer(raw: Any, frame: Any) -> Any:
    """The message with something unknown wherever a later release may add a field."""
    if isinstance(frame, list):
        return [newer(one, other) for one, other in zip(raw, frame, strict=True)]
    if not isinstance(frame, msgspec.Struct):
        return raw
    if isinstance(raw, dict):
        told = {name: newer(value, getattr(frame, name, None)) for name, value in raw.items()}
        return told | {"novelty": {"of": ["a later release", 1, None]}}
    fields = frame.__struct_fields__
    known = [newer(value, getattr(frame, name)) for name, value in zip(fields, raw, strict=False)]
    # fields that are left out at the end come before those of a later release
    rest = [msgspec.to_builtins(getattr(frame, name), builtin_types=(bytes,)) for name in fields[len(raw) :]]
    return [*known, *rest, "novelty", {"novelty": [1]}]


@pytest.mark.parametrize(("name", "body"), FRAMES, ids=[name for name, _ in FRAMES])
def test_a_frame_decodes_and_says_the_same_again(name: str, body: str) -> None:
    decode: Decoder[Any] = Decoder(struct_of(name))
    frame = decode(body.encode())
    assert json.loads(encode(frame)) == json.loads(body)
    assert decode(encode(frame, json=False)) == frame
    # lenient: what a newer release adds passes, as the page promises for frames
    later = newer(json.loads(body), frame)
    assert later != json.loads(body)
    assert decode(json.dumps(later).encode()) == frame
    if name == "Problem":
        assert CODES[frame.code][0] == frame.fault


def test_every_request_decodes_and_strictly() -> None:
    shown = blocks("request")
    assert shown
    for _, body in shown:
        decode_request(body.encode())
        with pytest.raises(Refused):
            decode_request(json.dumps({**json.loads(body), "unknown": 1}).encode())


def test_every_act_of_an_operator_decodes_strictly() -> None:
    shown = blocks("act")
    acts: dict[str, type[msgspec.Struct]] = {**operate.ACTS, "dlq": operate.DlqAct}
    assert [name for name, _ in shown] == [f"admin.{verb}" for verb in acts]
    for name, body in shown:
        verb, act = name.removeprefix("admin."), json.loads(body)
        read = operate.DlqAct.of if verb == "dlq" else partial(operate.act_of, verb)
        assert json.loads(encode(read(act))) == act
        with pytest.raises(Refused):
            read({**act, "unknown": 1})


def test_every_field_of_a_request_has_a_description() -> None:
    structs = SCHEMAS["request"]["$defs"]
    for name in (Request.__name__, *(struct.__name__ for struct in OF_REQUESTS.values())):
        lacking = [field for field, shown in structs[name]["properties"].items() if not shown.get("description")]
        assert lacking == [], name


def test_every_command_on_the_page_can_be_typed() -> None:
    lines = [found for _, body in blocks("sh") for found in _NATS.finditer(body)]
    lines += [
        found for found in _NATS.finditer("\n".join(re.findall(r"`(nats [^`]*)`", PAGE))) if found["payload"] != "…"
    ]
    assert {found["verb"] for found in lines} >= {"sub", "req"}
    known = [row.subject for row in Subjects().table()]
    for found in lines:
        subject, payload = found["subject"], found["payload"]
        word = r"[\\w*-]+" if found["verb"] == "sub" else r"[\\w-]+"
        assert any(re.fullmatch(re.sub(r"<\w+>", word, each), subject) for each in known), subject
        if payload is None:
            continue
        verb = subject.rpartition(".")[2]
        assert verb in (ADMIN_VERBS if subject.startswith(f"{PREFIX_DEFAULT}.admin.") else API_VERBS)
        if verb == "submit":
            decode_request(payload.encode())
        else:
            assert isinstance(json.loads(payload), dict)


def part(title: str) -> str:
    """The text below a heading of the second order."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_variable_of_a_job_is_on_the_page() -> None:
    page = part("The environment of a job")
    devices = [frames.Device(0, vendor, "name", "GPU-0123456789abcdef") for vendor in ("nvidia", "amd", "intel")]
    made = environment.gpu_environment(
        devices,
        tenant="t",
        job="j",
        replica=0,
        attempt=1,
        fence=9,
        mode="mps",
        gang=environment.Gang(2, "127.0.0.1", 29500, "eth0"),
        traceparent="00",
        simulated=True,
    )
    names = {*made, *environment.process_environment({}, made)}
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_every_error_that_a_worker_is_told_to_expect_is_one() -> None:
    codes = {
        code
        for line in re.findall(r"^\| (`.*?) \|", part("A worker"), re.M)
        for code in re.findall(r"`([\w-]+)`", line)
    }
    assert {"gap", "session-over", "stale-join", "worker-id-in-use"} <= codes <= set(CODES)
