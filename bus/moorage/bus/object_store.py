"""One bucket of NATS' object store (ADR-20), which `nats object get` and the object store of any client can read, too.

A large object passes through in pieces: neither side ever holds it whole. Readers see an object once its description is
acknowledged, which is written last. Pieces without a description are removed, or go with the bucket's age.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from moorage.bus.errors import BusError, JetStreamRefused, NoResponders, PermissionRefused, StreamGap, StreamMismatch
from moorage.bus.jetstream import BATCH_BYTES, ERR_STREAM_NOT_FOUND, JetStream, JsError, wall_seconds
from moorage.bus.jetstream_answers import StoredMessage
from moorage.schemas.subjects import Subjects
from moorage.schemas.unreadable import UNREADABLE

CHUNK_BYTES: Final = 512 * 1024
#: appends that are under way at a time
WINDOW: Final = 8
#: a bucket that has room for less is of no use
BUCKET_BYTES_MIN: Final = 64 * 1024 * 1024
#: the first piece is small: whether it is still there is looked up often
FIRST_BYTES: Final = 512
#: what is left free of a bucket, at most
SPARE_BYTES: Final = 8 * 1024 * 1024
#: header of an object with the sequence of its first piece
_FIRST: Final = "Moorage-First"
_DIGEST: Final = "SHA-256="
#: header of a message that takes the place of all earlier ones of its subject
_ALONE: Final = {"Nats-Rollup": "sub"}

_encode: Final = msgspec.json.Encoder().encode


#: what a bucket for files of jobs keeps that is made here: each object so long, and the newest ones of so many bytes
FILES_KEEP_S: Final = 7 * 86400
FILES_BUCKET_BYTES: Final = 4 << 30
#: what one for files of schedules has, which stay until the schedule is removed
SCHEDULES_BUCKET_BYTES: Final = 1 << 30
#: what one for checkpoints has: three of the largest, since one is stored before an older one goes
CHECKPOINTS_BUCKET_BYTES: Final = 32 << 30


class ObjectInfo(msgspec.Struct, frozen=True):
    """The description of an object (ADR-20), as far as readers need it, and where and when that description was
    stored."""

    nuid: str
    size: int = 0
    chunks: int = 0
    digest: str = ""
    headers: dict[str, list[str]] = {}
    deleted: bool = False
    seq: int = 0
    stored_s: float = 0.0  # Unix time, by the server's clock


class Content(msgspec.Struct, frozen=True, array_like=True):
    """The pieces of an object: under which name, how many bytes and pieces, their SHA-256 as a description has it, and
    the sequences of the first and the last one; 0 without any."""

    nuid: str
    size: int
    chunks: int
    digest: str
    first: int
    last: int

    @property
    def info(self) -> ObjectInfo:
        """What `ObjectStore.get` needs to read them."""
        return ObjectInfo(self.nuid, self.size, self.chunks, self.digest, seq=self.last)


_decode_info: Final = msgspec.json.Decoder(ObjectInfo).decode


class ObjectStore:
    """A bucket. If it does not exist, `put` makes it, if the user may.

    `config` are settings of its JetStream stream, `max_bytes` among them.
    """

    def __init__(self, jetstream: JetStream, bucket: str, config: Mapping[str, Any]) -> None:
        self._jetstream = jetstream
        self._bucket = bucket
        self._config = config
        self._stream = f"OBJ_{bucket}"

    async def find(self, name: str) -> ObjectInfo | None:
        """Return the description of an object. Raises BusError.

        None if there is no bucket, no object of that name, no valid description of it, or its first piece has gone.
        """
        kept = await self.message(name)
        info = None if kept is None else self.described(kept, name)
        if info is None:
            return None
        try:  # each client of the tenant can write a description
            begins = int(info.headers.get(_FIRST, ["0"])[0])
        except (ValueError, IndexError):
            return None
        if not 0 <= begins < info.seq:
            return None
        if begins:  # the oldest messages of a bucket go first, so that of an object its first piece is the first to go
            first = await self._jetstream.direct_get_batch(
                self._stream, seq=begins, next_by_subject=self.subject(info.nuid), batch=1
            )
            if not first or first[0].seq != begins:
                return None
        return info

    async def room(self) -> int | None:
        """Return for how many more bytes the bucket has room, None where it has no bound, is not there, or no right to
        ask.

        A part is left for messages that take the place of larger ones: a full bucket would refuse them.

        Raises BusError.
        """
        try:
            stream = await self._jetstream.stream_info(self._stream)
        except PermissionRefused:
            return None
        except JetStreamRefused as error:
            if error.err_code == ERR_STREAM_NOT_FOUND:
                return None
            raise
        most: int = stream.config.get("max_bytes", -1)
        return max(most - min(most >> 6, SPARE_BYTES) - stream.size_bytes, 0) if most > 0 else None

    async def message(self, name: str, seq: int | None = None) -> StoredMessage | None:
        """Return the message with this sequence, else (`seq` None) the one that describes the object of that name.

        None if it is not there, or there is no bucket. Raises BusError.
        """
        try:
            if seq is None:
                return await self._jetstream.get_last(self._stream, self._description(name))
            return await self._jetstream.get_message(self._stream, seq)
        except JetStreamRefused as error:
            if error.err_code == ERR_STREAM_NOT_FOUND:
                return None
            raise

    async def stored(self) -> list[tuple[str, ObjectInfo]]:
        """Return the names and descriptions of the objects, also of those whose pieces are gone. Raises BusError."""
        head, found = self._description(""), list[tuple[str, ObjectInfo]]()
        async with contextlib.aclosing(self._jetstream.read_range(self._stream, f"{head}*")) as messages:
            async for message in messages:
                with contextlib.suppress(ValueError):
                    name = base64.urlsafe_b64decode(message.subject.removeprefix(head)).decode()
                    if (info := self.described(message, name)) is not None:
                        found.append((name, info))
        return found

    def described(self, message: StoredMessage, name: str) -> ObjectInfo | None:
        """Return the description of the object of that name in this message; None if it describes none."""
        if message.subject != self._description(name):
            return None
        try:
            info = _decode_info(message.data)
        except UNREADABLE:
            return None
        if info.deleted:
            return None
        return msgspec.structs.replace(info, seq=message.seq, stored_s=wall_seconds(message.stored_at))

    async def put(
        self,
        name: str,
        pieces: Iterable[bytes],
        headers: Mapping[str, str],
        on_bytes: Callable[[int], None],
        also: str = "",
    ) -> str:
        """Store the pieces in order, and return the digest once all are acknowledged. An object of that name is
        replaced.

        `also` is another name of the same object.

        `on_bytes` is called with the number of bytes acknowledged so far. Raises BusError: then the pieces are removed
        if the user may, and else go with the bucket's age. If only the last append failed, an older object of that name
        may be gone, too.
        """
        content = await self.put_content(pieces, on_bytes)
        digest = base64.urlsafe_b64decode(content.digest.removeprefix(_DIGEST))
        try:
            for each in (name, also) if also else (name,):
                await self.describe(
                    each, content.nuid, content.size, content.chunks, digest, {_FIRST: str(content.first), **headers}
                )
        except BaseException:
            await self.forget(self.subject(content.nuid))
            raise
        return content.digest

    async def put_content(self, pieces: Iterable[bytes], on_bytes: Callable[[int], None]) -> Content:
        """Store the pieces of an object that no description names, and return what one needs to name it.

        Raises BusError, and whatever `pieces` raise: then the pieces are removed as for `put`.
        """
        nuid = secrets.token_hex(11)
        subject = self.subject(nuid)
        digest, size, count, done, first, last = hashlib.sha256(), 0, 0, 0, 0, 0
        pending: list[tuple[asyncio.Task[int], int]] = []
        try:
            sized = iter(_of_size(pieces))
            while (piece := await asyncio.to_thread(next, sized, None)) is not None:  # they may be read and compressed
                if count == 0:  # alone: it may have to make the bucket
                    first = last = await self.append(subject, piece)
                    done += len(piece)
                else:
                    pending.append((asyncio.create_task(self.append(subject, piece)), len(piece)))
                digest.update(piece)
                size, count = size + len(piece), count + 1
                # in the order of a single connection: a piece is on its way before the next one is
                while len(pending) >= WINDOW:
                    task, length = pending.pop(0)
                    last = await task
                    done += length
                on_bytes(done)
            for task, length in pending:
                last = await task
                done += length
                on_bytes(done)
        except BaseException:
            for task, _ in pending:
                task.cancel()
            await asyncio.gather(*(task for task, _ in pending), return_exceptions=True)
            await self.forget(subject)
            raise
        return Content(nuid, size, count, _said(digest.digest()), first, last)

    async def describe(
        self, name: str, nuid: str, size: int, chunks: int, digest: bytes, headers: Mapping[str, str]
    ) -> int:
        """Describe an object whose pieces are acknowledged; readers see it now. Return the sequence. Raises BusError.

        `digest` is its SHA-256. An object of that name is replaced.
        """
        described = {
            "name": name,
            "headers": {key: [value] for key, value in headers.items()},
            "options": {"max_chunk_size": CHUNK_BYTES},
            "bucket": self._bucket,
            "nuid": nuid,
            "size": size,
            "chunks": chunks,
            "digest": _said(digest),
            "mtime": datetime.now(UTC).isoformat(),
        }
        return await self.append(self._description(name), _encode(described), _ALONE)

    async def get(self, info: ObjectInfo, batch_bytes: int = BATCH_BYTES) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of an object that `find` has found, asked for in batches of so many bytes.

        Raises BusError: StreamGap, after the last piece, if pieces are missing or have another digest.
        """
        digest, size = hashlib.sha256(), 0
        if info.chunks:
            found = self._jetstream.read_range(
                self._stream, self.subject(info.nuid), to_seq=info.seq, batch_bytes=batch_bytes
            )
            async with contextlib.aclosing(found) as pieces:
                async for piece in pieces:
                    digest.update(piece.data)
                    size += len(piece.data)
                    yield piece.data
        said = info.digest.removeprefix(_DIGEST)
        if size != info.size or said.rstrip("=") != base64.urlsafe_b64encode(digest.digest()).decode().rstrip("="):
            raise StreamGap(self._stream, info.seq, 0)

    def subject(self, nuid: str) -> str:
        """Return the subject of an object's pieces."""
        return f"$O.{self._bucket}.C.{nuid}"

    def _description(self, name: str) -> str:
        return f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"

    async def append(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> int:
        """Append a message to the bucket's stream, and return its sequence once it is acknowledged. Raises BusError."""
        answer = await self._jetstream.append(subject, payload, headers)
        if isinstance(answer, JsError) and answer.nobody_listens:
            await self.make()
            answer = await self._jetstream.append(subject, payload, headers)
        if isinstance(answer, JsError):
            action = f"keep an object in {self._bucket}"
            raise JetStreamRefused(action, answer.code, answer.err_code, answer.description)
        return answer.seq

    async def make(self) -> None:
        """Make the bucket if it does not exist, smaller if the server lacks room. Raises BusError.

        An existing one keeps its settings: a smaller bound would drop the oldest objects.
        """
        try:
            await self._jetstream.ensure_stream_with_room(self._settings(), frozenset(), BUCKET_BYTES_MIN)
        except StreamMismatch:
            pass  # another client made it in the meantime, or an operator: its limits hold

    async def is_there(self) -> bool:
        """Return whether the bucket exists. Raises BusError."""
        try:
            await self._jetstream.stream_info(self._stream)
        except JetStreamRefused as error:
            if error.err_code == ERR_STREAM_NOT_FOUND:
                return False
            raise
        return True

    async def make_of(self, bytes_max: int) -> None:
        """Make the bucket with just this size if it does not exist. Raises BusError."""
        with contextlib.suppress(StreamMismatch):  # an operator made it in the meantime: its limits hold
            await self._jetstream.ensure_stream({**self._settings(), "max_bytes": bytes_max})

    def _settings(self) -> dict[str, Any]:
        return {
            "name": self._stream,
            "subjects": [f"$O.{self._bucket}.C.>", f"$O.{self._bucket}.M.>"],
            "allow_rollup_hdrs": True,
            "allow_direct": True,
            **self._config,
        }

    async def forget(self, subject: str) -> None:
        """Remove pieces that would fill the bucket, and that nobody is to read any more. Raises no BusError.

        What cannot be removed goes with the bucket's age. A full bucket that refuses new messages also refuses the
        message that would replace the pieces, so whoever removes there needs the right to purge.
        """
        with contextlib.suppress(BusError):
            try:
                await self._jetstream.purge(self._stream, subject=subject)
            except (PermissionRefused, NoResponders, JetStreamRefused):  # most keys may purge nothing
                await self._jetstream.append(subject, b"", _ALONE)  # in place of all pieces


def files_store(jetstream: JetStream, subjects: Subjects, tenant: str, replicas: int = 1) -> ObjectStore:
    """Return the bucket for the files that a tenant's jobs bring and leave. If it is full, the oldest files go
    first. `replicas` is the number of copies if it is made here."""
    config = {
        "description": "files that jobs of moorage bring and leave",
        "discard": "old",
        "max_age": FILES_KEEP_S * 10**9,
        "max_bytes": FILES_BUCKET_BYTES,
        "num_replicas": replicas,
    }
    return ObjectStore(jetstream, subjects.files_bucket(tenant), config)


def checkpoints_store(jetstream: JetStream, subjects: Subjects, tenant: str, replicas: int = 1) -> ObjectStore:
    """Return the bucket for the checkpoints of a tenant's jobs. If it is full, nothing more is taken: what goes first
    elsewhere may be a file that a new set shares with an old one. `replicas` is the number of copies if it is made
    here."""
    config = {
        "description": "checkpoints of jobs of moorage",
        "discard": "new",
        "max_age": FILES_KEEP_S * 10**9,
        "max_bytes": CHECKPOINTS_BUCKET_BYTES,
        "num_replicas": replicas,
    }
    return ObjectStore(jetstream, subjects.checkpoints_bucket(tenant), config)


def schedules_store(jetstream: JetStream, subjects: Subjects, tenant: str, replicas: int = 1) -> ObjectStore:
    """Return the bucket for the files of a tenant's schedules. If it is full, nothing more is taken. `replicas` is the
    number of copies if it is made here."""
    config = {
        "description": "files of schedules of moorage",
        "discard": "new",
        "max_bytes": SCHEDULES_BUCKET_BYTES,
        "num_replicas": replicas,
    }
    return ObjectStore(jetstream, subjects.schedules_bucket(tenant), config)


def _said(digest: bytes) -> str:
    """Return a SHA-256 as a description has it."""
    return _DIGEST + base64.urlsafe_b64encode(digest).decode()


def _of_size(pieces: Iterable[bytes]) -> Iterable[bytes]:
    """Yield the same bytes in pieces of `CHUNK_BYTES`; the first has `FIRST_BYTES`."""
    left, size = bytearray(), FIRST_BYTES
    for piece in pieces:
        left += piece
        while len(left) >= size:
            yield bytes(left[:size])
            del left[:size]
            size = CHUNK_BYTES
    if left:
        yield bytes(left)
