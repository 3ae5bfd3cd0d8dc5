"""Every question is answered: also where what answers it has a defect, or says more than it may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from moorage.scheduler import foresight as foresight_module
from moorage.scheduler import logs
from moorage.scheduler.foresight import Foresight
from moorage.scheduler.questions import Questions
from moorage.scheduler.whatif import child
from moorage.scheduler.whatif.child import FAILED, Children
from tests.scheduler.driving import SUBJECTS, Driving


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

    def say(self, messages: list[Any]) -> None:
        raise AssertionError("nobody is told anything")

    def figures(self) -> dict[str, Any]:
        return {}


def _fails(*_: object) -> None:
    raise ZeroDivisionError


async def test_a_question_for_output_that_fails_behind_a_record_is_answered_and_ends_no_term(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive = Driving()
    drive.submit("j")
    leader, nothing = _Leader(drive), cast(Any, None)
    questions = Questions(leader, nothing, nothing, SUBJECTS, nothing, nothing, forks=False)
    monkeypatch.setattr(logs, "find_log", _fails)
    questions.read("t", "logs", {"job": "j"}, "_INBOX.1", True)
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


async def test_whoever_waits_for_a_forecast_that_cannot_be_read_is_answered_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive = Driving()
    drive.worker("w0", 1)
    drive.submit("hog", gpu={})
    drive.submit("waits", gpu={})
    told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    unasked: list[object] = []

    def answered(answer: Callable[[], Any], reply: str, json: bool) -> None:
        told.set_result(answer())

    monkeypatch.setattr(foresight_module, "forecast", lambda engine, now_ms: b"no forecast")
    foresight = Foresight(
        drive.engine, lambda: drive.now, answered, unasked.append, lambda *frame: unasked.append(frame), forks=True
    )
    assert foresight.explain("t", "waits", "_INBOX.1", True) is None
    assert (await asyncio.wait_for(told, 60))["state"] == "QUEUED"
    assert not unasked
    foresight.close()


async def test_a_plan_that_cannot_be_read_is_answered_as_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Driving()
    told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(foresight_module, "plan", lambda engine, now_ms, tenant, question: b"no plan")
    foresight = Foresight(
        drive.engine, lambda: drive.now, _fails, _fails, lambda reply, frame, json: told.set_result(frame), forks=True
    )
    foresight.plan("t", {"request": {"run": {"driver": "noop"}}}, "_INBOX.1", True)
    assert (await asyncio.wait_for(told, 60)).code == "internal"
    foresight.close()
