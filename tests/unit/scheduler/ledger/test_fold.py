"""Folding: total, strict about what cannot follow, the same for every reader; and every (state, step) pair."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.folding import FoldError
from moorage.scheduler.core.ledger.record import Record, decode_record, encode_record
from moorage.scheduler.core.ledger.records import FORMAT, STEP_WIDTH, GangPhase, Op, packed
from moorage.scheduler.core.ledger.state import (
    AT_EXITED,
    CLAIMED,
    HELD,
    LEGAL,
    RUNNING,
    STATE,
    Attempt,
    Replica,
    State,
)
from moorage.scheduler.ledger.invariants import Broken, validate
from moorage.schemas.job import STATE_NUMBER, STATES, TERMINAL, TRANSITIONS, derive_state
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.faulty_world import FaultyWorld


def following(state: State, **fields: Any) -> Record:
    """A record that follows a state."""
    base: dict[str, Any] = {
        "format": FORMAT, "epoch": state.epoch, "leader": 7, "rid": 1, "time": state.time_ms + 1,
        "digest": state.digest,
    }  # fmt: skip
    return Record(**{**base, **fields})


def begun() -> State:
    """A state with worker 0 and job 1 of three replicas."""
    state = State()
    epoch = Record(FORMAT, 1, 7, 0, 1_000, 0, acts=[acts.Epoch("L", "me", 0.0)])
    fold(state, epoch, 1)
    hello = {
        "gpu_pool": [],
        "drivers": [],
        "labels": {},
        "sharers_max": {},
        "modes": [],
        "cpu_milli": 0,
        "memory_mib": 0,
    }
    first = [acts.Known(0, "w0", "m"), acts.Join(0, "b", 1, "f" * 32, 0, hello)]
    fold(state, following(state, acts=first, accepts=[("t", ["j", b"{}", 3, ""])]), 2)
    validate(state)
    return state


def in_state(name: str) -> State:
    """Replica 0 of job 1 put into a state, with an attempt where the state has one."""
    state = begun()
    job = state.jobs[1]
    job.fresh = ((1, 2),)
    replica = Replica(job, 0)
    replica.attempt_no, replica.fence = 1, 2
    if name in HOLDS:
        attempt = Attempt(replica, state.worker_by_num[0], 1, 2, 1, 1, 1, ("t", "j", 0, 1, 2))
        replica.attempt = state.worker_by_num[0].attempts[attempt.name] = attempt
        job.held = 1
        state.tenants[job.tenant].gpus = 1
        attempt.row = attempt.digest_row(state.level)
        state.digest += attempt.row
    replica.state = STATE_NUMBER[name]
    if name in TERMINAL:
        job.end(0, 0, STATE_NUMBER[name], 0, 0)
    else:
        job.rows[0] = replica
        job.back = name == "QUEUED"
        replica.row = replica.digest_row(state.level)
        state.digest += replica.row
    state.tenants[job.tenant].waits = job.waits
    state.digest += job.digest_row(state.level) - job.row
    job.row = job.digest_row(state.level)
    state.digest &= 0xFFFFFFFFFFFFFFFF
    validate(state)
    return state


HOLDS = frozenset({"PLACED", "CLAIMED", "RUNNING", "FROZEN", "ENDING", "CANCELLING", "LOST_KEPT"})


@pytest.mark.parametrize("now", STATES)
@pytest.mark.parametrize("to", STATES)
def test_every_pair_of_states(now: str, to: str) -> None:
    """MOVE, and EXIT where something is held: legal by the table, or the record is refused."""
    for op in (Op.MOVE, Op.EXIT, Op.REFUSE, Op.WITHDRAW, Op.LOSE, Op.END):
        state = in_state(now)
        record = following(state, steps=[op, 1, 0, STATE_NUMBER[to], 0, 0])
        legal = to in TRANSITIONS[now] and (op == Op.MOVE or now in HOLDS)
        if legal:
            fold(state, record, 3)
            assert state.jobs[1].replicas[0].state == STATE_NUMBER[to]
            assert state.full_digest() == state.digest
        else:
            with pytest.raises(FoldError):
                fold(state, record, 3)


@pytest.mark.parametrize("now", STATES)
@pytest.mark.parametrize("to", STATES)
def test_a_step_of_freezing_leads_from_running_to_frozen_and_back(now: str, to: str) -> None:
    state = in_state(now)
    record = following(state, steps=[Op.FREEZE, 1, 0, STATE_NUMBER[to], 0, 0])
    if (now, to) in (("RUNNING", "FROZEN"), ("FROZEN", "RUNNING"), ("LOST_KEPT", "FROZEN")):
        fold(state, record, 3)
        assert state.jobs[1].replicas[0].state == STATE_NUMBER[to]
        return
    with pytest.raises(FoldError):
        fold(state, record, 3)


@pytest.mark.parametrize("now", STATES)
def test_every_state_and_every_step(now: str) -> None:
    """No step, on whatever state, does anything but fold or raise FoldError."""
    for op in Op:
        state = in_state(now)
        record = following(state, steps=[op, 1, 0, 0, 0, 0])
        try:
            fold(state, record, 3)
        except FoldError:
            continue
        assert state.full_digest() == state.digest


def test_terminal_states_are_final_and_every_state_reaches_one() -> None:
    assert all(not TRANSITIONS[name] for name in TERMINAL)
    reach = set(TERMINAL)
    for _ in STATES:
        reach |= {name for name in STATES if TRANSITIONS[name] & reach}
    assert reach == set(STATES) == set(TRANSITIONS)
    assert all(LEGAL[STATE_NUMBER[name]] == {STATE_NUMBER[to] for to in TRANSITIONS[name]} for name in STATES)


@pytest.mark.parametrize(
    ("states", "job"),
    [
        ({"SUCCEEDED"}, "SUCCEEDED"),
        ({"SUCCEEDED", "RUNNING"}, "RUNNING"),
        ({"SUCCEEDED", "FAILED"}, "FAILED"),
        ({"SUCCEEDED", "CANCELLED"}, "CANCELLED"),
        ({"QUEUED", "FAILED"}, "QUEUED"),
        ({"QUEUED", "RUNNING", "PLACED"}, "RUNNING"),
        ({"CANCELLING", "CANCELLED"}, "CANCELLING"),
        ({"TIMED_OUT", "EXPIRED"}, "TIMED_OUT"),
        ({"EXPIRED", "SUCCEEDED"}, "EXPIRED"),
        ({"CANCELLING", "RUNNING"}, "RUNNING"),
        ({"CANCELLING", "QUEUED"}, "QUEUED"),
        ({"ENDING", "QUEUED", "PLACED"}, "PLACED"),
        ({"ENDING", "EXITED"}, "ENDING"),
        ({"LOST_KEPT", "SUCCEEDED"}, "LOST_KEPT"),
        ({"REJECTED"}, "REJECTED"),
    ],
)
def test_a_jobs_state_is_derived(states: set[str], job: str) -> None:
    assert derive_state(states) == job


def test_derivation_is_total_live_first_and_success_only_of_all() -> None:
    for first in STATES:
        for second in STATES:
            derived = derive_state({first, second})
            assert derived in (first, second)
            assert (derived in TERMINAL) == (first in TERMINAL and second in TERMINAL)
            assert (derived == "SUCCEEDED") == (first == second == "SUCCEEDED")
    with pytest.raises(ValueError, match="at least one replica"):
        derive_state(set())


# ------------------------------------------------------------------------------------------------ what cannot follow


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"format": FORMAT + 1}, f"format {FORMAT + 1}"),
        ({"digest": 1}, "follows state"),
        ({"epoch": 2}, "no epoch record"),
        ({"steps": [Op.MOVE, 99, 0, 0, 0, 0]}, "names no replica"),
        ({"steps": [Op.MOVE, 1, 3, 0, 0, 0]}, "names no replica"),
        ({"steps": [Op.CLAIM, 1, 0, 0, 0, 0]}, "names no replica"),
        ({"steps": [15, 1, 0, 0, 0, 0]}, "step 15, which this release does not know: begin with a new ledger"),
        ({"steps": [77, 1, 0, 0, 0, 0]}, "step 77, which this release does not know: use a newer release"),
        ({"steps": [Op.MOVE_FRESH, 1, 3, STATE_NUMBER["CANCELLED"], 9, 0]}, "cannot go"),
        ({"steps": [Op.MOVE_FRESH, 1, 0, STATE_NUMBER["RUNNING"], 9, 0]}, "cannot go"),
        ({"steps": [Op.FREE, 1, 0, packed(9), 0, 0]}, "does not linger"),
        ({"steps": [Op.QUARANTINE, 1, 0, packed(9), 1, 0]}, "does not linger"),
        ({"acts": [["from-the-future", 1]]}, "does not know"),
        ({"acts": [acts.Known(5, "w5", "m")]}, "not the next"),
        ({"acts": [acts.Compact([1, b"x" * 12])]}, "not the oldest ended"),
        ({"acts": [acts.Avoid(99, 0, 1)]}, "job 99, which is not there"),
        ({"acts": [acts.Preempt(99, [0], [])]}, "job 99, which is not there"),
        ({"epoch": 2, "acts": [acts.Epoch("another ledger", "me", 0.0)]}, "belongs to ledger"),
        ({"accepts": [("t", ["j", b"{}", 1, ""])]}, "accepted twice"),
        ({"accepts": [("t", ["k", b"{}", 1, "", "k", b"{}", 1, ""])]}, "accepted twice"),
    ],
)
def test_a_record_that_cannot_follow_is_refused(fields: dict[str, Any], says: str) -> None:
    state = begun()
    with pytest.raises(FoldError, match=says):
        fold(state, decode_record(encode_record(following(state, **fields))), 3)


def test_a_record_of_a_lower_epoch_is_a_counted_no_op() -> None:
    state = begun()
    stale = following(state, accepts=[("t", ["stale", b"{}", 1, ""])])
    fold(state, following(state, epoch=2, acts=[acts.Epoch("L", "other", 0.0)]), 3)
    digest = state.digest
    out = fold(state, stale, 4)
    assert (state.seq, state.digest, state.epoch) == (4, digest, 2)
    assert state.job("t", "stale") is None
    assert not out.accepted
    fold(state, following(state), 5)


def test_the_same_record_twice_does_not_follow_itself() -> None:
    state = begun()
    record = following(state, accepts=[("t", ["k", b"{}", 1, ""])])
    fold(state, record, 3)
    with pytest.raises(FoldError):
        fold(state, record, 4)


def test_every_reader_of_the_same_bytes_has_the_same_state() -> None:
    world = FaultyWorld(11)
    world.run(150)
    one, two = State(), State()
    for state in (one, two):
        for seq, payload in enumerate(world.drive.records, 1):
            fold(state, decode_record(payload), seq)
    assert one.digest == two.digest == world.drive.state.digest == one.full_digest()
    assert [attempt.name for attempt in one.attempts()] == [attempt.name for attempt in world.drive.state.attempts()]
    assert {job.name: job.history for job in one.jobs.values()} == {
        job.name: job.history for job in world.drive.state.jobs.values()
    }


def test_every_prefix_of_a_ledger_is_valid_and_gangs_are_in_one_phase() -> None:
    world = FaultyWorld(12)
    world.run(150)
    state = State()
    for seq, payload in enumerate(world.drive.records, 1):
        fold(state, decode_record(payload), seq)
        validate(state)
    assert state.digest == world.drive.state.digest


def test_dropping_any_record_is_noticed() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("j", gpu={})
    drive.settle()
    drive.run_out("w0")
    for left_out in range(2, len(drive.records)):
        state, failed = State(), False
        for seq, payload in enumerate(drive.records, 1):
            if seq == left_out:
                before = state.digest
                probe = State()
                for at, earlier in enumerate(drive.records[:seq], 1):
                    fold(probe, decode_record(earlier), at)
                if probe.digest == before:
                    failed = True  # a bare heartbeat changes nothing but the time
                    break
                continue
            try:
                fold(state, decode_record(payload), seq)
            except FoldError:
                failed = True
                break
        assert failed, f"record {left_out} was left out and nobody noticed"


@given(st.binary(max_size=200))
def test_decoding_junk_raises_and_nothing_else(junk: bytes) -> None:
    try:
        decode_record(junk)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass


@given(
    st.lists(
        st.tuples(
            st.integers(0, 18),
            st.integers(1, 2),
            st.integers(0, 3),
            st.integers(0, 14),
            st.integers(0, 14),
            st.integers(0, 1),
        ),
        max_size=6,
    )
)
def test_random_steps_fold_or_raise_fold_error(steps: list[tuple[int, ...]]) -> None:
    state = begun()
    record = following(state, steps=[x for step in steps for x in step], notes=["n"])
    try:
        fold(state, decode_record(encode_record(record)), 3)
    except (FoldError, IndexError, ValueError):
        return  # the state is thrown away
    assert state.full_digest() == state.digest


# ------------------------------------------------------------------------------------------------------- validate


@pytest.mark.parametrize(
    "damage",
    [
        "digest",
        "live",
        "held",
        "ended",
        "waits",
        "on hold",
        "two exclusive",
        "two modes",
        "mixed",
        "gang",
        "name",
        "two attempts",
        "orphan",
    ],
)
def test_validate_sees_what_is_broken(damage: str) -> None:
    drive = Driving.with_hosts(2)
    drive.submit("a", gpu={"sharing": "mps"})
    drive.submit("b", gpu={"sharing": "mps"})
    drive.submit("g", gpu={"sharing": "mps", "scheduling": "gang"}, replicas=2)
    state, job = drive.state, drive.job("a")
    first, second = drive.attempt("a"), drive.attempt("b")
    if damage == "digest":
        state.digest ^= 1
    elif damage == "live":
        job.live += 1
    elif damage == "held":
        job.held += 1
    elif damage == "ended":
        state.ended.append(job.num)
    elif damage == "waits":
        state.tenants["t"].waits += 1
    elif damage == "on hold":
        state.on_hold[job.num] = job
    elif damage == "two exclusive":
        first.mode = second.mode = 1
    elif damage == "two modes":
        first.mode = 3
    elif damage == "mixed":
        first.mode = 1
    elif damage == "gang":
        drive.replica("g", 1).state = STATE_NUMBER["RUNNING"]
    elif damage == "name":
        del state.tenants["t"].jobs["a"]
    elif damage == "two attempts":
        second.replica = first.replica
        worker = first.worker
        worker.attempts = {attempt.name: attempt for attempt in (first, second)}
    else:
        drive.replica("a").attempt = None
    with pytest.raises(Broken):
        validate(state)


def test_acts_and_new_jobs_are_folded_where_they_were_decided() -> None:
    """A report, then a hold, then a new job: the record has them in this order, and so has the job's history."""
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("j", gpu={})
    drive.reports([("claimed", "j", 0, 0, ""), ("started", "j", 0, 0, "")], tick=False)
    drive.offer_order("hold", tenant="t", job="j")
    drive.offer_submit("k", gpu={})
    drive.tick()
    steps = decode_record(drive.records[-1]).steps
    assert steps[::STEP_WIDTH] == [Op.CLAIM, Op.START, Op.ACT, Op.ACCEPT]
    assert [row[STATE] for row in drive.job("j").history[-3:]] == [CLAIMED, RUNNING, HELD]
    bad: list[dict[str, Any]] = [{"steps": [Op.ACT, -1, 0, 0, 0, 0]}, {"steps": [Op.ACCEPT, -1, 0, 1, 0, 0]}]
    for fields in bad:
        state = begun()
        with pytest.raises(FoldError, match="more acts or new jobs"):
            fold(state, following(state, **fields), 3)


def test_numbers_in_the_ledger_are_append_only() -> None:
    assert [(op.name, int(op)) for op in Op] == [
        ("PLACE", 0), ("CLAIM", 1), ("START", 2), ("EXIT", 3), ("REFUSE", 4), ("WITHDRAW", 5), ("LOSE", 6), ("FREE", 7),
        ("END", 8), ("MOVE", 9), ("BACKOFF", 10), ("GANG", 11), ("QUARANTINE", 12), ("FREEZE", 16), ("RESUME", 17),
        ("MOVE_FRESH", 18), ("READY", 19), ("AWAIT", 20), ("RAN", 21), ("ACT", 22), ("ACCEPT", 23),
    ]  # fmt: skip
    assert STATES == (
        "QUEUED", "PLACED", "CLAIMED", "RUNNING", "EXITED", "ENDING", "CANCELLING", "LOST_KEPT", "SUCCEEDED", "FAILED",
        "TIMED_OUT", "CANCELLED", "EXPIRED", "REJECTED", "FROZEN",
    )  # fmt: skip
    assert [int(phase) for phase in GangPhase] == [0, 1, 2, 3, 4]
    assert AT_EXITED == 3
