"""An operator starts a job on a worker by name: also on a cordoned one, where nothing else of all tenants begins."""

from __future__ import annotations

import random
from typing import Any

import pytest

from moorage.schemas.errors import Refused
from moorage.schemas.operate import act_of
from tests.unit.scheduler.driving import Driving


@pytest.fixture
def drive() -> Driving:
    found = Driving.with_hosts(4)
    found.operate("cordon", "w0", why="new fan")
    return found


def place(drive: Driving, job: str, on: str = "w0", **more: Any) -> dict[str, Any]:
    return drive.order("place", job=job, on=on, **more)


def test_it_starts_on_a_cordoned_worker_in_the_record_of_the_order_and_nothing_else_does(drive: Driving) -> None:
    drive.submit("first", gpu={}, priority=90)
    drive.submit("check", gpu={"count": 2})
    drive.submit("other", tenant="u", gpu={})
    assert drive.explained("check")["reason"] == "closed"
    records = len(drive.records)
    done = place(drive, "check")
    assert (done["kind"], done["changed"], done["members"], done["worker"], done["state"]) == (
        "done", True, 1, "w0", "QUEUED",
    )  # fmt: skip
    assert (len(drive.records) - records, drive.states("check")) == (1, ["PLACED"])
    drive.settle()
    assert (drive.states("check"), drive.slots("check")) == (["RUNNING"], [0, 1])
    placed = next(row for row in drive.job("check").history if row[4] == 1)
    assert placed[10] == "operator ana"
    assert (drive.states("first"), drive.states("other", "u")) == (["QUEUED"], ["QUEUED"])
    drive.lead_from_snapshot()
    drive.renew()
    drive.run_out("w0")
    drive.settle()
    assert drive.job("check").state == "SUCCEEDED"
    assert (drive.states("first"), drive.states("other", "u")) == (["QUEUED"], ["QUEUED"])
    drive.operate("uncordon", "w0")
    drive.settle()
    assert (drive.states("first"), drive.states("other", "u")) == (["RUNNING"], ["RUNNING"])


def test_as_many_replicas_start_as_have_room_and_the_others_wait(drive: Driving) -> None:
    drive.submit("many", gpu={}, replicas=6)
    assert place(drive, "many")["members"] == 4
    full = place(drive, "many")
    assert (full["code"], "no room" in full["message"]) == ("failed-precondition", True)
    drive.settle()
    drive.run_out("w0")
    assert drive.states("many").count("QUEUED") == 2, "the cordon holds for what comes back"
    assert place(drive, "many")["members"] == 2


def test_a_gang_starts_whole_or_not(drive: Driving) -> None:
    drive.submit("small", gpu={"count": 2, "scheduling": "gang"}, replicas=2)
    drive.submit("large", gpu={"count": 2, "scheduling": "gang"}, replicas=3, on_no_match="wait")
    assert place(drive, "large")["code"] == "failed-precondition"
    assert place(drive, "small")["members"] == 2
    drive.settle()
    assert (drive.job("small").state, drive.states("large")) == ("RUNNING", ["QUEUED"] * 3)


def test_of_a_job_for_each_worker_the_replica_of_this_one_starts(drive: Driving) -> None:
    drive.worker("w1", 1)
    drive.submit("warm", each_worker=True, gpu={})
    drive.settle()
    done = place(drive, "warm")
    assert (done["members"], drive.placed_on("warm")[:2]) == (1, ["w0", "w1"])


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ({"verb": "hold", "job": "j"}, "held: "),
        ({"verb": "hold"}, "tenant t is on hold"),
        ({"verb": "limit", "gpus": 1}, "has reached a limit"),
        ({"verb": "drain"}, "is draining"),
        ({"verb": "cordon", "slots": (0, 1, 2, 3)}, "no room"),
    ],
)
def test_what_keeps_it_from_there_all_the_same_is_told(drive: Driving, before: dict[str, Any], words: str) -> None:
    drive.submit("j", gpu={})
    drive.submit("busy", gpu={}, requires={"none": ["x"]}, on_no_match="wait")
    verb = before.pop("verb")
    if verb in ("drain", "cordon"):
        drive.operate(verb, "w0", **before)
    else:
        drive.order(verb, **before)
    if verb == "limit":
        drive.submit("one", gpu={})
        assert place(drive, "one")["changed"]
    refused = place(drive, "j")
    assert (refused["code"], words in refused["message"]) == ("failed-precondition", True), refused
    assert drive.states("j") == ["QUEUED"]


def test_a_worker_that_is_not_there_or_could_never_run_it_is_told(drive: Driving) -> None:
    drive.submit("huge", gpu={"count": 8}, on_no_match="wait")
    assert place(drive, "huge", "nowhere")["code"] == "not-found"
    assert "could never run it" in place(drive, "huge")["message"]
    drive.lead()
    drive.submit("j", gpu={})
    assert "not connected" in place(drive, "j")["message"], "not heard by this leader"
    drive.renew()
    assert place(drive, "j")["changed"]
    assert "nothing of it waits" in place(drive, "j")["message"]


def test_a_reason_is_refused_by_name_as_the_ledger_has_no_place_for_it() -> None:
    with pytest.raises(Refused, match="why must be empty"):
        act_of("place", {"tenant": "t", "job": "j", "on": "w0", "why": "to try it"})


@pytest.mark.parametrize("seed", range(3))
def test_in_any_order_with_all_else_what_an_order_places_keeps_every_promise(seed: int) -> None:
    """`Driving` checks ledger, fleet, queue and reservations behind each record."""
    chance = random.Random(seed)
    drive = Driving.with_hosts(4, 2, 8)
    placed = 0
    for step in range(100):
        worker = f"w{chance.randrange(3)}"
        waiting = [job.name for job in drive.state.jobs.values() if "QUEUED" in drive.states(job.name)]
        match chance.randrange(6):
            case 0:
                drive.operate(chance.choice(("cordon", "cordon", "uncordon")), worker)
            case 1 | 2:
                shared = {"sharing": "time-slice", "share": {"memory_mib": 9_000}} if chance.random() < 0.3 else {}
                gang = {"scheduling": "gang"} if chance.random() < 0.3 else {}
                gpu: dict[str, Any] = {"count": chance.choice((1, 1, 2)), **(gang or shared)}
                more: dict[str, Any] = {"preemptible": True} if chance.random() < 0.2 and not gang else {}
                drive.submit(
                    f"j{step}", gpu=gpu, replicas=chance.choice((1, 2, 3)), priority=chance.choice((20, 50, 80)),
                    on_no_match="wait", **more,
                )  # fmt: skip
            case 3 | 4:
                if waiting:
                    answer = place(drive, chance.choice(waiting), worker)
                    placed += answer["kind"] == "done"
                    assert answer["kind"] == "done" or answer["code"] in ("failed-precondition", "not-found"), answer
            case _:
                drive.settle()
                drive.run_out(worker)
        drive.pass_time(chance.choice((1, 1_000, 5_000)))
    assert placed > 2
