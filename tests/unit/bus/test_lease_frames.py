"""The frames of the lease socket, version 1: any process may speak them, so their bytes do not change."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.bus.lend.protocol import (
    PROTOCOL,
    Answer,
    AskedBack,
    Borrow,
    GiveBack,
    Granted,
    Request,
    Returned,
    frame,
    read_answer,
    read_request,
)
from moorage.schemas.errors import problem
from moorage.schemas.frames import Device
from moorage.schemas.gpu import GpuSpec
from moorage.system.framing import framed

PAGE = Path(__file__).parents[3] / "docs/protocol.head.md"
T4 = Device(0, "nvidia", "Tesla T4", "GPU-1", 15360)
#: a message, and its frame as version 1 has it
VERSION_1: list[tuple[Request | Answer, str]] = [
    (
        Borrow(GpuSpec(model=["T4"]), "fine-tune"),
        "00000030242547a083a46b696e64a6626f72726f77a3677075de0001a56d6f64656c91a25434a7707572706f7365a966696e652d74756e65",
    ),
    (GiveBack(), "00000010394c5a2881a46b696e64a9676976652d6261636b"),
    (
        Granted("n1", [T4]),
        "0000005efc459cea83a46b696e64a76772616e746564a6776f726b6572a26e31a7646576696365739185a5696e64657800a676656e646f72"
        "a66e7669646961a46e616d65a85465736c61205434a475756964a54750552d31aa6d656d6f72795f6d6962cd3c00",
    ),
    (
        AskedBack("drained", 12.5),
        "0000003de704a9c583a46b696e64aa61736b65642d6261636ba6726561736f6ea7647261696e6564b3646561646c696e655f626f6f747469"
        "6d655f73cb4029000000000000",
    ),
    (Returned(), "0000000fe9575b6881a46b696e64a872657475726e6564"),
]


@pytest.mark.parametrize(("message", "recorded"), VERSION_1, ids=[type(message).__name__ for message, _ in VERSION_1])
async def test_a_frame_of_version_1_is_written_and_read_as_it_was_recorded(
    message: Request | Answer, recorded: str
) -> None:
    assert (PROTOCOL, frame(message).hex()) == (1, recorded)
    assert await read(bytes.fromhex(recorded), message) == message


@pytest.mark.parametrize("message", [message for message, _ in VERSION_1], ids=lambda message: type(message).__name__)
async def test_a_field_that_is_not_known_is_ignored(message: Request | Answer) -> None:
    more = msgspec.msgpack.decode(frame(message)[8:]) | {"of_a_later_release": 1}
    assert await read(frame_of(more), message) == message


def frame_of(fields: dict[str, Any]) -> bytes:
    return framed(msgspec.msgpack.encode(fields), 1 << 16)


async def read(data: bytes, like: Request | Answer) -> Request | Answer | None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    return await (read_request(reader) if isinstance(like, Borrow | GiveBack) else read_answer(reader))


def test_the_page_has_each_frame() -> None:
    section = PAGE.read_text().partition("## A lease of a process")[2].partition("\n## ")[0]
    told = set(re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE))
    messages = [*(message for message, _ in VERSION_1), problem("internal", "x")]
    assert told == {msgspec.to_builtins(message)["kind"] for message in messages}
