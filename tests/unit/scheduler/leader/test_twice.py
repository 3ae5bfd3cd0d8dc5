"""A question or an order that has one key twice is refused: the last would count, and end the wrong job."""

from __future__ import annotations

import pytest

from moorage.bus.transport import Delivery
from moorage.scheduler.leader.intake import Intake
from tests.unit.scheduler.driving import SUBJECTS, Driving


@pytest.mark.parametrize(
    ("subject", "body"),
    [
        (SUBJECTS.api("t", "cancel"), b'{"job": "a", "job": "b"}'),
        (SUBJECTS.api("t", "signal"), b'{"job": "a", "signal": "USR1", "job": "b"}'),
        (SUBJECTS.api("t", "change"), b'{"job": "b", "priority": 9, "priority": 8}'),
        (SUBJECTS.admin("hold", "ana"), b'{"tenant": "t", "job": "a", "job": "b"}'),
    ],
)
def test_a_key_twice_is_refused_by_name_for_each_verb(subject: str, body: bytes) -> None:
    drive, answers = Driving.with_hosts(1), dict[str, bytes]()
    drive.submit("a")
    drive.submit("b")
    intake = Intake(drive.engine, SUBJECTS, answers.__setitem__, answers.__setitem__, lambda *_: None, lambda *_: None)
    intake.put(Delivery(subject, "_INBOX.x", body))
    intake.drain(drive.now)
    drive.tick()
    assert b" twice in one object" in answers["_INBOX.x"]
    assert drive.explained("b")["state"] != "CANCELLED"
