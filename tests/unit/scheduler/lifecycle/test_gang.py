"""Gangs: held, started and ended by one record each; tried again only when every rank answered or is fenced."""

from __future__ import annotations

import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.core.ledger.records import GangPhase
from moorage.scheduler.core.ledger.state import new_job
from moorage.schemas.frames import Goodbye, ReportKind
from tests.unit.scheduler.driving import Driving, wire

Told = tuple[ReportKind, str, int, int, str]


def gang(ranks: int = 3, *, stage: str = "HOLDING", workers: int | None = None, **fields: object) -> Driving:
    """One single-GPU worker a rank, for which the test speaks; gang `g` brought to a phase."""
    drive = Driving.with_hosts(*[ranks // (workers or ranks)] * (workers or ranks), auto=False)
    drive.submit("g", replicas=ranks, gpu={"scheduling": "gang"}, **fields)
    assert drive.states("g") == ["PLACED"] * ranks
    if stage in ("CLAIMED", "STARTED", "RUNNING"):
        drive.reports(claims(range(ranks - (stage == "CLAIMED"))))
    if stage == "RUNNING":
        drive.reports([("started", "g", index, 0, "") for index in range(ranks)])
        assert drive.states("g") == ["RUNNING"] * ranks
    return drive


def claims(ranks: range) -> list[Told]:
    return [("claimed", "g", index, 0, "w0.local:29511" if index == 0 else "") for index in ranks]


def phase(drive: Driving) -> GangPhase:
    return GangPhase(drive.job("g").gang)


def test_holding_until_the_last_then_started_in_one_record() -> None:
    drive = gang()
    assert all(place.hold for frame in drive.wanted for place in frame.place)
    for index in (2, 0):
        drive.reports(claims(range(index, index + 1)))
        assert phase(drive) == GangPhase.HOLDING
        assert not any(frame.start for frame in drive.wanted)
    drive.reports(claims(range(1, 2)))
    assert phase(drive) == GangPhase.STARTED
    starts = [start for frame in drive.wanted for start in frame.start]
    assert sorted(start.replica for start in starts) == [0, 1, 2]
    assert {(start.master_addr, start.master_port, start.world_size) for start in starts} == {("w0.local", 29511, 3)}
    assert {frame.worker for frame in drive.wanted} == {"w0", "w1", "w2"}


def shown_code(drive: Driving) -> int | None:
    shown = wire(views.show(drive.engine, "t", "g"))
    code: int | None = shown["code"]
    return code


def test_its_code_is_0_where_every_rank_ended_so_and_that_of_the_rank_that_failed_first() -> None:
    drive = gang(stage="RUNNING")
    for index in range(3):
        assert shown_code(drive) is None, "it is not over yet"
        drive.reports([("exited", "g", index, 0, "exit")])
    assert (drive.job("g").state, shown_code(drive)) == ("SUCCEEDED", 0)
    drive = gang(stage="RUNNING")
    drive.reports([("exited", "g", 1, 7, "exit")])
    drive.reports([("exited", "g", 0, -15, "exit"), ("exited", "g", 2, -15, "exit")])
    assert (drive.job("g").state, shown_code(drive)) == ("FAILED", 7)


@pytest.mark.parametrize("together", [True, False])
def test_the_last_row_of_each_rank_says_how_it_ended(together: bool) -> None:
    drive = gang(stage="RUNNING")
    drive.reports([("exited", "g", 2, 0, "exit")])
    drive.reports([("exited", "g", 1, 7, "exit")], tick=not together)
    drive.reports([("exited", "g", 0, -15, "exit")])
    assert drive.states("g") == ["FAILED"] * 3
    shown = wire(views.show(drive.engine, "t", "g"))
    rows = {change["replica"]: change for change in shown["changes"]}
    assert {index: (row["state"], row.get("code"), row.get("why")) for index, row in rows.items() if index >= 0} == {
        0: ("FAILED", -15, "gang: replica 1: exit code 7"),
        1: ("FAILED", 7, "gang: replica 1: exit code 7"),
        2: ("FAILED", None, "gang: replica 1: exit code 7"),
    }


@pytest.mark.parametrize("word", ["", "no port here", "host:ten", "x" * 500, "host:99999"])
def test_a_bad_address_never_stops_the_leader(word: str) -> None:
    drive = gang(2)
    drive.reports([("claimed", "g", 0, 0, word), ("claimed", "g", 1, 0, "")])
    assert phase(drive) == GangPhase.STARTED
    starts = [start for frame in drive.wanted for start in frame.start]
    assert [(start.master_addr, start.master_port) for start in starts] == [("", 0)] * 2
    drive.lead()
    drive.renew()


@pytest.mark.parametrize("led_anew", [False, True])
def test_start_is_said_again_until_the_renewal_shows_it_also_by_the_next_leader(led_anew: bool) -> None:
    drive = Driving()
    worker = drive.worker("w0", 2)
    drive.submit("g", replicas=2, gpu={"scheduling": "gang"})
    reports = worker.report_frame()
    assert reports is not None
    drive.send("w0", reports)
    drive.tick(obey=False)  # START is lost
    if led_anew:
        drive.lead()
    else:
        worker.report_answered(reports.no)
    drive.renew("w0")
    drive.settle()
    assert drive.states("g") == ["RUNNING", "RUNNING"]


def test_success_of_all_is_success() -> None:
    drive = gang(stage="RUNNING")
    drive.reports([("exited", "g", 0, 0, "exit"), ("freed", "g", 0, 0, "")])
    assert drive.states("g") == ["EXITED", "RUNNING", "RUNNING"]
    assert drive.job("g").state == "RUNNING"
    drive.reports([(kind, "g", index, 0, "exit") for index in (1, 2) for kind in ("exited", "freed")])
    assert drive.states("g") == ["SUCCEEDED"] * 3
    assert phase(drive) == GangPhase.OVER
    assert drive.free_gpus() == 3


@pytest.mark.parametrize(
    ("stage", "kind", "code", "detail", "count"),
    [
        ("HOLDING", "refused", 0, "device-busy", "refusals"),
        ("CLAIMED", "refused", 0, "device-busy", "refusals"),
        ("HOLDING", "not-held", 0, "", "refusals"),  # no rank has run before START
        ("CLAIMED", "not-held", 0, "", "refusals"),
        ("CLAIMED", "withdrawn", 0, "", "refusals"),
        ("CLAIMED", "exited", -9, "fence", "refusals"),
        ("STARTED", "not-held", 0, "", "losses"),
        ("STARTED", "exited", 127, "start-failed", "retries"),
        ("RUNNING", "exited", 1, "exit", "retries"),
        ("RUNNING", "exited", -9, "fence", "losses"),
        ("RUNNING", "not-held", 0, "", "losses"),
        ("CLAIMED", "exited", 0, "exit", "retries"),  # before START nothing may end well
    ],
)
def test_the_first_that_fails_ends_all_in_one_record(
    stage: str, kind: ReportKind, code: int, detail: str, count: str
) -> None:
    drive = gang(stage=stage, retries=1, retries_on_lost=1)
    drive.reports([(kind, "g", 1, code, detail)])
    assert phase(drive) == GangPhase.ENDING
    assert drive.states("g") == ["ENDING", "EXITED", "ENDING"]
    assert sorted(end.replica for frame in drive.wanted for end in frame.end) == [0, 2]
    drive.pass_time(60_000)
    assert drive.replica("g").attempt_no == 1, "no next attempt before each has answered"
    drive.reports(
        [("withdrawn", "g", 0, 0, "")]
        if stage != "RUNNING"
        else [("exited", "g", 0, -15, "end"), ("freed", "g", 0, 0, "")]
    )
    assert drive.states("g") == ["EXITED", "EXITED", "ENDING"]
    drive.pass_time(30_000, renew=False)  # the last one's worker is lost: fenced, and so over
    assert getattr(drive.replica("g"), count) == 1
    assert sum(getattr(drive.replica("g"), name) for name in ("retries", "losses", "refusals")) == 1
    assert drive.states("g") == ["QUEUED"] * 3


def test_the_next_attempt_has_one_number_and_one_fence() -> None:
    drive = gang(stage="RUNNING", retries=1)
    drive.reports([("exited", "g", 2, 1, "exit"), ("freed", "g", 2, 0, "")])
    drive.reports([(kind, "g", index, 0, "end") for index in (0, 1) for kind in ("exited", "freed")])
    assert drive.states("g") == ["QUEUED"] * 3
    drive.pass_time(1_100, step=1_100)
    job = drive.job("g")
    assert {replica.attempt_no for replica in job.replicas} == {2}
    assert len({replica.fence for replica in job.replicas}) == 1
    assert phase(drive) == GangPhase.HOLDING
    assert job.master == "", "the address of the attempt before is not this one's"


def test_a_timeout_of_one_rank_times_all_out() -> None:
    drive = gang(2, stage="RUNNING", retries=4)
    drive.reports([("exited", "g", 1, -15, "timeout"), ("freed", "g", 1, 0, "")])
    drive.reports([("exited", "g", 0, -15, "end"), ("freed", "g", 0, 0, "")])
    assert drive.states("g") == ["TIMED_OUT"] * 2


def test_several_ranks_fail_in_one_record() -> None:
    drive = gang(stage="RUNNING", retries=1)
    drive.reports([("exited", "g", index, 1, "exit") for index in (0, 1, 2)])
    assert drive.states("g") == ["QUEUED"] * 3
    assert drive.replica("g").retries == 1


def test_a_lost_worker_with_several_ranks() -> None:
    drive = gang(4, stage="RUNNING", workers=2, retries_on_lost=1)
    lost = drive.placed_on("g")[0]
    others = [index for index, name in enumerate(drive.placed_on("g")) if name != lost]
    for _ in range(30):
        for name in drive.workers:
            if name != lost:
                drive.send(name, drive.workers[name].renew_frame())
        drive.tick(1_000)
    assert drive.states("g") == ["ENDING" if index in others else "EXITED" for index in range(4)]
    drive.reports([(kind, "g", index, 0, "end") for index in others for kind in ("exited", "freed")])
    assert drive.states("g") == ["QUEUED"] * 4
    assert drive.replica("g").losses == 1


@pytest.mark.parametrize("stage", ["HOLDING", "CLAIMED", "STARTED"])
@pytest.mark.parametrize("how", ["goodbye", "silence"])
def test_a_gang_of_which_nothing_has_run_loses_no_try_with_its_workers(how: str, stage: str) -> None:
    """It failed, or lost a try, whenever one of its hosts restarted while it gathered."""
    drive = gang(2, stage=stage, workers=2, retries_on_lost=0)
    lost, other = drive.placed_on("g")
    if how == "goodbye":
        drive.send(lost, Goodbye(drive.workers[lost].session))
        drive.tick()
    else:
        for _ in range(30):
            drive.send(other, drive.workers[other].renew_frame())
            drive.tick(1_000)
    drive.report("withdrawn", "g", 1)
    begun = stage == "STARTED"  # a rank may have been started by then
    assert drive.states("g") == (["FAILED"] if begun else ["QUEUED"]) * 2
    assert drive.replica("g").losses == 0


@pytest.mark.parametrize("stage", ["HOLDING", "CLAIMED", "STARTED", "RUNNING"])
def test_cancel_at_every_phase(stage: str) -> None:
    drive = gang(stage=stage, retries=3)
    drive.cancel("g")
    assert drive.states("g") == ["CANCELLING"] * 3
    answers: list[Told] = []
    for index in range(3):
        if stage == "RUNNING":
            answers += [("exited", "g", index, -15, "end"), ("freed", "g", index, 0, "")]
        else:
            answers.append(("withdrawn", "g", index, 0, ""))
    drive.reports(answers)
    assert drive.states("g") == ["CANCELLED"] * 3
    assert drive.free_gpus() == 3
    assert drive.job("g").over


def test_cancel_while_ending() -> None:
    drive = gang(stage="RUNNING", retries=3)
    drive.reports([("exited", "g", 0, 1, "exit"), ("freed", "g", 0, 0, "")])
    drive.cancel("g")
    assert drive.states("g") == ["CANCELLED", "CANCELLING", "CANCELLING"]
    drive.reports([(kind, "g", index, 0, "end") for index in (1, 2) for kind in ("exited", "freed")])
    assert drive.states("g") == ["CANCELLED"] * 3
    assert drive.state.live == 0


@pytest.mark.parametrize("stage", ["HOLDING", "RUNNING"])
def test_deadline_ends_all(stage: str) -> None:
    drive = gang(2, stage=stage, deadline_s=20, retries=5)
    drive.pass_time(21_000)
    assert drive.states("g") == ["ENDING", "ENDING"]
    word: ReportKind = "exited" if stage == "RUNNING" else "withdrawn"
    drive.reports([(word, "g", index, -15, "end") for index in (0, 1)])
    assert drive.states("g") == ["TIMED_OUT", "TIMED_OUT"]


def test_deadline_while_ending_forbids_the_next_attempt() -> None:
    drive = gang(2, stage="RUNNING", deadline_s=20, retries=5)
    drive.reports([("exited", "g", 0, 1, "exit"), ("freed", "g", 0, 0, "")])
    drive.pass_time(21_000)
    assert drive.states("g") == ["EXITED", "ENDING"]
    drive.reports([("exited", "g", 1, -15, "end"), ("freed", "g", 1, 0, "")])
    assert drive.states("g") == ["TIMED_OUT", "TIMED_OUT"]


def test_a_gang_of_one_is_a_single_job() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("g", gpu={"scheduling": "gang"})
    drive.settle()
    assert drive.states("g") == ["RUNNING"]


def test_two_gangs_do_not_hold_half_each() -> None:
    drive = Driving.with_hosts(1, 1, 1, 1)
    for name in ("a", "b"):
        drive.submit(name, replicas=3, gpu={"scheduling": "gang"})
    drive.settle()
    assert drive.states("a") == ["RUNNING"] * 3
    assert drive.states("b") == ["QUEUED"] * 3
    assert drive.free_gpus() == 1


def test_a_gang_of_1024_ranks_fails_and_starts_within_the_records_bound() -> None:
    drive = Driving()
    drive.checks = False
    for index in range(16):
        drive.worker(f"w{index}", 64)
    drive.submit("g", replicas=1024, gpu={"scheduling": "gang"}, retries=1)
    drive.settle()
    drive.check()
    assert set(drive.states("g")) == {"RUNNING"}
    worker = drive.workers["w3"]
    worker.finish(next(iter(worker.held)), 1, "x" * 190)
    drive.settle()
    drive.pass_time(2_000)
    drive.settle()
    drive.check()
    assert set(drive.states("g")) == {"RUNNING"}
    assert drive.replica("g", 1023).attempt_no == 2
    assert max(drive.sizes) < 128 * 1024


def test_a_worker_with_ranks_of_many_gangs_is_lost_within_the_records_bound() -> None:
    drive = Driving()
    drive.checks = False
    for index in range(17):
        drive.worker(f"w{index}", 64)
    for index in range(16):
        drive.submit(f"g{index}", replicas=64, gpu={"scheduling": "gang"})
    drive.settle()
    for _ in range(30):
        for name, worker in drive.workers.items():
            if name != "w5":
                drive.send(name, worker.renew_frame())
        drive.tick(1_000)
    drive.settle()
    drive.check()
    assert not any("ENDING" in drive.states(f"g{index}") for index in range(16))


def test_phases_are_those_of_the_promise() -> None:
    assert [phase.name for phase in GangPhase] == ["NONE", "HOLDING", "STARTED", "ENDING", "OVER"]
    assert new_job(1, "t", "g", b"", ((0, 1),), "", 0, 1).gang == GangPhase.NONE


def sharers(drive: Driving, job: str, count: int, percent: int, replicas: int, **gpu: object) -> None:
    share = {"compute_percent": percent}
    drive.submit(job, replicas=replicas, gpu={"count": count, "sharing": "time-slice", "share": share, **gpu})


@pytest.mark.parametrize(
    ("gpus", "beside", "count", "percent", "ranks"),
    [(5, 0, 3, 50, 3), (5, 1, 3, 50, 3), (8, 0, 3, 25, 10), (1, 1, 1, 25, 3), (2, 1, 2, 20, 3), (4, 5, 3, 25, 3)],
)
def test_sharers_of_several_devices_start_as_a_gang_where_all_of_them_fit(
    gpus: int, beside: int, count: int, percent: int, ranks: int
) -> None:
    """If the first ranks took the same devices, the last of them would find too few, and the gang never started."""
    drive = Driving.with_hosts(gpus)
    if beside:
        sharers(drive, "beside", 1, percent, beside)
    sharers(drive, "g", count, percent, ranks, scheduling="gang")
    drive.settle()
    assert drive.states("g") == ["RUNNING"] * ranks
    sharers(drive, "more", count, 100, 1, scheduling="gang")
    sharers(drive, "again", count, percent, gpus * 100 // percent, scheduling="gang")
    drive.settle()
    assert drive.explained("again")["reason"] != "placing"
