"""What events and answers say of a job's transitions."""

from __future__ import annotations

import msgspec
import pytest

from moorage.scheduler.core.outputs.outputs import changes_since, event_of
from moorage.schemas.codec import encode
from moorage.schemas.frames import Accepted, Event
from tests.unit.scheduler.driving import Driving


def test_a_worker_that_joins_with_other_devices_is_told_with_those() -> None:
    drive = Driving()
    worker = drive.worker("w0", 1)
    drive.submit("a", gpu={})
    drive.settle()
    drive.run_out("w0")
    pool = [msgspec.structs.replace(device, uuid="GPU-other") for device in worker.hello.gpu_pool]
    worker.hello = msgspec.structs.replace(worker.hello, gpu_pool=pool)
    drive.join(worker)
    drive.renew("w0")
    drive.submit("b", gpu={})
    drive.settle()
    placed = [c for e in drive.events for c in e.get("changes", ()) if e["job"] == "b" and c["state"] == "PLACED"]
    assert [change["gpus"] for change in placed] == [["GPU-other"]]


def test_the_answer_to_a_submit_is_what_the_encoder_makes_of_it() -> None:
    drive = Driving.with_hosts(1)
    drive.settle()
    reply = drive.offer_submit("j")
    drive.now += 1
    seq = drive.store(drive.engine.build(drive.now, drive.now))
    out = drive.engine.commit(seq, drive.now)
    answers = dict(out.answers)
    assert answers[reply] == encode(Accepted("j", seq, "QUEUED"))


def test_what_is_not_over_yet_has_no_code() -> None:
    drive = Driving()
    worker = drive.worker("w0", 1)
    drive.submit("j", gpu={})
    drive.settle()
    worker.auto = False
    drive.cancel("j")
    job = drive.job("j")
    assert drive.states("j") == ["CANCELLING"]
    assert [(change.state, change.code) for change in changes_since(drive.state, job, 0)][-1] == ("CANCELLING", None)
    job.told = 0
    event = msgspec.json.decode(encode(event_of(drive.state, job)), type=Event)
    assert event.changes[-1].code is None
    drive.report("exited", "j", detail="exit")
    over = changes_since(drive.state, job, 0)[-1]
    assert (over.state, over.code) == ("SUCCEEDED", 0)


def test_a_reason_is_told_without_what_a_terminal_obeys() -> None:
    drive = Driving()
    drive.submit("j", gpu={})
    drive.cancel("j", why="\x1b[2Jenough\x9b1A\u202e")
    job = drive.job("j")
    assert changes_since(drive.state, job, 0)[-1].why == "\\x1b[2Jenough\\x9b1A\\u202e"
    job.told = 0
    assert not set(encode(event_of(drive.state, job)).decode()) & set("\x1b\x9b\u202e")


def test_an_event_of_very_many_replicas_says_behind_which_revision_its_changes_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A follower that had missed one of its failures could not know that."""
    drive = Driving.with_hosts(1)
    drive.submit("many", replicas=2_000, gpu={}, max_running=4)
    for _ in range(4):
        drive.settle()
        drive.run_out("w0", code=1)
    of_it = [event for event in drive.events if event["job"] == "many" and "replicas" in event]
    revs = [event["rev"] for event in of_it]
    assert len(of_it) > 4
    assert [event["replicas"].get("after", 0) for event in of_it] == [0, *revs[:-1]]

    monkeypatch.setattr("moorage.scheduler.core.outputs.outputs.CHANGES_SURE", 0)
    monkeypatch.setattr("moorage.scheduler.core.outputs.outputs.fitting", lambda changes: 1)
    job = drive.job("many")
    job.told = 0
    event = event_of(drive.state, job)
    assert event.replicas is not None
    assert (len(event.changes), event.replicas.after) == (1, job.rev), "the others did not fit: one has to ask for all"
