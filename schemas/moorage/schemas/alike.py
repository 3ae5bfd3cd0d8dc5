"""Requests that differ only in their names, such as those of a sweep, are decoded and checked once.

A body that begins with its job's name is looked up by the bytes after the name. No rule is weakened by that: a body
counts as known only if the very same bytes were decoded and checked before, and its name is checked by itself.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from moorage.schemas.codec import decode_request, identity
from moorage.schemas.job import Request

#: what is remembered at most; then it begins anew
KNOWN_MAX: Final = 1024
BYTES_MAX: Final = 4096
_NAMED: Final = re.compile(rb'\{\s*"job"\s*:\s*"([A-Za-z0-9_-]{1,64})"\s*,').match


class Asked:
    """What a request asks for. `request.job` is None where others asked alike: the name stands beside it."""

    __slots__ = ("_before", "_behind", "request", "shape", "workload")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.shape: Any = None  # whatever the reader's owner made of it
        self.workload = ""  # and what it called it
        self._before = self._behind = b""

    def identity(self, name: str | None) -> bytes:
        """The canonical form (see `codec.identity`) of this request under a job name; None: it has none."""
        if name is None or self.request.job == name:
            return identity(self.request)
        if not self._before:
            # the two differ in one byte, the name's only one; before it stands the byte that says its length
            a, b = (identity(msgspec.structs.replace(self.request, job=job)) for job in "ab")
            at = next(at for at, (one, other) in enumerate(zip(a, b, strict=True)) if one != other)
            self._before, self._behind = a[: at - 1], a[at + 1 :]
        raw = name.encode()
        head = bytes((0xA0 | len(raw),)) if len(raw) < 32 else bytes((0xD9, len(raw)))  # msgpack fixstr, str 8
        return self._before + head + raw + self._behind


class Requests:
    """A reader of request bodies that remembers what it has read."""

    def __init__(self) -> None:
        self._known: dict[bytes, Asked | None] = {}

    def read(self, body: bytes) -> tuple[str | None, Asked]:
        """The job's name, if the body says one, and what it asks for. Raises `Refused` as `decode_request` does."""
        named = _NAMED(body)
        if named is None:
            asked = Asked(decode_request(body))
            return asked.request.job, asked
        rest = body[named.end() :]
        known = self._known
        found = known.get(rest)
        if found is not None:
            return named[1].decode(), found
        request = decode_request(body)
        if len(rest) <= BYTES_MAX and request.job == named[1].decode():
            if rest not in known:  # one alone is not worth a second decoding
                if len(known) >= KNOWN_MAX:
                    known.clear()
                known[rest] = None
            elif b'"job"' not in rest and b"\\" not in rest:  # no second name in there, not a disguised one either
                known[rest] = asked = Asked(decode_request(b"{" + rest))
                return request.job, asked
        return request.job, Asked(request)
