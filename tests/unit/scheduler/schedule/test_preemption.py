"""Preemption: who may, whom it ends, whose the freed GPUs are, and that it survives a new leader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from moorage.scheduler.answers import waiting
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import ChangeOrder
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.schedule import preempt
from moorage.scheduler.core.schedule.victims import VOID_MS, Victim, _Search
from moorage.schemas.operate import ChangeAsked
from tests.unit.scheduler.driving import Driving, wire

ON = Config(preempt_priority=80, preempt_after=60.0)
GANG = {"scheduling": "gang"}


def running(config: Config = ON, gpus: int = 4, hosts: int = 1, **asked: Any) -> Driving:
    """Hosts full of jobs of one GPU each, `j0` the oldest; a second apart, all past `preempt_after`."""
    drive = Driving.with_hosts(*[gpus] * hosts, config=config, cpu_milli=64_000)
    for number in range(gpus * hosts):
        drive.submit(f"j{number}", gpu={}, **asked)
        drive.settle()
        drive.pass_time(1_000)
    drive.pass_time(70_000)
    return drive


def urgent(drive: Driving, name: str = "urgent", **asked: Any) -> None:
    drive.submit(name, priority=90, **({"gpu": {}} | asked))
    drive.pass_time(1_500)


def ended(drive: Driving, count: int) -> list[str]:
    return [f"j{n}" for n in range(count) if drive.states(f"j{n}") != ["RUNNING"]]


def test_off_by_default() -> None:
    drive = running(Config())
    urgent(drive)
    drive.pass_time(30_000)
    assert (drive.states("urgent"), ended(drive, 4)) == (["QUEUED"], [])


def test_the_one_that_loses_least_ends_and_waits_again_for_no_count() -> None:
    drive = running()
    urgent(drive)
    drive.settle()
    assert ended(drive, 4) == ["j3"]
    assert drive.states("urgent") == ["RUNNING"]
    assert (drive.states("j3"), drive.replica("j3").retries, drive.replica("j3").losses) == (["QUEUED"], 0, 0)
    whys = [change.get("why") for event in drive.events for change in event["changes"] if event["job"] == "j3"]
    assert "preempted by job urgent: priority 90 over 50" in whys
    drive.run_out("w0")
    drive.settle()
    assert drive.states("j3") == ["RUNNING"]


@pytest.mark.parametrize(
    ("priority", "low", "does"), [(79, 50, False), (80, 50, True), (90, 90, False), (90, 95, False), (90, 89, True)]
)
def test_only_a_higher_priority_from_the_setting_on(priority: int, low: int, does: bool) -> None:
    drive = running(gpus=1, priority=low)
    drive.submit("asks", gpu={}, priority=priority)
    drive.pass_time(2_500)
    drive.settle()
    assert drive.states("asks") == (["RUNNING"] if does else ["QUEUED"])
    assert drive.replica("j0").attempt_no == 1, "nor ended and placed again before whoever asked"


def test_a_job_behind_it_that_waits_for_the_tenants_limit_keeps_no_job_from_preempting() -> None:
    drive = running(gpus=2)
    drive.order("limit", tenant="t", gpus=3)
    drive.submit("urgent", priority=90, gpu={})
    drive.submit("behind", gpu={"count": 2})
    drive.pass_time(3_000)
    drive.settle()
    assert (drive.states("urgent"), drive.states("behind")) == (["RUNNING"], ["QUEUED"])


def test_what_has_just_begun_runs_in_peace() -> None:
    drive = Driving.with_hosts(1, config=ON)
    drive.submit("young", gpu={})
    drive.settle()
    urgent(drive)
    drive.pass_time(50_000)
    assert drive.states("young") == ["RUNNING"]
    drive.pass_time(15_000)
    drive.settle()
    assert (drive.states("young"), drive.states("urgent")) == (["QUEUED"], ["RUNNING"])


@pytest.mark.parametrize(("job", "priority"), [("j1", 95), ("j0", 5)], ids=["raised", "lowered"])
def test_the_record_of_an_operators_priority_ends_nobody_by_the_one_before(job: str, priority: int) -> None:
    drive = running(gpus=1, hosts=2)
    drive.submit("urgent", priority=90, gpu={})
    drive.offer_order("priority", job=job, priority=priority)
    drive.tick(1_000)
    assert ended(drive, 2) == ["j0"]


def test_tenants_that_change_priorities_with_every_record_keep_nobody_from_preempting() -> None:
    drive = running(gpus=1)
    drive.submit("urgent", priority=90, gpu={})
    drive.submit("waits", gpu={}, tenant="other", priority=10)
    for priority in (11, 12, 13):
        for tenant, job in (("t", "j0"), ("other", "waits")):
            drive.engine.offer(ChangeOrder(tenant, ChangeAsked(job=job, priority=priority), "", True))
        drive.tick(1_000)
    assert ended(drive, 1) == ["j0"]


def test_how_long_it_took_to_begin_is_no_time_that_it_has_run() -> None:
    """With the record that tells of its beginning it counted since it was placed: that may be long before."""
    drive = Driving.with_hosts(2, config=ON, auto=False)
    for name, priority in (("slow", 10), ("other", 50)):
        drive.submit(name, gpu={}, priority=priority)
    drive.reports([("claimed", "other", 0, 0, ""), ("started", "other", 0, 0, "")])
    drive.pass_time(70_000)
    drive.submit("urgent", priority=90, gpu={})
    drive.reports([("claimed", "slow", 0, 0, ""), ("started", "slow", 0, 0, "")], tick=False)
    drive.tick(1_000)
    assert (drive.states("slow"), drive.states("other")) == (["RUNNING"], ["ENDING"])


def test_no_job_is_preempted_where_that_would_not_make_room() -> None:
    drive = running()
    urgent(drive, gpu={"count": 5})
    urgent(drive, "other", resources={"cpu_milli": 100_000})
    assert ended(drive, 4) == []


def test_jobs_without_gpus_end_where_the_processors_are_what_is_lacking() -> None:
    drive = Driving.with_hosts(4, cpu_milli=8000)
    all_of_them = {"cpu_milli": 8000}
    drive.submit("spot", preemptible=True, resources=all_of_them)
    drive.settle()
    drive.submit("plain", gpu={}, resources=all_of_them)
    for _ in range(3):
        drive.pass_time(1000)
        drive.settle()
    assert (drive.states("spot"), drive.states("plain")) == (["QUEUED"], ["RUNNING"])


def test_as_few_as_free_what_is_needed_on_one_host() -> None:
    drive = running(hosts=2)
    worker = drive.workers["w1"]
    worker.finish(next(iter(worker.held)))
    drive.settle()
    urgent(drive, gpu={"count": 2})
    drive.settle()
    assert drive.states("urgent") == ["RUNNING"]
    assert len([name for name in ended(drive, 8) if drive.states(name) == ["QUEUED"]]) == 1


def test_the_lowest_priority_ends_first() -> None:
    drive = Driving.with_hosts(3, config=ON)
    for name, priority in (("mid", 50), ("low", 10), ("high", 70)):
        drive.submit(name, gpu={}, priority=priority)
        drive.settle()
    drive.pass_time(70_000)
    urgent(drive)
    drive.settle()
    assert [drive.states(name) for name in ("low", "mid", "high")] == [["QUEUED"], ["RUNNING"], ["RUNNING"]]


def test_a_gang_ends_whole_and_a_gang_is_placed_whole() -> None:
    drive = Driving.with_hosts(4, 4, config=ON)
    drive.submit("gang", gpu=GANG | {"count": 4}, replicas=2, priority=20)
    drive.settle()
    drive.pass_time(70_000)
    urgent(drive, gpu=GANG | {"count": 4}, replicas=2)
    drive.settle()
    assert drive.states("gang") == ["QUEUED", "QUEUED"]
    drive.pass_time(2_000)
    drive.settle()
    assert drive.states("urgent") == ["RUNNING", "RUNNING"]


def slow(drive: Driving, jobs: int) -> None:
    """What runs takes its time to end: the workers speak for nobody until told."""
    for worker in drive.workers.values():
        worker.auto = False
    assert jobs


def finish_ending(drive: Driving) -> None:
    for worker in drive.workers.values():
        for key in [key for key in worker.held if drive.states(key[1], key[0])[0] == "ENDING"]:
            worker.finish(key, -15, "end")
        worker.auto = True
    drive.settle()


def test_of_whom_a_large_gang_ends_each_host_looks_at_its_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at all of them for each host took a second of the leader, for a gang of 400 hosts."""
    drive = running(gpus=2, hosts=6)
    room_of, calls = _Search._room, Counter[int]()

    def counted(search: _Search, host: Host, victims: Iterable[Victim]) -> int:
        found = list(victims)
        assert all(host.worker in {attempt.worker for attempt in victim.attempts} for victim in found)
        calls[len(found)] += 1
        return room_of(search, host, found)

    monkeypatch.setattr(_Search, "_room", counted)
    urgent(drive, gpu={"count": 2, **GANG}, replicas=6)
    drive.settle()
    assert drive.states("urgent") == ["RUNNING"] * 6
    assert calls[2], "of a host both go"


def test_the_freed_gpus_are_the_preemptors_whoever_came_before() -> None:
    drive = running()
    slow(drive, 4)
    drive.submit("big", gpu={"count": 2}, priority=90)
    drive.pass_time(1_500)
    assert drive.job("big").preempts is not None
    drive.submit("first", gpu={}, priority=95)  # may preempt too, but not take what is freed for another
    worker = drive.workers["w0"]
    ending = [key for key in worker.held if drive.states(key[1])[0] == "ENDING"]
    assert len(ending) == 2
    worker.finish(ending[0], -15, "end")
    drive.settle()
    drive.tick()
    assert drive.states("first")[0] == "QUEUED"
    worker.finish(ending[1], -15, "end")
    worker.auto = True
    drive.settle()
    assert drive.states("big") == ["RUNNING"]
    assert drive.job("big").preempts is None


def test_a_new_leader_ends_nobody_while_room_may_be_on_a_worker_that_was_not_heard() -> None:
    """After a takeover workers renew one after the other, and nothing is placed on one that has not yet."""
    drive = running(gpus=1)
    drive.worker("w1", 1)
    drive.lead()
    drive.submit("urgent", priority=90, gpu={})
    drive.renew("w0")
    drive.tick(1_000)
    assert drive.states("j0") == ["RUNNING"]
    drive.renew("w1")
    assert (drive.placed_on("urgent"), drive.states("j0")) == (["w1"], ["RUNNING"])


def test_a_worker_that_is_not_heard_for_a_while_keeps_no_preemptor_waiting() -> None:
    drive = running(gpus=1)
    drive.worker("w1", 1)
    drive.lead()
    drive.workers["w1"].session = ""
    drive.submit("urgent", priority=90, gpu={})
    drive.pass_time(5_000)
    drive.settle()
    assert drive.placed_on("urgent") == ["w0"]


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_new_leader_goes_on_and_ends_nobody_twice(snapshot: bool) -> None:
    drive = running()
    slow(drive, 4)
    drive.submit("big", gpu={"count": 2}, priority=90)
    drive.pass_time(1_500)
    before = drive.job("big").preempts
    if snapshot:
        drive.take_snapshot()
    drive.lead()
    drive.renew()
    assert drive.job("big").preempts == before
    drive.submit("small", gpu={}, priority=90)
    drive.pass_time(5_000)
    finish_ending(drive)
    assert drive.states("big") == ["RUNNING"]
    assert before is not None
    assert sorted(drive.states(f"j{n}")[0] for n in range(4)).count("QUEUED") >= 2


def test_explain_says_for_whose_end_it_waits() -> None:
    drive = running()
    slow(drive, 4)
    drive.submit("big", gpu={"count": 2}, priority=90)
    drive.pass_time(1_500)
    found = wire(waiting.explain_job(drive.engine, "t", "big"))
    assert found["reason"] == "preempting"
    assert "job j2, job j3" in found["because"]


@pytest.mark.parametrize(("config", "priority", "says"), [(ON, 90, True), (ON, 79, False), (Config(), 90, False)])
def test_explain_says_before_the_act_that_others_will_be_ended(config: Config, priority: int, says: bool) -> None:
    drive = Driving.with_hosts(1, config=config)
    drive.submit("young", gpu={})
    drive.settle()
    drive.submit("urgent", gpu={}, priority=priority)
    drive.pass_time(1_500)
    found = wire(waiting.explain_job(drive.engine, "t", "urgent"))
    assert found["reason"] == "busy"
    words = "jobs of a lower priority than 90 are preempted for it once they have run for 60 s, if that makes room"
    assert found.get("because", "") == (words if says else "")


@pytest.mark.parametrize("how", ["cancel", "hold"])
def test_the_hosts_are_open_again_when_the_preemptor_goes(how: str) -> None:
    drive = running(replace(ON, reserve_after=1000.0))  # the jobs that ended have waited long, and would reserve them
    slow(drive, 4)
    drive.submit("big", gpu={"count": 2}, priority=90)
    drive.pass_time(1_500)
    if how == "cancel":
        drive.cancel("big")
    else:
        drive.order("hold", job="big")
    drive.submit("next", gpu={}, priority=60)
    drive.pass_time(2_000)
    assert not drive.state.preempting
    finish_ending(drive)
    assert drive.states("next") == ["RUNNING"]


def test_what_is_free_already_is_open_at_once_when_the_preemptor_goes() -> None:
    drive = running()
    slow(drive, 4)
    drive.submit("big", gpu={"count": 2}, priority=90)
    drive.pass_time(1_500)
    drive.submit("next", gpu={}, priority=60)
    worker = drive.workers["w0"]
    ending = [key for key in worker.held if drive.states(key[1])[0] == "ENDING"]
    worker.finish(ending[0], -15, "end")
    drive.settle()
    assert drive.states("next") == ["QUEUED"], "what is freed is held"
    drive.cancel("big")
    drive.tick()
    assert drive.states("next") == ["PLACED"], "though nothing else became free"


def test_of_a_preemptor_that_has_started_no_time_is_kept() -> None:
    """A number for each would stay as long as the leader leads, and the job's next preemption would count from it."""
    drive = running()
    slow(drive, 4)
    urgent(drive)
    drive.operate("cordon", "w0")
    finish_ending(drive)
    drive.pass_time(2_000)
    assert drive.engine.planner.preempting._void, "it waits though all have ended for it"
    drive.operate("uncordon", "w0")
    drive.settle()
    drive.pass_time(2_000)
    assert drive.states("urgent") == ["RUNNING"]
    assert not drive.engine.planner.preempting._void


def test_hosts_that_fail_the_preemptor_are_not_held_for_ever() -> None:
    drive = running(hosts=2, gpus=2)
    slow(drive, 4)
    drive.submit("big", gpu={"count": 2}, priority=90)
    drive.pass_time(1_500)
    preempts = drive.job("big").preempts
    assert preempts is not None
    name = drive.state.worker_by_num[preempts[0][0]].id
    drive.operate("cordon", name)
    finish_ending(drive)
    drive.pass_time(VOID_MS + 3_000)
    drive.settle()
    drive.pass_time(3_000)
    drive.settle()
    assert drive.states("big") == ["RUNNING"], "on the other host, by a second preemption"


def two_hosts(**asked: Any) -> Driving:
    """`w0` with a job of priority 10 and two replicas, asked to end in part for `urgent`; `w1` with one of 50."""
    drive = Driving.with_hosts(2, config=ON)
    drive.submit("pair", gpu={}, replicas=2, priority=10, **asked)
    drive.settle()
    drive.worker("w1", 1)
    drive.submit("other", gpu={})
    drive.settle()
    drive.pass_time(70_000)
    slow(drive, 3)
    urgent(drive)
    assert drive.states("pair") == ["ENDING", "RUNNING"]
    return drive


def test_a_replica_that_runs_on_beside_one_that_has_ended_holds_no_host() -> None:
    """It was taken for one that ends still: the preemptor waited for it, on a host that takes no work."""
    drive = two_hosts()
    drive.operate("cordon", "w0")
    worker = drive.workers["w0"]
    worker.finish(next(key for key in worker.held if key[2] == 0), -15, "end")
    drive.settle()
    assert drive.explained("urgent")["because"] == "the preempted jobs have ended"
    drive.pass_time(VOID_MS + 3_000)
    finish_ending(drive)
    assert drive.states("urgent") == ["RUNNING"], "on the other host, by a second preemption"
    assert (drive.states("pair"), drive.states("other")) == (["QUEUED", "RUNNING"], ["QUEUED"])


def test_what_is_kept_through_a_partition_keeps_no_preemptor_waiting() -> None:
    """A host that fails in between is given up, though what runs there may end on it days later."""
    drive = two_hosts(on_partition="keep")
    drive.workers["w0"].session = ""
    drive.pass_time(drive.config.lost_ms + VOID_MS + 5_000)
    assert drive.states("pair") == ["LOST_KEPT", "LOST_KEPT"]
    finish_ending(drive)
    assert drive.placed_on("urgent") == ["w1"]


@pytest.mark.parametrize(("own", "lenders", "ending"), [(3, 4, 2), (1, 3, 1)], ids=["lenders", "own"])
def test_what_is_taken_back_already_counts_for_both_sides(own: int, lenders: int, ending: int) -> None:
    """Three jobs in lines of their own, on a host each, before the first of those that end for them is gone."""
    drive = Driving.with_hosts(2, 2, 2, config=Config(reclaim=True, preempt_after=0.0), auto=False)
    drive.order("share", tenant="own", gpus=own)
    drive.order("share", tenant="t", gpus=lenders)
    for number in range(6):
        drive.submit(f"j{number}", gpu={}, priority=100)
        drive.reports([("claimed", f"j{number}", 0, 0, ""), ("started", f"j{number}", 0, 0, "")])
    for number in range(3):
        drive.submit(f"o{number}", gpu={}, tenant="own", priority=number)
        drive.pass_time(3_000)
    assert sum(drive.states(f"j{n}") == ["ENDING"] for n in range(6)) == ending


@pytest.mark.parametrize("new_leader", [False, True])
def test_who_still_ends_for_one_that_has_gone_counts_before_another_is_ended(new_leader: bool) -> None:
    """Five of the lender's run where four are its own: one alone may be taken back, whoever of its owner wants it."""
    drive = Driving(Config(reclaim=True, preempt_after=0.0))
    worker = drive.worker("w0", 5)
    worker.auto = False
    drive.order("share", tenant="own", gpus=1)
    drive.order("share", tenant="t", gpus=4)
    for number in range(5):
        drive.submit(f"j{number}", gpu={}, priority=100)
        drive.reports([("claimed", f"j{number}", 0, 0, ""), ("started", f"j{number}", 0, 0, "")])
    drive.submit("first", gpu={}, tenant="own")
    while not any(drive.states(f"j{n}") == ["ENDING"] for n in range(5)):
        drive.tick(200)
    drive.cancel("first", tenant="own")  # before anybody looks again for whom others end
    if new_leader:
        drive.lead()
        drive.renew()
    drive.submit("next", gpu={}, tenant="own")
    drive.pass_time(5_000)
    assert sum(drive.states(f"j{n}") == ["ENDING"] for n in range(5)) == 1


@pytest.mark.parametrize("how", ["cancelled", "drained", "cancelled, and too many are followed"])
def test_who_ends_for_another_reason_is_nothing_more_to_take_back(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lender leases five GPUs where four are its own, and one of the five is about to be free anyway."""
    monkeypatch.setattr(preempt, "FOLLOWED_MAX", 0 if "too many" in how else 10_000)
    drive = Driving.with_hosts(*[1] * 5, config=Config(reclaim=True, preempt_after=0.0), auto=False)
    drive.order("share", tenant="own", gpus=1)
    drive.order("share", tenant="t", gpus=4)
    for number in range(5):
        drive.submit(f"j{number}", gpu={}, priority=100)
        drive.reports([("claimed", f"j{number}", 0, 0, ""), ("started", f"j{number}", 0, 0, "")])
    drive.submit("before", gpu={}, tenant="u", priority=1)  # it waits, so the fleet is looked at for victims
    drive.pass_time(2_000)
    if how == "drained":
        drive.operate("drain", drive.attempt("j0").worker.id, within_s=1.0)
    else:
        drive.cancel("j0")
    drive.submit("next", gpu={}, tenant="own")
    drive.pass_time(5_000)
    assert drive.states("j0") == ["ENDING" if how == "drained" else "CANCELLING"]
    assert [drive.states(f"j{n}") for n in range(1, 5)] == [["RUNNING"]] * 4


def test_borrowed_gpus_are_taken_back_for_whom_they_are_guaranteed_and_no_more() -> None:
    drive = Driving.with_hosts(4, config=Config(reclaim=True, preempt_after=0.0))
    drive.order("share", tenant="own", gpus=2)
    drive.order("share", tenant="t", gpus=1)
    for number in range(4):
        drive.submit(f"j{number}", gpu={}, priority=100)
        drive.settle()
    drive.pass_time(5_000)
    for number in range(3):
        drive.submit(f"o{number}", gpu={}, tenant="own", priority=0)
    drive.pass_time(5_000)
    for _ in range(4):
        drive.settle()
        drive.pass_time(2_000)
    assert [drive.states(f"o{n}", "own") for n in range(3)] == [["RUNNING"], ["RUNNING"], ["QUEUED"]]
    assert sum(drive.states(f"j{n}") == ["RUNNING"] for n in range(4)) == 2
    whys = [change.get("why") for event in drive.events for change in event["changes"] if change["state"] == "ENDING"]
    assert set(whys) == {"preempted: borrowed GPUs go back to tenant own"}


@pytest.mark.parametrize("theirs", [0, 4])
@pytest.mark.parametrize("resource", ["cpu_milli", "memory_mib"])
def test_jobs_without_gpus_end_for_the_processors_and_memory_of_a_job_within_its_guarantee(
    resource: str, theirs: int
) -> None:
    """They had all of them, so 16 guaranteed GPUs were idle for ten hours: nobody had borrowed a GPU."""
    drive = Driving.with_hosts(8, 8, config=Config(reclaim=True), **{resource: 48_000})
    drive.order("share", tenant="own", gpus=16)
    drive.order("share", tenant="t", gpus=theirs)
    drive.submit("cores", replicas=12, resources={resource: 8_000})
    drive.settle()
    asked = {"gpu": {"count": 8}, "resources": {resource: 16_000}, "tenant": "own"}
    drive.submit("train", **asked)
    drive.pass_time(70_000)
    for _ in range(3):
        drive.settle()
        drive.pass_time(2_000)
    assert drive.states("train", "own") == ["RUNNING"]
    assert drive.states("cores").count("RUNNING") == 10, "two are enough"
    whys = {change.get("why") for event in drive.events for change in event["changes"] if change["state"] == "ENDING"}
    assert whys == {"preempted: tenant own needs processors or memory for its guaranteed GPUs"}
    drive.submit("more", **asked | {"tenant": "u"})
    drive.pass_time(70_000)
    assert drive.states("more", "u") == ["QUEUED"], "it would borrow"


def test_jobs_with_gpus_of_a_tenant_within_its_guarantee_are_spared_where_processors_are_short() -> None:
    drive = Driving.with_hosts(8, config=Config(reclaim=True, preempt_after=0.0), cpu_milli=8_000)
    drive.order("share", tenant="own", gpus=4)
    drive.order("share", tenant="t", gpus=4)
    drive.submit("guaranteed", gpu={"count": 4}, resources={"cpu_milli": 8_000})
    drive.settle()
    drive.submit("train", tenant="own", gpu={"count": 4}, resources={"cpu_milli": 4_000})
    drive.pass_time(10_000)
    assert (drive.states("guaranteed"), drive.states("train", "own")) == (["RUNNING"], ["QUEUED"])


@pytest.mark.parametrize("guaranteed", [0, 1, 2])
def test_who_would_borrow_takes_no_guarantee_by_priority(guaranteed: int) -> None:
    """What it ended took its GPU back at once, and was ended again: for ever."""
    drive = Driving.with_hosts(2, config=Config(preempt_priority=80, reclaim=True, preempt_after=0.0))
    drive.order("share", tenant="u", gpus=guaranteed)
    for number in range(2):
        drive.submit(f"u{number}", tenant="u", gpu={}, priority=10)
    drive.settle()
    for number in range(3):
        drive.submit(f"high{number}", gpu={}, priority=90)
    for _ in range(8):
        drive.pass_time(2_000)
        drive.settle()
    assert sum(drive.states(f"u{number}", "u") == ["RUNNING"] for number in range(2)) == guaranteed
    assert sum(drive.states(f"high{number}") == ["RUNNING"] for number in range(3)) == 2 - guaranteed
    assert sum(drive.replica(f"u{number}", tenant="u").attempt_no for number in range(2)) == 2, (
        "nobody is ended in turns"
    )


@pytest.mark.parametrize("need", [1, 2])
def test_within_a_tenant_priority_decides_also_over_its_guarantee(need: int) -> None:
    drive = Driving.with_hosts(2, config=Config(preempt_priority=80, reclaim=True, preempt_after=0.0))
    drive.order("share", tenant="t", gpus=2)
    for number in range(2):
        drive.submit(f"low{number}", gpu={})
    drive.settle()
    urgent(drive, gpu={"count": need})
    drive.settle()
    assert drive.states("urgent") == ["RUNNING"]
    assert sum(drive.states(f"low{number}") == ["QUEUED"] for number in range(2)) == need


def test_a_tenant_within_its_guarantee_ends_its_own_job_of_lower_priority_where_nobody_has_borrowed() -> None:
    """It had the right to take back, and that was its only one: it waited for its own job to end by itself."""
    drive = Driving.with_hosts(2, config=Config(preempt_after=0.0, reclaim=True, preempt_priority=80))
    drive.order("share", tenant="own", gpus=3)
    drive.order("share", tenant="other", gpus=1)
    drive.submit("others", gpu={}, tenant="other", priority=10)
    drive.submit("low", gpu={}, tenant="own", priority=50)
    drive.settle()
    drive.submit("urgent", gpu={}, tenant="own", priority=90)
    for _ in range(5):
        drive.pass_time(2_000)
        drive.settle()
    assert (drive.states("urgent", "own"), drive.states("low", "own")) == (["RUNNING"], ["QUEUED"])
    assert drive.states("others", "other") == ["RUNNING"], "its GPU is guaranteed to another tenant"


def test_age_does_not_keep_a_preemptor_from_what_was_freed_for_it() -> None:
    """The age of a job counts from its acceptance when it waits, and only until its start when it defends itself."""
    drive = Driving.with_hosts(1, config=Config(preempt_after=0.0, preempt_priority=80, ageing=600))
    drive.submit("old", gpu={}, priority=60)
    drive.settle()
    drive.pass_time(600_000, step=60_000)
    drive.submit("high", gpu={}, priority=90)
    drive.pass_time(2_000)
    drive.settle()
    assert (drive.states("high"), drive.states("old")) == (["RUNNING"], ["QUEUED"])


@pytest.mark.parametrize(("jobs", "replicas"), [(16, 1), (1, 16)])
def test_a_burst_ends_as_many_as_it_needs_at_once(jobs: int, replicas: int) -> None:
    """One was ended after the other: sixteen jobs waited for sixteen graces."""
    drive = Driving.with_hosts(*[4] * 16, config=Config())
    for number in range(64):
        drive.submit(f"j{number}", gpu={}, preemptible=True)
    drive.settle()
    slow(drive, 64)
    for number in range(jobs):
        drive.submit(f"urgent{number}", gpu={}, replicas=replicas)
    drive.pass_time(2_500)
    assert len(ended(drive, 64)) == 16
    drive.pass_time(5_000)
    assert len(ended(drive, 64)) == 16, "no more than it needs, however long they take to end"
    finish_ending(drive)
    drive.pass_time(2_500)
    drive.settle()
    assert {state for number in range(jobs) for state in drive.states(f"urgent{number}")} == {"RUNNING"}


def test_a_burst_beyond_its_tenants_limit_ends_as_many_as_may_start() -> None:
    drive = Driving.with_hosts(4, 4, config=Config())
    for number in range(8):
        drive.submit(f"j{number}", gpu={}, preemptible=True)
    drive.settle()
    drive.order("limit", tenant="u", gpus=3)
    drive.submit("urgent", tenant="u", gpu={}, replicas=8)
    drive.pass_time(30_000)
    drive.settle()
    assert Counter(drive.states("urgent", "u")) == {"RUNNING": 3, "QUEUED": 5}
    assert len(ended(drive, 8)) == 3


def test_a_job_that_bounds_how_many_run_ends_no_more_than_may_start() -> None:
    drive = Driving.with_hosts(8, config=Config())
    for number in range(8):
        drive.submit(f"j{number}", gpu={}, preemptible=True)
    drive.settle()
    drive.submit("urgent", gpu={}, replicas=8, max_running=2)
    drive.pass_time(30_000)
    drive.settle()
    assert Counter(drive.states("urgent")) == {"RUNNING": 2, "QUEUED": 6}
    assert len(ended(drive, 8)) == 2
