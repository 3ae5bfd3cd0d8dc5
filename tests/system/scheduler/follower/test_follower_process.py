"""The follower's process as its leader tells of it: why none follows the ledger now, until one does."""

from __future__ import annotations

import asyncio
import sys

import pytest

from moorage.scheduler.follower import beside
from moorage.scheduler.follower.beside import FollowerBeside
from moorage.scheduler.follower.follower import Position
from moorage.scheduler.follower.pipe import Told, framed
from moorage.scheduler.ledger.snapshot_follower import Command
from tests.waiting import until

#: it says what its argument is, in hex: once, or again and again
ONCE = "import sys; sys.stdout.buffer.write(bytes.fromhex(sys.argv[1]))"
OFTEN = f"import time\nwhile True: {ONCE}; sys.stdout.flush(); time.sleep(0.05)"


@pytest.mark.parametrize(
    ("argv", "trouble"),
    [
        (["/no/such/program"], "the follower of the ledger cannot be started: [Errno 2]"),
        ([sys.executable, "-c", "pass"], "the follower of the ledger ended"),
        ([sys.executable, "-c", OFTEN, ""], "the follower of the ledger said nothing for 1 s"),
        ([sys.executable, "-c", ONCE, framed(Told(Position())).hex()], "the follower of the ledger ended"),
    ],
)
async def test_a_process_that_follows_nothing_is_told_of_until_another_one_follows(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], trouble: str
) -> None:
    monkeypatch.setattr(beside, "SILENT_S_MAX", 1.0)
    monkeypatch.setattr(beside, "AGAIN_S", 0.01)
    command = Command(argv, {})
    follower = FollowerBeside(command, lambda: pytest.fail("it is a process"))
    assert not follower.figures(7).trouble, "it is about to begin"
    running = asyncio.create_task(follower.run())

    def told() -> str:
        return follower.figures(7).trouble

    try:
        await until(lambda: told().startswith(trouble), 60, trouble)
        command.argv[:] = [sys.executable, "-c", OFTEN, framed(Told(Position(seq=7))).hex()]
        await until(lambda: not told(), 60, "one that follows the ledger")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
