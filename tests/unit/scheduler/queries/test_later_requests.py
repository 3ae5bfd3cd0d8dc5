"""A job with a field that only a later release knows, under a leader of this release: it waits, and hides nothing else.

It was accepted by a newer scheduler, before an operator went back, or before all schedulers were new.
"""

from __future__ import annotations

import pytest

from moorage.scheduler.answers.listing import labelled
from moorage.scheduler.answers.schedules import schedule_row
from moorage.scheduler.answers.views import show
from moorage.scheduler.answers.waiting import waiting_by_reason
from moorage.scheduler.core.contained_engine import ContainedEngine
from moorage.scheduler.core.events import ChangeOrder, Order
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.follower.usage import Usage
from moorage.schemas.codec import decode_accepted, decode_request, encode
from moorage.schemas.errors import Problem, Refused
from moorage.schemas.operate import ChangeAsked, act_of
from moorage.schemas.reasons import REASONS
from moorage.schemas.release import RELEASE
from tests.unit.scheduler.driving import SUBJECTS, Driving
from tests.unit.scheduler.scheduled import offer_ask, offer_run

KNOWN = b'{"job":"later","gpu":{"count":1},"run":{"argv":["true"]}}'
LATER = b'{"job":"later","gpu":{"count":1,"warp":9},"run":{"argv":["true"],"hooks":[{"a":1}]},"luck":true}'


class Led(Driving):
    """Driven by an engine that sets aside what it fails on, as a leader's does."""

    def make_engine(self, state: State) -> ContainedEngine:
        return ContainedEngine(state, self.config, SUBJECTS, 7 + state.epoch, self.now, None)


def made_later(state: State) -> None:
    """Let the job's request be one of a later release."""
    job = state.job("t", "later")
    assert job is not None
    job.body, job.shape = LATER, None


def led_by_this_release() -> Led:
    drive = Led()
    drive.submit("later", gpu={"count": 1})
    drive.submit("plain", gpu={"count": 1})
    taken_over(drive)
    return drive


def taken_over(drive: Led) -> None:
    """Let a leader of this release follow, which reads the request as one of a later release."""
    for state in (drive.state, drive.shadow):
        made_later(state)
    drive.engine = drive.make_engine(drive.state)


def test_an_accepted_request_is_read_without_fields_of_a_later_release() -> None:
    assert decode_accepted(LATER) == decode_request(KNOWN)
    assert decode_accepted(encode({"job": "later", "gpu": {"count": 1}, "run": {"argv": ["true"]}, "x": 1}, json=False))
    for faulty in (b'{"job":"later","luck":true,"run":{"argv":7}}', b'{"job":"later","luck":true}', b"[1]", b"{"):
        with pytest.raises(Refused):
            decode_accepted(faulty)
    with pytest.raises(Refused):  # a new request is read strictly
        decode_request(LATER)


def test_a_job_of_a_later_release_is_listed_and_shown_and_the_others_start() -> None:
    drive = led_by_this_release()
    rows = [labelled(drive.engine, drive.job(name)) for name in ("later", "plain")]
    assert [(row.job, row.state, row.gpu) for row in rows] == [
        ("later", "QUEUED", "1xany"),
        ("plain", "QUEUED", "1xany"),
    ]
    shown = show(drive.engine, "t", "later")
    assert not isinstance(shown, Problem)
    assert (shown.state, shown.request) == ("QUEUED", decode_request(KNOWN))
    drive.worker("w0", 2)
    drive.tick()
    assert drive.states("plain") == ["PLACED"]
    assert drive.states("later") == ["QUEUED"], "it does not run without what it asks for"
    assert drive.job("later").hold is None, "it goes on once a newer release leads"
    assert not drive.engine.containment.counts, "nothing failed"
    drive.cancel("later")
    assert drive.states("later") == ["CANCELLED"]


def test_gpu_time_is_counted_beside_a_job_of_a_later_release() -> None:
    drive = led_by_this_release()
    assert Usage(drive.shadow)._request_of(drive.job("later")) == decode_request(KNOWN)


def test_a_waiting_job_of_a_later_release_is_explained_by_its_field_and_is_not_changed() -> None:
    drive = led_by_this_release()
    drive.worker("w0", 2)
    drive.tick()
    told = drive.explained("later")
    assert (told["reason"], told.get("position")) == ("later-release", None)
    because = f"its request has the field gpu.warp, which this scheduler's release {RELEASE} does not know"
    assert told["because"] == because
    assert REASONS["later-release"].fix.startswith("it goes on once a scheduler of that release leads")
    assert waiting_by_reason(drive.engine) == {"later-release": 1}
    resize = act_of("resize", {"tenant": "t", "job": "later", "memory_mib": 1024, "by": "ana"})
    drive.engine.offer(Order("resize", resize, "resized", True))
    drive.engine.offer(ChangeOrder("t", ChangeAsked(job="later", by="ana", priority=1), "changed", True))
    drive.tick()
    for reply in ("resized", "changed"):
        answer = drive.answers[reply]
        assert (answer["code"], answer["field"]) == ("failed-precondition", "$.gpu.warp")
        assert answer["next"] == "change it once a scheduler of a newer release leads"


def test_a_job_of_a_later_release_goes_on_once_that_release_leads() -> None:
    drive = led_by_this_release()
    drive.worker("w0", 2)
    drive.settle()
    drive.lead_from_snapshot()
    for state in (drive.state, drive.shadow):
        job = state.job("t", "later")
        assert job is not None
        job.body = KNOWN
    drive.engine = drive.make_engine(drive.state)
    drive.renew()
    drive.settle()
    assert drive.states("later") == ["RUNNING"]


def test_a_running_job_of_a_later_release_runs_on_and_so_do_its_neighbours() -> None:
    """Its worker had no place in the tables of an older leader: all jobs there counted as lost, and began again."""
    drive = Led()
    drive.worker("w0", 2)
    drive.submit("later", gpu={"count": 1})
    drive.submit("plain", gpu={"count": 1})
    drive.settle()
    taken_over(drive)
    for _ in range(40):
        drive.pass_time(3_000)
        drive.renew()
        drive.tick()
    assert (drive.states("later"), drive.states("plain")) == (["RUNNING"], ["RUNNING"])
    assert not drive.engine.containment.counts


def test_a_schedule_of_a_later_release_is_shown_and_its_run_says_why_it_makes_no_job() -> None:
    drive = Led()
    offer_ask(drive, "add")
    drive.tick()
    for state in (drive.state, drive.shadow):
        state.schedules["t"]["nightly"].body = LATER.replace(b'"job":"later",', b"")
    shown = schedule_row(drive.state, drive.state.schedules["t"]["nightly"], with_request=True)
    assert shown.request is not None
    assert shown.request["run"] == {"argv": ["true"]}
    offer_run(drive, 1)
    drive.tick()
    why = schedule_row(drive.state, drive.state.schedules["t"]["nightly"]).why
    assert why == "invalid-argument: Object contains unknown field `warp`"
