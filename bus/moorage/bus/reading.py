"""nats-py's client, whose reader no message ends.

Who may publish a message chooses its reply subject and its headers, often also the end of its subject, and the server
hands on whatever these are. So a message is read here as the server writes it, and what of its text cannot be read
costs that text alone.
"""

from __future__ import annotations

import re
from typing import Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import Header
from nats.protocol import parser

_VERSION: Final = "NATS/1.0"
#: the lines of messages as the server writes them, for all clients of this process: nats-py has no other place for it.
#: There are two blanks where a message of the server's own has an empty reply
_WORD: Final = rb"([^ \t\r\n]+)"
parser.MSG_RE = re.compile(rb"\AMSG +%b +(\d+) +(%b +)?(\d+)\r\n" % (_WORD, _WORD))
parser.HMSG_RE = re.compile(rb"\AHMSG +%b +(\d+) +(%b +)?(\d+) +(\d+)\r\n" % (_WORD, _WORD))


class Reading(Client):
    """A client that reads every message: what of its text is no UTF-8 is U+FFFD, and headers that are none are left
    out."""

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        text = subject.decode(errors="replace"), reply.decode(errors="replace")
        return Msg(self, *text, data, headers, _sid=sid)

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        if not headers:
            return None
        first, *lines = headers.decode(errors="replace").split("\r\n")
        found: dict[str, str] = {}
        if len(first) > len(_VERSION):  # what the server says by itself, as `NATS/1.0 503`
            status, _, description = first[len(_VERSION) :].strip().partition(" ")
            if status.isdigit():
                found[Header.STATUS] = status
            if description:
                found[Header.DESCRIPTION] = description
        for line in lines:
            name, colon, value = line.partition(":")
            if colon and name.isascii():
                found[name.strip()] = value.strip()
        return found or None
