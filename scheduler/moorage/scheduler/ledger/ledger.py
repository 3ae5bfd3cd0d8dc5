"""The ledger: a JetStream stream of records, appended by one leader and read by all schedulers.

One append is in flight at a time. It names the last sequence of the stream and of the epoch's subject, so the server
refuses it if another process has written meanwhile (the fence). Only an acknowledgement counts as success. After any
other result, the end of the stream is read through the stream leader and the same bytes are sent again, until the
record is known to be stored, or another leader's record is found (ledger-rules H1 to H6).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

from moorage.bus.errors import BusError, Disconnected, JetStreamRefused, RequestTimeout, StreamGap
from moorage.bus.jetstream import (
    API_TIMEOUT_S,
    ERR_STREAM_FULL,
    ERR_STREAM_NOT_FOUND,
    EXPECTED_LAST_SEQUENCE,
    EXPECTED_LAST_SUBJECT_SEQUENCE,
    EXPECTED_LAST_SUBJECT_SEQUENCE_SUBJECT,
    MESSAGE_ID,
    Ack,
    JetStream,
    JsError,
    StoredMessage,
    StreamInfo,
    wall_seconds,
)
from moorage.scheduler.core.ledger import acts, records
from moorage.scheduler.core.ledger.ceilings import CEILINGS, Ceilings
from moorage.scheduler.core.ledger.fold import check_format, fold
from moorage.scheduler.core.ledger.folding import Folded, FoldError
from moorage.scheduler.core.ledger.record import Record, decode_record, encode_record
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.pacing.reminders import AGAIN_S, Reminders
from moorage.scheduler.pacing.retrying import RETRY_WAIT_S, RETRY_WAIT_S_MAX, retry_unanswered
from moorage.scheduler.pacing.write_stall import NOT_CONNECTED, AppendProgress, what_next
from moorage.schemas.subjects import Subjects
from moorage.system.backoff import Backoff

log = logging.getLogger("moorage.ledger")
#: a wall clock that differs this much from the server's is logged
CLOCK_OFF_S_MAX: Final = 5.0
#: the bound of a ledger whose stream has none: half of it may wait for the follower
BYTES_MAX: Final = 4 * 1024**3
#: how long to wait for a read of the stream's end before the append is sent again: a read sent while the stream had no
#: leader is never answered. Waiting ten seconds cost every worker of a cluster a third of its lease, long after the
#: servers were back
READ_BACK_PATIENCE_S: Final = 2.0

#: how long a copy that ends before what was read may be one that its server has not fetched yet: one whose disk was
#: replaced has been seen to answer for its stream meanwhile
COPY_LAGS_S: Final = 30.0


class Deposed(Exception):
    """The ledger says that another scheduler leads, or it was replaced: drop all memory and stand by."""


class LedgerBroken(Exception):
    """The ledger cannot be read further (a gap, another ledger, an unknown format). An operator must act."""


class LedgerOlder(LedgerBroken):
    """Workers know of later terms than this ledger does, so it is an older backup (ledger-rules H7)."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"{why}. Bring back the newer one; if there is none, confirm this one: stop every scheduler, then"
            " `moorage admin backup FILE` and `moorage admin restore FILE --replace`"
        )


class LedgerGap(LedgerBroken):
    """Records were deleted before they were read. If they were purged, a newer snapshot has them (ledger-rules H22)."""


class SnapshotsUnread(LedgerGap):
    """Such records are only in snapshots of another release."""


class _Fence:
    """What an append says of the ledger before it; messages that are stepped over move it on."""

    __slots__ = ("epoch", "epoch_seq", "ledger_id", "seq")

    def __init__(self, state: State, seq: int) -> None:
        self.seq = seq
        self.epoch_seq = state.epoch_seq  # of the last message on the epoch's subject
        self.epoch = state.epoch
        self.ledger_id = state.ledger_id


class Ledger:
    """The ledger as one scheduler reads and writes it. `leader` is its random number, which marks its records."""

    def __init__(
        self, jetstream: JetStream, subjects: Subjects, leader: int, *, replicas: int = 1, ceilings: Ceilings = CEILINGS
    ) -> None:
        self.ceilings = ceilings
        self._js = jetstream
        self._subjects = subjects
        self._leader = leader
        self._replicas = replicas
        self.unclear = 0  # appends not acknowledged at the first try
        self.junk = 0  # messages in the stream that are no valid records
        self.appending = AppendProgress()
        self._stalled = Reminders()  # what was logged about the current append
        self._server_ahead_s: float | None = None  # compared with this machine's monotonic clock
        self.unread_snapshot = ""  # why no snapshot could be read, if another release wrote one
        self.epochs_last = 0  # how many epoch records end what was read: the terms before the last wrote nothing else
        self._lags_since_s = 0.0  # since when the server asked answers with less than was read; 0 if it does not

    async def ensure(self, *, first_seq: int = 0) -> int:
        """Create the ledger's stream (discard new, no age limit, no deletes), or check the settings of an existing one.

        A new stream begins at `first_seq` if that is not 0. Returns the stream's last sequence: 0 if no record was ever
        written and no `first_seq` given. Raises `BusError`, as `StreamMismatch` if settings differ.
        """
        config: dict[str, Any] = {
            "name": self._subjects.ledger_stream,
            "subjects": [self._subjects.ledger_all],
            "storage": "file",
            "retention": "limits",
            "discard": "new",
            "max_age": 0,
            "deny_delete": True,
            "allow_direct": True,
            "num_replicas": self._replicas,
            **({"first_seq": first_seq} if first_seq else {}),
        }
        info = await retry_unanswered(lambda: self._js.ensure_stream(config))
        self.note(info)
        return info.last_seq

    # ------------------------------------------------------------------------------------------ wall clocks

    def note(self, info: StreamInfo) -> None:
        """Remember what `info` says of the server: how far its wall clock is ahead of this machine's monotonic clock,
        and its name, if it holds the only copy."""
        self.appending.holder = info.leader if info.replicas == 1 else ""
        if info.now:
            self._server_ahead_s = wall_seconds(info.now) - time.monotonic()

    def server_s(self) -> float:
        """Return the wall time in seconds: by the server asked last, or by this machine if no server has given it."""
        return time.time() if self._server_ahead_s is None else time.monotonic() + self._server_ahead_s

    def wall_s(self) -> float:
        """Return the wall time from which a new leader continues ledger time: the earlier of its own and the server's.

        Ledger time never goes back. Taken from a clock that is ahead, it would pass every deadline and forget every
        finished job at once.
        """
        own_s, server_s = time.time(), self.server_s()
        if abs(own_s - server_s) > CLOCK_OFF_S_MAX:
            word = "ahead of" if own_s > server_s else "behind"
            text = (
                "this host's clock is %.0f s %s the nats-server's: ledger time continues from the earlier of "
                "both clocks"
            )
            log.warning(text, abs(own_s - server_s), word)
        return min(own_s, server_s)

    # ------------------------------------------------------------------------------------------ reading

    async def last_seq(self) -> int:
        """Return the stream's last sequence. Raises `BusError`."""
        return (await self._js.stream_info(self._subjects.ledger_stream)).last_seq

    async def follow(self, state: State, patience_s: float = API_TIMEOUT_S) -> int:
        """Fold the records after `state.seq` into the state. Raises `LedgerGap`, `LedgerBroken`, `BusError`.

        If the ledger ends before that, it is broken; with several copies only once that has lasted for `COPY_LAGS_S`.
        `patience_s` bounds the wait for the stream's last sequence. Returns how many records were folded; skipped ones
        do not count, as they are no sign that the leader is alive.
        """
        stream, count = self._subjects.ledger_stream, 0
        info = await self._js.stream_info(stream, timeout_s=patience_s)
        self.note(info)
        if info.last_seq < state.seq:
            why = f"the ledger ends at record {info.last_seq}, but this scheduler has read record {state.seq}"
            self._lags_since_s = self._lags_since_s or time.monotonic()
            if info.replicas > 1 and time.monotonic() - self._lags_since_s < COPY_LAGS_S:
                raise JetStreamRefused("the copy that was asked is not up to date", 503, 0, why)
            raise LedgerBroken(f"{why}: was it replaced by an older backup?")
        self._lags_since_s = 0.0
        if info.last_seq == state.seq:
            return 0
        with self._reading(state):
            async for message in self._js.read_range(stream, from_seq=state.seq + 1, to_seq=info.last_seq):
                count += self.fold_message(state, message)
                if message.seq % 200 == 0:
                    await asyncio.sleep(0)
        return count

    async def fold_range(self, state: State, through: int) -> AsyncIterator[tuple[int, Record, Folded]]:
        """Fold the records after `state.seq` up to `through`, yielding what each changed; invalid messages are skipped.

        Raises `LedgerGap`, `LedgerBroken`, `BusError`.
        """
        stream = self._subjects.ledger_stream
        with self._reading(state):
            async for message in self._js.read_range(stream, from_seq=state.seq + 1, to_seq=through):
                record = self._decode(message)
                if record is None or record.epoch < state.epoch:
                    self._skip(state, message)
                    continue
                yield message.seq, record, fold(state, record, message.seq)

    async def silent_for(self, state: State) -> float:
        """Return the seconds since record `state.seq` was stored, by the server's wall clock; 0 if it is deleted.

        Only a hint, so that a scheduler that just started need not wait for silence; the fence decides which scheduler
        leads.
        """
        message = await self._js.get_message(self._subjects.ledger_stream, state.seq)
        if message is None:
            return 0.0
        return self.server_s() - wall_seconds(message.stored_at)

    async def named_snapshots(self) -> list[tuple[str, int, str]]:
        """Return name, sequence and digest of the last two snapshots that a record names, newest first; [] if none.

        The record that names a snapshot repeats the previous one, and has a subject of its own: one read finds both.
        Raises `LedgerBroken` if it is of a release that this one cannot read.
        """
        stream, subject = self._subjects.ledger_stream, self._subjects.ledger_snapshot
        message = await self._js.get_last(stream, subject)
        record = self._decode(message) if message is not None else None
        if message is not None and record is None:  # the newest message is invalid: find the last valid record
            async for earlier in self._js.read_range(stream, subject):
                record = self._decode(earlier) or record
        if record is None:
            return []
        if message is not None:
            with self._reading(State()):
                check_format(record, message.seq)
        return [(act.name, act.seq, act.digest) for act in reversed(record.acts) if isinstance(act, acts.Snapshot)]

    async def last_term(self) -> State:
        """Return a state with only the epoch, the ledger's id and its former ids, from the newest epoch record.

        That record is never purged. An empty state if there is none, or it is invalid.
        """
        state = State()
        message = await self._js.get_last(self._subjects.ledger_stream, self._subjects.ledger_epoch)
        record = self._decode(message) if message is not None else None
        state.epoch = record.epoch if record is not None else 0
        for act in record.acts if record is not None else ():
            if isinstance(act, acts.Epoch):
                state.ledger_id = act.ledger_id
            elif isinstance(act, acts.Restored):
                state.former_id = act.formerly
        return state

    async def is_half_full(self) -> bool:
        """Return whether the ledger has half of the bytes of its bound; of `BYTES_MAX`, if its stream has none."""
        info = await self._js.stream_info(self._subjects.ledger_stream)
        bound = info.config.get("max_bytes", -1)
        return 2 * info.size_bytes >= (bound if bound > 0 else BYTES_MAX)

    async def purge_below(self, seq: int) -> int:
        """Delete the records below a sequence, and return how many (ledger-rules H36).

        Epoch records, and records that name a snapshot, have other subjects and stay.
        """
        return await self._js.purge(self._subjects.ledger_stream, subject=self._subjects.ledger_record, below_seq=seq)

    @contextlib.contextmanager
    def _reading(self, state: State) -> Iterator[None]:
        """Turn errors of reading and folding into errors of the ledger. Raises `LedgerGap`, `LedgerBroken`."""
        try:
            yield
        except StreamGap as gap:
            if self.unread_snapshot:  # it has the records that are missing
                raise SnapshotsUnread(self.unread_snapshot) from None
            raise LedgerGap(f"the ledger has a gap after record {state.seq}: {gap}") from None
        except FoldError as error:
            raise LedgerBroken(str(error)) from None

    def fold_message(self, state: State, message: StoredMessage) -> bool:
        """Fold one stored record and return True; step over an invalid or stale message and return False."""
        record = self._decode(message)
        if record is None or record.epoch < state.epoch:
            self._skip(state, message)
            return False
        fold(state, record, message.seq)
        self.epochs_last = self.epochs_last + 1 if message.subject == self._subjects.ledger_epoch else 0
        return True

    def _skip(self, state: State | _Fence, message: StoredMessage) -> None:
        """Step over an invalid message or a stale leader's record.

        If it is on the epoch's subject, the fence must name it from now on.
        """
        self.junk += 1
        log.warning("ledger record %d is invalid, or of the term of an earlier leader, and is skipped", message.seq)
        state.seq = message.seq
        if message.subject == self._subjects.ledger_epoch:
            state.epoch_seq = message.seq

    def _decode(self, message: StoredMessage) -> Record | None:
        try:
            return decode_record(message.data)
        except Exception:  # not written by a scheduler
            return None

    # ---------------------------------------------------------------------------------------- appending

    async def take_over(self, state: State, name: str, ledger_id: str, time_ms: int, wall_s: float) -> None:
        """Append the epoch record that begins this term, and fold it. Raises `Deposed` if another leader was first.

        `ledger_id` is the id of a new ledger; an existing one keeps its own.
        """
        record = Record(
            state.level if state.ledger_id else records.FORMAT,
            state.epoch + 1,
            self._leader,
            0,
            max(time_ms, state.time_ms),
            state.digest,
            acts=[acts.Epoch(state.ledger_id or ledger_id, name, wall_s)],
        )
        await self._append_and_fold(state, record, self._subjects.ledger_epoch)

    async def append_record(
        self, state: State, after: int, rid: int, payload: bytes, *, names_snapshot: bool = False
    ) -> int:
        """Append an encoded record of this term and return its sequence; the caller folds it. Raises `Deposed`.

        `after` is the sequence before it; the state may have the record in it already. A record that names a snapshot
        has a subject of its own, so that recovery finds it.
        """
        subject = self._subjects.ledger_snapshot if names_snapshot else self._subjects.ledger_record
        return await self._append(state, after, state.epoch, rid, payload, subject)

    async def begin_restored(
        self, state: State, snapshot: tuple[str, int, str], former: str, epochs_ahead: int
    ) -> None:
        """Append the first two records of a restored ledger: an epoch without a leader, and the name of its snapshot.

        `state` is the backup's, at the sequence before them; both records are folded into it. Raises `Deposed`.
        """
        wall_s = self.wall_s()
        first = Record(
            state.level,
            state.epoch + epochs_ahead,
            self._leader,
            0,
            max(int(wall_s * 1000), state.time_ms),
            state.digest,
            acts=[
                acts.Epoch(state.ledger_id, "restore", wall_s),
                acts.Restored(former),
                acts.Resign(),
            ],
        )
        state.epoch_seq = 0  # the backup's epoch record is not in this stream
        await self._append_and_fold(state, first, self._subjects.ledger_epoch)
        named = Record(
            state.level,
            state.epoch,
            self._leader,
            1,
            state.time_ms,
            state.digest,
            acts=[acts.Snapshot(*snapshot)],
        )
        await self._append_and_fold(state, named, self._subjects.ledger_snapshot)

    async def is_resigned(self, seq: int) -> bool:
        """Return whether the record at this sequence contains a leader's resignation; False if there is none there."""
        message = await self._js.get_message(self._subjects.ledger_stream, seq)
        record = self._decode(message) if message is not None else None
        return record is not None and any(isinstance(act, acts.Resign) for act in record.acts)

    async def mark_behind(self, state: State, rid: int, why: str) -> None:
        """Append the last record of a ledger found to be an older backup, so that no scheduler leads it.

        Raises `Deposed`.
        """
        record = Record(
            state.level,
            state.epoch,
            self._leader,
            rid,
            state.time_ms,
            state.digest,
            acts=[acts.Behind(why), acts.Resign()],
        )
        await self._append_and_fold(state, record, self._subjects.ledger_record)

    async def _append_and_fold(self, state: State, record: Record, subject: str) -> None:
        seq = await self._append(state, state.seq, record.epoch, record.rid, encode_record(record), subject)
        fold(state, record, seq)

    async def _append(self, state: State, after: int, epoch: int, rid: int, payload: bytes, subject: str) -> int:
        """Append one record and return its sequence once it is known to be stored, however long that takes.

        Steps over invalid messages at the end of the stream, so that the fence names its true end. Raises `Deposed`.
        """
        fence = _Fence(state, after)
        self.appending.begin()
        try:
            seq = await self._append_until_stored(fence, epoch, rid, payload, subject)
            state.epoch_seq = fence.epoch_seq
            if self.appending.told:
                log.warning(
                    "the ledger accepts records again; it accepted none for %.0f s",
                    self.appending.for_s(time.monotonic()),
                )
            return seq
        finally:
            self.appending.end()
            self._stalled.clear()

    async def _append_until_stored(self, fence: _Fence, epoch: int, rid: int, payload: bytes, subject: str) -> int:
        backoff, first, cut_off = Backoff(RETRY_WAIT_S, RETRY_WAIT_S_MAX), True, False
        while True:
            headers = {
                EXPECTED_LAST_SEQUENCE: str(fence.seq),
                EXPECTED_LAST_SUBJECT_SEQUENCE: str(fence.epoch_seq),
                EXPECTED_LAST_SUBJECT_SEQUENCE_SUBJECT: self._subjects.ledger_epoch,
                MESSAGE_ID: f"{epoch}.{self._leader:x}.{rid}",
            }
            answer: Ack | JsError | BusError
            try:
                answer = await self._js.append(subject, payload, headers)
            except (RequestTimeout, Disconnected) as error:
                answer = error
            if isinstance(answer, Ack):
                return answer.seq
            if first:
                self.unclear += 1
                first = False
            connected = self._js.is_connected
            if connected or not cut_off:  # only once while disconnected: the connection logs when it is back
                self._warn(f"append {rid} of epoch {epoch} is unclear (stored or not): {_words_of(answer)}")
            cut_off = not connected
            self.appending.trouble = _trouble_of(answer) if connected else NOT_CONNECTED
            after = fence.seq
            found = await self._read_back(fence, epoch, rid, subject)
            if found is not None:
                return found
            if fence.seq > after:
                continue  # at once: what is stepped over may come again and again
            self._log_stall(answer, connected=connected)
            await asyncio.sleep(backoff.next_s())

    def _warn(self, words: str) -> None:
        """Log a finding of a retry loop, but not at every try: without servers there is one a second, for hours."""
        if self._stalled.due(words):
            log.warning("%s", words)

    def _log_stall(self, answer: JsError | BusError, *, connected: bool) -> None:
        """Log why nothing is accepted now, and what an operator can do."""
        if isinstance(answer, JsError) and answer.err_code == ERR_STREAM_FULL:
            todo = "the ledger is full: nothing is lost, but nothing is accepted until it has room"
        elif connected and isinstance(answer, RequestTimeout | JsError):
            lost = "" if self.appending.gone else "nothing accepted is lost, "
            todo = f"the ledger takes no record: {lost}nothing new is accepted; {what_next(self.appending)}"
        else:
            return
        self.appending.told = True
        if self._stalled.due(todo):
            for_s = self.appending.for_s(time.monotonic())
            log.error("%s%s", todo, f" (for {for_s:.0f} s now)" if for_s >= AGAIN_S else "")

    async def _read_back(self, fence: _Fence, epoch: int, rid: int, subject: str) -> int | None:
        """Read through the stream leader whether the record is stored after all; return its sequence if so.

        None means that the record is not there now, or the end cannot be read. It may still arrive, so the caller sends
        the same bytes again. Another record of this or a later epoch raises `Deposed`; invalid messages and records of
        earlier epochs are stepped over.
        """
        while True:
            try:
                message = await self._js.get_message(self._subjects.ledger_stream, fence.seq + 1, READ_BACK_PATIENCE_S)
            except BusError as error:
                if self._js.is_connected:
                    self._warn(f"the ledger's end cannot be read now: {error}")
                self.appending.gone = isinstance(error, JetStreamRefused) and error.err_code == ERR_STREAM_NOT_FOUND
                self.appending.headless = self._replicas > 1 and _is_headless(error)
                return None
            self.appending.headless = False
            if message is None:
                await self._check_epoch(fence, epoch, subject)
                return None
            record = self._decode(message)
            if record is not None and record.leader == self._leader and record.rid == rid and record.epoch == epoch:
                return message.seq
            # also during a takeover, for the epoch that is to end: its leader lives, and was acknowledged
            if record is not None and record.epoch >= fence.epoch:
                raise Deposed(f"record {message.seq} begins or belongs to epoch {record.epoch}")
            self._skip(fence, message)

    async def _check_epoch(self, fence: _Fence, epoch: int, subject: str) -> None:
        """Raise `Deposed` if an operator has restored or replaced the ledger meanwhile.

        Such a ledger has a newer epoch or another id. It may end before this record's place; but once it had as many
        records as the old ledger, it would accept this append as its next record. Does nothing if it cannot be read.
        """
        try:
            stream, subject_of_epochs = self._subjects.ledger_stream, self._subjects.ledger_epoch
            newest = await self._js.get_last(stream, subject_of_epochs, READ_BACK_PATIENCE_S)
        except BusError:
            return
        record = self._decode(newest) if newest is not None else None
        # schedulers never purge the epoch record; it is missing only while the very first one is being appended
        self.appending.gone = newest is None and self._subjects.ledger_epoch != subject
        if record is not None and record.epoch > epoch:
            raise Deposed(f"epoch {record.epoch} has begun in a restored ledger")
        begun = next((act.ledger_id for act in record.acts if isinstance(act, acts.Epoch)), "") if record else ""
        if begun and fence.ledger_id and begun != fence.ledger_id:
            raise Deposed(f"ledger {begun} has replaced {fence.ledger_id}")


def _words_of(answer: JsError | BusError) -> str:
    """Return the text of an answer that is not an acknowledgement, for the log."""
    if isinstance(answer, JsError):
        return f"the nats-server says: {answer.description} ({answer.code}, {answer.err_code})"
    return str(answer)


def _trouble_of(answer: JsError | BusError) -> str:
    """Return why an append was not acknowledged, for the callers that wait for it."""
    if isinstance(answer, JsError):
        return f"the nats-server says: {answer.description}"
    return NOT_CONNECTED if isinstance(answer, Disconnected) else "nothing acknowledges it"


def _is_headless(error: BusError) -> bool:
    """Return whether a read failed because the stream, or the cluster, has no leader: then no server may answer."""
    return not isinstance(error, JetStreamRefused) or error.servers_missing
