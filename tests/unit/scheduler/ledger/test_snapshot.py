"""A snapshot is the state, byte for byte of its digest; whatever else the bytes are, `BadSnapshot`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger import snapshot as snapshots
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.invariants import validate
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.state import State
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.faulty_world import FaultyWorld


def busy() -> Driving:
    """Members that run, linger and are kept; gangs, tombstones, compacted jobs, a quarantine."""
    drive = Driving(Config(ended_max=1))
    worker = drive.worker("w0", 8)
    drive.submit("g", gpu={"scheduling": "gang"}, replicas=2)
    for index in range(4):
        drive.submit(f"j{index}", gpu={"sharing": "mps"} if index % 2 else {}, retries=2)
    drive.settle()
    worker.finish(next(key for key in worker.held if key[1] == "j0"))
    worker.finish(next(key for key in worker.held if key[1] == "j2"), 1, freed=False)
    drive.settle()
    drive.cancel("unknown", before=True)
    drive.submit("ended1")
    drive.cancel("j1")
    return drive


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
