"""An attempt without output whose devices do no work: told once and taken back, or ended as a failure."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.answers import views
from moorage.schemas.answers.jobs import ReplicaStall
from moorage.schemas.frames import AttemptUse, DeviceUse
from tests.unit.scheduler.driving import Driving

#: one device: percent, watts, and the most that it may draw
IDLE = (0, 70, 700)
SPINS = (100, 120, 700)


def running(replicas: int = 1, *, gang: bool = False, **fields: Any) -> Driving:
    """Job `j`, each replica with its own worker and two GPUs; all run."""
    drive = Driving.with_hosts(*[2] * replicas)
    run = {"driver": "noop", "stall_s": 60, **fields.pop("run", {})}
    gpu = {"count": 2} | ({"scheduling": "gang"} if gang else {})
    drive.submit("j", replicas=replicas, gpu=gpu, run=run, **fields)
    drive.settle()
    assert drive.states("j") == ["RUNNING"] * replicas
    drive.events.clear()
    return drive


def renew(drive: Driving, *ranks: tuple[int, list[tuple[int, int, int]]]) -> None:
    """One renewal of each rank's worker, a second later: for how long the rank is still, and what its devices do."""
    for replica, (still_s, devices) in enumerate(ranks):
        attempt = drive.attempt("j", replica)
        uses = [DeviceUse(slot, percent, 10, *power) for slot, (percent, *power) in enumerate(devices)]
        drive.workers[attempt.worker.id].use = [AttemptUse(attempt.fence, uses, still_s, *attempt.name[:4])]
    drive.renew()
    drive.tick(1000)


def told(drive: Driving) -> list[Any]:
    found = [event["stalled"] for event in drive.events if "stalled" in event]
    drive.events.clear()
    return found


def why(drive: Driving) -> str:
    [stalled] = told(drive)
    text: str = stalled["why"]
    return text


def test_a_hang_is_reported_once_and_taken_back_once_the_attempt_moves() -> None:
    drive = running()
    rev = drive.job("j").rev
    renew(drive, (59, [IDLE, SPINS]))
    assert told(drive) == [], "not for long enough"
    renew(drive, (60, [IDLE, SPINS]))
    words = "1 GPU at 0 %, 1 GPU at 100 % with at most 120 of 700 W"
    assert told(drive) == [{"seconds": 60, "why": words}]
    renew(drive, (90, [IDLE, SPINS]))
    assert told(drive) == [], "it was told"
    assert views.summary(drive.engine, drive.job("j")).stalled == [ReplicaStall(replica=0, seconds=90, why=words)]
    assert drive.explained("j")["stalled"][0]["seconds"] == 90
    fleet = views.fleet(drive.engine, drive.now)
    assert (fleet.stalled_jobs, fleet.stalled[0].job) == (1, "j")
    renew(drive, (0, [IDLE, (100, 650, 700)]))
    assert told(drive) == [{"seconds": 0, "why": "it moves again"}]
    assert views.summary(drive.engine, drive.job("j")).stalled == []
    renew(drive, (0, [IDLE, IDLE]))
    assert told(drive) == []
    renew(drive, (61, [IDLE, IDLE]))
    assert len(told(drive)) == 1, "another stall"
    assert drive.states("j") == ["RUNNING"]
    assert drive.job("j").rev == rev, "nothing of it is in the ledger"


def test_a_new_leader_knows_of_it_from_the_first_renewal() -> None:
    drive = running()
    renew(drive, (100, [IDLE, IDLE]))
    drive.lead()
    drive.events.clear()
    renew(drive, (105, [IDLE, IDLE]))
    assert [each["seconds"] for each in told(drive)] == [105]


def test_an_attempt_that_ends_or_is_lost_stalls_no_more() -> None:
    drive = running(retries=1)
    renew(drive, (100, [IDLE, IDLE]))
    assert len(told(drive)) == 1
    drive.run_out("w0", code=1)
    drive.settle()
    drive.tick(1000)
    assert told(drive) == []
    drive.tick(60_000)
    drive.settle()
    assert drive.states("j") == ["RUNNING"]
    drive.renew()  # says what its first attempt did
    drive.tick(1000)
    assert told(drive) == [], "the second attempt is another one"


@pytest.mark.parametrize("on_stall", ["warn", "end"])
def test_what_a_worker_said_last_of_an_attempt_is_no_stall_of_the_next_one_elsewhere(on_stall: str) -> None:
    """The memory of its GPUs was not back yet, and its worker had not renewed since: the next attempt was ended."""
    drive = running(retries=2, run={"on_stall": on_stall})
    drive.worker("w1", 2)
    worker, name = drive.workers["w0"], drive.attempt("j").name
    worker.auto = False
    renew(drive, (100, [IDLE, IDLE]))
    worker.finish(name, 1, "end", freed=False)
    drive.report_all()
    drive.tick(5_000)
    drive.settle()
    assert drive.attempt("j").worker.id == "w1"
    drive.events.clear()
    drive.tick(1000)
    assert told(drive) == []
    assert drive.states("j") == ["RUNNING"]


def test_without_stall_s_nothing_stalls() -> None:
    drive = running(run={"stall_s": None})
    renew(drive, (10_000, [IDLE, IDLE]))
    assert told(drive) == []


def test_on_stall_end_ends_an_attempt_that_hangs_as_a_failure() -> None:
    drive = running(retries=1, run={"on_stall": "end"})
    first = drive.attempt("j").fence
    renew(drive, (60, [SPINS, SPINS]))
    assert drive.states("j") == ["ENDING"]
    drive.settle()
    drive.tick(10_000)
    drive.settle()
    assert drive.states("j") == ["RUNNING"]
    assert (drive.attempt("j").fence > first, drive.replica("j").retries) == (True, 1)
    renew(drive, (60, [SPINS, SPINS]))
    drive.settle()
    assert drive.states("j") == ["FAILED"]
    row = views.summary(drive.engine, drive.job("j"))
    found = "2 GPUs at 100 % with at most 120 of 700 W"
    assert row.why == f"stalled: no output and no work of its GPUs for 60 s; {found}"


def test_on_stall_end_counts_no_retry_that_the_request_does_not_allow() -> None:
    drive = running(run={"on_stall": "end"})
    renew(drive, (60, [SPINS, SPINS]))
    assert (drive.states("j"), drive.replica("j").retries) == (["ENDING"], 0)
    drive.settle()
    assert drive.states("j") == ["FAILED"]


@pytest.mark.parametrize("restart", ["never", "on-failure"])
def test_it_begins_anew_after_a_back_off_that_grows_and_counts_from_its_end(restart: str) -> None:
    retries: dict[str, Any] = {"retries": 4} if restart == "never" else {}
    drive = running(**retries, run={"on_stall": "end", "restart": restart})
    waits = []
    for _ in range(4):
        renew(drive, (60, [SPINS, SPINS]))
        assert drive.states("j") == ["ENDING"]
        drive.pass_time(10_000)
        drive.lead()  # it ends late, and under another leader
        drive.renew()
        drive.settle()
        assert drive.states("j") == ["QUEUED"]
        ended_ms = drive.now
        while drive.states("j") == ["QUEUED"]:
            drive.pass_time(100, step=100)
        waits.append(round((drive.now - ended_ms) / 1000))
        drive.settle()
    assert waits == [1, 2, 4, 8]
    replica = drive.replica("j")
    assert (replica.retries, replica.restarts, replica.streak) == ((4, 0, 0) if restart == "never" else (0, 4, 4))


def test_a_gang_stalls_once_all_of_its_ranks_are_still() -> None:
    drive = running(3, gang=True)
    renew(drive, (300, [SPINS] * 2), (20, [IDLE] * 2), (300, [SPINS] * 2))
    assert told(drive) == [], "rank 1 has worked a moment ago"
    renew(drive, (300, [SPINS] * 2), (61, [IDLE] * 2), (300, [SPINS] * 2))
    [stalled] = told(drive)
    words = "rank 1 on w1 differs: 2 GPUs at 0 %; the others: 4 GPUs at 100 % with at most 120 of 700 W"
    assert stalled == {"seconds": 61, "replica": 1, "why": words}
    renew(drive, (300, [SPINS] * 2), (0, [IDLE] * 2), (300, [SPINS] * 2))
    assert [each["seconds"] for each in told(drive)] == [0]


def test_of_two_halves_of_a_gang_the_one_that_does_nothing_is_named() -> None:
    drive = running(2, gang=True)
    renew(drive, (90, [SPINS] * 2), (90, [IDLE] * 2))
    assert why(drive).startswith("rank 1 on w1 differs: 2 GPUs at 0 %;")


def test_ranks_in_the_minority_are_named_by_the_first_of_them() -> None:
    drive = running(5, gang=True)
    renew(drive, *[(90, [SPINS] * 2 if rank in (2, 4) else [IDLE] * 2) for rank in range(5)])
    assert why(drive).startswith("rank 2 on w2 and 1 other rank differ: 4 GPUs at 100 %")


def test_the_rank_that_stood_still_first_is_named_where_all_do_alike() -> None:
    drive = running(3, gang=True)
    renew(drive, (90, [SPINS] * 2), (90, [SPINS] * 2), (140, [SPINS] * 2))
    assert why(drive).startswith("rank 2 on w2 differs: it stood still 50 s earlier; 6 GPUs at 100 %")


def test_no_rank_is_named_where_none_differs() -> None:
    drive = running(3, gang=True)
    renew(drive, (90, [IDLE] * 2), (91, [IDLE] * 2), (92, [IDLE] * 2))
    [stalled] = told(drive)
    assert stalled == {"seconds": 90, "replica": -1, "why": "no rank differs: 6 GPUs at 0 %"}


def test_a_gang_that_hangs_is_ended_as_a_whole() -> None:
    drive = running(2, gang=True, run={"on_stall": "end"})
    renew(drive, (90, [SPINS] * 2), (90, [IDLE] * 2))
    drive.settle()
    assert drive.states("j") == ["FAILED"] * 2
    assert "rank 1 on w1 differs" in views.summary(drive.engine, drive.job("j")).why


def test_replicas_that_are_no_gang_stall_one_by_one() -> None:
    drive = running(2)
    renew(drive, (0, [SPINS] * 2), (90, [IDLE] * 2))
    assert told(drive) == [{"seconds": 90, "replica": 1, "why": "2 GPUs at 0 %"}]
