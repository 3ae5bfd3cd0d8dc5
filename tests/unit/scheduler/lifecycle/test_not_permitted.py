"""A worker's own rules forbid a job: it goes elsewhere, is not tried there again, and says why it waits.

What a worker tells of its rules with its join is a filter like any other: nothing is placed there to be refused.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.scheduler.answers.waiting import explain_job
from moorage.scheduler.core.fleet import fleet
from moorage.scheduler.core.ledger.state import AVOID_MAX
from moorage.schemas.frames import CANNOT_RUN, NOT_HERE, NOT_PERMITTED
from moorage.schemas.reasons import REASONS
from tests.unit.scheduler.driving import H100, Driving, wire
from tests.unit.scheduler.honest_worker import Worker
from tests.unit.scheduler.honest_worker import devices as devices_of

WHY = NOT_PERMITTED + "tenant t may not have the driver process on this worker"


@pytest.mark.parametrize("gpu", [None, {}])
@pytest.mark.parametrize("devices", [1, 3])
def test_a_refusal_that_a_worker_tells_as_it_joins_with_other_devices_is_explained(devices: int, gpu: Any) -> None:
    """The job avoids the devices that the worker had then. It was told to be placed with the next record, for ever."""
    drive = Driving()
    worker = drive.worker("w0", 2, auto=False)
    drive.submit("j", gpu=gpu)
    (place,) = drive.wanted[0].place
    worker.say("refused", place, 0, WHY)
    worker.hello = msgspec.structs.replace(worker.hello, gpu_pool=devices_of("w0", [H100] * devices))
    drive.join(worker)
    drive.pass_time(60_000)
    if devices == 3 and gpu is not None:
        assert drive.slots("j") == [2], "that one it has not refused"
        return
    found = drive.explained("j")
    assert (found["reason"], found["refused_by"]) == ("refused", ["w0"])
    if devices == 1:
        worker.boot += "-2"
        drive.join(worker)
        drive.pass_time(2_000)
        assert drive.states("j") == ["PLACED"], "it is asked anew"


@pytest.mark.parametrize("why", [WHY, NOT_HERE + "argv[0] names no handler of this worker"])
@pytest.mark.parametrize("workers", [2, 3])
def test_it_is_placed_on_each_worker_once_and_then_waits(workers: int, why: str) -> None:
    drive = Driving()
    names = [f"w{number}" for number in range(workers)]
    for name in names:
        drive.worker(name, 2, auto=False)
    drive.submit("j", gpu={})
    tried = []
    for _ in names:
        [place] = drive.placed_on("j")
        tried.append(place)
        drive.report("refused", "j", detail=why)
        assert drive.states("j") == ["QUEUED"]
        drive.pass_time(60_000)
    assert sorted(tried) == names
    assert drive.states("j") == ["QUEUED"]
    explained = wire(explain_job(drive.engine, "t", "j"))
    assert explained["because"] == why
    assert (explained["reason"], explained["means"]) == ("refused", REASONS["refused"].means)
    assert list(explained["workers_left"].items())[-1] == ("not-refused", 0)
    assert (explained["refused_by"], "avoids" in explained) == (sorted(names), False), "no GPU has failed"
    assert drive.fixes("j") == [], "whoever asked for other GPUs would be refused as well"
    # it is this job that may not, and nobody else
    drive.submit("other", gpu={"count": 2})
    assert drive.states("other") == ["PLACED"]


def test_one_that_a_worker_refused_waits_for_the_others() -> None:
    """It was said to wait for a sick GPU, though one worker refuses it and the other is busy."""
    drive = Driving()
    drive.worker("w1", 1, auto=False)
    drive.submit("other", gpu={})
    drive.worker("w0", 1, auto=False)
    drive.submit("j", gpu={})
    assert (drive.placed_on("other"), drive.placed_on("j")) == (["w1"], ["w0"])
    drive.report("refused", "j", detail=WHY)
    drive.pass_time(60_000)
    found = drive.explained("j")
    assert (found["reason"], found["because"]) == ("busy", WHY)
    assert (found["workers_left"]["large-enough"], found["workers_left"]["not-refused"]) == (2, 1)
    assert found["held_by"][-1] == "w1: 1 of 1 GPUs leased"


def test_one_that_more_workers_refuse_than_it_remembers_is_refused_while_it_waits_to_ask_again() -> None:
    """It was said to wait out a pause, as if some GPU had failed."""
    drive = Driving.with_hosts(*[1] * (AVOID_MAX + 2), auto=False)
    drive.submit("j", gpu={})
    for _ in range(AVOID_MAX + 2):
        drive.report("refused", "j", detail=WHY)
        found = drive.explained("j")
        assert found["because"] == WHY
        if len(drive.replica("j").job.avoid) < AVOID_MAX:
            assert found["reason"] == "backoff", "others have not been asked yet"
        else:
            assert (found["reason"], found["means"]) == ("refused", REASONS["refused"].means)
            assert found["starts_in_ms"] > 0
            assert drive.fixes("j") == []
        drive.pass_time(60_000)
        assert drive.states("j") == ["PLACED"]


@pytest.mark.parametrize("json", [False, True])
@pytest.mark.parametrize("lead", [False, True])
def test_a_worker_that_is_started_anew_is_asked_again(lead: bool, json: bool) -> None:
    """Its rules or its driver may have been mended: until now the job waited for an operator's release."""
    drive = Driving()
    drive.json_workers = json
    worker = drive.worker("w0", 2, auto=False)
    drive.submit("j", gpu={})
    drive.report("refused", "j", detail=WHY)
    drive.pass_time(60_000)
    assert drive.explained("j")["reason"] == "refused"
    if lead:
        drive.lead()
        drive.renew()
    drive.join(worker)
    drive.pass_time(2_000)
    assert drive.states("j") == ["QUEUED"], "it joined anew as it was"
    worker.boot += "-2"
    drive.join(worker)
    drive.pass_time(2_000)
    assert drive.states("j") == ["PLACED"]
    drive.report("refused", "j", detail=WHY)
    drive.pass_time(60_000)
    assert drive.states("j") == ["QUEUED"], "once, and not for ever"
    worker.hello = msgspec.structs.replace(worker.hello, labels={"mended": "yes"})
    drive.join(worker)
    drive.pass_time(2_000)
    assert drive.states("j") == ["PLACED"]


@pytest.mark.parametrize("why", [WHY, NOT_HERE + "argv[0] names no handler of this worker"])
@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("gpus", [0, 1, 2])
@pytest.mark.parametrize("asked", [{}, {"resources": {"cpu_milli": 100}}])
def test_a_job_without_gpus_is_kept_from_the_worker_that_refused_it(
    gpus: int, asked: dict[str, Any], snapshot: bool, why: str
) -> None:
    """It has no devices to avoid: it was placed there again after each pause, for ever."""
    drive = Driving.with_hosts(gpus, gpus, auto=False)
    drive.submit("j", **asked)
    tried = []
    for _ in range(2):
        tried += drive.placed_on("j")
        drive.report("refused", "j", detail=why)
        assert drive.states("j") == ["QUEUED"]
        if snapshot:
            drive.take_snapshot()
        drive.lead()
        drive.renew()
        drive.pass_time(60_000)
    assert (sorted(tried), drive.states("j")) == (["w0", "w1"], ["QUEUED"])
    found = drive.explained("j")
    assert (found["reason"], found["because"], found["refused_by"]) == ("refused", why, ["w0", "w1"])
    assert ("avoids" in found, drive.fixes("j")) == (False, [])
    drive.submit("other", **asked)
    assert drive.states("other") == ["PLACED"], "it is this job that may not, and nobody else"
    for name in ("w1", "w0"):  # and each that is started anew is asked once more
        drive.workers[name].boot += "-2"
        drive.join(drive.workers[name])
        drive.pass_time(2_000)
        assert drive.placed_on("j") == [name]
        drive.report("refused", "j", detail=why)
        drive.pass_time(60_000)
        assert drive.states("j") == ["QUEUED"]


def test_a_job_without_gpus_waits_for_the_worker_that_did_not_refuse_it() -> None:
    drive = Driving.with_hosts(0, auto=False, cpu_milli=1_000)
    drive.submit("j", resources={"cpu_milli": 1_000})
    drive.worker("w1", 0, auto=False, cpu_milli=1_000)
    drive.submit("other", resources={"cpu_milli": 1_000})
    drive.report("refused", "j", detail=WHY)
    drive.pass_time(60_000)
    found = drive.explained("j")
    assert (found["reason"], found["refused_by"]) == ("host-busy", ["w0"])
    drive.report("refused", "other", detail=WHY)
    drive.pass_time(60_000)
    assert (drive.placed_on("j"), drive.placed_on("other")) == (["w1"], ["w0"])


def test_jobs_that_no_worker_can_run_keep_no_gpu_from_others() -> None:
    """Each marked its GPUs as used by others until the next renewal: a few hundred took the whole fleet for good."""
    drive = Driving.with_hosts(2, auto=False)
    for number in range(8):
        drive.submit(f"bad-{number}", gpu={"count": 2})
        drive.report("refused", f"bad-{number}", detail=NOT_HERE + "argv[0] names no handler of this worker")
        assert drive.engine.fleet.hosts[0].open == 0b11
    drive.submit("good", gpu={"count": 2})
    assert drive.states("good") == ["PLACED"]


def test_another_refusal_keeps_no_job_away() -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("j", gpu={})
    drive.report("refused", "j", detail="device-busy 0")
    drive.pass_time(60_000)
    assert drive.states("j") == ["PLACED"]


WRONG = CANNOT_RUN + "the driver noop does not know this argv"


@pytest.mark.parametrize("workers", [1, 3])
def test_a_job_whose_request_is_wrong_fails_with_the_words_of_the_driver(workers: int) -> None:
    """It waited for ever for a worker that would take it, and each worker was asked."""
    drive = Driving.with_hosts(*[2] * workers, auto=False)
    drive.submit("j", gpu={}, replicas=2, retries=3)
    drive.report("refused", "j", 0, detail=WRONG)
    assert drive.states("j") == ["FAILED", "PLACED"]
    drive.report("refused", "j", 1, detail=WRONG)
    assert drive.states("j") == ["FAILED", "FAILED"]
    found = drive.explained("j")
    assert (found["state"], found["code"], found["why"]) == ("FAILED", 126, WRONG)
    assert drive.job("j").avoid == (), "no worker is at fault"
    assert drive.free_gpus() == 2 * workers
    drive.lead_from_snapshot()
    assert drive.states("j") == ["FAILED", "FAILED"]


def test_a_gang_whose_request_is_wrong_fails_as_a_whole() -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("j", gpu={"scheduling": "gang"}, replicas=2, retries=3)
    drive.reports([("refused", "j", 0, 0, WRONG), ("refused", "j", 1, 0, WRONG)])
    assert drive.states("j") == ["FAILED", "FAILED"]
    found = drive.explained("j")
    assert found["code"] == 126
    assert WRONG in found["why"]


@pytest.mark.parametrize("act", ["cancel", "requeue"])
def test_a_wrong_request_that_was_to_end_anyway_ends_as_it_was_asked_to(act: str) -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("j", gpu={})
    if act == "cancel":
        drive.cancel("j")
    else:
        drive.order("requeue", job="j")
    drive.report("refused", "j", detail=WRONG)
    drive.tick()
    assert drive.states("j")[0] in (["CANCELLED"] if act == "cancel" else ["QUEUED", "PLACED"])


# ------------------------------------------------------------------------------------------ rules that a worker tells


def test_nothing_is_placed_where_the_worker_told_that_it_may_not_be() -> None:
    drive = Driving()
    drive.worker("w0", drivers=["noop", "process"], drivers_for={"t": ["process"], "u": ["noop", "process"]})
    answer = drive.submit("j", gpu={})
    assert answer["warnings"] == ["no-match: no worker that offers the driver noop lets its tenant have it"]
    drive.submit("mine", tenant="u", gpu={})
    drive.settle()
    assert (drive.states("j"), drive.states("mine", "u")) == (["QUEUED"], ["RUNNING"])
    found = drive.explained("j")
    assert (found["reason"], found["means"]) == ("rules", REASONS["rules"].means)
    assert found["because"] == NOT_PERMITTED + "tenant t may not have the driver noop on 1 worker"
    assert found["held_by"] == ["w0: lets it have process"]
    assert drive.fixes("j") == [], "another request of this tenant would not help"
    drive.worker("w1")
    drive.settle()
    assert drive.placed_on("j") == ["w1"]
    assert drive.replica("j").refusals == 0


def test_who_is_not_named_has_what_others_have() -> None:
    drive = Driving.with_hosts(1, drivers_for={"u": ["noop"]})
    drive.worker("w1", drivers_for={"u": [], "*": ["noop"]})
    for job, tenant in (("a", "t"), ("b", "u")):
        drive.submit(job, tenant=tenant, gpu={})
    drive.settle()
    assert (drive.placed_on("a"), drive.placed_on("b", "u")) == (["w1"], ["w0"])


def test_who_waited_already_is_told_apart_once_a_worker_names_it() -> None:
    """Also those that wait together with another tenant's, and those of a gang."""
    drive = Driving()
    for tenant in ("t", "u", "v"):
        drive.submit("one", tenant=tenant, gpu={})
        drive.submit("gang", tenant=tenant, gpu={"scheduling": "gang"}, replicas=2)
    drive.worker("w0", 8, drivers_for={"u": ["noop"]})
    drive.settle()
    running = {(job, tenant): set(drive.states(job, tenant)) for tenant in "tuv" for job in ("one", "gang")}
    assert running == {(job, tenant): {"RUNNING" if tenant == "u" else "QUEUED"} for job, tenant in running}
    drive.worker("w1", 8, drivers_for={"t": ["noop"], "u": [], "*": []})
    drive.settle()
    assert {*drive.placed_on("one"), *drive.placed_on("gang")} == {"w1"}
    assert drive.states("one", "v") == ["QUEUED"]


def test_a_worker_that_joins_anew_without_rules_takes_everybody() -> None:
    drive = Driving()
    worker = drive.worker("w0", drivers_for={"t": []})
    drive.submit("j", gpu={})
    drive.settle()
    assert drive.states("j") == ["QUEUED"]
    worker.hello = msgspec.structs.replace(worker.hello, drivers_for={})
    drive.join(worker)
    drive.settle()
    assert drive.states("j") == ["RUNNING"]


def test_on_no_match_rejects_what_no_worker_lets_it_have() -> None:
    drive = Driving.with_hosts(1, drivers_for={"u": ["noop"]})
    answer = drive.submit("j", gpu={}, on_no_match="reject")
    assert answer["code"] == "failed-precondition"
    assert "no worker that offers the driver noop lets its tenant have it" in answer["message"]


def test_tenants_that_rules_name_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who would name more is taken to have no rules: it refuses by itself."""
    monkeypatch.setattr(fleet, "NAMED_MAX", 2)
    drive = Driving.with_hosts(1, drivers_for={"a": [], "b": []})
    drive.worker("w1", drivers_for={"c": [], "t": []})
    drive.submit("j", gpu={})
    drive.settle()
    assert drive.placed_on("j") == ["w1"]
    assert drive.engine.fleet.named == {"a", "b"}


RULES = st.dictionaries(st.sampled_from(["t", "u", "v", "*"]), st.sampled_from([[], ["noop"], ["process"]]), max_size=3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.sampled_from(["w0", "w1", "w2"]), RULES),
        st.tuples(st.just("submit"), st.sampled_from("tuv"), st.booleans()),
        st.just(("lead",)),
    ),
    max_size=14,
)


def permits(worker: Worker, tenant: str) -> bool:
    rules = worker.hello.drivers_for
    return not rules or "noop" in rules.get(tenant, rules.get("*", []))


@pytest.mark.slow
@given(STEPS)
def test_whoever_comes_when_runs_where_it_may_and_nowhere_else(steps: list[tuple[Any, ...]]) -> None:
    drive = Driving()
    jobs: dict[str, str] = {}
    for number, step in enumerate(steps):
        before = {job for job, tenant in jobs.items() if drive.states(job, tenant)[0] != "QUEUED"}
        if step[0] == "lead":
            drive.lead()
            drive.renew()
        elif step[0] == "submit":
            _, tenant, gang = step
            jobs[f"j{number}"] = tenant
            gpu = {"scheduling": "gang"} if gang else {}
            drive.submit(f"j{number}", tenant=tenant, gpu=gpu, replicas=2 if gang else 1)
        elif step[1] in drive.workers:
            worker = drive.workers[step[1]]
            worker.hello = msgspec.structs.replace(worker.hello, drivers_for=step[2])
            drive.join(worker)
        else:
            drive.worker(step[1], 32, drivers_for=step[2])
        drive.settle()
        for job, tenant in jobs.items():
            where = drive.placed_on(job, tenant)
            if where[0] == "-":
                assert not any(permits(worker, tenant) for worker in drive.workers.values()), (job, tenant)
            elif job not in before:
                assert all(permits(drive.workers[name], tenant) for name in where), (job, where)
    assert sum(worker.told["refused"] for worker in drive.workers.values()) == 0


@pytest.mark.parametrize("gpu", [{}, None])
def test_a_replica_that_waits_is_not_sent_where_another_one_is_refused_in_this_record(gpu: Any) -> None:
    """The job avoids the worker from this record on; the replicas that waited stood in the group of before."""
    drive = Driving.with_hosts(1, auto=False, cpu_milli=1_000)
    drive.submit("j", gpu=gpu, replicas=3, resources={"cpu_milli": 1_000})
    drive.submit("next", gpu=gpu, resources={"cpu_milli": 1_000})
    assert drive.states("j") == ["PLACED", "QUEUED", "QUEUED"]
    drive.report("refused", "j", detail=WHY)
    assert drive.states("j") == ["QUEUED"] * 3
    drive.worker("w1", 1, auto=False, cpu_milli=1_000)
    drive.pass_time(2_000)
    assert sorted(drive.placed_on("j")) == ["-", "-", "w1"], "none was sent to the worker that refuses the job"
    assert drive.placed_on("next") == ["w0"], "while that was the only worker j could never start"


def test_a_job_that_every_worker_refuses_holds_up_nobody_at_its_tenants_limit() -> None:
    drive = Driving.with_hosts(4, auto=False)
    drive.order("limit", gpus=2)
    drive.submit("refused", gpu={"count": 2})
    drive.report("refused", "refused", detail=WHY)
    drive.pass_time(2_000)
    drive.submit("runs", gpu={}, run={"driver": "noop", "timeout_s": 60})
    drive.worker("w1", 0)  # something changes, so all that waits is tried again
    drive.submit("behind", gpu={})
    assert (drive.states("runs"), drive.states("behind")) == (["PLACED"], ["PLACED"])
