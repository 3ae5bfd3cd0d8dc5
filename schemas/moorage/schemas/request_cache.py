"""A cache of decoded requests: bodies that differ only in the job's name, as in a sweep, are decoded and checked once.

A body that begins with its job's name is looked up by the bytes after the name. This weakens no check: the cache
answers only for bytes that were decoded and checked before, and the name is checked each time.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from moorage.schemas.codec import decode_accepted, decode_request, identity
from moorage.schemas.errors import Refused
from moorage.schemas.job import Request
from moorage.schemas.memo import Memo

#: bodies that the cache holds at most, then it is emptied; and the bytes of one body
KNOWN_MAX: Final = 1024
BYTES_MAX: Final = 4096
#: longer bodies that it holds at most, each of one job: its request is asked for at each placement of its replicas
LONG_MAX: Final = 8
#: bodies with a field that only a later release knows that it holds at most, each of one job
LATER_MAX: Final = 256
_NAMED: Final = re.compile(rb'\{\s*"job"\s*:\s*"([A-Za-z0-9_-]{1,64})"\s*,').match

_FIXSTR: Final = tuple(bytes((0xA0 | size,)) for size in range(32))


class CachedRequest:
    """A decoded request. `request.job` is None if several jobs share it, else the job's name (None without a name).

    `later` is the first field that only a later release knows, "" for none; `request` lacks all of these.
    """

    __slots__ = ("_before", "_behind", "later", "request", "run", "shape", "twice", "workload")

    def __init__(self, request: Request, later: str = "") -> None:
        self.request = request
        self.later = later
        self.shape: Any = None  # for the owner of the cache: what it has derived from this request
        self.workload = ""  # the same
        self.run = b""  # the same
        self.twice: str | None = None  # the same: a key that an object of its body has twice, once it was looked for
        self._before = self._behind = b""

    def identity(self, name: str | None) -> bytes:
        """Return the canonical form (see `codec.identity`) of this request under a job's name; None for no name."""
        if not self._before or name is None:
            if name is None or self.request.job == name:
                return identity(self.request)
            # under the names a and b the forms differ in the name's one byte; the byte before it is the name's length
            a, b = (identity(msgspec.structs.replace(self.request, job=job)) for job in "ab")
            at = next(at for at, (one, other) in enumerate(zip(a, b, strict=True)) if one != other)
            self._before, self._behind = a[: at - 1], a[at + 1 :]
        raw = name.encode()
        size = len(raw)
        head = _FIXSTR[size] if size < 32 else bytes((0xD9, size))  # msgpack fixstr, str 8
        return b"".join((self._before, head, raw, self._behind))


class RequestCache:
    """Decodes request bodies, and remembers them."""

    def __init__(self) -> None:
        self._known: Memo[bytes, CachedRequest | None] = Memo(KNOWN_MAX)
        self._long: Memo[bytes, CachedRequest] = Memo(LONG_MAX)
        self._later: Memo[bytes, CachedRequest] = Memo(LATER_MAX)

    def read(self, body: bytes) -> tuple[str | None, CachedRequest]:
        """Return the job's name, if the body has one, and the request. Raises `Refused` as `decode_request` does."""
        if len(body) > BYTES_MAX and (long := self._long.get(body)) is not None:
            return long.request.job, long
        named = _NAMED(body)
        if named is None:
            asked = CachedRequest(decode_request(body))
            return asked.request.job, asked
        rest = body[named.end() :]
        known = self._known
        found = known.get(rest)
        if found is not None:
            return named[1].decode(), found
        request = decode_request(body)
        if len(rest) > BYTES_MAX:
            return request.job, self._long.put(body, CachedRequest(request))
        if request.job == named[1].decode():
            if rest not in known:  # decoded once more, without the name, only when it comes a second time
                known.put(rest, None)
            elif b'"job"' not in rest and b"\\" not in rest:  # no second `job` key, nor an escaped one
                known[rest] = asked = CachedRequest(decode_request(b"{" + rest))
                return request.job, asked
        return request.job, CachedRequest(request)

    def read_accepted(self, body: bytes) -> tuple[str | None, CachedRequest]:
        """Return the same of an accepted job, without fields that only a later release knows (`decode_accepted`)."""
        try:
            return self.read(body)
        except Refused as refused:
            asked = self._later.get(body)
            if asked is None:
                asked = self._later.put(body, CachedRequest(decode_accepted(body), refused.problem.field))
            return asked.request.job, asked
