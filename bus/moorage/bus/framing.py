"""Small functions over the text of NATS: checks of subjects, header blocks, names of inboxes."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Final

from moorage.bus.errors import BadSubject

#: Bytes of one subject that we accept; the server's control line is 4,096 with reply and sizes in it.
SUBJECT_BYTES_MAX: Final = 1024
#: Bytes of a subject and a reply together that leave: the sizes behind them have the rest of the control line.
LINE_BYTES_MAX: Final = 4096 - 64
INBOX_PREFIX_DEFAULT: Final = "_INBOX"
_INBOX_RANDOM_BYTES: Final = 12

_TOKEN = re.compile(r"[^\s.*>]+")
_SUBJECT = re.compile(r"[^\s.*>]+(?:\.[^\s.*>]+)*")
_FILTER = re.compile(r"(?:[^\s.*>]+|\*)(?:\.(?:[^\s.*>]+|\*))*(?:\.>)?|>")


def is_token(text: str) -> bool:
    """Return whether a text is one token of a subject: not empty, and without dot, wildcard and blank."""
    return _TOKEN.fullmatch(text) is not None


def check_subject(subject: str) -> str:
    """Return `subject` if it can be published to; raise `BadSubject` otherwise. A blank in it would inject protocol."""
    if len(subject) > SUBJECT_BYTES_MAX:
        raise BadSubject(subject[:80] + "…", f"at most {SUBJECT_BYTES_MAX} characters")
    if _SUBJECT.fullmatch(subject) is None:
        raise BadSubject(subject, "tokens without blanks, wildcards or empty parts")
    return subject


def check_filter(subject: str) -> str:
    """Return `subject` if it can be subscribed to (wildcards allowed); raise `BadSubject` otherwise."""
    if len(subject) > SUBJECT_BYTES_MAX:
        raise BadSubject(subject[:80] + "…", f"at most {SUBJECT_BYTES_MAX} characters")
    if _FILTER.fullmatch(subject) is None:
        raise BadSubject(subject, "tokens without blanks or empty parts, `*` or a final `>`")
    return subject


def new_inbox(prefix: str) -> str:
    """Return `<prefix>.<random>`: 96 random bits, so that no other client can guess where our answers arrive."""
    return f"{prefix}.{secrets.token_urlsafe(_INBOX_RANDOM_BYTES).replace('-', 'A').replace('_', 'B')}"


def headers_size_bytes(headers: Mapping[str, str] | None) -> int:
    """Return how many bytes these headers take on the wire (NATS ADR-4), to check a message against max_payload."""
    if not headers:
        return 0
    return 12 + 4 * len(headers) + len("".join([part for pair in headers.items() for part in pair]).encode())


def parse_headers(block: bytes) -> dict[str, str] | None:
    """Return a header block (`NATS/1.0`, then `Key: value` lines, NATS ADR-4) as a dict; None if it has no header.

    Of a repeated key, the last value is kept. Lines that are no header are skipped; bytes that are not UTF-8 become
    U+FFFD.
    """
    found: dict[str, str] = {}
    for line in block.split(b"\r\n")[1:]:
        key, colon, value = line.partition(b":")
        if colon and key and not key.isspace():
            found[key.decode("utf-8", "replace").strip()] = value.decode("utf-8", "replace").strip()
    return found or None


def check_line(subject: str, reply: str) -> None:
    """Raise `BadSubject` if a subject and its reply are longer than a line that a server takes, which would cut the
    connection. Who asks chooses the reply, and a member sends it on behind a longer subject."""
    if 4 * (len(subject) + len(reply)) > LINE_BYTES_MAX and len((subject + reply).encode()) > LINE_BYTES_MAX:
        raise BadSubject(subject[:80], f"at most {LINE_BYTES_MAX} bytes, its reply included")


def is_subject(subject: str) -> bool:
    """Return whether a subject may be published to, as nats-py checks it: not empty, no blank."""
    return subject.split(None, 1)[:1] == [subject]
