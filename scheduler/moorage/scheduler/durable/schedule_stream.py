"""The stream in which nats-server counts the time of schedules: its message schedules (NATS ADR-51), server 2.14.

It is in the ledger's account, so that only schedulers have a right to it. For each schedule there are at most two
messages. The *wish* says when (`Nats-Schedule`), and which record of the ledger set it; that of an interval says no
time, as the leader counts it. The *run* is the newest message that the server or a leader has published for it, with
the header of the wish. The server passes on each run to a subject outside of the stream, on which the leader listens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from moorage.bus.connection import Connection
from moorage.bus.errors import BusError, JetStreamRefused
from moorage.bus.jetstream import (
    COPIES_FOLLOW,
    EXPECTED_LAST_SUBJECT_SEQUENCE,
    MESSAGE_ID,
    Ack,
    JetStream,
    JsError,
    StoredMessage,
    wall_seconds,
)
from moorage.bus.server_version import check_server
from moorage.bus.transport import Delivery
from moorage.scheduler.core.ledger.schedules import Schedule
from moorage.scheduler.durable.due_times import is_interval, wrong_field
from moorage.schemas.errors import refuse
from moorage.schemas.schedules import CRON_WORDS, SERVER_MIN, cron_of
from moorage.schemas.subjects import Subjects

SCHEDULE: Final = "Nats-Schedule"
TARGET: Final = "Nats-Schedule-Target"
ZONE: Final = "Nats-Schedule-Time-Zone"
#: of a run that the server published: when it publishes the next one
SERVER_NEXT: Final = "Nats-Schedule-Next"
#: of a run that a leader published: when the next one is due, in milliseconds since 1970
NEXT: Final = "Moorage-Next"
#: of a wish and of its runs: the sequence of the ledger record that set it
WISH: Final = "Moorage-Wish"
#: of a wish: from when on its schedule runs, in milliseconds since 1970
SINCE: Final = "Moorage-Since"
#: of what the server passes on: the sequence in the stream, and when it was stored
SEQUENCE: Final = "Nats-Sequence"
STORED_AT: Final = "Nats-Time-Stamp"

_ERR_PATTERN: Final = 10189
_ERR_ZONE: Final = 10223
_BATCH: Final = 1_000

#: tenant and name of a schedule
Key = tuple[str, str]


class Wish(NamedTuple):
    """A wish in the stream: the record that set it, its message's sequence, and from when on it holds (ms)."""

    record: int
    seq: int
    since_ms: int


class Run(NamedTuple):
    """A run in the stream: its number, for which wish, and when the next one comes (wall-clock ms; 0: not said).

    `made_ms` is when nats-server made it, 0 for a run of a leader.
    """

    key: Key
    wish: int
    sequence: int
    next_ms: int
    made_ms: int = 0


class ScheduleStream:
    """The stream, which is made when the first schedule is added."""

    def __init__(self, world: Connection, subjects: Subjects, replicas: int) -> None:
        self._world = world
        self._js = JetStream(world)
        self._subjects = subjects
        self._replicas = replicas
        self.stream = subjects.schedule_stream

    def config(self) -> dict[str, Any]:
        """Return the stream's settings."""
        return {
            "name": self.stream,
            "subjects": [self._subjects.schedule_all],
            "storage": "file",
            "retention": "limits",
            "discard": "old",
            "max_msgs_per_subject": 1,
            "num_replicas": self._replicas,
            "allow_direct": True,
            "allow_rollup_hdrs": True,  # the server needs it to replace a wish
            "allow_msg_schedules": True,
            "republish": {
                "src": self._subjects.schedule_runs,
                "dest": self._subjects.scheduled_all,
                "headers_only": True,
            },
        }

    def check_server(self) -> None:
        """Raise `Refused` if this nats-server cannot repeat messages."""
        own_cron = "a cron of your own that calls moorage submit needs nothing of it"
        check_server(self._world, SERVER_MIN, "cannot repeat messages, which schedules need", own_cron)

    async def ensure(self, ran_through: int) -> None:
        """Create the stream if it is not there. Runs have numbers above `ran_through`. Raises `BusError`."""

        async def first_seq() -> int:
            return ran_through + 1

        info = await self._js.ensure_stream(self.config(), COPIES_FOLLOW, first_seq)
        if info.last_seq < ran_through:  # another stream than that of which runs were recorded
            await self._js.delete_stream(self.stream)
            await self._js.ensure_stream(self.config(), COPIES_FOLLOW, first_seq)

    async def check(self, cron: str, zone: str) -> None:
        """Have the server check a time. Raises `Refused` for one that it does not know, and `BusError`."""
        headers = _times(cron, zone, self._subjects.schedule_tried)
        answer = await self._js.append(self._subjects.schedule_try, b"", headers)
        await self._js.purge(self.stream, subject=self._subjects.schedule_try)
        if isinstance(answer, Ack):
            return
        if answer.err_code == _ERR_PATTERN:
            wrong = "" if is_interval(cron) or cron.startswith("@") else wrong_field(cron)
            raise refuse(
                "invalid-argument",
                f"nats-server does not know the time {cron!r}, {wrong or 'or it never comes'}",
                field="$.cron",
                found=cron,
                allowed=f"{CRON_WORDS}; an interval of whole seconds; 0 or SUN for Sunday",
                next="moorage schedule add --help has examples",
            )
        if answer.err_code == _ERR_ZONE:
            raise refuse(
                "invalid-argument",
                f"nats-server does not know the time zone {zone!r}",
                field="$.tz",
                found=zone,
                allowed="a name of the tz database, as Europe/Berlin",
                next="if the name is right, install tzdata on the server's host",
            )
        raise _not_stored("a time was not checked", answer)

    async def wishes(self) -> dict[Key, Wish]:
        """Return the wishes in the stream. Raises `BusError`."""
        return {
            self._key(message.subject): Wish(
                _number(message.headers, WISH), message.seq, _number(message.headers, SINCE)
            )
            for message in await self._all(self._subjects.schedule_wishes)
        }

    async def runs(self) -> list[Run]:
        """Return the newest run of each schedule, in the order of their numbers. Raises `BusError`."""
        return [
            run_of(self._key(message.subject), message.headers, message.seq, message.stored_at)
            for message in await self._all(self._subjects.schedule_runs)
        ]

    def passed_on(self, delivery: Delivery) -> Run | None:
        """Return the run that the server passes on; None if it is none."""
        parts, sequence = delivery.subject.split("."), _number(delivery.headers, SEQUENCE)
        if len(parts) <= 2 or not sequence:
            return None
        stored_at = (delivery.headers or {}).get(STORED_AT, "")
        return run_of((parts[-2], parts[-1]), delivery.headers, sequence, stored_at)

    async def publish(self, key: Key, row: Schedule, since_ms: int, before: Wish | None) -> Wish:
        """Publish a wish in place of `before` (None: of none), and return it.

        A leader that was overtaken does not replace a wish that it does not know. Raises `BusError`.
        """
        record = row.wish
        headers = {} if is_interval(row.cron) else _times(row.cron, row.tz, self._subjects.schedule_run(*key))
        headers |= {
            WISH: str(record),
            SINCE: str(since_ms),
            EXPECTED_LAST_SUBJECT_SEQUENCE: str(before.seq if before is not None else 0),
        }
        answer = await self._js.append(self._subjects.schedule_wish(*key), b"", headers)
        if not isinstance(answer, Ack):
            raise _not_stored(f"the time of schedule {key[1]} of tenant {key[0]} was not set", answer)
        return Wish(record, answer.seq, since_ms)

    async def withdraw(self, key: Key, wish: Wish) -> None:
        """Delete a wish, unless it was replaced meanwhile. Raises `BusError`."""
        await self._js.purge(self.stream, subject=self._subjects.schedule_wish(*key), below_seq=wish.seq + 1)

    async def forget_run(self, key: Key, through: int) -> None:
        """Delete the run of a schedule that is no longer there. Raises `BusError`."""
        await self._js.purge(self.stream, subject=self._subjects.schedule_run(*key), below_seq=through + 1)

    async def now_ms(self) -> int:
        """Return the server's wall clock, in milliseconds since 1970; 0 if it does not tell. Raises `BusError`."""
        return _ms((await self._js.stream_info(self.stream)).now)

    async def make_run(self, key: Key, record: int, *, once: str = "", next_ms: int = 0) -> int:
        """Publish a run and return its number; with the same `once`, within two minutes, that of the first.

        `next_ms` is when the next one is due, 0 for a run that was asked for. Raises `BusError`.
        """
        headers = {WISH: str(record), **({MESSAGE_ID: f"{key[0]}.{key[1]}.{once}"} if once else {})}
        headers |= {NEXT: str(next_ms)} if next_ms else {}
        answer = await self._js.append(self._subjects.schedule_run(*key), b"", headers)
        if not isinstance(answer, Ack):
            raise _not_stored(f"no run of schedule {key[1]} of tenant {key[0]} was made", answer)
        return answer.seq

    def _key(self, subject: str) -> Key:
        _, tenant, name = subject.rsplit(".", 2)
        return tenant, name

    async def _all(self, subjects: str) -> list[StoredMessage]:
        found: list[StoredMessage] = []
        while True:
            first = found[-1].seq + 1 if found else 1
            more = await self._js.direct_get_batch(self.stream, seq=first, next_by_subject=subjects, batch=_BATCH)
            found += more
            if len(more) < _BATCH:
                return found


def run_of(key: Key, headers: Mapping[str, str] | None, sequence: int, stored_at: str) -> Run:
    """Return a run from its headers; one without a time was asked for by somebody."""
    wish = _number(headers, WISH)
    if SERVER_NEXT in (headers or {}):
        return Run(key, wish, sequence, _ms((headers or {})[SERVER_NEXT]), _ms(stored_at))
    return Run(key, wish, sequence, _number(headers, NEXT))


def _times(cron: str, zone: str, target: str) -> dict[str, str]:
    return {SCHEDULE: cron_of(cron), TARGET: target, **({ZONE: zone} if zone else {})}


def _ms(rfc3339: str) -> int:
    """Return a time of the server in milliseconds since 1970, 0 for one that is not there or cannot be read."""
    try:
        return int(wall_seconds(rfc3339) * 1000)
    except ValueError:
        return 0


def _number(headers: Mapping[str, str] | None, name: str) -> int:
    text = (headers or {}).get(name, "")
    return int(text) if text.isdigit() else 0


def _not_stored(what: str, answer: JsError) -> BusError:
    return JetStreamRefused(what, answer.code, answer.err_code, answer.description)
