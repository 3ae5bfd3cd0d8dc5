"""A snapshot is the state, byte for byte of its digest; whatever else the bytes are, `BadSnapshot`."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger import records
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.schedules import Schedule
from moorage.scheduler.core.ledger.state import Attempt, Job, Replica, State, Tenant, Worker, new_job
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.scheduler.ledger.invariants import validate
from moorage.schemas.ranges import ONE
from tests.levels import NEXT, know_next
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.faulty_world import FaultyWorld


def busy() -> Driving:
    """Attempts that run, linger and are kept; gangs, tombstones, compacted jobs, a quarantine."""
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
    drive.lead_from_snapshot()
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


@pytest.mark.parametrize(
    ("knows", "of", "refusal"),
    [
        (1, 1, "has format 1, this release reads 2: begin with a new ledger"),
        (1, 3, "has format 3, this release reads 2: use a newer release"),
        (2, 1, "has format 1, this release reads 2 to 3: begin with a new ledger"),
        (2, 4, "has format 4, this release reads 2 to 3: use a newer release"),
    ],
)
def test_another_format_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, knows: int, of: int, refusal: str) -> None:
    monkeypatch.setattr(records, "FORMAT", knows)
    with pytest.raises(snapshots.BadSnapshot, match=refusal):
        snapshots.load(msgspec.msgpack.encode([of, "ledger-1", 7]))


def test_a_snapshot_follows_the_feature_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby of the release before begins from what a newer leader writes, until an operator raises the level."""
    monkeypatch.setattr(records, "FORMAT", 1)
    drive = busy()
    earlier = snapshots.dump(drive.state)
    with monkeypatch.context() as next_release:
        know_next(next_release)
        assert snapshots.dump(drive.state) == earlier
        drive.state.level += 1
        drive.state.digest = drive.state.full_digest()
        later = snapshots.dump(drive.state)
        assert [snapshots.load(each).level for each in (earlier, later)] == [1, NEXT]
    with pytest.raises(snapshots.OtherSnapshot, match="use a newer release"):
        snapshots.load(later)


#: what stands in a row of a snapshot at feature level 1, in this order, and what only in rows where it is not usual
AT_LEVEL_1 = {
    State: """ledger_id former_id restored_ms restored_epoch behind level seq epoch epoch_seq leader time_ms next_num
        digest transitions snapshot snapshot_before ran_through next_worker half_life_ms counts_from_ms /""",
    Job: """num tenant name body numbers traceparent accepted_ms ledger rev gang after started fresh ends attempt_no
        placed_ms over count master history well / added avoid awaits bad bounds ceiling codes failed hold lacking
        preempts priority ready_ms relocating resizes scaled used""",
    Replica: "index state attempt_no fence retries losses refusals not_before after restarts streak /",
    Tenant: """name submit_cursor cancel_cursor tombstones / gpus_max guaranteed hold jobs_max limit share usage_text
        weight""",
    Worker: """num id machine boot n no session joined_ms left_ms left_why hello former flag flag_ms by why quarantined
        / until_ms unwell well well_n window""",
    Attempt: """replica.job.num replica.index is_current no fence home mode mask phase / address freeze leased notice_s
        preemptible rate_milli ready wakes""",
    Schedule: """tenant name cron tz overlap body by paused wish since_ms through runs skipped why job last_ms due_ms
        next_ms / live""",
}


@pytest.mark.parametrize("kind", AT_LEVEL_1)
def test_what_stands_in_a_snapshot_at_level_1_stays_as_it_is(kind: type[Job]) -> None:
    """Once 0.3 is released, whoever changes it raises `FORMAT`, and has `dump` write this at level 1 as before."""
    lasting = kind.LASTING
    assert [*lasting.made, *lasting.always, "/", *sorted(lasting.seldom)] == AT_LEVEL_1[kind].split()


def test_an_attempt_that_holds_devices_beside_the_next_one_keeps_its_name() -> None:
    drive = Driving()
    worker = drive.worker("w0", 2)
    drive.submit("j", retries=1)
    drive.settle()
    first = next(iter(worker.held))
    worker.finish(first, 1, freed=False)
    drive.settle()
    drive.pass_time(60_000)
    drive.settle()
    assert drive.states("j") == ["RUNNING"]
    drive.lead_from_snapshot()
    drive.renew()
    drive.settle()
    worker.free(first)
    drive.settle()
    assert [attempt.no for attempt in drive.state.attempts()] == [2], "its report is not known under another name"


#: fields that follow from others, and the digest of the row
FOLLOW = {
    Job: {"size", "live", "rows", "back", "held", "lingering", "row", "stands"},
    Replica: {"job", "attempt", "row"},
    Attempt: {"replica", "worker", "name", "row"},
    Worker: {"unwell_mask", "attempts", "inventory", "pool", "row"},
    Tenant: {"jobs", "live", "gpus", "held", "devices", "used", "rate_milli", "row", "usage_base"},
    Schedule: {"row"},
}
SOFT = {
    Job: {
        "is_listed",
        "fair",
        "shape",
        "needs",
        "deadline_ms",
        "key",
        "told",
        "folded",
        "always",
        "own_subject",
        "since_ms",
        "extra",
        "derived",
    },
    Replica: {"nth"},
    Attempt: {"missed", "unstored", "runs_as"},
    Tenant: {"extra", "waits", "keys"},
}

#: fields that the digest counts by what changes with them
COUNTED = {"bad", "codes", "failed", "wakes", "well_n", "weight", "guaranteed", "gpus_max", "jobs_max", "leased"}


def rows() -> list[Job | Replica | Attempt | Worker | Tenant]:
    job = new_job(1, "t", "j", b"{}", ONE, "", 5, 2)
    replica, worker = Replica(job, 0), Worker(0, "w0", "m")
    return [job, replica, worker, Tenant("t"), Attempt(replica, worker, 0, 3, 1, 1, 1, ("t", "j", 0, 0, 3))]


@pytest.mark.parametrize("kind", FOLLOW)
def test_every_field_of_a_row_lasts_or_follows_or_is_soft(kind: type[Job]) -> None:
    lasting = {name for name in (*kind.LASTING.made, *kind.LASTING.always, *kind.LASTING.seldom) if "." not in name}
    lasting -= {"is_current", "usage_text"}
    lasting |= {name for fields in kind.LASTING.later.values() for name in fields}
    assert lasting.isdisjoint(FOLLOW[kind] | SOFT.get(kind, set()))
    assert lasting | FOLLOW[kind] | SOFT.get(kind, set()) == set(kind.__slots__)


def test_a_new_row_has_the_defaults_of_its_list_and_its_digest_counts_what_differs() -> None:
    other = {int: 3, bool: True, str: "4"}
    for row in rows():
        plain, later = row.digest_row(NEXT), row.LASTING.later.get(NEXT, {})
        for name, (kind, default) in {**row.LASTING.seldom, **later}.items():
            assert getattr(row, name) == default, f"{type(row).__name__}.{name}"
            if name in COUNTED:
                continue
            before = row.digest_row(1)
            setattr(row, name, other.get(kind, ((1, 2),)) if name != "unwell" else {1: ("xid", "", 0, 0)})
            assert row.digest_row(NEXT) != plain, f"{type(row).__name__}.{name}"
            assert (row.digest_row(1) == before) is (name in later), f"{type(row).__name__}.{name}"
            setattr(row, name, default)
