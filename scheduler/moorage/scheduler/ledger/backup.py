"""Backup and restore of the ledger: the folded state at one record in a file, and a new ledger that begins with it.

A backup is a snapshot with all later records folded in: every job, session, cursor of the request queue and finished
id. It is taken beside a running leader, only by reading. A restore makes a ledger with another id, whose records,
fences and epochs begin far above all that workers may have received since the backup (ledger-rules H7). Its first
record names the former ledgers, so that their workers follow the new one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from moorage.bus.connection import Connection, connect
from moorage.bus.errors import ERR_NO_ROOM, JetStreamRefused
from moorage.bus.jetstream import COPIES_FOLLOW, JetStream, StreamInfo
from moorage.bus.server_version import check_oldest
from moorage.scheduler.core.ledger.records import SEQUENCES_AHEAD
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.durable.queue_reader import read_through
from moorage.scheduler.durable.queue_streams import QueueStreams, info_of, user_info
from moorage.scheduler.ledger.accounts import check_users_account
from moorage.scheduler.ledger.invariants import Broken, validate
from moorage.scheduler.ledger.ledger import Ledger, LedgerBroken
from moorage.scheduler.ledger.one_copy import check_one_copy, try_copies
from moorage.scheduler.ledger.snapshots import Snapshots, recover
from moorage.scheduler.ledger.state_bytes import BadSnapshot, dump, load, snapshot_digest
from moorage.schemas.errors import MoorageError, problem
from moorage.schemas.subjects import Subjects
from moorage.system.build import build

MAGIC: Final = b"moorage-backup-1\n"
HEADER_BYTES_MAX: Final = 4096
#: how many epochs the old ledger may have had after its backup: the restored ledger begins above them, as its records
#: do (`SEQUENCES_AHEAD`)
EPOCHS_AHEAD: Final = 1 << 20
#: how many predecessors a ledger names, by which workers recognise it
FORMERS_MAX: Final = 16
#: bytes that a restored ledger needs at once: its snapshot twice, and a first batch of records
ROOM_TIMES: Final = 2
ROOM_BYTES: Final = 16 * 1024**2
#: an idle leader writes at least every second: a younger record means that a scheduler leads
SILENT_S: Final = 15.0

Say = Callable[[str], None]
#: as `follower.count_the_rest`
CountTheRest = Callable[[JetStream, JetStream, Subjects, int], Awaitable[str]]


class BackupRefused(MoorageError):
    """A backup or restore is refused, with what to do instead."""


class Header(msgspec.Struct, frozen=True):
    """The header line of a backup. `digest` is BLAKE2b-128 of the `size_bytes` bytes after this line.

    `replicas` is the ledger's number of copies.
    """

    ledger_id: str
    seq: int
    epoch: int
    jobs: int
    workers: int
    taken_wall_s: float
    release: str
    digest: str
    size_bytes: int
    replicas: int

    @property
    def file_name(self) -> str:
        return f"moorage-{self.ledger_id}-{self.seq}.backup"


def _refused(message: str, next_step: str, *, found: object = None) -> BackupRefused:
    return BackupRefused(problem("failed-precondition", message, found=found, next=next_step))


# ------------------------------------------------------------------------------------------------------------- backup


async def backup(target: str | None, prefix: str, to: Path) -> tuple[Path, Header]:
    """Write the ledger's current state to the file `to`; if `to` is a folder, to a new file in it.

    Returns the file and its header. Never overwrites a file. Raises `BackupRefused` if the file `to` exists, or if
    there is no ledger or no scheduler has led it yet; also `LedgerBroken`, `BusError`, OSError.
    """
    if to.exists() and not to.is_dir():
        raise _refused(f"{to} exists already", "name another file, or a folder", found=str(to))
    async with await connect(target, "moorage-backup") as connection:
        jetstream, subjects = JetStream(connection), Subjects(prefix)
        info = await info_of(jetstream, subjects.ledger_stream)
        if info is None:
            raise _refused(
                f"there is no ledger {subjects.ledger_stream}",
                "check --prefix, and the account that MOORAGE_LEDGER_URL or MOORAGE_LEDGER_URL_FILE names",
            )
        ledger = Ledger(jetstream, subjects, 0)
        state = await recover(ledger, Snapshots(jetstream, subjects))
        await ledger.follow(state)
    if not state.ledger_id:
        empty = f"no scheduler has led the ledger {subjects.ledger_stream} yet: it holds nothing"
        raise _refused(empty, "start a scheduler")
    data = dump(state)
    header = Header(
        state.ledger_id,
        state.seq,
        state.epoch,
        len(state.jobs),
        len(state.workers),
        time.time(),
        build(),
        snapshot_digest(data),
        len(data),
        info.replicas,
    )
    file = to / header.file_name if to.is_dir() else to
    _write(file, MAGIC + msgspec.json.encode(header) + b"\n" + data)
    read(file)  # check that the written file can be read again
    return file, header


def _write(file: Path, data: bytes) -> None:
    """Write a file completely and to disk, or not at all; readable only by this user, as it contains requests.

    Raises OSError, also if the file exists.
    """
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None  # the caller knows no other name
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
        os.link(partial, file)  # raises if the file exists by now: a rename would replace it
    finally:
        partial.unlink()
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(file: Path) -> tuple[Header, State]:
    """Return the header and the state of a backup.

    Raises OSError, and `BackupRefused` if the file is no backup, is damaged, has a format that this release cannot
    read, or if its state contradicts itself.
    """
    another = "name another file: one that moorage admin backup has written"
    data = file.read_bytes()
    if not data.startswith(MAGIC):
        raise _refused(f"{file} is not a backup of moorage's ledger", another, found=data[:20].decode(errors="replace"))
    line, _, rest = data[len(MAGIC) : len(MAGIC) + HEADER_BYTES_MAX].partition(b"\n")
    try:
        header = msgspec.json.decode(line, type=Header)
    except msgspec.MsgspecError as error:
        raise _refused(f"the first line of {file} cannot be read: {error}", another) from None
    rest = data[len(MAGIC) + len(line) + 1 :]
    if len(rest) != header.size_bytes or snapshot_digest(rest) != header.digest:
        found = f"{len(rest)} bytes"
        raise _refused(f"{file} is damaged: its bytes do not match the digest in its first line", another, found=found)
    try:
        state = load(rest)
    except BadSnapshot as error:
        wrote = "use the release that wrote it"
        raise _refused(f"{file} cannot be read: {error}", wrote, found=header.release) from None
    try:
        validate(state)
    except Broken as error:
        raise _refused(f"the state in {file} contradicts itself: {error}", another) from None
    return header, state


# ------------------------------------------------------------------------------------------------------------ restore


async def restore(
    ledger_target: str | None,
    target: str | None,
    prefix: str,
    replicas: int,
    file: Path,
    *,
    replace: bool,
    say: Say,
    count_the_rest: CountTheRest | None = None,
) -> State:
    """Make a ledger that begins with the state of a backup; return its state. No scheduler may run.

    An existing ledger with records is deleted with `replace`, and refused without it. `replicas` is the number of
    copies of each stream; 0 for as many as the backed up ledger had, which is refused if that is one and the servers
    are a cluster. What the servers have no room for is refused before anything is deleted. Until the last step, a half
    made ledger names no snapshot and no scheduler leads it; run restore again with `replace`. `say` is called with a
    line about each step, `count_the_rest` before a ledger is deleted. Raises `BackupRefused`, `Refused`, `BusError`,
    OSError, `BadSnapshot`, `Deposed`.
    """
    header, state = read(file)
    subjects, said, replicas = Subjects(prefix), replicas, replicas or header.replicas
    async with (
        await connect(ledger_target, "moorage-restore") as connection,
        await connect(target, "moorage-restore") as world,
    ):
        jetstream, of_users = JetStream(connection), JetStream(world)
        check_oldest(connection)
        await check_users_account(world, subjects)
        await _check_ledger(jetstream, subjects, replace=replace)
        if replicas == 1 and not said:
            await check_one_copy(jetstream, subjects)
        own = await _own_queues(world, subjects, state)
        queue_from, stale = await _check_queue(of_users, subjects, state, own)
        replaced = await _replaced(jetstream, subjects)
        await _check_room(jetstream, subjects, replicas, ROOM_BYTES + ROOM_TIMES * header.size_bytes)
        own_kept = subjects.follower_stream, subjects.schedule_stream, subjects.trace_stream
        kept = [(jetstream, each) for each in own_kept]
        kept += [(of_users, each) for each in _streams_of_users(subjects, own) if each not in stale]
        await _copy(kept, replicas, say)
        if count_the_rest is not None and await info_of(jetstream, subjects.ledger_stream) is not None:
            why = await count_the_rest(jetstream, of_users, subjects, replicas)
            if why:
                say(f"GPU time and history behind the follower's last save are left out: {why}")
        for stream in stale:
            await of_users.delete_stream(stream)
        if queue_from:  # also behind what the ledger that is there has read: this may stop before it is deleted
            queue_from = max([queue_from, *(1 + read_through(each) for each in replaced)])
            await _new_queue(of_users, subjects, replicas, queue_from, say)
        if await info_of(jetstream, subjects.snapshot_stream) is not None:  # no room is lacking from here on
            await jetstream.delete_stream(subjects.snapshot_stream)
        former = state.ledger_id
        # also for workers that were away during several restores, and for workers of a replaced ledger
        formers = [each for row in (state, *replaced) for each in (row.ledger_id, *row.former_id.split()) if each]
        state.former_id = " ".join(list(dict.fromkeys(formers))[:FORMERS_MAX])
        state.ledger_id = secrets.token_hex(8)
        state.epoch = max(each.epoch for each in (state, *replaced))
        state.seq = max(each.seq for each in (state, *replaced)) + SEQUENCES_AHEAD
        state.snapshot = state.snapshot_before = None
        snapshots = Snapshots(jetstream, subjects, replicas)
        await snapshots.ensure()
        named = await snapshots.write(state)
        say(f"snapshot {named[0]} is written")
        # only now: if this stops here, the next try finds in the snapshot above which numbers to begin
        if await info_of(jetstream, subjects.ledger_stream) is not None:
            await jetstream.delete_stream(subjects.ledger_stream)
        ledger = Ledger(jetstream, subjects, secrets.randbits(62), replicas=replicas)
        await ledger.ensure(first_seq=state.seq + 1)
        # until the record that names the snapshot, the state cannot be recovered, so no scheduler leads this ledger
        await ledger.begin_restored(state, named, state.former_id, EPOCHS_AHEAD)
        copies = f", in {replicas} copies" if replicas > 1 else ""
        say(f"ledger {state.ledger_id} begins at record {state.seq}, from {header.seq} of {former}{copies}")
    return state


async def _replaced(jetstream: JetStream, subjects: Subjects) -> list[State]:
    """Return the states of the ledger that the restored one replaces: of its end, and of each snapshot.

    What cannot be read is left out, so some states only have ids and numbers; the list is empty if there is nothing.
    That ledger was led after the backup was taken, or was restored from the same backup. The new ledger must not repeat
    its numbers, and its workers must follow the new one.
    """
    found: list[State] = []
    written = await info_of(jetstream, subjects.snapshot_stream, subjects.snapshot_all)
    for subject in written.subjects if written is not None else ():
        parts = [each.data async for each in jetstream.read_range(subjects.snapshot_stream, subject)]
        try:
            found.append(load(b"".join(parts)))
        except BadSnapshot:  # an incomplete snapshot
            continue
    info = await info_of(jetstream, subjects.ledger_stream)
    if info is None:
        return found
    ledger = Ledger(jetstream, subjects, 0)
    state = State()
    with contextlib.suppress(LedgerBroken):  # which may be why it is restored
        if written is not None:
            state = await recover(ledger, Snapshots(jetstream, subjects))
        await ledger.follow(state)
    last = await ledger.last_term()
    last.seq = info.last_seq
    return [last, state, *found]


async def _check_ledger(jetstream: JetStream, subjects: Subjects, *, replace: bool) -> None:
    """Raise `BackupRefused` if a scheduler may lead the existing ledger, or if it has records and not `replace`."""
    info = await info_of(jetstream, subjects.ledger_stream)
    if info is not None and info.messages:
        silent_s = await _silent_s(jetstream, subjects, info)
        if silent_s < SILENT_S:
            raise _refused(
                f"a scheduler may lead the ledger {subjects.ledger_stream}: it was written to {silent_s:.0f} s ago",
                f"stop every scheduler, then restore, {SILENT_S:.0f} s after the last message in the ledger",
            )
        if not replace:
            raise _refused(
                f"there is a ledger {subjects.ledger_stream} with {info.messages} records",
                "back it up (moorage admin backup), then use --replace: the ledger is deleted",
                found=f"records {info.first_seq} to {info.last_seq}",
            )


async def _silent_s(jetstream: JetStream, subjects: Subjects, info: StreamInfo) -> float:
    """Return the age of the newest message in seconds; infinite for a resignation, 0 if the message is deleted."""
    state = State()
    state.seq = info.last_seq
    ledger = Ledger(jetstream, subjects, 0)
    ledger.note(info)
    if await ledger.is_resigned(info.last_seq):
        return float("inf")
    return await ledger.silent_for(state)


async def _own_queues(world: Connection, subjects: Subjects, state: State) -> frozenset[str]:
    """Return the tenants whose own stream of the durable queue may be there, also of one that has submitted nothing.

    A user with a list of rights may ask about those that it names, as schedulers with its key do, and about no others;
    a user without one, about those of every tenant of the backup. Raises `BusError`.
    """
    user = await user_info(world)
    named = user.own_queues(subjects)
    return named | state.tenants.keys() if user.allowed is None else named


async def _check_queue(
    world: JetStream, subjects: Subjects, state: State, own_queues: frozenset[str]
) -> tuple[int, list[str]]:
    """Return the first sequence of a new shared request queue (0: make none), and the tenants' own streams to delete.

    `own_queues` are the tenants that may have a stream of their own. The cursors of the backup are sequences of the
    queue, so the queue must be the same one, or begin behind the cursors. Tenants' streams that are other ones and
    empty are to be deleted: a scheduler makes them again behind the cursors. Raises `BackupRefused` for another queue
    that holds messages.
    """
    through, stale, apart = 0, list[str](), False
    for tenant in sorted(own_queues | state.tenants.keys()):
        row = state.tenants.get(tenant)
        cursor = 0 if row is None else max(row.submit_cursor, row.cancel_cursor)
        own = await info_of(world, subjects.request_stream_of(tenant)) if tenant in own_queues else None
        apart = apart or own is not None
        if own is None:
            through = max(through, cursor)
        elif own.last_seq < cursor:
            _check_empty(own, cursor)
            stale.append(own.name)
    info = await info_of(world, subjects.request_stream)
    if info is not None and info.last_seq >= through:
        return 0, stale
    if info is not None:
        _check_empty(info, through)
    # if tenants have streams of their own, the scheduler makes the missing ones, and no shared stream
    return 0 if apart else through + 1, stale


def _check_empty(info: StreamInfo, through: int) -> None:
    """Raise `BackupRefused` if this stream holds messages. The caller saw that the backup knows another one.

    `through` is where the backup's cursors are, for the message.
    """
    if info.messages:
        raise _refused(
            f"the request queue {info.name} ends at {info.last_seq}, and the backup had read it to"
            f" {through}: it is another queue, and the messages in it would be skipped",
            "let the senders send those messages again, purge it (nats stream purge), and restore again",
            found=f"{info.messages} messages",
        )


async def _new_queue(world: JetStream, subjects: Subjects, replicas: int, first_seq: int, say: Say) -> None:
    """Create an empty shared request queue that begins at `first_seq`; an existing one is deleted."""
    if await info_of(world, subjects.request_stream) is not None:
        await world.delete_stream(subjects.request_stream)

    async def begins() -> int:
        return first_seq

    await QueueStreams(world, subjects, replicas).ensure(begins)
    say(f"a new request queue begins at {first_seq}")


def _streams_of_users(subjects: Subjects, own_queues: frozenset[str]) -> list[str]:
    """Return the names of the streams in the users' account that a scheduler makes."""
    own = [subjects.request_stream_of(tenant) for tenant in sorted(own_queues)]
    return [subjects.request_stream, *own, subjects.dead_letter_stream, subjects.history_stream]


async def _check_room(jetstream: JetStream, subjects: Subjects, replicas: int, size: int) -> None:
    """Raise `BackupRefused` if servers have no room for so many copies of a ledger of `size` bytes; or `BusError`."""
    try:
        await try_copies(jetstream, subjects, replicas, size)
    except JetStreamRefused as refused:
        if refused.err_code not in ERR_NO_ROOM:
            raise
        raise _refused(
            f"the servers refuse {replicas} copies of the ledger, each of {size >> 20} MiB ({refused.description});"
            " nothing is changed",
            refused.problem.next or "make room on the servers' disks",
            found=f"copies: {replicas}",
        ) from None


async def _copy(streams: Iterable[tuple[JetStream, str]], replicas: int, say: Say) -> None:
    """Set the copies of streams that outlive the ledger to `replicas`; those that do not exist are left out.

    If there is no room for one, none is changed. Raises `BackupRefused` for that, and `BusError`.
    """
    done: list[tuple[JetStream, StreamInfo]] = []
    for jetstream, stream in streams:
        info = await info_of(jetstream, stream)
        if info is None or info.replicas == replicas:
            continue
        try:
            await jetstream.ensure_stream({"name": stream, "num_replicas": replicas}, COPIES_FOLLOW)
        except JetStreamRefused as refused:
            for at, before in reversed(done):
                await at.ensure_stream({"name": before.name, "num_replicas": before.replicas}, COPIES_FOLLOW)
            reserved = info.config.get("max_bytes", -1)
            size = f", which reserves {reserved >> 20} MiB on each server," if reserved > 0 else ""
            raise _refused(
                f"the servers refuse {replicas} copies of {stream}{size} ({refused.description}); nothing is changed",
                refused.problem.next or f"restore with the copies that it has: --replicas {info.replicas}",
                found=f"copies: {info.replicas}",
            ) from None
        done.append((jetstream, info))
    for _, before in done:
        say(f"copies of {before.name}: {replicas}, and not {before.replicas}")
