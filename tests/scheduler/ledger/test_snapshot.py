"""A snapshot is the state, byte for byte of its digest; whatever else the bytes are, `BadSnapshot`."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger import snapshot as snapshots
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.invariants import validate
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.records import FORMAT
from moorage.scheduler.core.ledger.state import State
from tests.scheduler.driving import Driving
from tests.scheduler.faulty_world import FaultyWorld


def busy(level: int = FORMAT) -> Driving:
    """Members that run, linger and are kept; gangs, tombstones, compacted jobs, a quarantine."""
    drive = Driving(Config(ended_max=1), level)
    worker = drive.worker("w0", 8)
    drive.submit("g", gpu={"scheduling": "gang"}, replicas=2)
    for index in range(4):
        drive.submit(f"j{index}", gpu={"sharing": "mps"} if index % 2 else {}, retries=2)
    drive.settle()
    worker.finish(next(key for key in worker.held if key[1] == "j0"))
    worker.finish(next(key for key in worker.held if key[1] == "j2"), 1, freed=False)
    drive.settle()
    drive.cancel("unknown")
    drive.submit("ended1")
    drive.cancel("j1")
    return drive


def as_first_written(snapshot: bytes) -> bytes:
    """The snapshot as release 0.1 wrote it: stories without actors and parts, finished jobs in rows of 29 bytes."""
    rows = msgspec.msgpack.decode(snapshot)[:16]
    for job in (jobs := rows[11]):
        job[14] = [entry[:10] for entry in job[14]]
    rows[11] = [job[:16] for job in jobs]
    finished = struct.iter_unpack("<12s8sIBIB", rows[13])
    rows[13] = b"".join(struct.pack("<12s12sIB", key, digest, at, state) for key, digest, at, state, _, _ in finished)
    return msgspec.msgpack.encode(rows)


def as_in_0_2(snapshot: bytes) -> bytes:
    """The snapshot without the fields that came with 0.3."""
    return msgspec.msgpack.encode(msgspec.msgpack.decode(snapshot)[:19])


def test_a_snapshot_of_0_2_is_read_and_one_of_0_1_is_refused() -> None:
    drive = busy(level=1)
    drive.settle()
    drive.tick()
    snapshot = snapshots.dump(drive.state)
    loaded = snapshots.load(as_in_0_2(snapshot))
    validate(loaded)
    assert (loaded.digest, loaded.level) == (drive.state.digest, 1)
    assert len(loaded.finished) == len(drive.state.finished) > 0
    assert {job.name: job.story for job in loaded.jobs.values()} == {
        job.name: job.story for job in drive.state.jobs.values()
    }
    with pytest.raises(snapshots.BadSnapshot, match=r"not a snapshot of release 0\.2 or a later one"):
        snapshots.load(as_first_written(snapshot))


def test_a_snapshot_with_everything_in_it_loads_and_goes_on() -> None:
    drive = busy()
    drive.take_snapshot()
    drive.lead()
    drive.renew()
    drive.settle()
    drive.run_out("w0")
    assert drive.states("g") == ["SUCCEEDED", "SUCCEEDED"]
    assert "unknown" in drive.state.tenants["t"].tombstones


def test_a_snapshot_of_any_moment_and_the_tail_give_the_leaders_state() -> None:
    world = FaultyWorld(5)
    world.run(120)
    records = world.drive.records
    state = State()
    for seq, payload in enumerate(records, 1):
        fold(state, decode_record(payload), seq)
        if seq % 10 == 0:
            again = snapshots.load(snapshots.dump(state))
            for later, tail in enumerate(records[seq : seq + 15], seq + 1):
                fold(again, decode_record(tail), later)
            validate(again)
    assert state.digest == world.drive.state.digest


def test_an_empty_state() -> None:
    assert snapshots.load(snapshots.dump(State())).seq == 0


@given(st.binary(max_size=100))
def test_junk_is_no_snapshot(junk: bytes) -> None:
    with pytest.raises(snapshots.BadSnapshot):
        snapshots.load(junk)


def test_a_state_that_is_not_what_it_claims_is_refused() -> None:
    drive = busy()
    good = snapshots.dump(drive.state)
    drive.state.digest ^= 1
    with pytest.raises(snapshots.BadSnapshot, match="digest"):
        snapshots.load(snapshots.dump(drive.state))
    assert snapshots.snapshot_digest(good) != snapshots.snapshot_digest(good + b"x")
