"""Snapshots: written in chunks by a follower process, named by the leader, and the start of every recovery.

`python -m moorage.scheduler.ledger.snapshots` is that follower: it folds the ledger from the last snapshot on, writes
the state, and prints `name sequence digest`. A crash at any point leaves chunks that no record names: they are never
overwritten or used, and are purged with the next snapshot.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from typing import Any, Final

from moorage.bus.connection import connect
from moorage.bus.errors import BusError
from moorage.bus.jetstream import COPIES_FOLLOW, MESSAGE_ID, Ack, JetStream, JsError
from moorage.scheduler.core.ledger.ceilings import CEILINGS, Ceilings
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.ledger.ledger import Ledger, LedgerBroken, LedgerGap
from moorage.scheduler.ledger.state_bytes import BadSnapshot, OtherSnapshot, dump, load, snapshot_digest
from moorage.scheduler.pacing.gate import Gate
from moorage.schemas.subjects import PREFIX_DEFAULT, Subjects
from moorage.system.logged import begin_log

log = logging.getLogger("moorage.snapshots")

CHUNK_BYTES: Final = 512 * 1024
FOLLOWER_TIMEOUT_S: Final = 600.0
#: tries of a chunk that nobody listens to, and the wait between two
UNHEARD_MAX: Final = 20
UNHEARD_WAIT_S: Final = 0.25
EXIT_FAILED: Final = 1
#: records that it needs were purged, and so were the snapshots that contained them
EXIT_GONE: Final = 3


class Snapshots:
    """The snapshot stream: immutable chunks under a name; a snapshot is valid once the ledger names it."""

    def __init__(
        self, jetstream: JetStream, subjects: Subjects, replicas: int = 1, ceilings: Ceilings = CEILINGS
    ) -> None:
        self._ceilings = ceilings
        self._js = jetstream
        self._subjects = subjects
        self._replicas = replicas

    async def ensure(self) -> None:
        config: dict[str, Any] = {
            "name": self._subjects.snapshot_stream,
            "subjects": [self._subjects.snapshot_all],
            "storage": "file",
            "retention": "limits",
            "discard": "new",
            "allow_direct": True,
            "num_replicas": self._replicas,
        }
        await self._js.ensure_stream(config, COPIES_FOLLOW)

    async def write(self, state: State, gate: Gate | None = None) -> tuple[str, int, str]:
        """Write the state in chunks and read them back, since the ledger will be purged up to this snapshot.

        `gate` is that of the term, if it is a leader's state. Returns name, sequence and digest for the record that
        names it. Raises `BadSnapshot`, `BusError`.
        """
        data, seq = dump(state), state.seq  # the state of a leader changes meanwhile
        if gate is not None:
            await gate.recorded()
        name, digest = f"{seq}-{os.urandom(4).hex()}", snapshot_digest(data)
        subject = self._subjects.snapshot(name)
        for start in range(0, len(data), CHUNK_BYTES):
            answer = await self._append(subject, data[start : start + CHUNK_BYTES], f"{name}.{start}")
            if not isinstance(answer, Ack):
                raise BadSnapshot(f"chunk at {start} of snapshot {name} was not stored: {answer}")
        await self.read(name, digest)
        return name, seq, digest

    async def _append(self, subject: str, chunk: bytes, once: str) -> Ack | JsError:
        """Append a chunk; while nobody listens, again: a stream that a cluster has just made is not yet known to each
        of its servers, nor is one whose leader changes."""
        for _ in range(UNHEARD_MAX):
            answer = await self._js.append(subject, chunk, {MESSAGE_ID: once})
            if not (isinstance(answer, JsError) and answer.nobody_listens):
                break
            await asyncio.sleep(UNHEARD_WAIT_S)
        return answer

    async def read(self, name: str, digest: str) -> State:
        """Return the state of a named snapshot.

        Raises `BadSnapshot` if it is missing or does not have this digest; `BusError`.
        """
        stream = self._subjects.snapshot_stream
        parts = [m.data async for m in self._js.read_range(stream, self._subjects.snapshot(name))]
        data = b"".join(parts)
        if snapshot_digest(data) != digest:
            raise BadSnapshot(f"snapshot {name} has {len(data)} bytes that are not those the ledger names")
        return load(data, self._ceilings)

    async def purge_older(self, newest: str, before: str) -> None:
        """Remove the chunks that were written before those of the snapshot `newest`, but for the snapshot `before`.

        What was written behind `newest` stays: a leader that is deposed, and does not know it yet, must not remove its
        successor's. Nothing is removed while `newest` is missing.
        """
        stream, subjects = self._subjects.snapshot_stream, self._subjects
        last = await self._js.get_last(stream, subjects.snapshot(newest))
        if last is None:
            return
        info = await self._js.stream_info(stream, subjects.snapshot_all)
        for subject in info.subjects:
            if subject not in (subjects.snapshot(newest), subjects.snapshot(before)):
                await self._js.purge(stream, subject=subject, below_seq=last.seq)


async def recover(ledger: Ledger, snapshots: Snapshots, *, oldest: bool = False) -> State:
    """Return the state to start from: the newest snapshot that a ledger record names and that can be read, or the
    oldest.

    If there is none, an empty state. Later records are not folded. If snapshots are of another release, and the records
    before them are deleted, reading on raises `SnapshotsUnread`. Raises `LedgerBroken`, `BusError`.
    """
    unread = ledger.unread_snapshot = ""
    ledger.epochs_last = 0
    named = await ledger.named_snapshots()
    for name, seq, digest in reversed(named) if oldest else named:
        try:
            state = await snapshots.read(name, digest)
        except BadSnapshot as error:
            log.warning("%s", error)
            if isinstance(error, OtherSnapshot):
                unread = str(error)
            continue
        if state.seq == seq:
            return state
        log.warning(
            "snapshot %s ends at record %d, but the ledger says that it ends at record %d", name, state.seq, seq
        )
    ledger.unread_snapshot = unread
    return State(ledger.ceilings)


async def follow_and_write(ledger_target: str | None, prefix: str, replicas: int) -> tuple[str, int, str]:
    subjects = Subjects(prefix)
    async with await connect(ledger_target, "moorage-snapshots") as connection:
        jetstream = JetStream(connection)
        ledger = Ledger(jetstream, subjects, 0, replicas=replicas)
        snapshots = Snapshots(jetstream, subjects, replicas)
        await snapshots.ensure()
        state = await recover(ledger, snapshots)
        await ledger.follow(state)
        return await snapshots.write(state)


def main() -> None:
    from moorage.scheduler.settings import NATS_VARIABLE, ledger_url

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix", default=PREFIX_DEFAULT)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--log-format", default="text")
    arguments = parser.parse_args()
    begin_log("WARNING", arguments.log_format)
    os.nice(10)
    try:
        target = ledger_url() or os.environ.get(NATS_VARIABLE)
        name, seq, digest = asyncio.run(follow_and_write(target, arguments.prefix, arguments.replicas))
    except (LedgerBroken, BadSnapshot, BusError) as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_GONE if isinstance(error, LedgerGap) else EXIT_FAILED)
    print(name, seq, digest)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
