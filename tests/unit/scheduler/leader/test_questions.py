"""Every question is answered: also where what answers it has a defect, or says more than it may."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from moorage.scheduler.answers.counts import Counts
from moorage.scheduler.follower.beside import QUESTIONS_MAX_TENANT, FollowerBeside
from moorage.scheduler.follower.follower import Question
from moorage.scheduler.questions import foresight as foresight_module
from moorage.scheduler.questions import relay
from moorage.scheduler.questions.foresight import Foresight
from moorage.scheduler.questions.questions import Questions
from moorage.scheduler.questions.schedules import ScheduleVerb
from moorage.scheduler.whatif import child
from moorage.scheduler.whatif.child import FAILED, Children
from moorage.schemas.answers.fleet import FleetAnswer
from moorage.schemas.answers.jobs import Explained
from tests.unit.scheduler.driving import SUBJECTS, Driving


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a copy may take longer than a client waits."""
    monkeypatch.setattr(foresight_module, "ANSWERED_S", 60.0)


class _Leader:
    """A leader that may have been replaced: each question waits for the next acknowledged record."""

    def __init__(self, drive: Driving) -> None:
        self.engine = drive.engine
        self.answered: list[tuple[str, bytes]] = []

    def is_fresh(self) -> bool:
        return False

    def mono_ms(self) -> int:
        return 0

    def time_ms(self) -> int:
        return self.engine.state.time_ms

    def answer_now(self, reply: str, payload: bytes) -> None:
        self.answered.append((reply, payload))

    def send_soon(self, messages: list[Any]) -> None:
        raise AssertionError("nobody is told anything")

    def add_figures(self, fleet: FleetAnswer) -> FleetAnswer:
        return fleet

    @property
    def follower(self) -> FollowerBeside:
        raise AssertionError("nobody asks it")

    @property
    def counts(self) -> Counts:
        raise AssertionError("nobody asks them")


def _fails(*_: object) -> None:
    raise ZeroDivisionError


async def test_a_question_for_output_that_fails_behind_a_record_is_answered_and_ends_no_term(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive = Driving()
    drive.submit("j")
    leader, nothing = _Leader(drive), cast(Any, None)
    schedules = ScheduleVerb(leader.engine, nothing, leader.answer_now, nothing)
    questions = Questions(leader, nothing, nothing, nothing, SUBJECTS, nothing, nothing, schedules, forks=False)
    monkeypatch.setattr(relay, "find_log", _fails)
    questions.read("t", "logs", {"job": "j"}, "_INBOX.1", True, "")
    drive.tick()  # its commit raised, and the leader's term ended
    assert drive.answers["_INBOX.1"]["code"] == "internal"
    assert not leader.answered
    await questions.close()


@pytest.mark.parametrize(("more", "whole"), [(0, True), (1, False), (1_000_000, False)])
async def test_an_answer_longer_than_allowed_is_a_failure_and_not_a_part(
    more: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "ANSWER_BYTES_MAX", 300_000)
    told: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
    children = Children()
    assert children.ask(lambda: b"a" * (300_000 + more), told.set_result)
    answer = await asyncio.wait_for(told, 60)
    assert answer == (b"a" * 300_000 if whole else FAILED)
    children.close()


async def test_the_plans_of_one_tenant_leave_room_for_another_whose_turn_is_next() -> None:
    """A tenant that asked without pause had all places, and others were refused for as long."""
    children, told_of = Children(), Counter[str]()
    over = asyncio.Event()
    firsts, others = os.pipe(), os.pipe()  # `os.read` ends in a child once nobody holds the other end

    def until_closed(pipe: tuple[int, int]) -> Callable[[], bytes]:
        def waits() -> bytes:
            os.close(pipe[1])
            return os.read(pipe[0], 1) or b"-"

        return waits

    def told(name: str) -> Callable[[bytes | None], None]:
        def tell(_: bytes | None) -> None:
            told_of[name] += 1
            if name == "u":
                os.close(others[1])  # the tenant's others wait for this
            if told_of.total() == child.CHILDREN_MAX + child.WAITING_MAX_TENANT + 1:
                over.set()

        return tell

    for _ in range(child.CHILDREN_MAX):
        assert children.ask(until_closed(firsts), told("first"), "t")
    for _ in range(child.WAITING_MAX_TENANT):
        assert children.ask(until_closed(others), told("t"), "t")
    assert not children.ask(lambda: b"-", told("t"), "t")
    assert children.ask(lambda: b"-", told("u"), "u")
    os.close(firsts[1])
    async with asyncio.timeout(60):
        await over.wait()
    os.close(firsts[0])
    os.close(others[0])
    children.close()


async def test_the_questions_of_one_tenant_to_the_follower_leave_room_for_others() -> None:
    follower = FollowerBeside(None, cast(Any, None))

    def ask(tenant: str | None) -> bool:
        return follower.ask(Question("usage", 1, tenant, {}), lambda _: None) is None

    assert [ask("t") for _ in range(QUESTIONS_MAX_TENANT + 1)] == [True] * QUESTIONS_MAX_TENANT + [False]
    assert ask("u")
    assert ask(None)
    await follower.close()


async def test_whoever_waits_for_a_forecast_that_cannot_be_read_is_answered_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive = Driving.with_hosts(1)
    drive.submit("hog", gpu={})
    drive.submit("waits", gpu={})
    told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    unasked: list[object] = []

    def answered(answer: Callable[[], Any], reply: str, json: bool) -> None:
        told.set_result(answer())

    monkeypatch.setattr(foresight_module, "foresee", lambda *_, **__: b"no forecast")
    foresight = Foresight(
        drive.engine, lambda: drive.now, answered, unasked.append, lambda *frame: unasked.append(frame), forks=True
    )
    assert foresight.explain("t", "waits", "_INBOX.1", True) is None
    assert (await asyncio.wait_for(told, 60)).state == "QUEUED"
    assert not unasked
    foresight.close()


async def test_a_plan_that_cannot_be_read_is_answered_as_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Driving()
    told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(foresight_module, "plan", lambda engine, now_ms, tenant, question: b"no plan")
    foresight = Foresight(
        drive.engine, lambda: drive.now, _fails, _fails, lambda reply, frame, json: told.set_result(frame), forks=True
    )
    foresight.plan("t", "t", {"request": {"run": {"driver": "noop"}}}, "_INBOX.1", True)
    assert (await asyncio.wait_for(told, 60)).code == "internal"
    foresight.close()


class Asked:
    """A waiting job and what is told of it; with copies of this process."""

    def __init__(self) -> None:
        self.drive = Driving()
        self.drive.worker("w0", 1)
        self.drive.submit("hog", gpu={})
        self.drive.settle()
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.sent: asyncio.Queue[Any] = asyncio.Queue()
        self.foresight = Foresight(
            self.drive.engine, lambda: self.drive.now, self._answered, self._send, _fails, forks=True
        )
        self.drive.explain_waiting = self.foresight.at_submit
        self.accepted = self.drive.submit("waits", gpu={"count": 2})

    def _answered(self, answer: Callable[[], Any], reply: str, json: bool) -> None:
        self.answers.put_nowait(answer())

    def _send(self, messages: list[Any]) -> None:
        for _, payload, _ in messages:
            self.sent.put_nowait(msgspec.json.decode(payload))

    async def explained(self) -> Explained:
        assert self.foresight.explain("t", "waits", "_INBOX.1", True) is None
        told: Explained = await asyncio.wait_for(self.answers.get(), 60)
        return told


async def test_the_reason_is_told_at_submit_and_the_fixes_when_asked() -> None:
    asked = Asked()
    assert (asked.accepted["waiting"]["reason"], "fixes" in asked.accepted["waiting"]) == ("count", False)
    asked.drive.worker("w1", 1)
    told = await asked.explained()
    assert (told.reason, [fix.say for fix in told.fixes]) == ("count", ["1 GPU instead of 2"])
    asked.foresight.close()


async def test_the_reason_is_told_where_no_copy_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(work: object) -> tuple[int, int]:
        raise OSError("no room for another process")

    asked = Asked()
    monkeypatch.setattr(child, "fork", no_room)
    for _ in range(2):
        told = await asked.explained()
        assert (told.reason, told.position, told.fixes) == ("count", 1, [])
    asked.foresight.close()


async def test_fixes_of_another_reason_than_it_has_by_now_are_not_told() -> None:
    asked = Asked()
    asked.drive.worker("w1", 1)
    assert asked.foresight.explain("t", "waits", "_INBOX.1", True) is None
    await asyncio.sleep(0)  # the copy is made
    asked.drive.order("hold", job="waits")
    told = await asyncio.wait_for(asked.answers.get(), 60)
    assert (told.reason, told.fixes) == ("held", [])
    asked.foresight.close()


async def test_the_news_of_a_job_that_waits_have_its_fixes() -> None:
    asked = Asked()
    asked.drive.worker("w1", 1)
    await asked.explained()
    asked.drive.order("hold", job="waits")
    asked.drive.now += 60_000 // 2
    assert asked.foresight._news() == []
    told = (await asyncio.wait_for(asked.sent.get(), 60))["waiting"]
    assert (told["reason"], told["fixes"]) == ("held", [])
    asked.foresight.close()
