"""What the guard kills is announced to the daemon whose client it is, whatever another daemon does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import cast

import pytest

from moorage.testing import SimulatedClock
from moorage.worker.sharing.mps.control import MpsControl, MpsFault
from moorage.worker.sharing.mps.watched import Watched, WatchedDaemons


class Control:
    """The questions that a daemon answers: it has one server with these clients, hangs, or says why it cannot."""

    def __init__(self, clients: tuple[int, ...] = (), why: str = "", *, hangs: bool = False) -> None:
        self._clients = clients
        self._why = why
        self._hangs = hangs
        self.asked: list[str] = []

    async def servers(self) -> list[int]:
        if self._hangs:
            await asyncio.Event().wait()
        if self._why:
            raise MpsFault(self._why)
        return [1]

    async def clients(self, server: int) -> tuple[int, ...]:
        return self._clients

    async def ask(self, command: str) -> None:
        self.asked.append(command)


class Daemons(WatchedDaemons):
    def __init__(self, *controls: Control) -> None:
        super().__init__()
        self._all = [
            Watched(control=cast("MpsControl", control), where=f"at {at}") for at, control in enumerate(controls)
        ]

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
