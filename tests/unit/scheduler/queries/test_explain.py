"""Why a job waits: the first filter that leaves nobody is the reason, and the counts are those of the filters."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moorage.cli.jobs.explain import explained_rows
from moorage.scheduler.answers import view as view_module
from moorage.scheduler.answers import views
from moorage.scheduler.answers.explain import HOLDERS_MAX
from moorage.scheduler.answers.waiting import explain_job
from moorage.schemas.answers.jobs import Explained
from moorage.schemas.frames import Renew
from moorage.schemas.reasons import REASONS
from tests.unit.scheduler.driving import PATIENCE_MS, Driving, wire
from tests.unit.scheduler.lifecycle.test_services import READY, served


def why(drive: Driving, job: str) -> dict[str, Any]:
    data = wire(explain_job(drive.engine, "t", job))
    assert data["state"] != "QUEUED" or data["reason"] in REASONS
    return data


def fleet() -> Driving:
    drive = Driving()
    drive.worker(
        "w0", 2, labels={"zone": "a"}, cpu_milli=8_000, memory_mib=8_000, drivers=["noop"], modes=["exclusive", "mps"]
    )
    drive.worker("cpu", 0, cpu_milli=1_000, drivers=["noop"])
    return drive


@pytest.mark.parametrize(
    ("asks", "reason"),
    [
        ({"run": {"driver": "vm", "argv": ["x"]}}, "driver"),
        ({"requires": {"zone": ["b"]}}, "label"),
        ({"gpu": {"sharing": "time-slice"}}, "sharing"),
        ({"gpu": {"vendor": "amd"}}, "vendor"),
        ({"gpu": {"model": "A100"}}, "model"),
        ({"gpu": {"model": "H100", "min_memory_mib": 100_000}}, "memory"),
        ({"gpu": {"count": 3}}, "count"),
        ({"gpu": {}, "resources": {"cpu_milli": 9_000}}, "host-size"),
        ({"gpu": {"scheduling": "gang"}, "replicas": 3}, "gang-size"),
        ({"gpu": {"scheduling": "gang"}, "replicas": 2, "resources": {"cpu_milli": 5_000}}, "gang-size"),
    ],
)
def test_never_here(asks: dict[str, Any], reason: str) -> None:
    drive = fleet()
    drive.submit("j", **asks)
    assert why(drive, "j")["reason"] == reason


def test_nobody_and_no_gpu() -> None:
    drive = Driving()
    drive.submit("j", gpu={})
    assert why(drive, "j")["reason"] == "no-worker"
    drive.worker("cpu", 0)
    assert why(drive, "j")["reason"] == "no-gpu"


def test_slot() -> None:
    drive = Driving.with_hosts(2)
    drive.submit("j", gpu={"sharing": "time-slice", "time_slice_index": 5})
    assert why(drive, "j")["reason"] == "slot"


def test_under_a_limit_of_gpus_only_jobs_with_gpus_hold_it_up() -> None:
    drive = Driving.with_hosts(4)
    drive.order("limit", gpus=2)
    drive.submit("other", gpu={})
    drive.submit("without", run={"driver": "noop"})
    drive.submit("j", gpu={}, replicas=3)
    told = why(drive, "j")
    assert (told["reason"], told["held_by"]) == ("limit", ["its own replicas: 1 GPU", "job other: 1 GPU"])


def test_not_heard_closed_busy_sick_host_busy() -> None:
    drive = Driving()
    worker = drive.worker("w0", 2, cpu_milli=8_000)
    drive.lead()
    drive.submit("j", gpu={})
    assert why(drive, "j")["reason"] == "not-heard"
    drive.operate("cordon", "w0")
    drive.renew()
    assert why(drive, "j")["reason"] == "closed"
    drive.operate("uncordon", "w0")
    worker.waiting = True
    drive.renew()
    drive.submit("k", gpu={})
    assert why(drive, "k")["reason"] == "closed"
    worker.waiting = False
    drive.renew()
    drive.tick()
    assert (drive.states("j"), drive.states("k")) == (["PLACED"], ["PLACED"])
    drive.submit("l", gpu={})
    told = why(drive, "l")
    assert told["reason"] == "busy"
    assert told["workers_left"] == {
        "known": 1,
        "matching": 1,
        "large-enough": 1,
        "heard": 1,
        "open": 1,
        "with-free-gpus": 0,
    }
    assert told["held_by"] == ["job j: 1 GPU", "job k: 1 GPU", "w0: 2 of 2 GPUs leased"]
    assert told["needs"] == "1 more GPU on one host"
    drive.submit("two", gpu={"count": 2, "model": "H100"})
    assert why(drive, "two")["needs"] == "2 more H100 on one host"
    drive.cancel("two")
    drive.load("w0", s0="ecc", s1="ecc")
    drive.cancel("k")
    drive.settle()
    assert why(drive, "l")["reason"] == "sick"
    drive.cancel("l")
    drive.load("w0")
    drive.submit("eater", resources={"cpu_milli": 8_000}, priority=90)
    drive.submit("m", gpu={}, resources={"cpu_milli": 1})
    drive.settle()
    assert why(drive, "m")["reason"] == "host-busy"


def test_what_a_worker_lends_to_processes_of_its_host_is_told_as_that() -> None:
    drive = Driving()
    worker = drive.worker("w0", 4)
    worker.local = {0, 1, 2, 3}
    drive.renew()
    drive.load("w0")
    drive.submit("j", gpu={"count": 2})
    told = why(drive, "j")
    assert (told["reason"], told["held_by"]) == ("lent", ["w0: lends 4 GPUs to processes of its host"])
    drive.load("w0", s0="ecc", s1="ecc")
    assert why(drive, "j")["reason"] == "lent", "two others would do"
    drive.load("w0", s0="ecc", s1="ecc", s2="ecc")
    told = why(drive, "j")
    assert told["reason"] == "sick"
    assert told["held_by"][-1] == "w0: lends 1 GPU to processes of its host"
    worker.local = {0, 1, 2}
    drive.load("w0")
    drive.submit("one", gpu={})
    drive.renew()
    assert drive.states("one") == ["PLACED"]
    told = why(drive, "j")
    assert (told["reason"], told["held_by"][0]) == ("lent", "w0: lends 3 GPUs to processes of its host")


def test_what_a_worker_has_just_refused_is_no_loan() -> None:
    """A full disk refused each start, and the page said that processes of the host borrow the GPUs."""
    drive = Driving()
    worker = drive.worker("w0", 2)
    drive.load("w0")
    worker.local = {0, 1}  # since its last renewal
    drive.submit("first", gpu={"count": 2})
    drive.settle()
    drive.submit("j", gpu={"count": 2})
    told = why(drive, "j")
    assert (told["reason"], told["held_by"]) == ("just-refused", ["w0: has just refused a start on 2 GPUs"])
    drive.load("w0", s0="ecc")
    assert why(drive, "j")["reason"] == "sick"
    drive.load("w0")
    drive.renew()
    told = why(drive, "j")
    assert (told["reason"], told["held_by"]) == ("lent", ["w0: lends 2 GPUs to processes of its host"])


def test_a_full_share_is_busy_not_placing() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("a", gpu={"sharing": "mps", "share": {"compute_percent": 60}})
    drive.submit("b", gpu={"sharing": "mps", "share": {"compute_percent": 60}})
    assert drive.states("b") == ["QUEUED"]
    assert why(drive, "b")["reason"] == "busy"


def test_of_other_tenants_no_more_than_how_many_and_how_much() -> None:
    drive = Driving.with_hosts(4)
    drive.submit("secret-1", tenant="u", gpu={"count": 2})
    drive.submit("secret-2", tenant="v", gpu={})
    drive.submit("mine", gpu={})
    drive.settle()
    drive.submit("j", gpu={"count": 2})
    told = why(drive, "j")
    assert told["holders"] == {
        "own": [{"job": "mine", "gpus": 1}],
        "own_jobs": 1,
        "other_jobs": 2,
        "other_gpus": 3,
        "workers": ["w0: 4 of 4 GPUs leased"],
        "hosts": 1,
    }
    assert told["held_by"] == ["job mine: 1 GPU", "2 jobs of other tenants: 3 GPUs", "w0: 4 of 4 GPUs leased"]
    assert "secret" not in repr(told)


def test_of_many_full_workers_some_are_named_and_the_rest_counted() -> None:
    drive = Driving()
    for number in range(HOLDERS_MAX + 3):
        drive.worker(f"w{number}", 1)
        drive.submit(f"runs-{number}", tenant="u", gpu={})
    drive.settle()
    drive.submit("j", gpu={})
    assert why(drive, "j")["held_by"][-2:] == [f"w{HOLDERS_MAX - 1}: 1 of 1 GPUs leased", "3 more workers"]


@pytest.mark.parametrize(("code", "how"), [(3, "with code 3"), (0, "with code 0"), (-11, "of signal 11")])
def test_who_waits_for_the_next_attempt_is_told_how_the_last_one_ended(code: int, how: str) -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("j", gpu={}, run={"driver": "process", "argv": ["x"], "restart": "always"})
    for attempt in (1, 2):
        drive.reports([(kind, "j", 0, 0, "") for kind in ("claimed", "started")])
        drive.reports([("exited", "j", 0, code, "exit"), ("freed", "j", 0, 0, "")])
        told = why(drive, "j")
        assert (told["reason"], told["because"]) == ("backoff", f"attempt {attempt} ended by itself, {how}")
        drive.pass_time(2_000)


@pytest.mark.parametrize("detail", ["device-busy", "start-failed: journal: [Errno 28] No space left on device"])
def test_backoff_and_contended(detail: str) -> None:
    drive = Driving()
    worker = drive.worker("w0", 1, auto=False)
    drive.submit("j", gpu={})
    for times in range(1, 8):
        drive.report("refused", "j", detail=detail)
        drive.send("w0", Renew(worker.session, times))
        drive.tick()
        told, is_claimed = why(drive, "j"), detail == "device-busy" and times >= views.CONTENDED_AT
        assert (told["reason"], told["because"]) == ("contended" if is_claimed else "backoff", detail), times
        assert told["starts_in_ms"] > 0
        drive.pass_time(31_000, step=31_000)
        assert drive.states("j") == ["PLACED"]


def test_position_and_what_else_is_told() -> None:
    drive = Driving()
    for index in range(3):
        drive.submit(f"j{index}", gpu={"count": 2}, replicas=2)
    told = why(drive, "j1")
    assert (told["asks"], told["waiting_replicas"]) == ("2x2xany", 2)
    assert (told["position"], told["queued"], told["queued_of"]) == (2, 3, "jobs"), "of jobs, whatever their replicas"


def test_in_a_very_long_queue_the_place_is_of_jobs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "COUNTED_MAX", 2)
    drive = Driving()
    for index in range(3):
        drive.submit(f"j{index}", gpu={"count": 2}, replicas=2)
    told = why(drive, "j1")
    assert (told["position"], told["queued"], told["queued_of"]) == (2, 3, "jobs")


def test_a_job_that_runs_shows_its_history_and_an_unknown_one_is_not_found() -> None:
    drive = fleet()
    drive.submit("j", gpu={})
    drive.settle()
    assert why(drive, "j") == {"job": "j", "tenant": "t", "state": "RUNNING", "why": ""}
    problem = explain_job(drive.engine, "t", "no")
    assert not isinstance(problem, dict)
    assert problem.code == "not-found"
    assert views.show(drive.engine, "other", "j").__class__.__name__ == "Problem"


def test_why_an_earlier_attempt_ended_says_nothing_of_one_that_runs() -> None:
    drive = Driving()
    worker = drive.worker("w0", 2, auto=False)
    drive.submit("j", gpu={}, replicas=2, retries=1)

    def told() -> str:
        shown = wire(views.show(drive.engine, "t", "j"))
        assert views.summary(drive.engine, drive.job("j")).why == shown["why"]
        assert why(drive, "j").get("why", shown["why"]) == shown["why"]
        return str(shown["why"])

    for times in range(1, 3):
        drive.report("refused", "j", detail="device-busy")
        assert told() == "device-busy", "why it waits"
        drive.send("w0", Renew(worker.session, times))
        drive.pass_time(31_000, step=31_000)
        assert drive.states("j") == ["PLACED", "PLACED"]
        assert told() == "", "it was placed again"
    drive.reports([("started", "j", index, 0, "") for index in range(2)])
    assert (drive.job("j").state, told()) == ("RUNNING", "")
    drive.report("exited", "j", code=3, detail="no such file")
    assert told() == "no such file", "of the attempt that ended; the other replica goes on"


@pytest.mark.parametrize("released", [False, True])
def test_what_an_operator_said_of_an_order_is_no_reason_for_the_end(released: bool) -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("j", gpu={})
    drive.reports([("claimed", "j", 0, 0, ""), ("started", "j", 0, 0, "")])
    drive.order("hold", job="j", why="check")
    if released:
        drive.order("release", job="j", why="data is fine")
    drive.order("priority", job="j", priority=90, why="boss")
    drive.reports([("exited", "j", 0, 9, "exit"), ("freed", "j", 0, 0, "")])
    assert drive.states("j") == ["FAILED"]
    row = views.summary(drive.engine, drive.job("j"))
    assert (row.why, row.code) == ("", 9)
    assert why(drive, "j")["why"] == "it ended by itself, with code 9"


def test_an_audit_shows_only_what_two_renewals_of_a_worker_showed() -> None:
    drive = Driving()
    worker = drive.worker("w0", 4)
    drive.submit("known", gpu={})
    drive.submit("ends", gpu={})
    drive.settle()

    def drift() -> list[tuple[str, str]]:
        rows = views.audit(drive.engine).drift
        return [(row.kind, row.member.partition(" ")[0]) for row in rows]

    assert drift() == [], "it has had no time for a renewal"
    drive.renew()
    worker.finish(next(key for key in worker.held if key[1] == "ends"))
    drive.send("w0", worker.renew_frame())  # lists it still, in the record of its end
    drive.settle()
    assert drift() == []
    gone, worker.held = worker.held, {}
    for shown in ([], [("ledger-only", "t/known/0")]):
        drive.renew()
        assert drift() == shown
    worker.held = gone
    drive.renew()
    assert drift() == []
    held = drive.state.workers["w0"].attempts
    attempt = held.pop(next(iter(held)))  # as if the ledger had lost it
    drive.checks = False
    for shown in ([], [("worker-only", "t/known/0")]):
        drive.send("w0", worker.renew_frame())
        drive.tick(obey=False)
        assert drift() == shown
    held[attempt.name] = attempt
    drive.lead()
    assert drift() == []
    drive.pass_time(3_500, renew=False)
    assert drift() == [("silent", "")]


def test_while_nothing_is_placed_after_a_restore_a_job_that_fits_says_so() -> None:
    drive = Driving.with_hosts(2)
    drive.lead()
    drive.state.restored_ms, drive.state.restored_epoch = drive.state.time_ms, drive.state.epoch - 1
    drive.renew()
    drive.submit("j", gpu={})
    drive.pass_time(5_000)
    found = why(drive, "j")
    assert (found["reason"], found["means"]) == ("restored", REASONS["restored"].means)
    unheard = "may still run on workers that have not reported yet"
    assert found["because"] == f"jobs that were placed after the backup {unheard}"
    assert 0 < found["starts_in_ms"] <= drive.config.lost_ms - 5_000
    assert drive.fixes("j") == []
    drive.pass_time(found["starts_in_ms"] + 1_000)
    assert drive.states("j") == ["PLACED"]


def test_each_filter_that_took_some_is_counted() -> None:
    drive = Driving.with_hosts(2)
    drive.worker("w1", 2, "NVIDIA L40S", gpu_memory_mib=46_068)
    drive.worker("w2", 4, "NVIDIA L40S", gpu_memory_mib=46_068, labels={"zone": "a"})
    drive.submit("j", gpu={"count": 3, "model": "L40S"}, requires={"zone": ["b"]})
    assert why(drive, "j")["workers_left"] == {"known": 3, "label": 0, "matching": 0}
    drive.submit("k", gpu={"model": "L40S", "min_memory_mib": 60_000})
    assert why(drive, "k")["workers_left"] == {"known": 3, "model": 2, "memory": 0, "matching": 0}
    drive.submit("l", gpu={"count": 5, "model": "L40S"})
    assert why(drive, "l")["workers_left"] == {"known": 3, "model": 2, "count": 0, "matching": 0}


def test_who_is_closed_and_why() -> None:
    drive = Driving.with_hosts(2, 2)
    worker = drive.workers["w1"]
    drive.operate("cordon", "w0")
    worker.waiting = True
    drive.renew()
    drive.submit("j", gpu={})
    told = why(drive, "j")
    assert told["reason"] == "closed"
    assert told["held_by"] == ["w0: cordoned by operator, unverified (says me)", "w1: kept for a local claim"]


def test_what_of_the_host_is_taken_and_by_whom() -> None:
    drive = Driving.with_hosts(4, cpu_milli=8_000)
    drive.submit("eater", gpu={}, resources={"cpu_milli": 6_000})
    drive.settle()
    drive.submit("j", gpu={}, resources={"cpu_milli": 4_000})
    told = why(drive, "j")
    assert (told["reason"], told["because"]) == ("host-busy", "it asks for 4 cores on one host")
    assert told["held_by"][0] == "job eater: 1 GPU"
    assert told["held_by"][1].startswith("w0: 2 of 8 cores, ")
    drive.submit("big", gpu={}, resources={"cpu_milli": 9_000})
    told = why(drive, "big")
    assert told["reason"] == "host-size"
    assert told["because"].startswith("it asks for 9 cores on one host; the most that one has is 8 cores and ")


def test_how_much_of_a_gang_there_is_room_for() -> None:
    drive = Driving.with_hosts(4)
    drive.submit("huge", replicas=5, gpu={"scheduling": "gang"})
    assert why(drive, "huge")["because"] == "empty, they would hold 4 of its 5"
    drive.submit("one", gpu={})
    drive.submit("g", replicas=4, gpu={"scheduling": "gang"})
    told = why(drive, "g")
    assert (told["reason"], told["because"]) == ("gang", "room for 3 of its 4 replicas")


def test_for_whom_hosts_are_held_back() -> None:
    drive = Driving.with_hosts(4)
    drive.submit("runs", gpu={"count": 2}, run={"driver": "noop", "timeout_s": 1_000})
    drive.settle()
    drive.submit("big", gpu={"count": 4}, priority=60)
    drive.pass_time(PATIENCE_MS + 2_000)
    drive.submit("mine", gpu={})
    drive.submit("theirs", tenant="u", gpu={})
    told = why(drive, "mine")
    assert told["reason"] == "reserved"
    assert told["held_by"] == ["job big, which comes first and has waited long", "reserved: w0"]
    assert why(drive, "big")["reason"] == "busy", "no host is held back for itself"
    other = wire(explain_job(drive.engine, "u", "theirs"))
    assert other["held_by"] == ["a job of another tenant, which comes first and has waited long", "reserved: w0"]


def test_a_place_counts_those_who_wait_and_nobody_else() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("runs", gpu={})
    drive.settle()
    for number in range(5):
        drive.submit(f"j{number}", gpu={})
    drive.submit("first", gpu={}, priority=90)
    assert [why(drive, name)["position"] for name in ("first", "j0", "j4")] == [1, 2, 6]
    for name in ("j0", "j1", "first"):
        drive.cancel(name)
    drive.order("hold", job="j2")
    told = why(drive, "j4")
    assert (told["position"], told["queued"]) == (2, 2)
    assert why(drive, "j2")["queued"] == 2


def test_a_pause_is_told_as_one_and_has_its_place() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("j", gpu={}, retries=3)
    drive.settle()
    drive.run_out("w0", code=1)
    drive.settle()
    told = why(drive, "j")
    assert (told["reason"], told["means"]) == ("backoff", REASONS["backoff"].means)
    assert (told["position"], told["queued"]) == (1, 1)


def test_sharers_of_several_devices_fit_as_often_as_no_device_counts_twice_for_one() -> None:
    drive = Driving.with_hosts(2)
    for number in range(7):
        drive.submit(f"s{number}", gpu={"sharing": "mps", "count": 1})
    drive.settle()
    assert {slot for number in range(7) for slot in drive.slots(f"s{number}")} == {0}
    drive.submit("gang", gpu={"sharing": "mps", "count": 2, "scheduling": "gang"}, replicas=2)
    told = drive.explained("gang")
    assert (drive.states("gang"), told["reason"], told["because"]) == (
        ["QUEUED", "QUEUED"], "gang", "room for 1 of its 2 replicas",
    )  # fmt: skip


def test_a_job_on_a_silent_worker_says_so_and_what_follows() -> None:
    """It was RUNNING, or PLACED, and nothing else, until the worker counted as lost."""
    drive = Driving()
    drive.worker("w0", 1)
    drive.submit("j", gpu={})
    drive.settle()
    assert why(drive, "j")["why"] == ""
    lost_s = drive.engine.config.lost_ms // 1000
    silent_s = lost_s * 2 // 3
    drive.send("w0", drive.workers["w0"].renew_frame())
    drive.tick()
    drive.pass_time(silent_s * 1000, renew=False)
    assert why(drive, "j")["why"] == (
        f"worker w0 is silent, for {silent_s}s now: after {lost_s}s it counts as lost, and the job is tried again"
        " elsewhere, if its request allows that"
    )
    drive.pass_time(lost_s * 1000, renew=False)
    assert why(drive, "j")["state"] == "QUEUED"


def test_a_services_models_are_told_and_why_none_is_ready() -> None:
    service = {"name": "chat", "models": ["m1", "m2"], "http": {"health": "/health"}}
    drive = served(2, run=READY, service=service)
    told = why(drive, "a")
    assert (told["service"], told["models"], told["members_ready"]) == ("chat", ("m1", "m2"), 1)
    assert "its check is" not in told.get("why", "")
    drive.pass_time(30_000)
    drive.report("not-ready", "a")
    drive.pass_time(9_000)
    told = why(drive, "a")
    assert told["members_ready"] == 0
    assert told["why"].startswith("ready no more for 9 s: its check is ")
    rows = dict(explained_rows(msgspec.convert(told, Explained)))
    assert rows["serves"] == "chat (m1, m2): no member is ready for calls"
    other = {"name": "other", "models": ["m3"]}
    drive.submit("b", run=READY, gpu={"count": 9}, service=other, on_no_match="wait")
    assert (why(drive, "b")["members_ready"], why(drive, "b")["reason"]) == (0, "count")
