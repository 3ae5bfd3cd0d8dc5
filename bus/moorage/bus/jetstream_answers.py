"""The answers of JetStream as types: acknowledgements, refusals, stored messages, stream information."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, TypeVar

import msgspec

from moorage.bus.errors import JetStreamRefused
from moorage.schemas.unreadable import UNREADABLE

A = TypeVar("A", bound=msgspec.Struct)


class Ack(msgspec.Struct, frozen=True, gc=False):
    """An acknowledgement: the message is stored at `seq`.

    If `duplicate` is set, its Nats-Msg-Id was known, and `seq` is that of the first message with this id.
    """

    stream: str
    seq: int
    duplicate: bool = False


def wall_seconds(rfc3339: str) -> float:
    """Return a time stamp of the server as seconds since 1970."""
    return datetime.fromisoformat(rfc3339).timestamp()


class JsError(msgspec.Struct, frozen=True, gc=False):
    """A refusal of the server, or with `code` 0 an answer that cannot be read.

    It does not prove that nothing was stored: see `err_code` in the ledger's rules.
    """

    code: int
    err_code: int = 0
    description: str = ""

    @property
    def nobody_listens(self) -> bool:
        """Whether no stream takes the subject: this is NATS's own "no responders", without a code of JetStream."""
        return self.code == 503 and not self.err_code


class StoredMessage(msgspec.Struct, frozen=True, gc=False):
    """A message of a stream. `stored_at` is RFC 3339 by the server's clock. `headers` are those it was published
    with."""

    stream: str
    subject: str
    seq: int
    stored_at: str
    data: bytes
    headers: dict[str, str] | None = None


class StreamInfo(msgspec.Struct, frozen=True):
    """The state and the settings of a stream.

    `subjects`: messages by subject, only if a filter was given. `leader` is the server that leads it, "" if the answer
    does not tell it. `now` is the answering server's wall clock, RFC 3339; "" if the server does not tell it. `lacking`
    names the servers whose copy is not up to date, because they are gone or still catch up; "?" is a server of which
    nothing is known. `servers` names those that hold a copy. `cluster` is the name of their cluster, "" for a server
    in none.
    """

    name: str
    messages: int
    size_bytes: int
    first_seq: int
    last_seq: int
    leader: str
    replicas: int
    config: dict[str, Any]
    subjects: dict[str, int]
    now: str = ""
    lacking: frozenset[str] = frozenset()
    servers: frozenset[str] = frozenset()
    cluster: str = ""


class _State(msgspec.Struct):
    messages: int = 0
    bytes: int = 0
    first_seq: int = 0
    last_seq: int = 0
    subjects: dict[str, int] = {}


class _Peer(msgspec.Struct):
    name: str = ""
    current: bool = False
    offline: bool = False


class _Cluster(msgspec.Struct):
    name: str = ""
    leader: str = ""
    replicas: list[_Peer] = []

    @property
    def servers(self) -> frozenset[str]:
        return frozenset({self.leader, *(peer.name for peer in self.replicas)} - {""})

    def lacking(self, copies: int) -> frozenset[str]:
        """Return the servers, other than the leader, whose copy of the stream is not up to date; `copies` is how many
        there should be."""
        behind = {peer.name for peer in self.replicas if peer.offline or not peer.current}
        return frozenset(behind | {"?"} if 1 + len(self.replicas) < copies else behind)


class InfoAnswer(msgspec.Struct):
    error: JsError | None = None
    config: dict[str, Any] = {}
    state: _State = msgspec.field(default_factory=_State)
    cluster: _Cluster = msgspec.field(default_factory=_Cluster)
    total: int = 0
    offset: int = 0
    limit: int = 0
    ts: str = ""


class AckAnswer(msgspec.Struct, gc=False):
    error: JsError | None = None
    stream: str = ""
    seq: int = 0
    duplicate: bool = False


class RawMessage(msgspec.Struct):
    subject: str = ""
    seq: int = 0
    time: str = ""
    data: str = ""
    hdrs: str = ""


class GetAnswer(msgspec.Struct):
    error: JsError | None = None
    message: RawMessage | None = None


class DoneAnswer(msgspec.Struct):
    error: JsError | None = None
    success: bool = False
    purged: int = 0


_decode_ack = msgspec.json.Decoder(AckAnswer).decode


def read_ack(data: bytes) -> Ack | JsError:
    """Return the decoded answer to an append. What is no answer of JetStream becomes a JsError with code 0."""
    try:
        answer = _decode_ack(data)
    except UNREADABLE:
        return JsError(0, 0, f"no JetStream answer: {data[:80]!r}")
    if answer.error is not None:
        return answer.error
    if not answer.stream or answer.seq <= 0:
        return JsError(0, 0, f"no JetStream answer: {data[:80]!r}")
    return Ack(answer.stream, answer.seq, answer.duplicate)


def _reader(kind: type[A]) -> Callable[[bytes], A]:
    decode = msgspec.json.Decoder(kind).decode

    def read(data: bytes) -> A:
        """Raise `JetStreamRefused` for what is no answer of JetStream's."""
        try:
            return decode(data)
        except UNREADABLE:
            raise JetStreamRefused("read an answer", 0, 0, f"no JetStream answer: {data[:80]!r}") from None

    return read


read_info: Final = _reader(InfoAnswer)
read_get: Final = _reader(GetAnswer)
read_done: Final = _reader(DoneAnswer)
