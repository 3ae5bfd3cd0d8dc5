"""Store a handler's result in the stream of the tenant's bucket, acknowledged before the job is over.

A large result is an object of NATS' object store (ADR-20), so `nats object get` and every client's object store can
read it: bucket `<PREFIX>_RESULT_<tenant>`, object `<job>.<replica>.<fence>`. The fence is in the name, so that an
attempt that outlived its lease can never replace a later attempt's result. Small results that a worker finished in one
turn are stored together, in one message of the bucket's stream; object stores see it as a piece without a description.
Both are found by the sequence of a message (for an object, of its description), which the worker reports. Small results
are also sent to the waiting clients.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from moorage.bus.errors import BusError, JetStreamRefused
from moorage.bus.jetstream import ERR_STREAM_FULL, JetStream
from moorage.bus.object_store import ObjectStore
from moorage.schemas.handler import Result, result_bucket, together
from moorage.schemas.passed_on import TOGETHER

#: how long results are kept in a bucket that is made here, in seconds, and their bytes at most
RESULT_KEEP_DEFAULT: Final = 7 * 86400.0
RESULT_BYTES_DEFAULT: Final = 256 << 20
#: most bytes of one message: a piece of an object, or small results
CHUNK_BYTES: Final = 128 * 1024
STORE_TRIES_MAX: Final = 5
STORE_RETRY_S: Final = 0.5
_SECOND_NS: Final = 10**9


class _Line(msgspec.Struct, frozen=True):
    """A `ResultLine`, decoded for a search: its value stays undecoded."""

    result: str
    content_type: str = ""
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Lines(msgspec.Struct, frozen=True):
    """`Results`, with only the fields that a search needs."""

    results: list[_Line]


_decode_lines: Final = msgspec.json.Decoder(_Lines).decode


class ResultStore:
    """Results in the buckets of tenants. It makes a missing bucket, and uses an operator's own bucket unchanged."""

    def __init__(
        self,
        jetstream: JetStream,
        prefix: str,
        keep_s: float = RESULT_KEEP_DEFAULT,
        bytes_max: int = RESULT_BYTES_DEFAULT,
    ) -> None:
        """Set it up; `keep_s` and `bytes_max` apply to buckets that it makes."""
        self._jetstream = jetstream
        self._prefix = prefix
        self._keep_s = keep_s
        self._bytes_max = bytes_max

    async def put(self, tenant: str, name: str, result: Result) -> int:
        """Store an object and return its sequence once JetStream has acknowledged all of it.

        A second object with the same name replaces the first. It tries up to `STORE_TRIES_MAX` times, a full bucket
        once; each try may take the append's own time-out. Raises the last BusError.
        """
        return await self._again(lambda: self._put(self._of(tenant), name, result))

    async def put_together(self, tenant: str, lines: Sequence[bytes]) -> int:
        """Store the lines of small results in one message and return its sequence. Tries and raises as `put`."""
        store = self._of(tenant)
        return await self._again(lambda: store.append(store.subject(TOGETHER), together(lines)))

    @staticmethod
    async def _again(store: Callable[[], Awaitable[int]]) -> int:
        left = STORE_TRIES_MAX
        while True:
            left -= 1
            try:
                return await store()
            except BusError as error:
                if not left or (isinstance(error, JetStreamRefused) and error.err_code == ERR_STREAM_FULL):
                    raise
                await asyncio.sleep(STORE_RETRY_S)

    async def get(self, tenant: str, name: str, seq: int | None = None) -> Result | None:
        """Return a result: from the message that its worker reported, else (`seq` None) the object of that name.

        Return None if no result of that name is there (any more). An object is complete and checked against its digest.
        Raises BusError: the connection's errors, and StreamGap if pieces are missing or do not match the digest.
        """
        store = self._of(tenant)
        kept = await store.message(name, seq)
        if kept is not None and kept.subject == store.subject(TOGETHER):
            return _found_in(kept.data, name)
        info = None if kept is None else store.described(kept, name)
        if info is None:
            return None
        data = b"".join([piece async for piece in store.get(info)])
        return Result(info.headers.get("Content-Type", ["application/octet-stream"])[0], data)

    @staticmethod
    async def _put(store: ObjectStore, name: str, result: Result) -> int:
        nuid = secrets.token_hex(11)
        data = memoryview(result.data)
        pieces = [bytes(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
        try:
            for piece in pieces:
                await store.append(store.subject(nuid), piece)
            digest, headers = hashlib.sha256(data).digest(), {"Content-Type": result.content_type}
            return await store.describe(name, nuid, len(data), len(pieces), digest, headers)
        except BusError:
            await store.forget(store.subject(nuid))
            raise

    def _of(self, tenant: str) -> ObjectStore:
        return results_bucket(self._jetstream, self._prefix, tenant, self._keep_s, self._bytes_max)


def results_bucket(
    jetstream: JetStream,
    prefix: str,
    tenant: str,
    keep_s: float = RESULT_KEEP_DEFAULT,
    bytes_max: int = RESULT_BYTES_DEFAULT,
    replicas: int = 1,
) -> ObjectStore:
    """Return the bucket for results of a tenant's functions; the last three are settings of one that is made here."""
    config = {
        "description": "results of handlers, kept by moorage workers",
        "discard": "new",
        "max_age": int(keep_s * _SECOND_NS),
        "max_bytes": bytes_max,
        "num_replicas": replicas,
    }
    return ObjectStore(jetstream, result_bucket(prefix, tenant), config)


def _found_in(message: bytes, name: str) -> Result | None:
    """Return the result of this name from a message of small results; None if it is not there."""
    found = next((line for line in _decode_lines(message).results if line.result == name), None)
    if found is None or found.value is msgspec.UNSET:
        return None
    if found.content_type == "application/json":
        return Result(found.content_type, bytes(found.value))
    text: str = msgspec.json.decode(found.value)
    data = base64.b64decode(text) if found.content_type == "application/octet-stream" else text.encode()
    return Result(found.content_type, data)
