"""JetStream by raw requests: streams, fenced appends, reads through the leader, batched direct get, replay.

nats-py has no batched direct get, and its publish hides which refusal came; the ledger's rules need both. Every
answer of the server comes back as a value here or as `JetStreamRefused`; silence and a lost connection are
`RequestTimeout` and `Disconnected`, which say nothing of whether the message was stored.

Sources: NATS ADR-1 (API as JSON), ADR-31 (direct get, batches), ADR-22 and the server's publish headers.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Final, Protocol

import msgspec

from moorage.bus.errors import ERR_NO_ROOM, JetStreamRefused, NoResponders, StreamGap, StreamMismatch
from moorage.bus.framing import is_token, parse_headers
from moorage.bus.jetstream_answers import (
    Ack,
    DoneAnswer,
    InfoAnswer,
    JsError,
    StoredMessage,
    StreamInfo,
    read_ack,
    read_done,
    read_get,
    read_info,
    wall_seconds,
)
from moorage.bus.transport import STATUS_HEADER, Delivery

__all__ = ["Ack", "JetStream", "JsError", "StoredMessage", "StreamInfo", "wall_seconds"]

API_TIMEOUT_S: Final = 10.0
APPEND_TIMEOUT_S: Final = 5.0
#: Longest silence between two messages of one batch.
BATCH_IDLE_TIMEOUT_S: Final = 10.0
#: Of one batch; at 0 or less the server answers in another form, without the end marker.
BATCH_MESSAGES_MAX: Final = 1000
#: Bytes of one batch: a few records at their largest, well under what server and client buffer for one reader.
BATCH_BYTES: Final = 4 * 1024 * 1024

EXPECTED_LAST_SEQUENCE: Final = "Nats-Expected-Last-Sequence"
EXPECTED_LAST_SUBJECT_SEQUENCE: Final = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_LAST_SUBJECT_SEQUENCE_SUBJECT: Final = "Nats-Expected-Last-Subject-Sequence-Subject"
MESSAGE_ID: Final = "Nats-Msg-Id"
#: All that a fenced append names.
_FENCE: Final = frozenset(
    {EXPECTED_LAST_SEQUENCE, EXPECTED_LAST_SUBJECT_SEQUENCE, EXPECTED_LAST_SUBJECT_SEQUENCE_SUBJECT, MESSAGE_ID}
)
#: Never sent: one false value of it wedges a replicated stream of server 2.14 and 2.15 for good.
FORBIDDEN_HEADER: Final = "Nats-Expected-Last-Msg-Id"

#: the number of copies, as a setting that `ensure_stream` may update: of every stream but the ledger, which says how
#: many there are, and whose own number goes with leases and takeovers
COPIES_FOLLOW: Final = frozenset({"num_replicas"})

ERR_NO_MESSAGE: Final = 10037
ERR_STREAM_NOT_FOUND: Final = 10059
ERR_WRONG_LAST_SEQUENCE: Final = 10071
ERR_STREAM_FULL: Final = 10077
#: more waits to be stored than the server buffers: this message is not stored
ERR_TOO_MANY: Final = 10167

#: Headers that a direct get adds to the stored ones.
_ADDED_BY_SERVER: Final = frozenset(
    {
        "Nats-Stream",
        "Nats-Subject",
        "Nats-Sequence",
        "Nats-Time-Stamp",
        "Nats-Num-Pending",
        "Nats-Last-Sequence",
        "Nats-UpTo-Sequence",
    }
)


_encode = msgspec.json.Encoder().encode

log = logging.getLogger("moorage.bus")


class Asked(Protocol):
    """What JetStream needs of a connection."""

    @property
    def is_connected(self) -> bool: ...

    async def request(
        self, subject: str, payload: bytes, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Delivery: ...

    async def request_many(
        self, subject: str, payload: bytes, idle_timeout_s: float, is_last: Callable[[Delivery], bool]
    ) -> list[Delivery]: ...


class JetStream:
    """The JetStream API behind one connection. `api_prefix` is that of `Context.api_prefix`, which differs for
    domains."""

    def __init__(self, connection: Asked, api_prefix: str = "$JS.API") -> None:
        self._connection = connection
        self._api = api_prefix

    @property
    def is_connected(self) -> bool:
        """Whether the connection has a server to ask now."""
        return self._connection.is_connected

    # -- streams ------------------------------------------------------------------------------------------------

    async def ensure_stream(
        self,
        config: Mapping[str, Any],
        may_update: frozenset[str] = frozenset(),
        first_seq: Callable[[], Awaitable[int]] | None = None,
        *,
        keeps_larger: frozenset[str] = frozenset(),
    ) -> StreamInfo:
        """Create the stream, or check that its settings are those of `config` (each key given, in the API's own names).

        A setting that differs raises `StreamMismatch`, because changing a retention or a bound can delete what is
        stored; only the settings named in `may_update` are changed. Bounds in `keeps_larger` are never made smaller:
        an operator has enlarged them, perhaps to -1, which is no bound. If the stream has to be created, `first_seq` is
        called for its first sequence. Raises `JetStreamRefused` for what the server refuses.
        """
        name = _stream_name(config["name"])
        found = await self._info(name, {})
        if found is None:
            first = 1 if first_seq is None else await first_seq()
            begins = {"first_seq": first} if first > 1 else {}
            answer = read_info(await self._call(f"STREAM.CREATE.{name}", {**config, **begins}))
            if answer.error is None:
                return _stream_info(answer, {})
            # Another one of ours may have made it meanwhile.
            found = await self._info(name, {})
            if found is None:
                raise _refused(f"create stream {name}", answer.error)
        differences = {
            key: (found.config.get(key), wanted)
            for key, wanted in config.items()
            if not _same(found.config.get(key), wanted)
            and not (key in keeps_larger and _is_larger(found.config.get(key, -1), wanted))
        }
        if not differences:
            return found
        if forbidden := {key: both for key, both in differences.items() if key not in may_update}:
            raise StreamMismatch(name, forbidden)
        updated = {**found.config, **{key: wanted for key, (_, wanted) in differences.items()}}
        answer = read_info(await self._call(f"STREAM.UPDATE.{name}", updated))
        if answer.error is not None:
            raise _refused(f"update stream {name}", answer.error)
        return _stream_info(answer, {})

    async def ensure_stream_with_room(
        self,
        config: Mapping[str, Any],
        may_update: frozenset[str],
        bytes_min: int,
        first_seq: Callable[[], Awaitable[int]] | None = None,
        *,
        keeps_larger: frozenset[str] = frozenset(),
    ) -> StreamInfo:
        """Do the same as `ensure_stream`, but with a smaller `max_bytes` if the server cannot reserve that much: a
        quarter of it, then a quarter of that, and at least `bytes_min`.

        An existing stream is never made smaller for want of room, and stays as it is where there is none to change it.
        `max_bytes` has to be in `config`. Raises as `ensure_stream`.
        """
        name, size = config["name"], config["max_bytes"]
        while True:
            try:
                found = await self.ensure_stream(
                    {**config, "max_bytes": size}, may_update, first_seq, keeps_larger=keeps_larger
                )
            except JetStreamRefused as refused:
                if refused.err_code not in ERR_NO_ROOM or refused.servers_missing:
                    raise
                held = await self._info(_stream_name(name), {})
                if held is None:
                    if size // 4 < bytes_min:
                        raise
                    size //= 4
                elif held.config.get("max_bytes") != size:
                    size = held.config.get("max_bytes", -1)
                else:
                    log.warning("there is no room to change the stream %s, which stays as it is: %s", name, refused)
                    return held
            else:
                if size != config["max_bytes"]:
                    room = f"{size >> 20} MiB" if size > 0 else "nothing"
                    log.warning(
                        "the server reserves %s for the stream %s, not the %d MiB that were asked for",
                        room,
                        name,
                        config["max_bytes"] >> 20,
                    )
                return found

    async def stream_info(self, stream: str, subjects_filter: str = "", timeout_s: float = API_TIMEOUT_S) -> StreamInfo:
        """Return a stream's state and settings; with a filter, also the number of messages of each matching subject.

        Raises `JetStreamRefused`, with status 404 if there is no such stream.
        """
        request: dict[str, Any] = {"subjects_filter": subjects_filter} if subjects_filter else {}
        info = await self._info(_stream_name(stream), request, timeout_s)
        if info is None:
            raise JetStreamRefused(f"info of stream {stream}", 404, ERR_STREAM_NOT_FOUND, "stream not found")
        return info

    async def purge(self, stream: str, *, subject: str = "", below_seq: int = 0) -> int:
        """Delete messages of `subject` (a filter; "" is all), with `below_seq` those below that sequence, and return
        how many.

        If a stream holds an epoch's message that must stay, name a subject that does not match it. Raises
        `JetStreamRefused`.
        """
        request: dict[str, Any] = {}
        if subject:
            request["filter"] = subject
        if below_seq:
            request["seq"] = below_seq
        return (await self._do(f"STREAM.PURGE.{_stream_name(stream)}", request, f"purge stream {stream}")).purged

    async def delete_message(self, stream: str, seq: int) -> None:
        """Delete one message; its bytes are not overwritten.

        Raises `JetStreamRefused` if there is none, and for every message of a stream with deny_delete.
        """
        request = {"seq": seq, "no_erase": True}
        await self._do(f"STREAM.MSG.DELETE.{_stream_name(stream)}", request, f"delete message {seq} of stream {stream}")

    async def delete_stream(self, stream: str) -> None:
        await self._do(f"STREAM.DELETE.{_stream_name(stream)}", {}, f"delete stream {stream}")

    # -- writing ------------------------------------------------------------------------------------------------

    async def append(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = APPEND_TIMEOUT_S,
    ) -> Ack | JsError:
        """Publish one message to a stream and return the server's answer: an `Ack`, or a `JsError` (503: no stream
        takes the subject).

        Only an `Ack` proves what was stored. After a JsError, even 10071, and after `RequestTimeout` or `Disconnected`,
        the message may be stored all the same. Raises `PayloadTooLarge`, `PermissionRefused`, `ConnectionClosed`, and
        ValueError for a header that must never be sent.
        """
        if headers and not headers.keys() <= _FENCE and any(key.lower() == _FORBIDDEN_LOWER for key in headers):
            raise ValueError(f"{FORBIDDEN_HEADER} must never be sent")
        try:
            delivery = await self._connection.request(subject, payload, timeout_s, headers)
        except NoResponders as error:
            return JsError(503, 0, str(error))
        return read_ack(delivery.data)

    # -- reading ------------------------------------------------------------------------------------------------

    async def get_message(self, stream: str, seq: int, timeout_s: float = API_TIMEOUT_S) -> StoredMessage | None:
        """Return the message with this sequence, or None. Raises `JetStreamRefused`, also if there is no such stream.

        The stream's leader reads it, so every acknowledged message is seen.
        """
        return await self._get(stream, {"seq": seq}, timeout_s)

    async def get_last(self, stream: str, subject: str, timeout_s: float = API_TIMEOUT_S) -> StoredMessage | None:
        """Return the last message of a subject, or None. The stream's leader reads it. Raises as `get_message`."""
        return await self._get(stream, {"last_by_subj": subject}, timeout_s)

    async def direct_get_batch(
        self,
        stream: str,
        *,
        seq: int,
        next_by_subject: str = "",
        batch: int = BATCH_MESSAGES_MAX,
        max_bytes: int = BATCH_BYTES,
    ) -> list[StoredMessage]:
        """Return up to `batch` messages (1..1000) from `seq` on, in order, of the subjects that match; [] if there is
        none.

        Any replica may answer, so the newest messages can be missing. The stream needs `allow_direct`. `max_bytes` ends
        a batch, but at least one message comes, whatever its size. Raises `JetStreamRefused` (503: no such stream, or
        without `allow_direct`), `RequestTimeout`, `Disconnected`.
        """
        if not 1 <= batch <= BATCH_MESSAGES_MAX:
            raise ValueError(f"batch is {batch}, must be 1..{BATCH_MESSAGES_MAX}")
        request: dict[str, Any] = {"seq": max(seq, 1), "batch": batch, "max_bytes": max_bytes}
        if next_by_subject:
            request["next_by_subj"] = next_by_subject
        subject = f"{self._api}.DIRECT.GET.{_stream_name(stream)}"
        try:
            replies = await self._connection.request_many(subject, _encode(request), BATCH_IDLE_TIMEOUT_S, _is_end)
        except NoResponders:
            raise JetStreamRefused(
                f"direct get of stream {stream}", 503, 0, "no such stream, or it lacks allow_direct"
            ) from None
        last = replies[-1]
        status = (last.headers or {}).get(STATUS_HEADER, "")
        if status not in ("204", "404"):
            text = (last.headers or {}).get("Description", "")
            raise JetStreamRefused(f"direct get of stream {stream}", int(status or 0), 0, text)
        return [_direct(stream, reply) for reply in replies[:-1]]

    async def read_range(
        self,
        stream: str,
        subject_filter: str = "",
        from_seq: int = 1,
        *,
        to_seq: int | None = None,
        batch_bytes: int = BATCH_BYTES,
    ) -> AsyncGenerator[StoredMessage, None]:
        """Yield the messages from `from_seq` on, in order, up to `to_seq`, or up to the end as it was at the start.

        Without a filter, every sequence must follow the one before. A jump raises `StreamGap`; so does an end that
        comes too early (found 0). If a lagging replica ends too early, the leader is asked for the next message. With a
        filter nothing of this can be checked, and the newest messages may be missing. The next batch is read while the
        one before is being used.
        """
        last_seq = (await self.stream_info(stream)).last_seq if to_seq is None else to_seq
        checked = subject_filter in ("", ">")
        expected = max(from_seq, 1)

        def read(seq: int) -> asyncio.Task[list[StoredMessage]]:
            return asyncio.create_task(
                self.direct_get_batch(stream, seq=seq, next_by_subject=subject_filter, max_bytes=batch_bytes)
            )

        ahead = read(expected) if expected <= last_seq else None
        try:
            while ahead is not None:
                messages = await ahead
                if not messages and checked and (missing := await self.get_message(stream, expected)) is not None:
                    messages = [missing]
                more = bool(messages) and messages[-1].seq < last_seq
                ahead = read(messages[-1].seq + 1) if more else None
                for message in messages:
                    if message.seq > last_seq:
                        break
                    if checked and message.seq != expected:
                        raise StreamGap(stream, expected, message.seq)
                    expected = message.seq + 1
                    yield message
            if checked and expected <= last_seq:
                raise StreamGap(stream, expected, 0)
        finally:
            if ahead is not None:
                ahead.cancel()

    # -- the API ------------------------------------------------------------------------------------------------

    async def _call(self, verb: str, request: Mapping[str, Any], timeout_s: float = API_TIMEOUT_S) -> bytes:
        payload = _encode(request) if request else b""
        return (await self._connection.request(f"{self._api}.{verb}", payload, timeout_s)).data

    async def _do(self, verb: str, request: Mapping[str, Any], action: str) -> DoneAnswer:
        answer = read_done(await self._call(verb, request))
        if answer.error is not None:
            raise _refused(action, answer.error)
        return answer

    async def _info(self, name: str, request: dict[str, Any], timeout_s: float = API_TIMEOUT_S) -> StreamInfo | None:
        subjects: dict[str, int] = {}
        while True:
            page = {**request, "offset": len(subjects)} if subjects else request
            answer = read_info(await self._call(f"STREAM.INFO.{name}", page, timeout_s))
            if answer.error is not None:
                if answer.error.err_code == ERR_STREAM_NOT_FOUND:
                    return None
                raise _refused(f"info of stream {name}", answer.error)
            before = len(subjects)
            subjects.update(answer.state.subjects)
            if len(subjects) >= answer.total or len(subjects) == before:
                return _stream_info(answer, subjects)

    async def _get(self, stream: str, request: dict[str, Any], timeout_s: float) -> StoredMessage | None:
        answer = read_get(await self._call(f"STREAM.MSG.GET.{_stream_name(stream)}", request, timeout_s))
        if answer.error is not None:
            if answer.error.err_code == ERR_NO_MESSAGE:
                return None
            raise _refused(f"read of stream {stream}", answer.error)
        if (raw := answer.message) is None:
            raise JetStreamRefused(f"read of stream {stream}", 0, 0, "an answer without a message")
        headers = parse_headers(base64.b64decode(raw.hdrs)) if raw.hdrs else None
        return StoredMessage(stream, raw.subject, raw.seq, raw.time, base64.b64decode(raw.data), headers)


_FORBIDDEN_LOWER: Final = FORBIDDEN_HEADER.lower()


def _is_end(delivery: Delivery) -> bool:
    """Return whether this is the end of a batch: its marker, or an error status.

    A stored message never looks like one: the server adds Nats-Sequence to each, after the headers of its publisher.
    """
    headers = delivery.headers
    return headers is None or "Nats-Sequence" not in headers


def _direct(stream: str, delivery: Delivery) -> StoredMessage:
    headers = delivery.headers or {}
    own = {key: value for key, value in headers.items() if key not in _ADDED_BY_SERVER} or None
    return StoredMessage(
        stream, headers["Nats-Subject"], int(headers["Nats-Sequence"]), headers["Nats-Time-Stamp"], delivery.data, own
    )


def _stream_info(answer: InfoAnswer, subjects: dict[str, int]) -> StreamInfo:
    state, config = answer.state, answer.config
    return StreamInfo(
        name=config.get("name", ""),
        messages=state.messages,
        size_bytes=state.bytes,
        first_seq=state.first_seq,
        last_seq=state.last_seq,
        leader=answer.cluster.leader,
        replicas=config.get("num_replicas", 1),
        config=config,
        subjects=subjects,
        now=answer.ts,
        lacking=answer.cluster.lacking(config.get("num_replicas", 1)),
        servers=answer.cluster.servers,
        cluster=answer.cluster.name,
    )


def _stream_name(name: str) -> str:
    if not is_token(name) or "/" in name or "\\" in name:
        raise ValueError(f"bad stream name {name!r}")
    return name


def _is_larger(bound: int, wanted: int) -> bool:
    """Return whether a bound is above another; -1 is none."""
    return bound < 0 or bound > wanted >= 0


def _same(found: object, wanted: object) -> bool:
    """Return whether a setting is as it must be. The server leaves out what is false, zero or empty."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(_same(found.get(key), value) for key, value in wanted.items())
    return found == wanted or (not found and not wanted)


def _refused(action: str, error: JsError) -> JetStreamRefused:
    return JetStreamRefused(action, error.code, error.err_code, error.description)
