"""What events and answers say of a job's transitions."""

from __future__ import annotations

import msgspec

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
    drive.fact("exited", "j", detail="exit")
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
