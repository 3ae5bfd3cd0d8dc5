"""The durable queue: requests and cancels published to a stream, which is also possible while no scheduler leads.

There is no JetStream consumer. The ledger holds a cursor for each tenant, from which the stream is read with batched
direct get (ledger-rules H16). So one tenant's flood hides no other tenant, nothing is redelivered, and the stream is
purged up to the cursor. Messages that cannot be read go to the dead letters before the cursor passes them. Requests
refused later (a conflict, say) go there afterwards, since no client waits for an answer.

A deleted stream is made again, beginning after the cursors, which are sequences of it. A stream that ends before a
cursor is another stream; it is read from its beginning, so that nothing it acknowledged is skipped. `queue_streams`
says which stream belongs to which tenant.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from moorage.bus.errors import BusError, JetStreamRefused
from moorage.bus.jetstream import ERR_STREAM_NOT_FOUND, JetStream, StoredMessage
from moorage.bus.jetstream_answers import StreamInfo
from moorage.bus.transport import Delivery
from moorage.scheduler.arguments import cancel_of
from moorage.scheduler.core.containment import trace_of
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import Cancel, QueueRead, Submit
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.core.outputs.outputs import Message
from moorage.scheduler.durable.dead_letters import DeadLetters, job_in
from moorage.scheduler.durable.look_back import LookBack
from moorage.scheduler.durable.queue_streams import QueueStreams
from moorage.scheduler.durable.tenant_buckets import TenantBuckets
from moorage.scheduler.pacing.gate import Gate
from moorage.scheduler.tflops import resolved
from moorage.schemas.answers.fleet import RequestQueueRow
from moorage.schemas.codec import Decoder, refuse_twice
from moorage.schemas.errors import Problem, Refused, problem
from moorage.schemas.names import is_tenant
from moorage.schemas.subjects import Subjects
from moorage.schemas.ways import OPEN, QUEUE

log = logging.getLogger("moorage.queue")

BATCH: Final = 500
#: reading pauses at this many events that were offered and are not recorded yet
AHEAD_MAX: Final = 5_000
PURGE_EVERY_S: Final = 5.0
SWEEP_EVERY_S: Final = 10.0
#: a cancel of an unknown job is remembered for at least so long after it was read, while there is room for others
REMEMBERED_S: Final = 60.0
#: from this part of its bytes on, the log, `moorage doctor` and an alert warn that the queue fills
FULL_PERCENT: Final = 80
AGAIN_S: Final = 1.0
#: how many unreadable messages are stored as dead letters at once, since each waits for a disk; refused requests have
#: as many tasks of their own, because they may wait for dead letters that cannot be stored, and reading must not
BURIED_AT_ONCE: Final = 16
#: with this many refused requests of one tenant to store, that tenant's queue pauses
UNBURIED_MAX: Final = BATCH

_VERBS: Final = ("submit", "cancel")
#: marks answers to messages read here; a subject has no blank
_REPLY_MARK: Final = "queue "

_decode_refusal: Final = Decoder[Problem](Problem)
_decode_cancel: Final = Decoder[dict[str, Any]](dict[str, Any], 4096)


def read_through(state: State) -> int:
    """Return the highest cursor of all tenants in the ledger, 0 if there is none: a new stream begins behind it."""
    return max((max(row.submit_cursor, row.cancel_cursor) for row in state.tenants.values()), default=0)


def _part(info: StreamInfo) -> float:
    """Return how full a stream is, 0 to 1; 0 for one without a bound."""
    bytes_max = info.config.get("max_bytes", -1)
    return info.size_bytes / bytes_max if bytes_max > 0 else 0.0


class QueueReader:
    """Reads every tenant's queue from its cursor, in turn. `wake` is called when something was offered."""

    def __init__(
        self,
        jetstream: JetStream,
        subjects: Subjects,
        engine: Engine,
        wake: Callable[[], None],
        say: Callable[[list[Message]], None],
        replicas: int,
        streams: QueueStreams,
        buckets: TenantBuckets,
        gate: Gate,
    ) -> None:
        self._js = jetstream
        self._subjects = subjects
        self._engine = engine
        self._wake = wake
        self._streams = streams
        self._buckets = buckets
        self._gate = gate
        self._former_read = set[tuple[str, str]]()  # queues with nothing left in the former shared stream
        self._former: StreamInfo | None = None
        #: set once `_former` and the list of streams are known; reading earlier would skip messages of the former
        #: stream
        self._known = asyncio.Event()
        self._to_make = False
        self.letters = DeadLetters(jetstream, subjects, engine, wake, say, replicas)
        #: (tenant, verb) of the queues to read, in order of arrival, and whether a hint says so
        self._dirty: dict[tuple[str, str], bool] = {}
        self._read: dict[tuple[str, str], int] = {}  # sequence read so far, ahead of the cursor in the ledger
        self._purged: dict[tuple[str, str, str], int] = {}  # by stream, tenant, verb
        self._offered: dict[str, tuple[str, StoredMessage]] = {}  # by mark, until the core has decided
        self._refused: asyncio.Queue[tuple[str, StoredMessage, Problem, str]] = asyncio.Queue()
        self._unburied: dict[str, set[int]] = {}  # by tenant, the sequences of those that are not stored yet
        self._look_back = LookBack(
            jetstream, subjects, engine, streams, lambda tenant, message: self._submit(tenant, message, "")
        )
        #: unreadable submits: tenant, last sequence of the batch, job, why. They are told once the batch is decided, as
        #: another submit of it may make that job
        self._untold = deque[tuple[str, int, str, Problem]](maxlen=AHEAD_MAX)
        self._some = asyncio.Event()
        self._room = asyncio.Event()
        self._held_back: list[tuple[str, str]] = []  # queues that wait for room (for jobs, or to remember cancels)
        #: by tenant: the last sequence when its queue of submits was found empty, and when (monotonic seconds)
        self._empty: dict[str, tuple[int, float]] = {}
        self._strays_told = False  # whether the log says that messages of no tenant are in the queue
        self._filled: dict[str, StreamInfo] = {}  # as last counted; by tenant, "" for the shared stream
        self._full_told = set[str]()

    def hint(self, delivery: Delivery) -> None:
        """Note that a message was published, so that its tenant's queue is read."""
        parts = delivery.subject.split(".")
        if len(parts) >= 3 and parts[-1] in _VERBS and is_tenant(parts[-2]):
            self._dirty[(parts[-2], parts[-1])] = True
            self._some.set()

    def figures(self) -> RequestQueueRow | None:
        """Return size, limit (0: none) and owner of the fullest stream of the queue; None until counted.

        The owner is given if the stream belongs to one tenant.
        """
        if not self._filled:
            return None
        tenant, info = max(self._filled.items(), key=lambda row: _part(row[1]))
        bytes_max = max(0, info.config.get("max_bytes", 0))
        return RequestQueueRow(tenant=tenant, messages=info.messages, bytes=info.size_bytes, bytes_max=bytes_max)

    def _watch(self, tenant: str, info: StreamInfo) -> None:
        """Warn once while a stream is nearly full: when it is full, the server refuses what is published to it."""
        self._filled[tenant] = info
        if _part(info) * 100 < FULL_PERCENT:
            self._full_told.discard(tenant)
            return
        if tenant in self._full_told:
            return
        self._full_told.add(tenant)
        subject, most = max(info.subjects.items(), key=lambda row: row[1], default=("", 0))
        log.warning(
            "the durable queue%s is %d %% full (%d of %d MiB), and accepts no request%s when it is full: %d "
            "messages are of"
            " tenant %s; moorage admin tenants shows the limits of that tenant",
            f" of tenant {tenant}" if tenant else "",
            int(_part(info) * 100),
            info.size_bytes >> 20,
            info.config["max_bytes"] >> 20,
            "" if tenant else " of any tenant",
            most,
            self._subjects.token(subject, 1),
        )

    def unburied(self, tenant: str) -> int:
        """Return how many refused requests of a tenant are not stored as dead letters yet."""
        return len(self._unburied.get(tenant, ()))

    def decided(self, reply: str, answer: bytes) -> bool:
        """Take an answer about a queued message or a resent dead letter; return False for any other answer.

        `reply` is the mark with which the message was offered. A refused queued message becomes a dead letter, since no
        client waits for the answer.
        """
        if not reply.startswith(_REPLY_MARK):
            return self.letters.decided(reply, answer)
        # None: read twice, because an earlier run of the reader failed after it
        offered = self._offered.pop(reply, None)
        if offered is not None and b'"kind":"error"' in answer:
            evidence = self._engine.containment.traces.pop(reply, "")
            self._refuse(*offered, _decode_refusal(answer), evidence)
        return True

    def _refuse(self, tenant: str, message: StoredMessage, why: Problem, evidence: str = "") -> None:
        self._unburied.setdefault(tenant, set()).add(message.seq)
        self._refused.put_nowait((tenant, message, why, evidence))

    def made_room(self) -> None:
        """Resume reading after a fold, also for queues that had waited for room; tell what is known to be refused."""
        self._room.set()
        if self._held_back:
            for key in self._held_back:
                self._look_at(key)
            self._held_back.clear()
        for _ in range(len(self._untold)):
            tenant, through, job, why = self._untold.popleft()
            if self._folded(tenant, "submit") >= through:
                self.letters.reject(tenant, job, why)
            else:
                self._untold.append((tenant, through, job, why))

    async def run(self) -> None:
        """Read forever: on hints, and regularly to find what hints missed. May be run again after it raised."""
        self._some.set()
        async with asyncio.TaskGroup() as group:
            for _ in range(BURIED_AT_ONCE):
                group.create_task(self._bury_refused())
            group.create_task(self._sweep())
            group.create_task(self._purge())
            group.create_task(self._bury_left())
            while True:
                await self._some.wait()
                self._some.clear()
                while self._dirty:
                    key = next(iter(self._dirty))
                    hinted = self._dirty.pop(key)
                    try:
                        if await self._read_some(*key):
                            self._look_at(key, hinted)  # more may wait; other queues come first
                        elif hinted:  # the hint may have come before the message was stored where it is read from
                            asyncio.get_running_loop().call_later(AGAIN_S, self._look_at, key)
                    except BusError as error:
                        log.warning("the durable queue of tenant %s cannot be read now: %s", key[0], error)
                        self._look_at(key, hinted)
                        await self._make_again(error)
                        await asyncio.sleep(AGAIN_S)
                    except Exception:
                        self._look_at(key, hinted)
                        raise

    async def _bury_refused(self) -> None:
        while True:
            tenant, message, problem, evidence = await self._refused.get()
            try:
                await self.letters.bury(tenant, message, problem, evidence)
            except BaseException:
                self._refused.put_nowait((tenant, message, problem, evidence))  # for the next run
                raise
            left = self._unburied.get(tenant, set())  # a tenant's former stream may have had the same sequence
            left.discard(message.seq)
            if not left:
                self._unburied.pop(tenant, None)

    async def _bury_left(self) -> None:
        """Have dead letters stored that an earlier leader may not have stored."""
        while self._look_back.tenants:
            await self._known.wait()
            try:
                for lost in await self._look_back.look():
                    self._refuse(*lost)
            except BusError as error:
                log.warning("what an earlier leader refused of the durable queue cannot be read now: %s", error)
                await asyncio.sleep(AGAIN_S)

    async def _sweep(self) -> None:
        """Find tenants with a backlog by the stream's own counts: hints are core messages and may be lost."""
        while True:
            wait_s = SWEEP_EVERY_S
            try:
                await self._count()
                await self._buckets.ensure(self._streams.buckets_of)
            except BusError as error:
                log.warning("the size of the durable queue cannot be read now: %s", error)
                await self._make_again(error)
                wait_s = AGAIN_S
            await asyncio.sleep(wait_s)

    async def _count(self) -> None:
        """Check each stream of the queue, and hint at each subject with messages. Raises `BusError`."""
        if await self._streams.refresh():
            self._known.clear()
            self._to_make = True
        if self._to_make or self._streams.lacking:
            await self._streams.ensure(self._behind)
            self._to_make = False
        self._former = await self._streams.former()
        self._known.set()
        counted = [
            (tenant, self._streams.of(tenant)) for tenant in sorted(self._streams.tenants - self._streams.lacking)
        ]
        for tenant, stream in counted or [("", self._subjects.request_stream)]:
            info = await self._js.stream_info(stream, self._subjects.request_all)
            self._watch(tenant, info)
            if info.last_seq < self._read_through(tenant):
                await self._begin_anew(tenant, stream)
            for subject in info.subjects:
                self.hint(Delivery(subject, "", b""))
            await self._bury_verbs(stream, info)
        await self._forget_cancels()
        if self._former is not None and self._former.messages:
            for tenant in self._streams.tenants:
                for verb in _VERBS:
                    self._look_at((tenant, verb))

    async def _forget_cancels(self) -> None:
        """Have the cancels of unknown jobs forgotten whose submits would have been read by now. Raises `BusError`.

        The cursor of the submits does that as it passes them. It stands still while a tenant queues no submits; then it
        is moved to the end of the stream. The stream's leader must say that no submit waits before that end: a batch
        may be read from a copy that lags.
        """
        for tenant in list(self._engine.state.tenants.values()):
            name = tenant.name
            if all(at <= 0 for at in tenant.tombstones.values()):
                self._empty.pop(name, None)
                continue
            if self._former is not None and self._former.messages:
                return  # its sequences are those of another stream
            if name in self._streams.lacking:
                continue
            subject = self._subjects.request(name, "submit")
            info = await self._js.stream_info(self._streams.of(name), subject)
            if info.subjects.get(subject):
                self._empty.pop(name, None)
                continue
            now_s = asyncio.get_running_loop().time()
            through, since_s = self._empty.setdefault(name, (info.last_seq, now_s))
            is_full = len(tenant.tombstones) >= self._engine.config.tombstones_max
            if is_full or now_s - since_s >= REMEMBERED_S:
                del self._empty[name]
                # also where the cursor is there already: cancels before it may have been read after it was moved
                through = max(info.last_seq if is_full else through, self._cursor(name, "submit"))
                self._read[(name, "submit")] = through
                self._engine.offer(QueueRead(name, "submit", through))
                self._wake()

    async def _bury_verbs(self, stream: str, info: StreamInfo) -> None:
        """Move messages whose verb no scheduler reads to the dead letters. Raises `BusError`.

        Where no permissions are set, any client can publish them, and they would stay in the queue unread.
        """
        for subject in info.subjects:
            tenant, verb = self._subjects.token(subject, 1), self._subjects.token(subject, 2)
            if not is_tenant(tenant):
                if not self._strays_told:
                    log.warning("messages in the durable queue are of no tenant, and nothing reads them: %s", subject)
                self._strays_told = True
                continue
            if verb in _VERBS and subject == self._subjects.request(tenant, verb):
                continue
            messages = await self._js.direct_get_batch(stream, seq=1, next_by_subject=subject, batch=BATCH)
            unknown = problem(
                "unknown-verb",
                f"the durable queue has no verb {subject.removeprefix(self._subjects.request(tenant, ''))}",
                found=subject,
                allowed=", ".join(self._subjects.request(tenant, known) for known in _VERBS),
                next="publish it again on one of the allowed subjects",
            )
            lost = await self._bury_unread(tenant, [(message, unknown, "") for message in messages])
            through = lost - 1 if lost else messages[-1].seq if messages else 0
            if through:
                await self._js.purge(stream, subject=subject, below_seq=through + 1)

    async def _behind(self) -> int:
        return self._read_through() + 1

    def _read_through(self, tenant: str = "") -> int:
        """Return the highest cursor of a tenant ("" for all), including those that no record holds yet."""
        return max((self._cursor(*key) for key in self._cursors() if tenant in ("", key[0])), default=0)

    def _cursors(self) -> set[tuple[str, str]]:
        """Return the (tenant, verb) of all queues read in this term or before."""
        return {(tenant, verb) for tenant in self._engine.state.tenants for verb in _VERBS} | self._read.keys()

    async def _make_again(self, error: BusError) -> None:
        """Make the stream again if it was deleted; until then no publisher gets an acknowledgement."""
        if not isinstance(error, JetStreamRefused) or (error.status != 503 and error.err_code != ERR_STREAM_NOT_FOUND):
            return

        async def behind() -> int:
            log.error("the durable queue was deleted, and the requests in it are lost; the scheduler creates it again")
            return self._read_through() + 1

        try:
            await self._streams.ensure(behind)
        except BusError as refused:
            log.warning("the durable queue cannot be created again now: %s", refused)

    async def _begin_anew(self, tenant: str, stream: str) -> None:
        """Read another stream from its beginning, if it ends before what was read. Raises `BusError`.

        Checked twice: the leader of a replicated stream may lag behind the server that answered the reads. A job
        accepted before and found again is the same job, as if it were sent again.
        """
        await asyncio.sleep(AGAIN_S)
        last_seq, through = (await self._js.stream_info(stream)).last_seq, self._read_through(tenant)
        if last_seq >= through:
            return
        log.error(
            "the durable queue ends at message %d, but was read to message %d: the queue was created anew, "
            "and is read from its beginning",
            last_seq,
            through,
        )
        mine = [key for key in self._cursors() if tenant in ("", key[0])]
        before = {key: self._folded(*key) for key in mine if self._cursor(*key)}
        for key in before:
            self._read[key] = 0
            self._engine.offer(QueueRead(*key, 0))
        self._wake()
        while any(cursor and cursor == self._folded(*key) for key, cursor in before.items()):
            self._room.clear()
            await self._room.wait()

    def _cursor(self, tenant: str, verb: str) -> int:
        return max(self._folded(tenant, verb), self._read.get((tenant, verb), 0))

    def _folded(self, tenant: str, verb: str) -> int:
        row = self._engine.state.tenants.get(tenant)
        return 0 if row is None else (row.submit_cursor if verb == "submit" else row.cancel_cursor)

    def _room_to_remember(self, tenant: str) -> int:
        """Return how many of a tenant's cancels may be read now: all could be of unknown jobs, to be remembered.

        Near the bound, nothing more is read until everything read is folded.
        """
        row = self._engine.state.tenants.get(tenant)
        room = self._engine.config.tombstones_max - (len(row.tombstones) if row is not None else 0)
        if room >= AHEAD_MAX + BATCH:
            return BATCH
        folded = row.cancel_cursor if row is not None else 0
        return min(BATCH, room) if self._read.get((tenant, "cancel"), 0) <= folded else 0

    def _room_for(self, tenant: str) -> int:
        """Return how many of a tenant's requests may be read now; 0 or less for none.

        The memory bound, and what is read but not recorded, are considered. With an operator's limit of jobs, nothing
        more is read until everything read is folded.
        """
        engine = self._engine
        ahead = engine.waiting  # of any tenant: the difference lasts only a moment
        room = min(BATCH, engine.state.room(engine.config.jobs_max, tenant, ahead, ahead))
        row = engine.state.tenants.get(tenant)
        if row is None or not row.jobs_max:
            return room
        is_folded = self._read.get((tenant, "submit"), 0) <= row.submit_cursor
        return min(room, row.jobs_max - row.live) if is_folded else 0

    async def _read_some(self, tenant: str, verb: str) -> bool:
        """Read one batch of a tenant's queue; return whether to read on at once.

        False if nothing is left, or the queue waits for room or for its dead letters to be stored.
        """
        while self._engine.waiting > AHEAD_MAX:
            self._room.clear()
            await self._room.wait()
        room = self._room_for(tenant) if verb == "submit" else self._room_to_remember(tenant)
        if room <= 0 or self._engine.refuses(tenant, verb) is not None or self.unburied(tenant) >= UNBURIED_MAX:
            self._held_back.append((tenant, verb))
            return False
        cursor = self._cursor(tenant, verb)
        messages = await self._next(tenant, verb, cursor + 1, min(BATCH, room))
        if not messages:
            return False
        events, unread = self._decoded(tenant, verb, messages)
        lost = await self._bury_unread(tenant, unread)
        through = lost - 1 if lost else messages[-1].seq
        if verb == "submit":
            for message, why, _ in unread:
                if message.seq <= through:
                    self._untold.append((tenant, through, job_in(why, message.data, message.seq), why))
        for message, event in events:
            if message.seq <= through:
                self._engine.offer(event)
                self._offered[event.reply] = (tenant, message)
        if through > cursor:
            self._read[(tenant, verb)] = through
            self._engine.offer(QueueRead(tenant, verb, through))
            self._wake()
        if lost:  # other tenants' queues do not wait for it
            asyncio.get_running_loop().call_later(AGAIN_S, self._look_at, (tenant, verb))
        return not lost

    async def _next(self, tenant: str, verb: str, seq: int, most: int) -> list[StoredMessage]:
        """Return the next messages of a queue, [] if there are none: first those in the former shared stream."""
        await self._known.wait()
        key, subject = (tenant, verb), self._subjects.request(tenant, verb)
        if self._former is not None and self._former.messages and key not in self._former_read:
            stream = self._subjects.request_stream
            messages = await self._js.direct_get_batch(stream, seq=seq, next_by_subject=subject, batch=most)
            if messages:
                return messages
            self._former_read.add(key)
            await self._known.wait()
        if tenant in self._streams.lacking:
            return []
        return await self._js.direct_get_batch(self._streams.of(tenant), seq=seq, next_by_subject=subject, batch=most)

    def _decoded(
        self, tenant: str, verb: str, messages: list[StoredMessage]
    ) -> tuple[list[tuple[StoredMessage, Submit | Cancel]], list[tuple[StoredMessage, Problem, str]]]:
        """Return the messages as events for the core, and the unreadable messages with reason and traceback."""
        events: list[tuple[StoredMessage, Submit | Cancel]] = []
        unread: list[tuple[StoredMessage, Problem, str]] = []
        for message in messages:
            reply = f"{_REPLY_MARK}{tenant} {message.seq}"
            try:
                if verb == "submit":
                    events.append((message, self._submit(tenant, message, reply)))
                else:
                    arguments = _decode_cancel(message.data)
                    refuse_twice(message.data)
                    cancel = cancel_of(tenant, arguments, reply=reply, sequence=message.seq)
                    cancel.came = self._way
                    events.append((message, cancel))
            except Refused as refused:
                unread.append((message, refused.problem, ""))
            # a defect of moorage must not end the term: the next leader would read the message again
            except Exception as raised:
                log.exception("request %d of tenant %s could not be read", message.seq, tenant)
                failed = problem("internal", "the scheduler failed on this request as it read it; nothing was recorded")
                unread.append((message, failed, trace_of(raised)))
        return events, unread

    async def _bury_unread(self, tenant: str, unread: list[tuple[StoredMessage, Problem, str]]) -> int:
        """Store unreadable messages as dead letters; return the first sequence that could not be stored, or 0."""
        for first in range(0, len(unread), BURIED_AT_ONCE):
            some = unread[first : first + BURIED_AT_ONCE]
            kept = await asyncio.gather(*(self.letters.keep(tenant, *each) for each in some))
            if not all(kept):
                return some[kept.index(False)][0].seq
        return 0

    def _look_at(self, key: tuple[str, str], hinted: bool = False) -> None:
        self._dirty[key] = hinted or self._dirty.get(key, False)
        self._some.set()

    def _submit(self, tenant: str, message: StoredMessage, reply: str) -> Submit:
        trace = (message.headers or {}).get("traceparent", "")
        body = resolved(message.data, self._engine.config.tflops_file)
        return self._engine.submitted(
            tenant,
            body,
            lambda: f"q{message.seq}",
            reply,
            sequence=message.seq,
            trace=trace,
            came=self._way,
        )

    @property
    def _way(self) -> str:
        """How messages of the queue came. A header of theirs may be their sender's own."""
        return QUEUE if self._streams.has_keys else OPEN

    async def _purge(self) -> None:
        """Delete, forever, messages up to the folded cursors; repeating or losing a purge does no harm."""
        while True:
            await asyncio.sleep(PURGE_EVERY_S)
            await self.purge_read()

    async def purge_read(self) -> None:
        """Delete the messages that recorded cursors have passed, but none whose dead letter may not be stored yet."""
        for tenant in list(self._engine.state.tenants.values()):
            if tenant.name in self._look_back.tenants:
                continue
            for verb, cursor in (("submit", tenant.submit_cursor), ("cancel", tenant.cancel_cursor)):
                streams = [self._streams.of(tenant.name)]
                if self._former is not None and self._former.messages:
                    streams.append(self._subjects.request_stream)
                for stream in streams:
                    await self._purge_behind(stream, tenant.name, verb, cursor)

    async def _purge_behind(self, stream: str, tenant: str, verb: str, cursor: int) -> None:
        key = (stream, tenant, verb)
        if not cursor or self._purged.get(key) == cursor:
            return
        await self._gate.recorded()  # else the record with the cursor might never be stored, and the requests be lost
        through = min([cursor, *(seq - 1 for seq in self._unburied.get(tenant, ()))])
        if not through or self._purged.get(key) == through:
            return
        try:
            await self._js.purge(stream, subject=self._subjects.request(tenant, verb), below_seq=through + 1)
            self._purged[key] = through
        except BusError as error:
            log.warning("the durable queue of tenant %s cannot be purged now: %s", tenant, error)
