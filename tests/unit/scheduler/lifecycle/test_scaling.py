"""As many members as the calls of a service need: what the leader does with what members say, in virtual time."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.answers.logs import find_log
from moorage.scheduler.answers.waiting import explain_job
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Wake
from moorage.scheduler.core.lifecycle.scaling import FILLED, FULL
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.scheduler.ledger.recording import RecordedEngine, Recorder, replay
from moorage.scheduler.questions import foresight as foresight_module
from moorage.scheduler.questions.foresight import Foresight
from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.errors import Problem
from moorage.schemas.frames import LogsAsked
from moorage.schemas.service import CallCounts, MemberLoad
from tests.unit.scheduler.driving import SUBJECTS, Driving
from tests.unit.scheduler.queries.test_forecast_looks import nothing

UP_MS = int(Config().scale_up_s * 1000)
DOWN_MS = int(Config().scale_down_s * 1000)
CALLS = {"process": {"answers_calls": True}}


class Service:
    """Members that each run as many calls as are given, and say so once a second."""

    def __init__(self, drive: Driving, name: str = "embed", places: int = 1, tenant: str = "t") -> None:
        self.drive = drive
        self.name = name
        self.places = places
        self.tenant = tenant
        self.refused: dict[AttemptName, int] = {}
        self.ended: dict[AttemptName, int] = {}

    def members(self) -> list[int]:
        """The numbers of the replicas that run and were not asked to end."""
        rows = self.drive.job(self.name, self.tenant).rows.values()
        return sorted(row.index for row in rows if self.drive.states(self.name, self.tenant)[row.index] == "RUNNING")

    def say(self, calls: float, *, refused: int = 0, oldest_ms: int = 0, run_ms: int = 20) -> None:
        """Each member says its part of the calls at a time, of which it runs as many as it has places."""
        found = self.members()
        for at, index in enumerate(found):
            member = self.drive.attempt(self.name, index, self.tenant)
            mine = calls / len(found)
            # a part of a call is one in that part of the frames
            count = int(mine) + (((self.drive.now // 1000 + at) * 7919 % 100) < (mine - int(mine)) * 100)
            which = member.name
            self.refused[which] = self.refused.get(which, 0) + refused
            self.ended[which] = self.ended.get(which, 0) + (round(mine * 1000 / run_ms) if calls else 0)
            load = MemberLoad(
                f"m{index}", self.places, min(count, self.places), max(0, count - self.places), oldest_ms, False,
                self.refused[which], 0, 0, self.ended[which], 0, self.ended[which] * run_ms,
                self.name, index, member.fence, member.no,
            )  # fmt: skip
            self.drive.engine.offer_member_load(self.tenant, load.job, load, self.drive.now)
            self.drive.term_counts.calls.add_load(self.tenant, load.job, load, self.drive.now)

    def serve(self, seconds: int, calls: float, **said: int) -> list[int]:
        """Serve for a while; return how many members there were at the end of each second."""
        found = []
        for _ in range(seconds):
            self.say(calls, **said)
            self.drive.pass_time(1000)
            self.drive.settle()
            found.append(len(self.members()))
        return found


def scaled(drive: Driving, name: str = "embed", **fields: Any) -> dict[str, Any]:
    fields = {"replicas": {"min": 1, "max": 8}, "service": {"name": name}, "gpu": {}, **fields}
    return drive.submit(name, run={"driver": "process", "argv": ["serve"]}, **fields)


def serving(gpus: int = 8, **fields: Any) -> tuple[Driving, Service]:
    drive = Driving.with_hosts(gpus, capabilities=CALLS)
    assert scaled(drive, **fields)["kind"] == "accepted"
    drive.settle()
    return drive, Service(drive)


def wanted(drive: Driving, name: str = "embed") -> int:
    found: int = drive.explained(name)["scaled"]["wanted"]
    return found


def test_a_service_has_its_fewest_members_until_it_is_called() -> None:
    drive, service = serving(replicas={"min": 2, "max": 4})
    assert service.members() == [0, 1]
    told = drive.explained("embed")
    assert (told["reason"], told["waiting_replicas"]) == ("scaled", 2)
    assert told["scaled"] == {"wanted": 2, "min": 2, "max": 4}
    assert told["because"] == "2 members of it, as replicas.min says, until its calls need more"
    service.serve(120, 0)
    assert service.members() == [0, 1]


def test_members_that_are_not_wanted_wait_for_nothing_and_their_latest_start_counts_from_when_they_are() -> None:
    drive, service = serving(start_within_s=60)
    assert service.serve(60, 2.5)[-1] == 4
    assert service.serve(330, 0)[-1] == 1
    assert drive.states("embed") == ["RUNNING"] + ["QUEUED"] * 7
    drive.submit("other", gpu={"count": 7}, priority=90)
    drive.settle()
    service.serve(10, 2.5)
    assert wanted(drive) == 2
    service.serve(40, 2.5)
    assert drive.states("embed") == ["RUNNING"] + ["QUEUED"] * 7
    drive.offer_cancel("other")
    drive.settle()
    assert service.serve(5, 2.5)[-1] > 1


def test_members_follow_the_calls_one_at_a_step_and_no_more_than_needed() -> None:
    """2.5 calls at a time on members of one place: 4 of them are 62 % busy, 3 would be 83 %."""
    drive, service = serving()
    found = service.serve(60, 2.5)
    assert found[-1] == 4
    steps = [at for at in range(1, 60) if found[at] != found[at - 1]]
    assert [found[at] - found[at - 1] for at in steps] == [1, 1, 1]
    assert all(after - before >= 5 for before, after in itertools.pairwise(steps))
    told = drive.explained("embed")["scaled"]
    assert told["wanted"] == 4
    assert "calls at a time" in told["why"]
    assert service.serve(120, 2.5)[-1] == 4, "one more would not help"
    quiet = service.serve(600, 0)
    assert quiet[-1] == 1
    down = [at for at in range(1, 600) if quiet[at] != quiet[at - 1]]
    assert [quiet[at] - quiet[at - 1] for at in down] == [-1, -1, -1]
    assert down[0] >= 60
    assert all(after - before >= 60 for before, after in itertools.pairwise(down))
    assert service.serve(60, 2.5)[-1] == 4, "those that were ended start again"


@pytest.mark.parametrize("said", [{"refused": 1}, {"oldest_ms": 201}])
def test_calls_that_are_refused_or_wait_too_long_ask_for_one_more_at_once(said: dict[str, int]) -> None:
    drive, service = serving()
    service.serve(10, 0.1)
    assert len(service.members()) == 1
    assert service.serve(2, 0.1, **said)[-1] == 2
    why = drive.explained("embed")["scaled"]["why"]
    assert ("refused" if "refused" in said else "waited 201 ms") in why
    assert service.serve(10, 0.1, oldest_ms=200)[-1] == 2


def test_no_more_are_wanted_while_those_wanted_do_not_answer_yet() -> None:
    drive, service = serving(gpus=2)
    service.serve(60, 8.0, oldest_ms=900)
    assert len(service.members()) == 2
    assert wanted(drive) == 3, "the third waits for a GPU, and a fourth would wait, too"
    told = drive.explained("embed")
    assert told["reason"] == "busy"


def test_the_member_with_the_fewest_calls_ends() -> None:
    drive, service = serving(replicas={"min": 1, "max": 3})
    service.serve(30, 2.0)
    assert service.members() == [0, 1, 2]
    for _ in range(130):
        for index, running in ((0, 0), (1, 1), (2, 0)):
            if index in service.members():
                fence = drive.attempt("embed", index).fence
                load = MemberLoad(f"m{fence}", 1, running, 0, 0, False, 0, 0, 0, 9, 0, 9, "embed", index, fence)
                drive.engine.offer_member_load("t", "s", load, drive.now)
        drive.pass_time(1000)
        drive.settle()
    assert 1 in service.members()
    assert len(service.members()) == 2
    assert drive.states("embed").count("QUEUED") == 1


def test_a_new_leader_goes_on_with_the_number_that_it_finds_and_takes_none_away_unheard() -> None:
    drive, service = serving()
    service.serve(60, 2.5)
    drive.take_snapshot()
    assert snapshots.load(snapshots.dump(drive.state)).jobs[drive.job("embed").num].scaled == drive.job("embed").scaled
    drive.lead()
    drive.renew()
    assert wanted(drive) == 4
    assert service.serve(2 * DOWN_MS // 1000, 2.5)[-1] == 4
    drive.pass_time(2 * DOWN_MS)
    assert wanted(drive) == 4
    assert set(service.serve(30, 2.5)) == {4}


def test_what_members_said_is_in_a_recording_and_decides_the_same_again(tmp_path: Path) -> None:
    drive, recorder = Driving(), Recorder(tmp_path / "leader.rec")
    drive.engine = RecordedEngine(recorder, drive.state, drive.config, SUBJECTS, drive.engine.leader, drive.now, None)
    drive.worker("w0", 8, capabilities=CALLS)
    scaled(drive, replicas={"min": 0, "max": 8})
    woken(drive)
    drive.settle()
    Service(drive).serve(30, 2.5)
    recorder.close()
    found = list(replay(tmp_path / "leader.rec"))
    assert all(one.same for one in found)
    last = found[-1].state.jobs[drive.job("embed").num].scaled
    assert last is not None
    assert last == drive.job("embed").scaled
    assert last.wanted > 1


def test_who_claims_to_be_a_member_and_is_none_changes_nothing() -> None:
    drive, service = serving()
    fence = drive.attempt("embed").fence
    for tenant, job, index, said in (("t", "embed", 0, fence + 1), ("t", "embed", 7, fence), ("u", "embed", 0, fence),
                                     ("t", "other", 0, fence), ("t", "", 0, 0)):  # fmt: skip
        load = MemberLoad("m", 1, 1, 50, 9_999, False, 99, 0, 0, 0, 0, 0, job, index, said)
        for _ in range(3):
            drive.engine.offer_member_load(tenant, "s", load, drive.now)
            drive.pass_time(UP_MS)
    assert service.members() == [0]


def test_a_member_that_was_cut_off_while_it_was_to_end_ends_when_it_comes_back() -> None:
    drive = Driving.with_hosts(1, 1, capabilities=CALLS)
    scaled(drive, on_partition="keep")
    drive.settle()
    service = Service(drive)
    assert service.serve(40, 1.5)[-1] == 2
    for worker in drive.workers.values():
        worker.auto = False
    while "ENDING" not in drive.states("embed"):
        service.say(0)
        drive.pass_time(1000)
        drive.report_all()
    gone = drive.workers[drive.attempt("embed", drive.states("embed").index("ENDING")).worker.id]
    (other,) = (worker for worker in drive.workers.values() if worker is not gone)
    gone.session = ""
    for _ in range(60):
        drive.send(other.id, other.renew_frame())
        service.say(0)
        drive.tick(1000)
    assert sorted(drive.states("embed")[:2]) == ["LOST_KEPT", "RUNNING"]
    gone.auto = other.auto = True
    drive.join(gone)
    drive.settle()
    assert service.serve(10, 0)[-1] == 1
    assert wanted(drive) == 1


# ---------------------------------------------------------------------------------------------------- none, and wake


def woken(drive: Driving, service: str = "embed", tenant: str = "t") -> dict[str, Any]:
    drive.engine.offer(Wake(tenant, service, "woken", True))
    drive.tick()
    answer: dict[str, Any] = drive.answers["woken"]
    return answer


@pytest.mark.parametrize("most", [1, 4])
def test_a_service_without_calls_has_no_member_and_a_caller_wakes_it(most: int) -> None:
    drive, service = serving(replicas={"min": 0, "max": most})
    assert service.members() == []
    assert drive.explained("embed")["reason"] == "scaled"
    answer = woken(drive)
    assert (answer["verb"], answer["data"]) == ("wake", {"service": "embed", "job": "embed", "wanted": 1})
    assert answer["ledger"] == drive.state.seq
    assert drive.states("embed")[0] == "PLACED", "in the record with the answer"
    drive.settle()
    assert service.members() == [0]
    assert drive.explained("embed")["scaled"]["why"] == "woken by a caller"
    assert woken(drive)["data"]["wanted"] == 1
    assert set(service.serve(100, 0.1)) == {1}
    assert service.serve(130, 0)[-1] == 0
    woken(drive)
    drive.settle()
    assert len(service.members()) == 1
    assert [row.woken for row in drive.term_counts.calls.rows(drive.now)] == [2], (
        "not the caller that came while it started"
    )


def test_two_callers_wake_one_member() -> None:
    drive, service = serving(replicas={"min": 0, "max": 4})
    for _ in range(2):
        drive.engine.offer(Wake("t", "embed", "", True))
    drive.tick()
    drive.settle()
    assert service.members() == [0]


@pytest.mark.parametrize(
    ("tenant", "name", "there"), [("t", "other", "embed"), ("u", "embed", ""), ("nobody", "embed", "")]
)
def test_of_a_service_that_no_job_has_it_is_said_and_what_there_is(tenant: str, name: str, there: str) -> None:
    drive, _ = serving(replicas={"min": 0, "max": 4})
    drive.submit("theirs", tenant="u")
    answer = woken(drive, name, tenant)
    assert (answer["code"], answer["found"], answer.get("allowed", "")) == ("not-found", name, there)
    assert answer["message"] == f"no job of tenant {tenant} has the service {name}"


def test_who_calls_a_job_by_its_id_hears_the_name_of_its_service() -> None:
    drive = Driving.with_hosts(1, capabilities=CALLS)
    drive.submit("mix3", run={"driver": "process", "argv": ["serve"]}, service={"name": "mix"}, gpu={})
    answer = woken(drive, "mix3")
    assert (answer["code"], answer["message"], answer["next"]) == (
        "not-found",
        "mix3 is a job; its service is mix",
        "call mix",
    )


def test_who_asks_about_a_job_by_the_name_of_its_service_hears_its_id() -> None:
    """Of logs, show and explain too, all that was said was that there is no such job."""
    drive = Driving.with_hosts(1, capabilities=CALLS)
    drive.submit("mix3", run={"driver": "process", "argv": ["serve"]}, service={"name": "mix"}, gpu={})
    asked = [views.show(drive.engine, "t", "mix"), explain_job(drive.engine, "t", "mix")]
    for answer in (*asked, find_log(drive.engine, "t", LogsAsked("mix"))):
        assert isinstance(answer, Problem)
        assert answer.message == "no job mix of tenant t; it is a service, whose job is mix3"
        assert (answer.code, answer.next) == ("not-found", "name its job: mix3")
    other = views.show(drive.engine, "u", "mix")
    assert isinstance(other, Problem)
    assert other.message == "no job mix of tenant u"


def test_of_a_service_whose_job_is_over_its_end_is_said_and_a_live_one_is_waited_for() -> None:
    """Also of a job with a fixed number of members, and of one that waits."""
    drive = Driving.with_hosts(1, capabilities=CALLS)
    run, service = {"driver": "process", "argv": ["serve"]}, {"name": "embed"}
    drive.submit("first", run=run, service=service, gpu={})
    assert woken(drive)["data"] == {"service": "embed", "job": "first", "wanted": 1}
    drive.settle()
    drive.run_out("w0", 3)
    answer = woken(drive)
    assert (answer["code"], answer["job"], answer["next"]) == ("not-found", "first", "moorage logs first")
    assert answer["message"] == "nobody serves embed: job first FAILED with code 3"
    for at, (code, said) in enumerate(((-9, "FAILED with code 137"), (0, "SUCCEEDED"))):
        drive.submit(f"other-{at}", run=run, service=service, gpu={})
        drive.settle()
        drive.run_out("w0", code)
        assert woken(drive)["message"] == f"nobody serves embed: job other-{at} {said}"
    drive.submit("second", run=run, service=service, gpu={"count": 8})
    foresight = Foresight(drive.engine, lambda: drive.now, nothing, nothing, nothing, forks=False)
    drive.engine.explain_woken = foresight.at_wake
    told = woken(drive)["data"]
    assert (told["job"], "no remaining worker has as many matching GPUs" in told["why"]) == ("second", True)
    drive.cancel("second")
    assert woken(drive)["message"] == "nobody serves embed: job second CANCELLED"


def test_wakes_use_up_no_explanation_of_a_submit_and_follow_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one explanation, its kind has used up its share for longer than the test lasts."""
    monkeypatch.setattr(foresight_module, "UNASKED_SHARE", 10**9)
    drive, _ = serving(1, replicas={"min": 0, "max": 1}, gpu={"count": 8})
    foresight = Foresight(drive.engine, lambda: drive.now, nothing, nothing, nothing, forks=False)
    drive.engine.explain_woken, drive.explain_waiting = foresight.at_wake, foresight.at_submit
    first = woken(drive)["data"]["why"]
    assert not foresight._followed
    assert drive.submit("waits", gpu={"count": 8})["waiting"]["reason"] == "count"
    assert woken(drive)["data"]["why"] == first, "the same words for a second"
    drive.pass_time(1_000)
    assert "why" not in woken(drive)["data"]


# ----------------------------------------------------------------------------------------------------- others wait


def test_members_above_the_fewest_end_for_a_job_that_comes_first() -> None:
    drive, service = serving(gpus=4)
    service.serve(40, 4.0)
    assert len(service.members()) == 4
    drive.submit("urgent", priority=60, gpu={"count": 2})
    found = service.serve(40, 4.0)
    assert drive.states("urgent") == ["RUNNING"]
    assert found[-1] == 2
    why = [change["why"] for change in drive_changes(drive) if change["state"] == "ENDING"]
    assert why
    assert "an earlier or more urgent job waits for what a member has" in why[0]
    drive.submit("later", priority=50, gpu={"count": 1})
    assert service.serve(60, 4.0)[-1] == 2, "this one came later, and waits"
    assert drive.states("later") == ["QUEUED"]


@pytest.mark.parametrize("urgent", [{}, {"sharing": "mps", "share": {"compute_percent": 50}}])
def test_members_that_share_a_gpu_end_for_a_job_that_comes_first(urgent: dict[str, Any]) -> None:
    share = {"sharing": "mps", "share": {"compute_percent": 50}}
    drive, service = serving(1, replicas={"min": 0, "max": 2}, gpu=share)
    woken(drive)
    drive.settle()
    assert service.serve(40, 2.0)[-1] == 2
    drive.submit("urgent", priority=60, gpu=urgent)
    assert service.serve(20, 2.0)[-1] == (1 if urgent else 0)
    assert drive.states("urgent") == ["RUNNING"]
    drive.submit("later", gpu={})
    assert service.serve(20, 2.0)[-1] == (1 if urgent else 0), "it came later"


def drive_changes(drive: Driving) -> list[dict[str, Any]]:
    return [change for event in drive.events for change in event.get("changes", [])]


def test_not_the_last_members_and_not_for_what_they_do_not_have() -> None:
    drive, service = serving(gpus=2, replicas={"min": 2, "max": 4})
    drive.submit("urgent", priority=60, gpu={"count": 1})
    drive.submit("other-model", priority=90, gpu={"model": "L40S"})
    assert set(service.serve(60, 2.0)) == {2}
    drive, service = serving(gpus=4)
    service.serve(40, 4.0)
    drive.submit("other-model", priority=90, gpu={"model": "L40S"})
    assert set(service.serve(60, 4.0)) == {4}


GANG = {"gpu": {"count": 2, "scheduling": "gang"}, "replicas": 3}


@pytest.mark.parametrize("job", [GANG, {"gpu": {}, "resources": {"cpu_milli": 64_000}}])
def test_for_a_job_that_can_never_start_no_member_ends_and_the_service_grows(job: dict[str, Any]) -> None:
    drive = Driving.with_hosts(2, 2, cpu_milli=8_000, capabilities={**CALLS, "noop": {}})
    scaled(drive, replicas={"min": 1, "max": 4})
    drive.settle()
    service = Service(drive)
    service.serve(15, 2.5)
    assert 1 < len(service.members()) < 4
    drive.submit("never", tenant="u", priority=60, **job)
    assert service.serve(90, 2.5)[-1] == 4
    assert drive.states("never", "u")[0] == "QUEUED"


def test_no_member_ends_where_that_would_not_make_room() -> None:
    drive, service = serving(gpus=5, replicas={"min": 1, "max": 3})
    drive.submit("hog", gpu={"count": 2})
    drive.settle()
    assert service.serve(60, 2.0)[-1] == 3
    drive.submit("wide", tenant="u", priority=60, gpu={"count": 4})
    assert set(service.serve(60, 2.0)) == {3}
    drive.cancel("hog")
    drive.settle()
    service.serve(60, 2.0)
    assert drive.states("wide", "u") == ["RUNNING"], "with its GPUs there is room"


def test_two_services_make_room_together() -> None:
    drive, service = serving(gpus=4, replicas={"min": 1, "max": 2})
    scaled(drive, "other", replicas={"min": 1, "max": 2})
    drive.settle()
    other = Service(drive, "other")
    for _ in range(60):
        service.say(2.0)
        other.serve(1, 2.0)
    assert (len(service.members()), len(other.members())) == (2, 2)
    drive.submit("wide", tenant="u", priority=60, gpu={"count": 2})
    for _ in range(60):
        service.say(2.0)
        other.serve(1, 2.0)
    assert drive.states("wide", "u") == ["RUNNING"]


def test_none_ends_for_a_job_that_needs_a_place_of_an_earlier_service_too() -> None:
    drive = Driving.with_hosts(4, capabilities=CALLS)
    scaled(drive, "first", replicas={"min": 1, "max": 2})
    drive.settle()
    first = Service(drive, "first")
    first.serve(60, 2.0)
    assert len(first.members()) == 2
    drive.submit("wide", gpu={"count": 3})
    scaled(drive, "later", replicas={"min": 0, "max": 2})
    drive.settle()
    assert drive.states("wide")[0] == "QUEUED"
    drive.engine.offer(Wake("t", "later", "woken", True))
    drive.tick()
    drive.settle()
    later = Service(drive, "later")
    assert len(later.members()) == 1
    for _ in range(60):
        first.say(2.0)
        later.serve(1, 1.0)
        assert later.members(), "its places and those of the first one would do, and the first one keeps its own"
    assert len(first.members()) == 2


def test_no_member_ends_on_a_closed_worker() -> None:
    drive, service = serving(gpus=3, replicas={"min": 1, "max": 3})
    service.serve(60, 2.0)
    drive.operate("cordon", "w0", why="tonight")
    drive.submit("urgent", tenant="u", priority=60, gpu={})
    assert set(service.serve(60, 2.0)) == {3}
    drive.operate("uncordon", "w0")
    service.serve(20, 2.0)
    assert drive.states("urgent", "u") == ["RUNNING"]


@pytest.mark.parametrize("both", [False, True])
def test_a_preemptible_job_ends_no_member_that_would_preempt_it_again(both: bool) -> None:
    """They took turns: a member preempted the job, ended for it as it had come earlier, and preempted it again."""
    drive = Driving.with_hosts(2, capabilities=CALLS)
    drive.submit("earlier", gpu={"count": 1}, preemptible=True)
    drive.settle()
    assert scaled(drive, preemptible=both)["kind"] == "accepted"
    drive.settle()
    service = Service(drive)
    found = service.serve(90, 4.0)
    assert found[-1] == (1 if both else 2)
    attempts = drive.job("earlier").rows[0].attempt_no
    assert attempts == 1
    assert drive.states("earlier") == (["RUNNING"] if both else ["QUEUED"])


def test_a_tenant_that_has_used_less_gets_members_of_another_until_both_have_the_same() -> None:
    drive, service = serving(gpus=4)
    service.serve(60, 4.0)
    drive.submit("theirs", tenant="u", gpu={"count": 1}, replicas=4)
    found = service.serve(120, 4.0)
    assert found[-1] == 2
    assert drive.states("theirs", "u").count("RUNNING") == 2


@pytest.mark.parametrize("asks", [{}, {"gpu": None, "resources": {"cpu_milli": 1000}}])
@pytest.mark.parametrize(("of", "shares"), [(4, {"t": 2, "u": 2}), (9, {"t": 3, "u": 3, "v": 3})])
def test_full_services_of_several_tenants_come_to_rest(of: int, shares: dict[str, int], asks: dict[str, Any]) -> None:
    """Each wants all GPUs, or CPUs. None takes a member that it would then have to give back."""
    drive = Driving.with_hosts(of, capabilities=CALLS, cpu_milli=1000 * of)
    assert scaled(drive, tenant="t", **asks)["kind"] == "accepted"
    drive.settle()
    first = Service(drive, tenant="t")
    first.serve(60, 8.0)
    services = [first]
    for tenant in list(shares)[1:]:
        scaled(drive, tenant=tenant, **asks)
        drive.settle()
        services.append(Service(drive, tenant=tenant))

    def serve(seconds: int) -> int:
        for _ in range(seconds):
            for service in services:
                service.say(8.0)
            drive.pass_time(1000)
            drive.settle()
        return sum(row.attempt_no for tenant in shares for row in drive.job("embed", tenant).rows.values())

    before = serve(120)
    assert {service.tenant: len(service.members()) for service in services} == shares
    assert serve(120) == before, "none ended for another"


def test_on_hold_it_changes_nothing() -> None:
    drive, service = serving()
    drive.order("hold", job="embed", why="look")
    service.serve(60, 4.0)
    assert service.members() == [0]


# ------------------------------------------------------------------------------------------ under load, and its cost


class Calls:
    """Callers that arrive at random, and calls of random length, in one queue before as many members as there are."""

    def __init__(self, a_second: float, run_ms: float) -> None:
        self.random = random.Random(46)
        self.a_second = a_second
        self.run_ms = run_ms
        self.now_ms = self.next_ms = 0.0
        self.free_ms: list[float] = []  # by member: when it is free again
        self.ended: list[int] = []
        self.ran_ms: list[float] = []

    def second(self, members: int) -> list[float]:
        """Let a second pass; return how many milliseconds each call that came waited for a place."""
        if len(self.free_ms) != members:  # they fetch from each other what waits
            waits_ms = sum(max(0.0, free_ms - self.now_ms) for free_ms in self.free_ms)
            self.free_ms = [self.now_ms + waits_ms / members] * members
            new = members - len(self.ended)
            self.ended = [*self.ended[:members], *[0] * new]
            self.ran_ms = [*self.ran_ms[:members], *[0.0] * new]
        self.now_ms += 1000
        waits = []
        while self.next_ms < self.now_ms:
            first = min(range(members), key=self.free_ms.__getitem__)
            waits.append(max(0.0, self.free_ms[first] - self.next_ms))
            run_ms = self.random.expovariate(1 / self.run_ms)
            self.free_ms[first] = max(self.free_ms[first], self.next_ms) + run_ms
            self.ended[first] += 1
            self.ran_ms[first] += run_ms
            self.next_ms += self.random.expovariate(self.a_second / 1000)
        return waits


def p99(waits: list[float]) -> float:
    return sorted(waits)[len(waits) * 99 // 100]


def waits_with(members: int, a_second: float, run_ms: float) -> float:
    """The 99th percentile of the waits with this many members from the start."""
    calls = Calls(a_second, run_ms)
    return p99([wait for _ in range(120) for wait in calls.second(members)])


@pytest.mark.parametrize(("a_second", "run_ms"), [(100, 20), (200, 20), (60, 50), (400, 5)])
def test_as_many_are_wanted_that_one_more_would_not_help(a_second: float, run_ms: float) -> None:
    drive, service = serving(gpus=8)
    calls, waits = Calls(a_second, run_ms), list[float]()
    for second in range(480):
        found = service.members()
        came = calls.second(len(found))
        waits += came if second >= 240 else []
        for at, index in enumerate(found):
            fence = drive.attempt("embed", index).fence
            backlog_ms = max(0.0, calls.free_ms[at] - calls.now_ms)
            running, waiting = int(backlog_ms > 0), max(0, round(backlog_ms / run_ms) - 1)
            sums = (0, 0, 0, calls.ended[at], 0, round(calls.ran_ms[at]))
            load = MemberLoad(f"m{fence}", 1, running, waiting, 0, False, *sums, "embed", index, fence)
            drive.engine.offer_member_load("t", "s", load, drive.now)
        drive.pass_time(1000)
        drive.settle()
    members, at_a_time = len(service.members()), a_second * run_ms / 1000
    assert at_a_time / members < FULL, "they are enough"
    assert at_a_time / (members - 1) > FILLED, "with one less they would be too full"
    more, less = waits_with(members + 1, a_second, run_ms), waits_with(members - 1, a_second, run_ms)
    assert p99(waits) - more < 4 * run_ms, "one more would not help"
    assert less - p99(waits) > p99(waits) - more, "one less would"


@pytest.mark.slow
def test_a_thousand_services_cost_the_leader_little() -> None:
    """2,000 members that speak once a second, on 250 hosts: some 110 calls of functions for each frame."""
    drive = Driving()
    drive.checks = False
    for number in range(250):
        drive.worker(f"w{number}", 8, capabilities=CALLS)
    for number in range(1_000):
        run = {"driver": "process", "argv": ["serve"]}
        drive.offer_submit(f"s{number}", run=run, replicas={"min": 2, "max": 4}, service={"name": f"s{number}"}, gpu={})
    for _ in range(10):
        drive.tick(100)
        drive.settle(3)
    members = [row for number in range(1_000) for row in drive.job(f"s{number}").rows.values()]
    decode, counted = Decoder[MemberLoad](MemberLoad), list[int]()
    for second in range(3):
        done = second * 25
        counts = CallCounts({"500": second}, (done, *[0] * 11), (done, *[0] * 11), (0,) * 10)
        frames = [
            (
                row.job.name,
                encode(
                    MemberLoad(
                        "m", 1, 1, 0, 0, False, 0, 0, 0, done, 0, 20 * done, row.job.name, row.index, row.fence,
                        counts=counts,
                    )
                ),
            )
            for row in members
        ]  # fmt: skip
        made = Counter[str]()

        def count(_: object, event: str, __: object, made: Counter[str] = made) -> None:
            made[event] += 1

        sys.setprofile(count)
        for service, frame in frames:
            drive.engine.offer_member_load("t", service, decode(frame), drive.now)
        drive.engine.scaling.pass_time(Draft(drive.state, drive.now), drive.now)
        sys.setprofile(None)
        counted.append((made["call"] + made["c_call"]) // len(frames))
        drive.tick(1000)
    assert max(counted) < 150, counted


def test_a_member_that_was_killed_leaves_the_metrics_with_the_end_of_its_attempt() -> None:
    drive, service = serving(replicas={"min": 2, "max": 2})
    service.say(1)
    assert [row.members for row in drive.term_counts.calls.rows(drive.now)] == [2]
    drive.workers["w0"].finish(drive.attempt("embed", 1).name, -9, "exit")
    drive.settle()
    assert [row.members for row in drive.term_counts.calls.rows(drive.now)] == [1]
