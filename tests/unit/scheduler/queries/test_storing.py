"""A worker stores objects of the attempts that it has, until it reports their end, and what it is asked to rescue."""

from __future__ import annotations

from moorage.scheduler.answers.storing import may_store
from moorage.schemas.frames import Report
from moorage.schemas.handler import checkpoint_object, kept_object, rescued_object, result_object
from moorage.schemas.passed_on import StoreAsked
from tests.unit.scheduler.driving import Driving

RUN = {"driver": "process", "argv": ["train"], "checkpoint": "ck"}


def running() -> Driving:
    drive = Driving()
    drive.worker("w0", 1, auto=False)
    drive.submit("a", gpu={}, run=RUN)
    drive.pass_time(1_000)
    drive.worker("w1", 1)
    return drive


def names_of(drive: Driving, *, further: int = 0) -> list[str]:
    """All of the attempt; or of one further on, which there is not."""
    attempt = drive.attempt("a", 0)
    fence, no, accepted_ms = attempt.fence + further, attempt.no + further, attempt.replica.job.accepted_ms
    return [
        result_object("a", 0, fence),
        kept_object("a", further),
        checkpoint_object("a", accepted_ms, 0, no),
        checkpoint_object("a", accepted_ms, 0, no) + ".a",
        checkpoint_object("a", accepted_ms + further, 0, attempt.no),
        checkpoint_object("a", accepted_ms, 0, 10 * no + further) if further else kept_object("a", 0),
    ]


def allowed(drive: Driving, worker: str, names: list[str], tenant: str = "t") -> list[bool]:
    return [may_store(drive.state, (), StoreAsked(worker, tenant, name)).may for name in names]


def test_a_worker_may_store_what_its_attempt_keeps_and_no_other_may() -> None:
    drive = running()
    assert all(allowed(drive, "w0", names_of(drive)))
    for worker, tenant in (("w1", "t"), ("w0", "u"), ("w9", "t")):
        assert not any(allowed(drive, worker, names_of(drive), tenant)), (worker, tenant)
    assert not any(allowed(drive, "w0", names_of(drive, further=1)))
    fence = drive.attempt("a", 0).fence
    others = ["", "a", "..", "x", "kept", result_object("b", 0, fence), rescued_object("a", 0, fence, "")]
    assert not any(allowed(drive, "w0", [*others, "ab" * 32]))


def test_once_it_has_reported_the_end_it_may_not_while_its_device_is_not_free() -> None:
    drive = running()
    attempt, worker, names = drive.attempt("a", 0), drive.workers["w0"], names_of(drive)
    worker.gathered.append(Report("exited", "t", "a", 0, attempt.no, attempt.fence, 3, "exit"))
    frame = worker.report_frame()
    assert frame is not None
    drive.send("w0", frame)
    worker.report_answered(frame.no)
    drive.tick()
    assert drive.state.workers["w0"].attempts
    assert not any(allowed(drive, "w0", names))


def test_it_may_store_a_rescue_that_it_was_asked_for() -> None:
    drive = running()
    asked = StoreAsked("w1", "t", rescued_object("a", 0, 7, "out"))
    assert may_store(drive.state, {asked}, asked).may
    assert not may_store(drive.state, {asked}, StoreAsked("w0", "t", asked.object)).may
