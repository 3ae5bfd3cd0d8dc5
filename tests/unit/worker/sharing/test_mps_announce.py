"""Daemons that are watched: what the guard kills is announced to its own, and a failed one is not watched for ever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moorage.schemas.errors import MoorageError
from moorage.testing import SimulatedClock
from moorage.worker.sharing.mps.control import MpsControl, MpsFault
from moorage.worker.sharing.mps.watched import MPS, WANTED_S, OperatorsMps, Watched, WatchedDaemons


class Control(MpsControl):
    """The questions that a daemon answers: it has one server with these clients, hangs, or says why it cannot."""

    def __init__(self, clients: tuple[int, ...] = (), why: str = "", *, hangs: bool = False) -> None:
        super().__init__("", Path(), Path())
        self._clients = clients
        self._why = why
        self._hangs = hangs
        self.is_gone = False
        self.looks = 0
        self.asked: list[str] = []

    async def servers(self) -> list[int]:
        self.looks += 1
        if self._hangs:
            await asyncio.Event().wait()
        if self._why or self.is_gone:
            raise MpsFault(self._why or "no such pipe")
        return [1]

    async def clients(self, server: int) -> list[int]:
        return list(self._clients)

    async def ask(self, command: str, timeout_s: float | None = None) -> list[str]:
        self.asked.append(command)
        return []

    async def is_faulty(self, server: int) -> bool:
        return False

    def blamed(self) -> list[int]:
        return []


class Daemons(WatchedDaemons):
    def __init__(self, *controls: Control) -> None:
        super().__init__()
        self._all = [Watched(control=control, where=f"at {at}") for at, control in enumerate(controls)]

    def _watched(self) -> Iterable[Watched]:
        return self._all


def test_a_daemon_that_hangs_or_fails_keeps_no_word_from_another(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "moorage.worker")
    its_own, other = Control((7, 8)), Control((9,))
    daemons = Daemons(Control(hangs=True), Control(why="no such pipe"), its_own, other)
    SimulatedClock().run(daemons.announce(7))
    assert (its_own.asked, other.asked) == (["terminate_client 1 7"], [])
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == 2
    assert all("mps-not-asked" in each for each in told)


def test_a_failed_daemon_of_an_operator_serves_no_job_and_is_watched_while_jobs_want_to_share_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    control, daemons = Control(), OperatorsMps()
    monkeypatch.setattr("moorage.worker.sharing.mps.watched.MpsControl", lambda *_: control)
    attempt: Any = SimpleNamespace(
        name=("acme", "a", 0, 1, 1), place=SimpleNamespace(mode=MPS), request=SimpleNamespace(effective_gpu=None)
    )
    lost: list[str] = []
    daemons.attach(lambda names, _: lost.extend(name[1] for name in names), lambda _: None)

    async def looks_in(seconds: float) -> int:
        before = control.looks
        await asyncio.sleep(seconds)
        return control.looks - before

    async def scene() -> None:
        await daemons.open()
        daemons.admit(attempt, None)
        await asyncio.sleep(60)
        daemons.forget(attempt.name)
        assert await looks_in(WANTED_S) <= 1, "it is well, and nobody shares by it"
        control.is_gone = True
        daemons.admit(attempt, None)
        await asyncio.sleep(60)
        assert lost == ["a"], "it has answered, so a job does not run on without it"
        with pytest.raises(MoorageError, match="no such pipe"):
            daemons.admit(attempt, None)
        assert await looks_in(WANTED_S / 2) > 0
        await asyncio.sleep(WANTED_S)
        assert await looks_in(WANTED_S) == 0
        with pytest.raises(MoorageError, match="no such pipe"):
            daemons.admit(attempt, None)
        control.is_gone = False
        assert await looks_in(60) > 0, "a job that wants it is a reason to look at it again"
        daemons.admit(attempt, None)
        await daemons.close()

    SimulatedClock().run(scene())
