"""Children that the leader forks to look ahead: one that hangs is killed, and nobody waits for it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moorage.scheduler.questions import foresight as foresight_module
from moorage.scheduler.questions.foresight import Foresight
from moorage.scheduler.whatif import child
from tests.unit.scheduler.driving import Driving


def _fails(*_: object) -> None:
    raise AssertionError("nobody is sent anything")


def test_a_child_that_fails_or_takes_too_long_is_no_answer_and_leaves_nothing() -> None:
    def fails() -> bytes:
        raise RuntimeError("on purpose")

    def sleeps() -> bytes:
        time.sleep(60)
        return b""

    before = set(os.listdir("/proc/self/fd"))
    assert child.ask(fails) is None
    assert child.ask(sleeps, limit_s=0.2) is None
    assert child.ask(lambda: b"x" * 1_000_000) == b"x" * 1_000_000
    assert set(os.listdir("/proc/self/fd")) == before


def test_children_have_one_limit_together(tmp_path: Path) -> None:
    """Each had the whole limit, and those of a busy machine took longer than who asked had waited."""

    def sleeps(number: int) -> bytes:
        (tmp_path / str(number)).touch()
        time.sleep(60)
        return b""

    assert child.ask_all([partial(sleeps, number) for number in range(6)], limit_s=0.5) == [None] * 6
    assert len(list(tmp_path.iterdir())) <= child.CHILDREN_MAX


async def test_who_asks_why_a_job_waits_is_answered_in_time_though_the_copy_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive = Driving.with_hosts(1)
    drive.submit("hog", gpu={})
    drive.submit("waits", gpu={})
    answers: asyncio.Queue[Any] = asyncio.Queue()

    def answered(answer: Callable[[], Any], reply: str, json: bool) -> None:
        answers.put_nowait(answer())

    monkeypatch.setattr(foresight_module, "ANSWERED_S", 0.0)
    monkeypatch.setattr(foresight_module, "foresee", lambda *_, **__: time.sleep(60))
    foresight = Foresight(drive.engine, lambda: drive.now, answered, _fails, _fails, forks=True)
    for _ in range(2):
        assert foresight.explain("t", "waits", "_INBOX.1", True) is None
        told = await asyncio.wait_for(answers.get(), 60)
        assert (told.reason, told.starts_unknown) == ("busy", foresight_module.LOOKING)
    foresight.close()
    await asyncio.sleep(0)
    assert answers.empty()
