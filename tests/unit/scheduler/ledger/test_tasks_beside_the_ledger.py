"""A task beside the record loop that raises is started again; what is raised about the ledger ends the term."""

from __future__ import annotations

import asyncio
import logging

import pytest

from moorage.scheduler.leader import beside
from moorage.scheduler.leader.beside import keep_running
from moorage.scheduler.ledger.ledger import Deposed, LedgerBroken

TRIES = 3


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "AGAIN_S", 0.001)


async def test_a_task_that_raises_is_counted_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    failed: list[str] = []
    works = asyncio.Event()

    async def work() -> None:
        if len(failed) < TRIES:
            raise ValueError("a defect")
        works.set()

    with caplog.at_level(logging.ERROR):
        await keep_running("the frame", work, lambda name, raised: failed.append(f"{name}: {raised}"))
    assert works.is_set()
    assert failed == ["the frame: a defect"] * TRIES
    (told,) = caplog.records
    assert "the frame is started again" in told.getMessage(), "the same words once a minute"


@pytest.mark.parametrize(
    "raised",
    [Deposed("another leads"), LedgerBroken("no"), ExceptionGroup("g", [ValueError("x"), LedgerBroken("no")])],
)
async def test_what_is_about_the_ledger_ends_the_term(raised: Exception) -> None:
    failed: list[str] = []

    async def work() -> None:
        if not failed:  # started again, it would return
            raise raised

    with pytest.raises(type(raised)):
        await keep_running("snapshots", work, lambda name, _: failed.append(name))
    assert not failed


async def test_a_cancel_ends_it_also_in_its_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "AGAIN_S", 3600.0)
    has_failed = asyncio.Event()

    async def work() -> None:
        raise ValueError("a defect")

    task = asyncio.create_task(keep_running("x", work, lambda *_: has_failed.set()))
    await has_failed.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
