"""The streams of the durable queue: one for all tenants, or one for each where the server knows the tenants.

In a stream for all, a tenant at its limit fills the bytes of everybody. So where the permissions of this scheduler name
a stream for a tenant (`nats-config` writes them for tenants with an account of their own), that tenant has its own,
bounded by itself. The stream for all then takes nothing any more; what waits in it is read first. A tenant's own stream
begins behind it, so that sequences, cursors and the ids `q<sequence>` go on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from moorage.bus.connection import Connection
from moorage.bus.errors import JetStreamRefused, NoResponders, PermissionRefused
from moorage.bus.jetstream import ERR_STREAM_NOT_FOUND, JetStream
from moorage.bus.jetstream_answers import StreamInfo
from moorage.schemas.names import is_tenant
from moorage.schemas.roles import USER_INFO
from moorage.schemas.subjects import Subjects

MESSAGES_PER_SUBJECT_MAX: Final = 1_000_000
#: JetStream reserves it, where the server has so much: of the stream for all, and of one tenant's own
BYTES_MAX: Final = 1024**3
TENANT_BYTES_MAX: Final = 256 * 1024**2
BYTES_MIN: Final = 16 * 1024**2
#: for so long the server drops a message whose `Nats-Msg-Id` it has seen, whoever sent that and whatever it says; the
#: smallest that it takes. What is the same job is decided by the job's id, never by this
DUPLICATES_NS: Final = 100_000_000
#: settings of a stream that may change under one that is there: nothing that is kept depends on them
MAY_CHANGE: Final = frozenset({"max_bytes", "duplicate_window"})
USER_INFO_S: Final = 2.0

_decode: Final = msgspec.json.Decoder(dict[str, Any]).decode


def stream_config(subjects: Subjects, replicas: int, tenant: str = "") -> dict[str, Any]:
    """Return the stream for all tenants, or one's own: bounded, and refusing the new at the bound."""
    return {
        "name": subjects.request_stream_of(tenant) if tenant else subjects.request_stream,
        "subjects": [subjects.request(tenant, ">") if tenant else subjects.request_all],
        "storage": "file",
        "retention": "limits",
        "discard": "new",
        "num_replicas": replicas,
        "max_msgs_per_subject": MESSAGES_PER_SUBJECT_MAX,
        "discard_new_per_subject": True,
        "max_bytes": TENANT_BYTES_MAX if tenant else BYTES_MAX,
        "max_msg_size": 64 * 1024,
        "duplicate_window": DUPLICATES_NS,
        "allow_direct": True,
    }


async def tenants_of(world: Connection, subjects: Subjects) -> frozenset[str]:
    """The tenants that have a stream of their own here: those for which this user may make one. Raises `BusError`."""
    head = f"$JS.API.STREAM.CREATE.{subjects.request_stream_of('')}"
    try:
        answer = _decode((await world.request(USER_INFO, b"", USER_INFO_S)).data)
    except (NoResponders, PermissionRefused):  # rights that an older release wrote
        return frozenset()
    permissions = (answer.get("data") or {}).get("permissions") or {}
    allowed = (permissions.get("publish") or {}).get("allow") or ()
    return frozenset(tenant for each in allowed if each.startswith(head) and is_tenant(tenant := each[len(head) :]))


class QueueStreams:
    """Which stream holds whose queue. `tenants` are those with one of their own, as `world` said last."""

    def __init__(
        self, jetstream: JetStream, subjects: Subjects, replicas: int, world: Connection | None = None
    ) -> None:
        self._js = jetstream
        self._subjects = subjects
        self._replicas = replicas
        self._world = world
        self.tenants = frozenset[str]()

    async def refresh(self) -> bool:
        """Ask anew which tenants have a stream of their own; whether that changed. Raises `BusError`."""
        before = self.tenants
        if self._world is not None:
            self.tenants = await tenants_of(self._world, self._subjects)
        return self.tenants != before

    def of(self, tenant: str) -> str:
        """Return the stream to which a tenant's messages are published now."""
        return self._subjects.request_stream_of(tenant) if tenant in self.tenants else self._subjects.request_stream

    async def ensure(self, first_seq: Callable[[], Awaitable[int]]) -> None:
        """Make the streams, as large as the server has room; `first_seq` is asked where one that has to be made begins.

        May be broken off anywhere and done again. Raises `BusError`.
        """
        if not self.tenants:
            config = stream_config(self._subjects, self._replicas)
            await self._js.ensure_stream_with_room(config, MAY_CHANGE, BYTES_MIN, first_seq)
            return
        former = await self.former()
        if former is not None:
            closed = {"name": former.name, "subjects": [self._subjects.request_none], "max_bytes": -1}
            former = await self._js.ensure_stream(closed, frozenset(closed))

        async def behind() -> int:
            return max(await first_seq(), 1 + (former.last_seq if former is not None else 0))

        for tenant in sorted(self.tenants):
            config = stream_config(self._subjects, self._replicas, tenant)
            await self._js.ensure_stream_with_room(config, MAY_CHANGE, BYTES_MIN, behind)

    async def former(self) -> StreamInfo | None:
        """Return the stream for all where tenants have their own, if there is one. Raises `BusError`."""
        return await info_of(self._js, self._subjects.request_stream) if self.tenants else None


async def info_of(jetstream: JetStream, stream: str, subjects: str = "") -> StreamInfo | None:
    """State and settings of a stream, None if there is none. Raises `BusError`."""
    try:
        return await jetstream.stream_info(stream, subjects)
    except JetStreamRefused as refused:
        if refused.err_code == ERR_STREAM_NOT_FOUND:
            return None
        raise
