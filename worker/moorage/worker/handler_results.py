"""Where a handler's result goes: the stream of the tenant's bucket, acknowledged before the job is over.

A large result is an object of NATS' object store (ADR-20), so `nats object get` and any client's object store read it:
bucket `<PREFIX>_RESULT_<tenant>`, object `<job>.<replica>.<fence>`. The fence is in the name, so that an attempt that
outlived its lease can never replace the result of the one after it. Small results go together: those that a worker
finished in one turn are one message of the bucket's stream, which object stores take for a piece without a description.
Both are found by the sequence of a message (an object's: its description), which the worker reports. Small results are
sent to those that wait as well.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from moorage.bus.errors import BusError, JetStreamRefused, StreamGap, StreamMismatch
from moorage.bus.jetstream import ERR_STREAM_FULL, ERR_STREAM_NOT_FOUND, JetStream, JsError
from moorage.schemas.errors import refuse
from moorage.schemas.frames import VERSION, ResultLine
from moorage.schemas.subjects import Subjects
from moorage.worker.settings import RESULT_BYTES_DEFAULT, RESULT_KEEP_DEFAULT

#: of one result; larger ones belong in a store of the service's own, with the result naming the place
RESULT_BYTES_MAX: Final = 64 * 1024 * 1024
#: a result up to this size is sent on the log subject as well
INLINE_BYTES_MAX: Final = 32 * 1024
#: and one up to this size goes together with others
TOGETHER_BYTES_MAX: Final = 16 * 1024
#: arrays and objects in one another, of a result that goes together with others
NESTED_MAX: Final = 200
#: of one message: a piece of an object, or small results
CHUNK_BYTES: Final = 128 * 1024
#: the last token of the subject of messages with small results, where pieces of objects have their object's id
TOGETHER: Final = "together"
STORE_TRIES_MAX: Final = 5
STORE_RETRY_S: Final = 0.5
_SECOND_NS: Final = 10**9

_encode: Final = msgspec.json.Encoder().encode


class _Meta(msgspec.Struct, frozen=True):
    """What ADR-20 keeps of an object, as far as a reader needs it."""

    nuid: str
    size: int = 0
    chunks: int = 0
    digest: str = ""
    headers: dict[str, list[str]] = {}
    deleted: bool = False


_decode_meta: Final = msgspec.json.Decoder(_Meta).decode


class Result(msgspec.Struct, frozen=True):
    """What a function returned, as bytes: `content_type` says which Python type it was."""

    content_type: str
    data: bytes


def encode_result(value: object) -> Result:
    """`bytes` as they are, `str` as UTF-8, anything else as JSON. Raises Refused for what is neither, or too large."""
    if isinstance(value, bytes | bytearray | memoryview):
        result = Result("application/octet-stream", bytes(value))
    elif isinstance(value, str):
        result = Result("text/plain; charset=utf-8", value.encode())
    else:
        try:
            result = Result("application/json", _encode(value))
            if len(result.data) <= INLINE_BYTES_MAX:
                _decode_raw(result.data)  # it may hold a `msgspec.Raw` that is no JSON, and others' lines are beside it
        except (TypeError, msgspec.MsgspecError) as error:
            raise refuse("invalid-argument", f"the result is neither bytes nor text nor JSON: {error}") from None
    if len(result.data) > RESULT_BYTES_MAX:
        raise refuse("too-large", f"a result has at most {RESULT_BYTES_MAX} bytes", found=len(result.data))
    return result


def decode_result(result: Result) -> Any:
    """What the function returned: bytes, text, or what its JSON says. Raises ValueError for what is none of them."""
    if result.content_type == "application/json":
        return msgspec.json.decode(result.data)
    return result.data.decode() if result.content_type.startswith("text/") else result.data


def inline(result: Result) -> object:
    """A small result as it stands in the line on the log subject: JSON, text, or bytes in base64; else None."""
    if len(result.data) > INLINE_BYTES_MAX or _is_deep(result):
        return None
    if result.content_type == "application/json":
        return msgspec.Raw(result.data)
    return result.data.decode() if result.content_type.startswith("text/") else base64.b64encode(result.data).decode()


def decode_inline(content_type: str, value: Any) -> Any:
    """What the function returned, from the line that `inline` is in."""
    return base64.b64decode(value) if content_type == "application/octet-stream" else value


class _Line(msgspec.Struct, frozen=True):
    """`ResultLine` as it is looked for in a message: the values of the others stay as they are."""

    result: str
    content_type: str = ""
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Lines(msgspec.Struct, frozen=True):
    """`Results`, as far as they are looked at."""

    results: list[_Line]


_decode_raw: Final = msgspec.json.Decoder(msgspec.Raw).decode
_decode_lines: Final = msgspec.json.Decoder(_Lines).decode


def goes_together(result: Result) -> bool:
    """Return whether a result is stored in one message with others."""
    return len(result.data) <= TOGETHER_BYTES_MAX and not _is_deep(result)


def _is_deep(result: Result) -> bool:
    """Return whether JSON is nested so deeply that a reader's stack may be too small for it."""
    data = result.data
    if result.content_type != "application/json" or data.count(b"[") + data.count(b"{") <= NESTED_MAX:
        return False
    level = [msgspec.json.decode(data)]
    for _ in range(NESTED_MAX):
        level = [each for v in level if isinstance(v, list | dict) for each in (v.values() if type(v) is dict else v)]
    return any(isinstance(value, list | dict) for value in level)


def line_of(name: str, result: Result) -> bytes:
    """A `ResultLine` as JSON, with the value of a result of at most `INLINE_BYTES_MAX`."""
    small = inline(result)
    return _encode(ResultLine(name, len(result.data), result.content_type, msgspec.UNSET if small is None else small))


def together(lines: Sequence[bytes]) -> bytes:
    """`Results` as JSON, of these lines."""
    return b'{"kind":"results","v":%d,"results":[%b]}' % (VERSION, b",".join(lines))


def result_bucket(prefix: str, tenant: str) -> str:
    """The tenant's bucket; its stream is `OBJ_<bucket>`."""
    return Subjects(prefix).result_bucket(tenant)


def result_object(job: str, replica: int, fence: int) -> str:
    """The object's name; `fence` is in the change that made the replica RUNNING and SUCCEEDED."""
    return f"{job}.{replica}.{fence}"


class ResultStore:
    """Results in the buckets of tenants. Makes a bucket that is missing; an operator's own is used as it is."""

    def __init__(
        self,
        jetstream: JetStream,
        prefix: str,
        keep_s: float = RESULT_KEEP_DEFAULT,
        bytes_max: int = RESULT_BYTES_DEFAULT,
    ) -> None:
        """`keep_s` and `bytes_max` are of buckets that are made here."""
        self._jetstream = jetstream
        self._prefix = prefix
        self._keep_s = keep_s
        self._bytes_max = bytes_max

    async def put(self, tenant: str, name: str, result: Result) -> int:
        """Store an object and return its sequence once JetStream has acknowledged the whole.

        A second time with the same name replaces it. Tries `STORE_TRIES_MAX` times, a full bucket once; each may take
        the append's own time-out. Raises the last BusError.
        """
        bucket = result_bucket(self._prefix, tenant)
        return await self._again(lambda: self._put(bucket, name, result))

    async def put_together(self, tenant: str, lines: Sequence[bytes]) -> int:
        """Store the lines of small results in one message and return its sequence. Tries and raises as `put`."""
        bucket = result_bucket(self._prefix, tenant)
        return await self._again(lambda: self._append(bucket, _together_subject(bucket), together(lines)))

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
        """Return a result: of the message that its worker reported, else (None) the object of that name.

        None where there is none of that name any more. An object is whole and checked against its digest. Raises
        BusError: what the connection raises, and StreamGap where pieces are missing.
        """
        bucket = result_bucket(self._prefix, tenant)
        stream = f"OBJ_{bucket}"
        try:
            if seq is None:
                kept = await self._jetstream.get_last(stream, _meta_subject(bucket, name))
            else:
                kept = await self._jetstream.get_message(stream, seq)
        except JetStreamRefused as error:
            if error.err_code == ERR_STREAM_NOT_FOUND:
                return None
            raise
        if kept is not None and kept.subject == _together_subject(bucket):
            return _found_in(kept.data, name)
        if kept is not None and kept.subject != _meta_subject(bucket, name):
            return None  # of a bucket that was made anew since
        meta = None if kept is None else _decode_meta(kept.data)
        if kept is None or meta is None or meta.deleted:
            return None
        data = b""
        if meta.chunks:
            pieces = self._jetstream.read_range(stream, f"$O.{bucket}.C.{meta.nuid}", to_seq=kept.seq)
            data = b"".join([piece.data async for piece in pieces])
        if len(data) != meta.size or (meta.digest and meta.digest != _digest(data)):
            raise StreamGap(stream, kept.seq, 0)  # a replica that lags behind answered: ask again
        return Result(meta.headers.get("Content-Type", ["application/octet-stream"])[0], data)

    async def _put(self, bucket: str, name: str, result: Result) -> int:
        nuid = secrets.token_hex(11)
        chunks_subject = f"$O.{bucket}.C.{nuid}"
        data = memoryview(result.data)
        pieces = [bytes(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
        try:
            for piece in pieces:
                await self._append(bucket, chunks_subject, piece)
            meta: dict[str, Any] = {
                "name": name,
                "headers": {"Content-Type": [result.content_type]},
                "options": {"max_chunk_size": CHUNK_BYTES},
                "bucket": bucket,
                "nuid": nuid,
                "size": len(data),
                "chunks": len(pieces),
                "digest": _digest(result.data),
                "mtime": datetime.now(UTC).isoformat(),
            }
            return await self._append(bucket, _meta_subject(bucket, name), _encode(meta), {"Nats-Rollup": "sub"})
        except BusError:
            await self._forget(bucket, chunks_subject)
            raise

    async def _append(self, bucket: str, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> int:
        answer = await self._jetstream.append(subject, payload, headers)
        if isinstance(answer, JsError) and answer.nobody_listens:
            await self._make(bucket)
            answer = await self._jetstream.append(subject, payload, headers)
        if isinstance(answer, JsError):
            raise JetStreamRefused(f"keep a result in {bucket}", answer.code, answer.err_code, answer.description)
        return answer.seq

    async def _make(self, bucket: str) -> None:
        config = {
            "name": f"OBJ_{bucket}",
            "description": "results of handlers, kept by moorage workers",
            "subjects": [f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"],
            "discard": "new",
            "max_age": int(self._keep_s * _SECOND_NS),
            "max_bytes": self._bytes_max,
            "allow_rollup_hdrs": True,
            "allow_direct": True,
        }
        try:
            await self._jetstream.ensure_stream(config)
        except StreamMismatch:
            pass  # somebody made it in the meantime, with limits of their own: theirs hold

    async def _forget(self, bucket: str, subject: str) -> None:
        """Pieces without a description would fill the bucket until they are too old."""
        try:
            await self._jetstream.purge(f"OBJ_{bucket}", subject=subject)
        except BusError:
            pass


def _meta_subject(bucket: str, name: str) -> str:
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def _together_subject(bucket: str) -> str:
    return f"$O.{bucket}.C.{TOGETHER}"


def _found_in(message: bytes, name: str) -> Result | None:
    """Return the result of this name from a message of small ones."""
    found = next((line for line in _decode_lines(message).results if line.result == name), None)
    if found is None or found.value is msgspec.UNSET:
        return None
    if found.content_type == "application/json":
        return Result(found.content_type, bytes(found.value))
    text: str = msgspec.json.decode(found.value)
    data = base64.b64decode(text) if found.content_type == "application/octet-stream" else text.encode()
    return Result(found.content_type, data)


def _digest(data: bytes) -> str:
    return f"SHA-256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()}"
