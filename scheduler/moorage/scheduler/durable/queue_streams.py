"""The streams of the durable queue: one shared by all tenants, or one for each tenant that the server knows.

In a shared stream, one tenant can fill the bytes of all. So if this scheduler's permissions name a stream for a tenant
(`nats-config` writes them for tenants with an account of their own), that tenant has its own stream with its own bound.
The shared stream then accepts nothing more; what it still contains is read first. A tenant's own stream begins behind
it, so that sequences, cursors and the ids `q<sequence>` continue.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from moorage.bus.connection import Connection
from moorage.bus.errors import JetStreamRefused, NoResponders, PermissionRefused
from moorage.bus.jetstream import COPIES_FOLLOW, ERR_STREAM_NOT_FOUND, JetStream
from moorage.bus.jetstream_answers import StreamInfo
from moorage.scheduler.pacing.reminders import Reminders
from moorage.schemas.codec import REQUEST_BYTES_MAX
from moorage.schemas.names import is_person, is_tenant
from moorage.schemas.roles import USER_INFO
from moorage.schemas.subjects import Subjects

MESSAGES_PER_SUBJECT_MAX: Final = 1_000_000
#: JetStream reserves this much, if the server has it: for the shared stream, and for a tenant's own
BYTES_MAX: Final = 1024**3
TENANT_BYTES_MAX: Final = 256 * 1024**2
BYTES_MIN: Final = 16 * 1024**2
#: the time for which the server drops messages with a `Nats-Msg-Id` it has seen, whatever the sender or content; the
#: smallest that it accepts. Moorage recognises repeated jobs by the job's id only
DUPLICATES_NS: Final = 100_000_000
#: room for the headers of a message, such as traceparent: nats-server counts them in `max_msg_size`, too
HEADERS_BYTES_MAX: Final = 4096
#: settings that may change on an existing stream: no stored message depends on them
MAY_CHANGE: Final = frozenset({"max_bytes", "max_msg_size", "duplicate_window", *COPIES_FOLLOW})
#: those that an operator may enlarge
BOUNDS: Final = frozenset({"max_bytes", "max_msgs_per_subject"})
USER_INFO_S: Final = 2.0

log = logging.getLogger(__name__)

_decode: Final = msgspec.json.Decoder(dict[str, Any]).decode


def stream_config(subjects: Subjects, replicas: int, tenant: str = "") -> dict[str, Any]:
    """Return the settings of the shared stream, or of one tenant's: bounded, and refusing new messages when full."""
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
        "max_msg_size": REQUEST_BYTES_MAX + HEADERS_BYTES_MAX,
        "duplicate_window": DUPLICATES_NS,
        "allow_direct": True,
    }


class UserInfo(msgspec.Struct):
    """What a server says of a user: its `account`, "" if it does not say, and to which subjects it may publish and
    subscribe.

    `allowed` is None for a user without such a list, who may publish to any; so is `heard`.
    """

    account: str = ""
    allowed: list[str] | None = None
    heard: list[str] | None = None

    def own_queues(self, subjects: Subjects) -> frozenset[str]:
        """Return the tenants with a stream of their own: those for which this user may create one."""
        return self._may_create(subjects.request_stream_of(""))

    def own_buckets(self, subjects: Subjects) -> frozenset[str]:
        """Return the tenants with buckets of their own for files and results, which this user may create."""
        return self._may_create(f"OBJ_{subjects.files_bucket('')}")

    def persons(self, subjects: Subjects) -> dict[str, str]:
        """Return whose keys are persons': `vision/lena` by the user as nats-server names it."""
        head = subjects.persons
        found = (each[len(head) :].split(".", 2) for each in self.allowed or () if each.startswith(head))
        return {words[2]: f"{words[0]}/{words[1]}" for words in found if _is_person(words)}

    def passes_on(self, subjects: Subjects) -> bool:
        """Return whether workers have this user pass on what they ask of buckets, see `schemas.passed_on`."""
        return subjects.worker_fetch_all in (self.heard or ()) and bool(self.own_buckets(subjects))

    def _may_create(self, stream: str) -> frozenset[str]:
        head = f"$JS.API.STREAM.CREATE.{stream}"
        found = [each[len(head) :] for each in self.allowed or () if each.startswith(head)]
        return frozenset(tenant for tenant in found if is_tenant(tenant))


def _is_person(words: list[str]) -> bool:
    return len(words) == len(("tenant", "name", "user")) and bool(is_tenant(words[0]) and is_person(words[1]))


async def user_info(world: Connection) -> UserInfo:
    """Return what the server says of this user; nothing where permissions that moorage did not write refuse it.

    Raises `BusError`.
    """
    try:
        answer = _decode((await world.request(USER_INFO, b"", USER_INFO_S)).data)
    except (NoResponders, PermissionRefused):
        return UserInfo()
    told = answer.get("data") or {}
    permissions = told.get("permissions") or {}
    allowed, heard = ((permissions.get(verb) or {}).get("allow") or None for verb in ("publish", "subscribe"))
    return UserInfo(told.get("account") or "", allowed, heard)


class QueueStreams:
    """The mapping of tenants' queues to streams. `tenants` are those with their own stream, as of the last refresh.

    Before the first refresh, and without `world`, there are none.
    """

    def __init__(
        self, jetstream: JetStream, subjects: Subjects, replicas: int, world: Connection | None = None
    ) -> None:
        self._js = jetstream
        self._subjects = subjects
        self._replicas = replicas
        self._world = world
        self.tenants = frozenset[str]()
        self.lacking = frozenset[str]()  # those whose stream cannot be made now
        self.buckets_of = frozenset[str]()  # tenants whose buckets are to be there
        self.has_keys = False  # whether the server has rights for each user
        self.persons: dict[str, str] = {}  # whose keys are persons': `vision/lena` by the server's name of the user
        self._refused = Reminders()

    async def refresh(self) -> bool:
        """Ask again which tenants have their own stream; return whether that changed. Raises `BusError`."""
        before = self.tenants
        if self._world is not None:
            info = await user_info(self._world)
            self.has_keys = info.allowed is not None
            self.persons = info.persons(self._subjects)
            self.tenants, self.buckets_of = info.own_queues(self._subjects), info.own_buckets(self._subjects)
        return self.tenants != before

    def of(self, tenant: str) -> str:
        """Return the stream to which a tenant's messages are published now."""
        return self._subjects.request_stream_of(tenant) if tenant in self.tenants else self._subjects.request_stream

    async def ensure(self, first_seq: Callable[[], Awaitable[int]]) -> None:
        """Create the streams, smaller if the server lacks room, or check them; `first_seq` says where a new one begins.

        A bound that an operator has enlarged stays as large. If tenants have their own streams, the shared one is not
        created, and an existing one accepts nothing more. May be repeated after it stopped anywhere. Raises `BusError`;
        but a tenant whose stream the server refuses is logged and `lacking`, unless it refuses all.
        """
        if not self.tenants:
            config = stream_config(self._subjects, self._replicas)
            await self._js.ensure_stream_with_room(config, MAY_CHANGE, BYTES_MIN, first_seq, keeps_larger=BOUNDS)
            return
        former = await self.former()
        if former is not None:
            closed = {"name": former.name, "subjects": [self._subjects.request_none], "max_bytes": -1}
            former = await self._js.ensure_stream(closed, frozenset(closed))

        async def behind() -> int:
            return max(await first_seq(), 1 + (former.last_seq if former is not None else 0))

        lacking = set[str]()
        for tenant in sorted(self.tenants):
            config = stream_config(self._subjects, self._replicas, tenant)
            try:
                await self._js.ensure_stream_with_room(config, MAY_CHANGE, BYTES_MIN, behind, keeps_larger=BOUNDS)
            except JetStreamRefused as refused:
                lacking.add(tenant)
                if self._refused.due(words := f"tenant {tenant} has no durable queue now: {refused}"):
                    log.warning("%s", words)
                if len(lacking) == len(self.tenants):
                    raise
        self.lacking = frozenset(lacking)

    async def former(self) -> StreamInfo | None:
        """Return the shared stream if tenants have streams of their own and it exists; else None. Raises `BusError`."""
        return await info_of(self._js, self._subjects.request_stream) if self.tenants else None


async def info_of(jetstream: JetStream, stream: str, subjects: str = "") -> StreamInfo | None:
    """Return state and settings of a stream, None if it does not exist; with a filter `subjects`, also their counts.

    Raises `BusError`.
    """
    try:
        return await jetstream.stream_info(stream, subjects)
    except JetStreamRefused as refused:
        if refused.err_code == ERR_STREAM_NOT_FOUND:
            return None
        raise
