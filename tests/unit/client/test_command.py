"""A command in a job, between a scripted scheduler and a worker that only starts it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from moorage.bus.transport import Delivery
from moorage.client import AsyncClient, ClientError
from moorage.client.command import Command
from moorage.schemas.frames import DEAD_S, Answer, ExecGiven, Mark, piece, read_piece
from tests.unit.client.scripted_scheduler import ScriptedScheduler


class StoodStill:
    """The event loop of a process whose clock went on while it did not run."""

    def __init__(self) -> None:
        self.still_s = 0.0
        self._loop = asyncio.get_running_loop()

    def time(self) -> float:
        return self._loop.time() + self.still_s

    def create_task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._loop.create_task(work)


async def test_who_stood_still_for_too_long_is_not_told_that_the_worker_was_silent(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the lid of a laptop was closed, or under a cell of a notebook that computes."""
    monkeypatch.setattr("moorage.client.command.BEAT_S", 0.05)
    given = ExecGiven("j", 0, 1, "w1", "5" * 32)
    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will("exec", Answer("exec", 9, given))
        link, subjects = client._wire.link, client._wire.subjects
        sent: set[asyncio.Task[Any]] = set()

        def on_input(delivery: Delivery) -> None:
            if read_piece(delivery.data)[0] is Mark.GO:
                out = subjects.tty(unique, "w1", given.stream, "out")
                sent.add(asyncio.create_task(link.send([(out, piece(Mark.STARTED, 0, b""), "")])))

        await link.subscribe(subjects.tty(unique, "w1", given.stream, "in"), on_input)
        command = Command.of(client._wire, "j", ["sleep", "600"])
        loop = StoodStill()
        monkeypatch.setattr(command, "_loop", loop)
        async with command:
            loop.still_s = 2 * DEAD_S
            with pytest.raises(ClientError, match="this process did not run for 20 s") as ended:
                await command.wait()
        assert ended.value.code == "disconnected"
