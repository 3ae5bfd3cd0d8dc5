"""The events that are written by hand are, byte for byte, what the encoder makes of the same transitions."""

from __future__ import annotations

import random

import msgspec
import pytest

from moorage.scheduler.core.ledger.state import Job, State
from moorage.scheduler.core.outputs.event_encoder import EventEncoder
from moorage.scheduler.core.outputs.outputs import changes_since, enforced_of
from moorage.scheduler.leader.intake import cancel_of
from moorage.schemas.codec import encode
from moorage.schemas.frames import Accepted, Event
from tests.scheduler.driving import Driving
from tests.scheduler.faulty_world import FaultyWorld


def event_of(state: State, job: Job, told: int) -> Event:
    changes = changes_since(state, job, told)
    workers = state.worker_by_num
    rows = [row for row in job.story if row[0] > told]
    simulated = any(workers[row[5]].hello.get("simulated", False) for row in rows if row[5] >= 0)
    why = next((change.why for change in reversed(changes) if change.why), "")
    enforced = enforced_of(job) if any(change.state == "PLACED" for change in changes) else None
    return Event(job.tenant, job.name, job.rev, job.state, state.seq, changes, why, simulated, enforced=enforced)


@pytest.mark.parametrize("seed", range(6))
def test_events_of_a_faulty_world(seed: int) -> None:
    world = FaultyWorld(seed)
    world.run(150)
    state, chance = world.drive.state, random.Random(seed)
    encoder = EventEncoder(state)
    assert state.jobs
    for job in state.jobs.values():
        for told in {told for told in (0, 1, job.rev - 1, chance.randrange(job.rev)) if told < job.rev}:
            job.told = told
            assert encoder.event(job) == encode(event_of(state, job, told))
            assert job.told == job.rev


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("simulated", [False, True])
def test_what_most_jobs_begin_with(simulated: bool, replicas: int) -> None:
    """Accepted and placed in one record: of one replica, of two, and with one that still waits."""
    drive = Driving()
    drive.worker("w0", 3, simulated=simulated)
    for name in ("a", "b"):
        drive.submit(name, gpu={}, replicas=replicas)
        job = drive.job(name)
        for told in range(job.rev):
            job.told = told
            assert EventEncoder(drive.state).event(job) == encode(event_of(drive.state, job, told))


def test_texts_that_need_escaping() -> None:
    drive = Driving()
    drive.worker("w0", 2, simulated=True)
    drive.submit("j", gpu={"count": 2})
    drive.engine.offer(cancel_of("t", {"job": "j", "reason": 'say "no"\n\u00fc\\', "by": 'ann "the" \u00fc'}))
    drive.tick()
    state, job = drive.state, drive.job("j")
    worker = state.workers["w0"]
    worker.hello["gpu_pool"][1]["uuid"] = 'GPU-"\\\u00fc'
    job.told = 0
    said = EventEncoder(state).event(job)
    assert said == encode(event_of(state, job, 0))
    assert msgspec.json.decode(said)["simulated"] is True


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
    drive = Driving()
    drive.worker("w0", 1)
    drive.settle()
    reply = drive.offer_submit("j")
    drive.now += 1
    seq = drive.store(drive.engine.build(drive.now, drive.now))
    out = drive.engine.commit(seq, drive.now)
    drive.engine.complete(out)
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
    event = msgspec.json.decode(EventEncoder(drive.state).event(job), type=Event)
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
    assert not set(EventEncoder(drive.state).event(job).decode()) & set("\x1b\x9b\u202e")
