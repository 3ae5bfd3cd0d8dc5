"""What a leader does with requests while its ledger takes no record."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from moorage.bus.transport import Delivery
from moorage.scheduler.pacing import write_stall
from moorage.scheduler.pacing.reminders import AGAIN_S, WORDS_MAX, Reminders
from moorage.scheduler.pacing.write_stall import AppendProgress, StalledRequests
from moorage.testing.bus.clock import SimulatedClock
from tests.unit.scheduler.driving import SUBJECTS
from tests.waiting import until

AFTER_S = 3.0


class Desk:
    """A leader's door, and an append that began at second 100 of its own clock."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.read: list[str] = []
        self.appending = AppendProgress()
        self.appending.since_s = 100.0
        self.stalled = StalledRequests(self.appending, SUBJECTS, AFTER_S, self.answers.__setitem__, self._resume)

    def _resume(self, delivery: Delivery) -> None:
        assert not self.stalled.keeps(delivery), "kept back twice"
        self.read.append(delivery.reply)

    def keeps(self, subject: str, reply: str = "_INBOX.a", at_s: float = 110.0) -> bool:
        return self.stalled.keeps(Delivery(subject, reply, b"{}", None, at_s))


async def test_requests_alone_are_kept_back_and_no_sooner_than_the_append_is_late() -> None:
    desk, submit = Desk(), SUBJECTS.api("acme", "submit")
    assert not desk.keeps(submit, at_s=102.9)
    assert desk.keeps(submit, at_s=103.0)
    assert desk.keeps(SUBJECTS.admin("fleet"))
    assert not desk.keeps(SUBJECTS.worker("w", "renew"))
    assert not desk.keeps(SUBJECTS.worker("w", "fact"))
    assert not desk.keeps(submit, reply="")
    assert not desk.keeps(submit, reply=SUBJECTS.ledger_record), "nobody is answered where its asker may not write"
    desk.appending.end()
    assert not desk.keeps(submit)
    desk.stalled.close()


async def test_what_was_kept_back_is_read_in_its_order_once_a_record_is_taken() -> None:
    desk = Desk()
    names = [f"_INBOX.{number}" for number in range(5)]
    for name in names:
        assert desk.keeps(SUBJECTS.api("acme", "submit"), name)
    desk.appending.end()
    desk.stalled.release()
    desk.stalled.release()
    assert desk.read == names
    assert desk.answers == {}


async def test_who_waited_long_enough_is_told_and_read_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_stall, "TOLD_AFTER_S", 0.05)
    desk, loop = Desk(), asyncio.get_running_loop()
    desk.appending.since_s = loop.time() - 34
    desk.appending.trouble = "the nats-server says: no space left"
    assert desk.keeps(SUBJECTS.api("acme", "ls"), at_s=loop.time())
    assert desk.answers == {}, "another leader, if there is one, answers first"
    await until(lambda: desk.answers, what="told")
    told = json.loads(desk.answers["_INBOX.a"])
    assert (told["code"], told["retry_after_s"]) == ("not-leading", 1.0)
    assert re.search(r"could not write its ledger for 3\d s \(the nats-server says: no space left\)", told["message"])
    assert "send again, with the same id" in told["next"]
    desk.stalled.release()
    assert desk.read == []


def test_who_is_told_at_the_very_instant_is_told_once_whatever_a_difference_rounds_to() -> None:
    clock = SimulatedClock()

    async def many() -> int:
        desk = Desk()
        for number in range(1, 200):
            clock.advance(1 / (3 * number))
            now_s = asyncio.get_running_loop().time()
            desk.appending.since_s = now_s - AFTER_S
            assert desk.keeps(SUBJECTS.api("acme", "ls"), f"_INBOX.{number}", at_s=now_s)
            await asyncio.sleep(write_stall.TOLD_AFTER_S + 0.001)
        return desk.stalled.told

    assert clock.run(many()) == 199


async def test_beyond_its_bound_it_keeps_none_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_stall, "KEPT_MAX", 2)
    desk = Desk()
    assert [desk.keeps(SUBJECTS.api("acme", "ls"), f"_INBOX.{number}") for number in range(3)] == [True, True, False]
    desk.stalled.close()


def test_a_trouble_is_logged_when_it_begins_and_then_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("moorage.scheduler.pacing.reminders.time.monotonic", lambda: now_s)
    trouble = Reminders()
    assert trouble.due("no room")
    assert not trouble.due("no room"), "not at every try"
    assert trouble.due("nobody answers"), "what is new is told at once"
    assert not trouble.due("no room"), "nor where two take turns"
    now_s += AGAIN_S
    assert trouble.due("no room"), "who looks at the end of the log finds it"
    trouble.clear()
    assert trouble.due("nobody answers"), "the next one is another trouble"
    assert len([None for number in range(WORDS_MAX + 1) if trouble.due(f"append {number}")]) == WORDS_MAX + 1


async def test_the_refusal_names_the_server_that_has_the_only_copy() -> None:
    appending = AppendProgress()
    appending.since_s, appending.trouble = 100.0, "nothing acknowledges it"
    assert "one copy" not in write_stall.stall_problem(appending, 110.0).message
    appending.holder = "moorage-3"
    told = write_stall.stall_problem(appending, 110.0).message
    assert "its ledger for 10 s (nothing acknowledges it): its ledger has one copy, on moorage-3; nothing new" in told
