"""How a job is kept to its part of a GPU: told by the worker, shown with the placement, and required by a request."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.whatif.plan import PlanAsk, decode_planned, plan
from moorage.schemas.capabilities import LEVELS, Capabilities, Enforced
from moorage.schemas.codec import decode_request
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request
from tests.unit.scheduler.driving import Driving, wire

RUN = {"driver": "process", "argv": ["x"]}
GUARDED = {"process": Capabilities(enforced={"time-slice": Enforced("guarded", "advisory")})}
COUNTED = {"process": Capabilities(enforced={"time-slice": Enforced("advisory", "advisory")})}
PART = {"sharing": "time-slice", "share": {"memory_mib": 4000}}
GUARDED_MEMORY = {"memory": "guarded", "compute": "advisory"}
ADVISORY = {"memory": "advisory", "compute": "advisory"}
HARD = {"memory": "hard", "compute": "hard"}


def fleet(**capabilities: dict[str, Capabilities] | None) -> Driving:
    drive = Driving()
    for name, can in capabilities.items():
        drive.worker(name, 1, drivers=["process", "noop"], capabilities=can or {})
    return drive


def shown(drive: Driving, job: str) -> dict[str, Any] | None:
    data = wire(views.show(drive.engine, "t", job))
    found: dict[str, Any] | None = data["replica_states"][0].get("enforced")
    return found


def told(drive: Driving, job: str) -> list[Any]:
    """The levels in the job's events."""
    return [event["enforced"] for event in drive.events if event["job"] == job and "enforced" in event]


@pytest.mark.parametrize(
    ("can", "gpu", "level"),
    [
        (GUARDED, PART, GUARDED_MEMORY),
        (GUARDED, {"sharing": "time-slice"}, ADVISORY),  # it named no part, so nothing is kept
        (GUARDED, {"sharing": "time-slice", "share": {"compute_percent": 50}}, ADVISORY),
        (GUARDED, {"sharing": "mps", "share": {"memory_mib": 4000}}, ADVISORY),  # nothing is told of this mode
        (GUARDED, {}, HARD),
        (COUNTED, PART, ADVISORY),
        (None, PART, ADVISORY),  # a worker that tells none
        (None, {}, HARD),
        ({"process": Capabilities(enforced={"time-slice": Enforced("sworn", "hard")})}, PART, None),
    ],
)
def test_the_level_is_what_the_worker_does_for_what_the_job_names(can: Any, gpu: Any, level: Any) -> None:
    drive = fleet(w0=can)
    drive.submit("j", gpu=gpu, run=RUN)
    found = shown(drive, "j")
    assert found == (level or {"memory": "sworn", "compute": "advisory"})
    assert told(drive, "j") == ([] if level == HARD else [found]), "an exclusive job is kept hard, and not told so"


def test_a_job_without_gpus_has_no_level() -> None:
    drive = fleet(w0=GUARDED)
    drive.submit("j", run=RUN)
    assert shown(drive, "j") is None
    assert told(drive, "j") == []


def test_a_required_level_is_a_filter_with_its_reason() -> None:
    drive = fleet(w0=COUNTED, older=None)
    asks = {"gpu": {**PART, "enforce": {"memory": "guarded"}}, "run": RUN}
    accepted = drive.submit("waits", **asks)
    assert "enforces of a time-slice share: memory is advisory and compute advisory" in str(accepted["warnings"])
    explained = drive.explained("waits")
    assert (explained["reason"], explained["workers_left"]["enforce"]) == ("enforce", 0)
    refused = drive.submit("never", on_no_match="reject", **asks)
    assert refused["code"] == "failed-precondition"
    drive.submit("hard", gpu={"enforce": {"memory": "hard", "compute": "hard"}}, run=RUN)
    assert shown(drive, "hard") == HARD, "an exclusive GPU is the job's own"
    drive.worker("w1", 1, drivers=["process"], capabilities=GUARDED)
    drive.settle()
    assert drive.placed_on("waits") == ["w1"]
    assert shown(drive, "waits") == GUARDED_MEMORY
    drive.submit("compute", gpu={
        "sharing": "time-slice", "share": {"compute_percent": 50}, "enforce": {"compute": "guarded"},
    }, run=RUN)  # fmt: skip
    assert drive.explained("compute")["reason"] == "enforce"


def test_hosts_that_differ_in_their_levels_alone_are_told_apart() -> None:
    drive = fleet(w0=COUNTED, w1=GUARDED, w2=COUNTED)
    drive.submit("j", gpu={**PART, "enforce": {"memory": "guarded"}}, run=RUN)
    assert drive.placed_on("j") == ["w1"]


def rejoin(drive: Driving, name: str, can: dict[str, Capabilities]) -> None:
    worker = drive.workers[name]
    worker.hello = msgspec.structs.replace(worker.hello, capabilities=can)
    assert drive.join(worker)["kind"] == "joined"


def test_a_level_that_falls_during_a_run_is_an_event_and_closes_the_host_to_those_who_require_it() -> None:
    drive = fleet(w0=GUARDED)
    asks = {"gpu": {**PART, "enforce": {"memory": "guarded"}}, "run": RUN}
    drive.submit("shares", **asks)
    drive.submit("counted", gpu={"sharing": "time-slice"}, run=RUN)
    drive.settle()
    rev = drive.state.tenants["t"].jobs["shares"].rev
    drive.events.clear()
    rejoin(drive, "w0", COUNTED)
    assert told(drive, "shares") == [ADVISORY]
    (event,) = [event for event in drive.events if event["job"] == "shares"]
    assert (event["rev"], event.get("changes", [])) == (rev, []), "no transition: it runs on"
    assert told(drive, "counted") == [], "nothing changed for a job that named no part"
    assert shown(drive, "shares") == ADVISORY
    drive.submit("next", **asks)
    assert drive.explained("next")["reason"] == "enforce"
    drive.events.clear()
    rejoin(drive, "w0", COUNTED)
    assert told(drive, "shares") == [], "joined anew, and nothing is otherwise"
    rejoin(drive, "w0", GUARDED)
    drive.renew("w0")
    drive.settle()
    assert told(drive, "shares") == [GUARDED_MEMORY]
    assert drive.placed_on("next") == ["w0"]


def test_a_plan_says_the_level_of_each_place() -> None:
    drive = fleet(w0=GUARDED)
    asked = PlanAsk(msgspec.convert({"gpu": PART, "run": RUN, "replicas": 2}, Request))
    planned = decode_planned(plan(drive.engine, drive.now, "t", asked))
    assert [place.enforced for place in planned.places] == [Enforced("guarded", "advisory")] * 2


@pytest.mark.parametrize(
    ("gpu", "field"),
    [
        ({"sharing": "time-slice", "enforce": {"memory": "guarded"}}, "$.gpu.enforce.memory"),
        ({**PART, "enforce": {"compute": "hard"}}, "$.gpu.enforce.compute"),
    ],
)
def test_a_level_of_a_part_that_is_not_named_is_refused(gpu: dict[str, Any], field: str) -> None:
    refused = fleet(w0=GUARDED).submit("j", gpu=gpu, run=RUN)
    assert (refused["code"], refused["field"]) == ("invalid-argument", field)


def test_a_request_says_levels_by_their_words() -> None:
    assert LEVELS == ("advisory", "guarded", "hard")
    body = b'{"gpu": {"enforce": {"memory": "sworn"}}, "run": {"argv": ["x"]}}'
    with pytest.raises(Exception, match="sworn"):
        decode_request(body)
    assert GpuSpec().levels_required == (0, 0)
