"""Where a function's result is: from its worker's report through the ledger to all that tell how the job ended."""

from __future__ import annotations

from typing import Final

import pytest

from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.records import Op, exiting
from moorage.scheduler.core.outputs.outputs import changes_since
from moorage.scheduler.history import packing as packing_
from moorage.scheduler.history.unpacking import changes_in, read_frame
from moorage.schemas.frames import result_of
from moorage.schemas.job import SUCCEEDED
from tests.unit.scheduler.driving import Driving

#: the longest that is taken: it adds at most 9 bytes to a record
LARGEST: Final = 10**14 - 1


def ended(detail: str, code: int = 0, **request: object) -> Driving:
    """A job that was claimed and started, and whose worker then reported its end in a record of its own."""
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("j", gpu={}, **request)
    drive.report("claimed", "j")
    drive.report("started", "j")
    drive.reports([("exited", "j", 0, code, detail), ("freed", "j", 0, 0, "")])
    return drive


@pytest.mark.parametrize("result", [0, 1, 1729, LARGEST])
def test_the_message_that_a_worker_names_is_told_wherever_the_end_is(result: int) -> None:
    drive = ended(f"result:{result}")
    drive.lead_from_snapshot()
    job = drive.job("j")
    assert job.state == SUCCEEDED
    told = changes_since(drive.state, job, 0)
    assert [(change.result, change.why) for change in told] == [(None, "")] * 4 + [(result, "")]
    [event] = [event for event in drive.events if event["state"] == SUCCEEDED]
    assert event["changes"][-1]["result"] == result
    assert "why" not in event
    packing = packing_.Packing(drive.state, "t")
    assert packing.add(job, [], with_request=True)
    frame = read_frame(packing.frame())
    assert list(changes_in(frame, frame.jobs[0])) == told[1:]


def test_a_result_costs_a_record_nine_bytes_at_most() -> None:
    sizes = {detail: len(ended(detail).records[-1]) for detail in ("exit", "result:0", f"result:{LARGEST}")}
    assert sizes["result:0"] - sizes["exit"] <= 2
    assert sizes[f"result:{LARGEST}"] - sizes["exit"] <= 9


@pytest.mark.parametrize(
    "detail", ["result:", "result:-1", "result:x", "result:1 ", "result:²", f"result:{LARGEST + 1}", "Result:1"]
)
def test_what_names_no_message_is_the_reason_of_a_failure(detail: str) -> None:
    assert result_of(detail) is None
    drive = ended(detail)
    assert drive.job("j").state == "FAILED"
    assert changes_since(drive.state, drive.job("j"), 0)[-1].why == detail


def test_a_failed_attempt_has_no_result() -> None:
    drive = ended("result:7", code=1)
    last = changes_since(drive.state, drive.job("j"), 0)[-1]
    assert (last.state, last.code, last.result) == ("FAILED", 1, None)


def test_each_rank_of_a_gang_keeps_its_own() -> None:
    drive = Driving.with_hosts(2, auto=False)
    drive.submit("g", gpu={"scheduling": "gang"}, replicas=2)
    drive.reports([("claimed", "g", 0, 0, "10.0.0.1:29500"), ("claimed", "g", 1, 0, "")])
    drive.reports([("started", "g", 0, 0, ""), ("started", "g", 1, 0, "")])
    drive.reports([("exited", "g", 1, 0, "result:5"), ("exited", "g", 0, 0, "result:9")])
    assert drive.job("g").state == SUCCEEDED
    told = changes_since(drive.state, drive.job("g"), 0)
    assert {change.replica: change.result for change in told if change.state == "EXITED"} == {0: 9, 1: 5}


def test_a_job_that_ends_well_while_it_is_cancelled_keeps_its_result() -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("j", gpu={})
    drive.report("claimed", "j")
    drive.report("started", "j")
    drive.cancel("j")
    drive.report("exited", "j", detail="result:3")
    last = changes_since(drive.state, drive.job("j"), 0)[-1]
    assert (last.state, last.result) == (SUCCEEDED, 3)


def test_the_step_of_a_well_ended_attempt_has_the_result_above_its_state() -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("j", gpu={})
    drive.reports([("ran", "j", 0, 0, "result:7")])
    [step] = [decode_record(drive.records[-1]).steps]
    state = drive.replica("j").state
    assert step[0] == Op.RAN
    assert step[3] == exiting(state, 7)
    assert exiting(state, None) == state
    assert drive.events[-1]["changes"][-1]["result"] == 7, "also where one record has the whole run"
