"""Messages are read as the server writes them, and text that cannot be read costs that text alone."""

from __future__ import annotations

import pytest
from nats.aio.client import Client
from nats.protocol import parser

from moorage.bus.reading import Reading


class Unreadable(bytes):
    """Harmless bytes that no strict reader can read."""

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        if errors == "strict":
            raise UnicodeDecodeError(encoding, bytes(self), 0, 1, "played")
        return "\ufffd" * len(self)


def test_a_text_that_cannot_be_read_costs_that_text_alone() -> None:
    message = Reading()._build_message(1, b"a.b", Unreadable(b"xy"), b"data", None)
    assert (message.subject, message.reply, message.data) == ("a.b", "\ufffd\ufffd", b"data")
    assert Reading()._build_message(1, Unreadable(b"x"), b"r", b"", None).subject == "\ufffd"


@pytest.mark.parametrize(
    "headers",
    [
        "",
        "\r\nMoorage-Wait-Ms: 90000\r\nContent-Type:application/json",
        "\r\nA: b: c \r\nName: Zoë",
        " 503",
        " 404 No Messages",
        " 100 Idle Heartbeat\r\nNats-Last-Consumer: 1016\r\nNats-Last-Stream: 1024",
    ],
)
async def test_headers_are_read_as_nats_py_reads_them(headers: str) -> None:
    block = f"NATS/1.0{headers}\r\n\r\n".encode()
    assert await Reading()._process_headers(block) == await Client()._process_headers(block)


async def test_headers_that_cannot_be_read_are_none() -> None:
    assert await Reading()._process_headers(Unreadable(b"NATS/1.0\r\nA: b\r\n\r\n")) is None
    assert await Reading()._process_headers(None) is None


@pytest.mark.parametrize(
    ("line", "subject", "number", "reply", "sizes"),
    [
        (b"MSG a.b 7 2\r\n", b"a.b", b"7", None, (b"2",)),
        (b"MSG a.b 7 _INBOX.x 2\r\n", b"a.b", b"7", b"_INBOX.x", (b"2",)),
        (b"MSG $JS.EVENT.ADVISORY.API 2  760\r\n", b"$JS.EVENT.ADVISORY.API", b"2", None, (b"760",)),
        (b"HMSG a.b 7 12 14\r\n", b"a.b", b"7", None, (b"12", b"14")),
        (b"HMSG a.b 7 _INBOX.x 12 14\r\n", b"a.b", b"7", b"_INBOX.x", (b"12", b"14")),
    ],
)
def test_lines_are_read_as_the_server_writes_them(
    line: bytes, subject: bytes, number: bytes, reply: bytes | None, sizes: tuple[bytes, ...]
) -> None:
    found = (parser.HMSG_RE if line.startswith(b"H") else parser.MSG_RE).match(line)
    assert found is not None
    got_subject, got_number, _, got_reply, *got_sizes = found.groups()
    assert (got_subject, got_number, got_reply, tuple(got_sizes)) == (subject, number, reply, sizes)


@pytest.mark.parametrize("line", [b"MSG a.b x 2\r\n", b"MSG a.b 7 r s 2\r\n", b"MSG a.b 7\r\n"])
def test_no_other_line_is_one_of_a_message(line: bytes) -> None:
    assert parser.MSG_RE.match(line) is None
