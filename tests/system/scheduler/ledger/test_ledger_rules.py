"""Rules of the ledger that no other test shows alone; docs/reliability-rules.md has them all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from moorage.bus.transport import Delivery
from moorage.scheduler.leader.intake import Intake
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.scheduler.ledger.state_bytes import snapshot_digest
from moorage.schemas.frames import Hello, Join
from tests.unit.scheduler.driving import SUBJECTS, Driving
from tests.unit.scheduler.faulty_world import FaultyWorld

#: folds the records of a file and tells the snapshot's digest
FOLDS: Final = """
import sys
import msgspec
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.ledger.invariants import validate
from moorage.scheduler.core.ledger.state import State
state = State()
for seq, payload in enumerate(msgspec.msgpack.decode(open(sys.argv[1], "rb").read()), 1):
    fold(state, decode_record(payload), seq)
validate(state)
print(snapshots.snapshot_digest(snapshots.dump(state)))
"""


def test_an_attempt_keeps_the_fence_of_the_record_that_placed_it_over_every_term() -> None:
    """H9: what an honest worker says of an attempt of the term before counts, and nothing is placed anew."""
    drive = Driving.with_hosts(1)
    drive.submit("j", gpu={})
    fence, placed = drive.attempt("j").fence, drive.attempt("j").no
    for _ in range(3):
        drive.lead()
        drive.renew()
        drive.settle()
    assert (drive.attempt("j").fence, drive.attempt("j").no) == (fence, placed)
    drive.run_out("w0")
    assert drive.states("j") == ["SUCCEEDED"]


def test_two_tenants_may_use_one_job_id_and_neither_reaches_the_others() -> None:
    """H15: the key is (tenant, job), and the tenant is that of the subject."""
    drive = Driving.with_hosts(2)
    drive.submit("same", gpu={})
    drive.offer_submit("same", tenant="u", gpu={"count": 1}, priority=90)
    drive.settle()
    assert drive.job("same", "t") is not drive.job("same", "u")
    drive.cancel("same", tenant="u")
    drive.settle()
    assert drive.states("same", "u") == ["CANCELLED"]
    assert drive.states("same", "t") == ["RUNNING"]


def test_a_load_frame_frees_nothing() -> None:
    """H21: a frame that was made before a claim shows the GPU free; only a report frees it."""
    drive = Driving.with_hosts(1)
    drive.submit("first", gpu={})
    drive.settle()
    drive.load("w0")  # everything idle and well, it says
    drive.submit("second", gpu={})
    drive.settle()
    assert drive.states("second") == ["QUEUED"]
    assert drive.free_gpus() == 0
    drive.run_out("w0")
    drive.settle()
    assert drive.states("second") == ["RUNNING"]


def test_a_worker_whose_own_claimers_wait_takes_no_placement() -> None:
    """H42: neither starves the other: a worker with pending local claimers is full for the scheduler."""
    drive = Driving()
    worker = drive.worker("w0", 2)
    worker.waiting = True
    drive.renew("w0")
    drive.submit("j", gpu={})
    drive.settle()
    assert drive.states("j") == ["QUEUED"]
    worker.waiting = False
    drive.renew("w0")
    drive.settle()
    assert drive.states("j") == ["RUNNING"]


def test_a_renewal_is_answered_by_an_append_that_was_sent_after_it_came() -> None:
    """H27: so an answer proves that its leader led after the renewal was sent, and an old one's proves nothing."""
    drive = Driving()
    worker = drive.worker("w0", 1)
    payload = drive.engine.build(drive.now + 1, drive.now + 1)
    early = drive.send("w0", worker.renew_frame())  # while that record is under way
    out = drive.engine.commit(drive.store(payload), drive.now + 1)
    assert [reply for reply, _ in out.answers] == []
    drive.tick()
    assert drive.answers[early]["kind"] == "renewed"


def test_another_process_folds_the_same_bytes_to_the_same_state(tmp_path: Path) -> None:
    """H32: a record says what came of a decision, so that neither clock nor hash seed nor process matter."""
    world = FaultyWorld(13)
    world.run(150)
    ledger = tmp_path / "ledger"
    ledger.write_bytes(msgspec.msgpack.encode(world.drive.records))
    ours = snapshot_digest(snapshots.dump(world.drive.state))
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", FOLDS, str(ledger)], env=environment, capture_output=True, text=True, timeout=60
        )
        assert (done.stdout.strip(), done.returncode) == (ours, 0), done.stderr


def test_nothing_is_placed_on_a_worker_before_it_has_reported_in_this_term() -> None:
    """H34: what the ledger says of a worker may be as old as the last term."""
    drive = Driving.with_hosts(1)
    drive.lead()
    drive.submit("j", gpu={})
    drive.tick()
    assert drive.states("j") == ["QUEUED"]
    drive.renew("w0")
    drive.settle()
    assert drive.states("j") == ["RUNNING"]


def test_a_lease_session_is_128_random_bits() -> None:
    """H38: who knows it may speak to its worker, so that nobody may guess it or know it from another one."""
    drive = Driving()
    intake = Intake(drive.engine, SUBJECTS, lambda *_: None, lambda *_: None, lambda *_: None, lambda *_: None)
    given: list[str] = []
    for name in ("w0", "w1", "w2"):
        join = msgspec.json.encode(Join("machine", "boot", 1, Hello(name, "boot")))
        intake.put(Delivery(SUBJECTS.worker(name, "join"), f"_INBOX.{name}", join))
        intake.drain(drive.now)
        drive.tick()
        given.append(drive.answers[f"_INBOX.{name}"]["session"])
    assert len(set(given)) == 3
    assert all(len(bytes.fromhex(session)) == 16 for session in given)


def test_a_slot_that_was_refused_is_busy_until_a_renewal_says_otherwise() -> None:
    """H41: the pool knew better; the next job is not sent into the same refusal."""
    drive = Driving()
    worker = drive.worker("w0", 2, auto=False)
    drive.submit("first", gpu={})
    drive.report("refused", "first", detail="device-busy")
    host = drive.engine.fleet.hosts[0]
    assert host.busy == 0b01
    drive.submit("second", gpu={})
    assert drive.attempt("second").mask == 0b10
    worker.local.clear()
    drive.renew("w0")
    assert host.busy == 0
