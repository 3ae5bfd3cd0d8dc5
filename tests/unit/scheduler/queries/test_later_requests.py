"""A job with a field that only a later release knows, under a leader of this release: it waits, and hides nothing else.

It was accepted by a newer scheduler, before an operator went back, or before all schedulers were new.
"""

from __future__ import annotations

import pytest

from moorage.scheduler.answers.listing import labelled
from moorage.scheduler.answers.views import show
from moorage.scheduler.core.contained_engine import ContainedEngine
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.follower.usage import Usage
from moorage.schemas.codec import decode_accepted, decode_request, encode
from moorage.schemas.errors import Problem, Refused
from tests.unit.scheduler.driving import SUBJECTS, Driving

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
    drive.checks = False  # they read the shape of each job
    drive.submit("later", gpu={"count": 1})
    drive.submit("plain", gpu={"count": 1})
    for state in (drive.state, drive.shadow):
        made_later(state)
    drive.engine = drive.make_engine(drive.state)
    return drive


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
    drive.cancel("later")
    assert drive.states("later") == ["CANCELLED"]


def test_gpu_time_is_counted_beside_a_job_of_a_later_release() -> None:
    drive = led_by_this_release()
    assert Usage(drive.shadow)._request_of(drive.job("later")) == decode_request(KNOWN)
