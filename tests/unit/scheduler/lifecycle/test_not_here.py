"""A host that lacks what a job needs: the job goes elsewhere at no cost, and ends once enough hosts have refused it."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.schemas.frames import CANNOT_RUN, NOT_HERE, SETUP_FAILED
from moorage.schemas.reasons import REASONS
from tests.unit.scheduler.driving import Driving

WHY = NOT_HERE + "secret 'token': there is no such file in the worker's folder of secrets"


def fleet(count: int, gpus: int = 1, config: Config | None = None) -> Driving:
    return Driving.with_hosts(*[gpus] * count, config=config, auto=False)


def refuse(drive: Driving, job: str = "j", replica: int = 0, why: str = WHY, code: int = 126) -> str:
    """The worker that has it refuses it; a minute passes. Returns the worker."""
    place = drive.placed_on(job)[replica]
    drive.report("refused", job, replica, code=code, detail=why)
    drive.pass_time(60_000)
    return place


@pytest.mark.parametrize(("workers", "most", "tried"), [(1, 3, 1), (2, 3, 2), (3, 3, 3), (9, 3, 3), (9, 5, 5)])
@pytest.mark.parametrize("gpu", [None, {}])
def test_it_ends_once_enough_hosts_have_refused_it(workers: int, most: int, tried: int, gpu: Any) -> None:
    """It waited for ever, and was tried again and again on the same hosts once there were more than 16."""
    drive = fleet(workers, config=Config(not_here_max=most))
    drive.submit("j", gpu=gpu, retries=0)
    refused = []
    for _ in range(tried):
        assert drive.states("j") == ["PLACED"]
        refused.append(refuse(drive))
    assert len(set(refused)) == tried
    assert drive.states("j") == ["FAILED"]
    found = drive.explained("j")
    assert found["code"] == 126
    assert found["why"].startswith(WHY)
    assert all(name in found["why"] for name in refused[-3:])
    assert drive.job("j").replicas[0].retries == 0
    drive.lead_from_snapshot()
    assert drive.states("j") == ["FAILED"]


def test_the_code_of_the_start_is_the_code_of_the_job() -> None:
    drive = fleet(1)
    drive.submit("j", gpu={})
    refuse(drive, why=NOT_HERE + "no program nope in PATH /bin", code=127)
    assert drive.explained("j")["code"] == 127


def test_a_host_that_has_it_runs_it_whatever_the_others_lack() -> None:
    drive = fleet(2)
    drive.submit("other", gpu={})
    drive.submit("j", gpu={})
    bad = refuse(drive)
    assert drive.states("j") == ["QUEUED"]
    found = drive.explained("j")
    assert (found["reason"], found["because"], found["refused_by"]) == ("busy", WHY, [bad])
    for snapshot in (False, True):
        if snapshot:
            drive.take_snapshot()
        drive.lead()
        drive.renew()
        assert drive.explained("j")["refused_by"] == [bad]
    drive.reports([("claimed", "other", 0, 0, ""), ("started", "other", 0, 0, "")])
    drive.reports([("exited", "other", 0, 0, "exit"), ("freed", "other", 0, 0, "")])
    drive.pass_time(1_000)
    assert drive.states("j") == ["PLACED"]
    assert drive.placed_on("j") != [bad]


def test_a_host_that_joins_later_is_a_new_one() -> None:
    drive = fleet(3)
    drive.operate("cordon", "w2")
    drive.submit("j", gpu={})
    assert {refuse(drive), refuse(drive)} == {"w0", "w1"}
    assert drive.states("j") == ["QUEUED"], "w2 could take it once it is open"
    drive.worker("w3", 1, auto=False)
    drive.pass_time(1_000)
    assert drive.placed_on("j") == ["w3"]
    refuse(drive)
    assert drive.states("j") == ["FAILED"], "by three hosts"


def test_a_host_that_was_started_anew_has_not_refused_it() -> None:
    drive = fleet(2)
    drive.operate("cordon", "w1")
    drive.submit("j", gpu={})
    for _ in range(5):
        assert refuse(drive) == "w0"
        assert drive.states("j") == ["QUEUED"]
        drive.workers["w0"].boot += "-2"
        drive.join(drive.workers["w0"])
        drive.pass_time(1_000)
    drive.report("started", "j")
    assert drive.states("j") == ["RUNNING"]
    assert drive.job("j").lacking == ()


def test_a_job_of_many_replicas_has_one_count() -> None:
    """Each of its replicas was tried on each host."""
    drive = fleet(4, 2)
    drive.submit("j", gpu={}, replicas=100)
    tried: list[str] = []
    for _ in range(20):
        placed = [(index, name) for index, name in enumerate(drive.placed_on("j")) if name != "-"]
        if not placed:
            break
        tried.append(placed[0][1])
        drive.report("refused", "j", placed[0][0], code=126, detail=WHY)
        drive.pass_time(1_000)
    assert set(drive.states("j")) == {"FAILED"}
    assert len(tried) == 8, "what was placed before the first refusal, and no more"


def test_replicas_that_start_elsewhere_keep_the_job_from_ending() -> None:
    drive = fleet(4, 1)
    drive.submit("j", gpu={}, replicas=8)
    good = drive.placed_on("j").index("w0")
    for index, name in list(enumerate(drive.placed_on("j"))):
        if name in ("w1", "w2", "w3"):
            drive.report("refused", "j", index, code=126, detail=WHY)
    assert drive.states("j").count("FAILED") == 0, "w0 has not said yet whether it can"
    for _ in range(8):
        drive.reports([("claimed", "j", good, 0, ""), ("started", "j", good, 0, "")])
        drive.reports([("exited", "j", good, 0, "exit"), ("freed", "j", good, 0, "")])
        drive.pass_time(60_000)
        if "w0" in drive.placed_on("j"):
            good = drive.placed_on("j").index("w0")
    assert drive.states("j") == ["SUCCEEDED"] * 8


def test_a_gang_ends_as_a_whole() -> None:
    drive = fleet(4, 1)
    drive.submit("j", gpu={"scheduling": "gang"}, replicas=2)
    for _ in range(3):
        if drive.states("j") != ["PLACED", "PLACED"]:
            break
        drive.reports([("refused", "j", 0, 126, WHY), ("withdrawn", "j", 1, 0, "")])
        drive.pass_time(60_000)
    assert drive.states("j") == ["FAILED", "FAILED"]
    assert WHY in drive.explained("j")["why"]


def test_a_gang_ends_once_the_hosts_that_are_left_could_not_hold_it() -> None:
    drive = fleet(3, 1)
    drive.submit("j", gpu={"scheduling": "gang"}, replicas=3)
    drive.reports([("refused", "j", 0, 126, WHY), ("withdrawn", "j", 1, 0, ""), ("withdrawn", "j", 2, 0, "")])
    assert drive.states("j") == ["FAILED"] * 3


@pytest.mark.parametrize("act", ["cancel", "requeue"])
def test_what_was_to_end_anyway_ends_as_it_was_asked_to(act: str) -> None:
    drive = fleet(1)
    drive.submit("j", gpu={})
    if act == "cancel":
        drive.cancel("j")
    else:
        drive.order("requeue", job="j")
    drive.report("refused", "j", code=126, detail=WHY)
    assert drive.states("j") == ["CANCELLED" if act == "cancel" else "QUEUED"]


def test_a_job_that_has_run_waits_for_a_host_like_the_one_that_ran_it() -> None:
    drive = fleet(2)
    drive.submit("other", gpu={})
    drive.submit("j", gpu={}, retries=1)
    drive.reports([("claimed", "j", 0, 0, ""), ("started", "j", 0, 0, "")])
    drive.operate("cordon", drive.placed_on("j")[0])
    drive.reports([("exited", "j", 0, 1, "exit"), ("freed", "j", 0, 0, "")])
    drive.reports([("claimed", "other", 0, 0, ""), ("started", "other", 0, 0, "")])
    drive.reports([("exited", "other", 0, 0, "exit"), ("freed", "other", 0, 0, "")])
    drive.pass_time(60_000)
    refuse(drive)
    assert drive.states("j") == ["QUEUED"]


def test_a_request_that_is_wrong_for_every_host_ends_at_once_with_its_code() -> None:
    drive = fleet(3)
    drive.submit("j", gpu={}, retries=3)
    drive.report("refused", "j", code=127, detail=CANNOT_RUN + "no ./train.py in the job's own files")
    assert drive.states("j") == ["FAILED"]
    assert drive.explained("j")["code"] == 127


# ------------------------------------------------------------------------------------ what a worker knows as it joins

NO_USERS: dict[str, Any] = {"capabilities": {"process": {"users": False}}, "own_user": ["ana", "1000"]}


def test_a_setup_that_failed_ends_every_replica_that_waits_with_its_code() -> None:
    drive = fleet(2)
    drive.submit("j", gpu={}, replicas=6, max_running=2)
    drive.reports([("claimed", "j", 1, 0, ""), ("started", "j", 1, 0, "")])
    drive.report("refused", "j", 0, code=3, detail=SETUP_FAILED + "exit code 3: no such package")
    assert drive.states("j") == ["FAILED", "RUNNING", *["FAILED"] * 4]
    drive.report("exited", "j", 1)
    assert drive.explained("j")["code"] == 3


@pytest.mark.parametrize(("most", "others"), [(1, "CANCELLING"), (2, "PLACED")])
@pytest.mark.parametrize("why", [SETUP_FAILED + "exit code 3: no such package", WHY])
def test_one_whose_setup_failed_counts_towards_max_failed_and_those_that_waited_do_not(
    why: str, most: int, others: str
) -> None:
    drive = fleet(1, gpus=2)
    drive.submit("j", gpu={}, replicas=6, max_running=2, max_failed=most)
    drive.report("refused", "j", 0, code=3, detail=why)
    drive.tick()
    assert drive.states("j") == ["FAILED", others, *["FAILED"] * 4]


def test_a_new_leader_lets_those_run_on_that_started_elsewhere_before_a_setup_failed() -> None:
    drive = fleet(1)
    drive.worker("w1", 1)
    drive.submit("j", gpu={}, replicas=6, max_failed=2)
    drive.report_all("w1")
    failed = drive.placed_on("j").index("w0")
    drive.report("refused", "j", failed, code=3, detail=SETUP_FAILED + "exit code 3: no such package")
    before = drive.states("j")
    assert sorted(before) == [*["FAILED"] * 5, "RUNNING"]
    drive.lead()
    drive.join(drive.workers["w1"])
    drive.pass_time(2_000)
    assert drive.states("j") == before


@pytest.mark.parametrize("leads_anew", [False, True])
def test_replicas_that_ended_while_they_waited_do_not_count_when_the_next_one_fails(leads_anew: bool) -> None:
    drive = fleet(1)
    elsewhere = drive.worker("w1", 2)
    drive.submit("j", gpu={}, replicas=6, max_failed=3)
    drive.report_all("w1")
    drive.report("refused", "j", drive.placed_on("j").index("w0"), code=3, detail=SETUP_FAILED + "exit code 3")
    assert sorted(drive.states("j")) == [*["FAILED"] * 4, "RUNNING", "RUNNING"]
    if leads_anew:
        drive.lead_from_snapshot()
        drive.join(elsewhere)
    elsewhere.finish(next(iter(elsewhere.held)), 1)
    drive.settle()
    assert sorted(drive.states("j")) == [*["FAILED"] * 5, "RUNNING"]
    assert drive.job("j").failed == 2


@pytest.mark.parametrize("user", ["daemon", "1"])
def test_a_user_that_no_worker_may_run_jobs_as_is_refused_at_once(user: str) -> None:
    """It was placed, refused and placed again, for ever and without a reason."""
    drive = Driving()
    drive.worker("w0", 1, **NO_USERS)
    answer = drive.submit("j", gpu={}, run={"argv": ["true"], "user": user})
    assert answer["code"] == "failed-precondition"
    assert "may run its jobs as another user" in answer["message"]
    for own in ("ana", "1000", None):
        drive.submit(f"own-{own}", gpu={}, run={"argv": ["true"], "user": own})
        drive.settle()
        drive.run_out("w0")
        assert drive.states(f"own-{own}") == ["SUCCEEDED"]
    drive.submit("noop", gpu={}, run={"driver": "noop", "user": user})
    assert drive.states("noop") != ["QUEUED"], "that driver runs it as any user"


def test_one_that_names_a_user_goes_where_that_is_possible() -> None:
    drive = Driving()
    for name in ("w0", "w1", "w2"):
        drive.worker(name, 1, **NO_USERS)
    drive.worker("root", 1)
    for number in range(3):
        drive.submit(f"j{number}", gpu={}, run={"argv": ["true"], "user": "daemon"})
        drive.settle()
    assert [drive.placed_on(f"j{number}") for number in range(3)] == [["root"], ["-"], ["-"]]
    found = drive.explained("j1")
    assert (found["reason"], found["workers_left"]["no-users"]) == ("busy", 1)
    drive.run_out("root")
    drive.settle()
    assert drive.placed_on("j1") == ["root"]


def test_one_that_came_before_the_workers_were_heard_is_rejected_by_event() -> None:
    drive = Driving()
    drive.worker("w0", 1, **NO_USERS)
    drive.lead()
    answer = drive.submit("j", gpu={}, run={"argv": ["true"], "user": "daemon"})
    assert answer["kind"] == "accepted"
    drive.pass_time(3_000)
    assert drive.states("j") == ["REJECTED"]


def test_a_job_whose_memory_must_be_limited_goes_where_that_is_possible() -> None:
    drive = Driving()
    none: dict[str, Any] = {"capabilities": {"noop": {"memory_limit": False}}}
    hard = {"memory_mib": 100, "enforce": "hard"}
    drive.worker("w0", 1, **none)
    answer = drive.submit("j", gpu={}, resources=hard)
    assert "memory controller" in answer["warnings"][0]
    assert drive.explained("j")["reason"] == "no-memory-limit"
    drive.submit("soft", gpu={}, resources={"memory_mib": 100})
    drive.settle()
    assert drive.placed_on("soft") == ["w0"]
    drive.worker("w1", 1)
    drive.settle()
    assert drive.placed_on("j") == ["w1"]


def test_a_member_of_a_service_goes_where_its_driver_lets_it_reach_the_server_or_is_refused_with_the_fix() -> None:
    """Containers without a network, for one: such a member would run and never answer a call."""
    drive = Driving()
    mute: dict[str, Any] = {"drivers": ["box"], "capabilities": {"box": {"gpu_enabled": True}}}
    service: dict[str, Any] = {"run": {"driver": "box", "argv": ["serve"]}, "service": {"name": "embed"}}
    drive.worker("w0", 1, **mute)
    refused = drive.submit("now", on_no_match="reject", **service)
    assert "lets its jobs reach the server" in str(refused)
    answer = drive.submit("j", **service)
    assert "lets its jobs reach the server" in answer["warnings"][0]
    assert drive.explained("j")["reason"] == "no-calls"
    assert "answers_calls" in REASONS["no-calls"].fix
    drive.submit("plain", run=service["run"])
    drive.settle()
    assert drive.placed_on("plain") == ["w0"]
    drive.worker("w1", 1, **{**mute, "capabilities": {"box": {"answers_calls": True}}})
    drive.settle()
    assert drive.placed_on("j") == ["w1"]
